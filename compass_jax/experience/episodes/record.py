"""How an episode went: what its verdict keeps, the metrics of a step's episodes, and the parts of a
logged sample: what was given, and what the model sampled.

A record is JSON: "turns", "branches" and "dropped_tokens" of all branches, "branch" (the number of
the trained one), "environment_s", "model_s", "replies" (`Timed`) of the trained branch, and "end",
why it ended, if its driver says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import GIVEN, Group, Rollout, Score
from compass_jax.experience.episodes.sessions import Session, Timed

# Ends of an episode that its environment would have continued: it had all its source's turns, all
# its tokens, or a turn that reached the limit on its length.
LIMITS = ("turns", "tokens", "length")
METRICS = {
    "turns": "episode/turns",
    "branches": "episode/branches",
    "dropped_tokens": "episode/dropped_tokens",
    "environment_s": "time/episode_environment_s",
    "model_s": "time/episode_model_s",
}


TextOf = Callable[[Rollout], str]


def record_of(
    session: Session, agent: str, environment_s: float, total_s: float
) -> dict[str, object]:
    """Returns the record of an episode, whose trained branch is one of `agent`, without its end."""
    branch = session.trained(agent)
    sampled, replies = (0, []) if branch is None else (branch.sampled, branch.replies)
    return {
        "turns": session.turns,
        "branches": len(session.branches),
        "dropped_tokens": session.sampled - sampled,
        "branch": 0 if branch is None else branch.number,
        "environment_s": _seconds(environment_s),
        "model_s": _seconds(total_s - environment_s),
        "replies": [[x.end, _seconds(x.environment_s), _seconds(x.model_s)] for x in replies],
    }


def _seconds(time_s: float) -> float:
    return round(max(time_s, 0.0), 4)


def episode_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the metrics of a step's episodes; empty without one."""
    samples = [x for g in groups for x in zip(g.rollouts, g.scores, strict=True) if x[1].episode]
    if not samples:
        return {}
    truncated = [
        rollout.truncated or score.episode.get("end") in LIMITS
        for rollout, score in samples
        if score.known
    ]
    means = {METRICS[x]: np.mean([score.episode[x] for _, score in samples]) for x in METRICS}
    means["episode/truncated_frac"] = np.mean(truncated) if truncated else np.nan
    return {name: float(mean) for name, mean in means.items()}


def response_row(rollout: Rollout, score: Score, text_of: TextOf) -> JsonObject:
    """Returns a sample's response for rollouts.jsonl. Where some of it was given, "parts" splits it
    into what the environment and the model said in turn, each with its characters and tokens, and
    in an episode with its seconds; "episode" has the record.
    """
    if rollout.generated.all() and not score.episode:
        return {"response": text_of(rollout)}
    record = dict(score.episode)
    replies = [Timed(*x) for x in record.pop("replies", ())]
    texts, parts, start = list[str](), list[dict[str, object]](), len(rollout.prompt.tokens)
    prompt, without = rollout.prompt, replace(rollout.prompt, tokens=rollout.tokens[:0])
    for tokens in rollout.stretches if rollout.response_length else ():
        piece = replace(rollout, prompt=without, tokens=tokens)
        if not parts:  # its text may begin with what the prompt's end opens
            piece = replace(rollout, prompt=prompt, tokens=rollout.tokens[: start + len(tokens)])
        texts.append(text_of(piece))
        by = "environment" if rollout.versions[start] == GIVEN else "model"
        parts.append({"by": by, "chars": len(texts[-1]), "tokens": len(tokens)})
        of_part = [x for x in replies if start < x.end <= start + len(tokens)]
        if of_part:
            parts[-1]["time_s"] = _seconds(sum(x.model_s for x in of_part))
        if of_part and len(parts) > 1:
            parts[-2]["time_s"] = _seconds(sum(x.environment_s for x in of_part))
        start += len(tokens)
    row = {"response": "".join(texts), "parts": parts}
    return row | ({"episode": record} if record else {})
