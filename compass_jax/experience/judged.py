"""Verdicts on whole groups: the share of responses with an answer, the groups by kind, and a
warning with a sample where rewards carry no information.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from compass_jax.base.records import Group, Prompt, Rollout, Score
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.config.verifiers import looked_for
from compass_jax.experience.growth import is_uniform, known_rewards
from compass_jax.rewards.answer_form import form_of, remedy
from compass_jax.rewards.faults import summary

KINDS = ("varied", "all_right", "all_wrong", "between", "undecided")
FAILURES = ("error", "crash", "timeout")  # outcomes of checks that did not finish
MAX_REASONS = 3  # in a message about samples without a reward
MAX_SHOWN = 600  # characters of a text in a warning

NOTHING_EXTRACTED, ALL_WRONG, ALL_RIGHT = "nothing extracted", "all wrong", "all right"
NO_GROUP_VARIES = "no group varies"


def kind_of(scores: Sequence[Score], rewards: RewardConfig) -> str:
    """Returns one of KINDS, as rl/zero_variance.py counts them."""
    known = known_rewards(scores)
    if len(known) < 2:
        return "undecided"
    if not is_uniform(scores):
        return "varied"
    if min(known) >= rewards.right_at:
        return "all_right"
    return "all_wrong" if max(known) <= rewards.wrong_at else "between"


def group_shares(groups: Sequence[Sequence[Score]], rewards: RewardConfig) -> dict[str, float]:
    """Returns the share of each kind of group; they sum to 1."""
    kinds = Counter(kind_of(scores, rewards) for scores in groups)
    return {kind: kinds[kind] / max(len(groups), 1) for kind in KINDS}


def extracted_frac(scores: Sequence[Score]) -> float:
    """Returns the share of responses with an answer among those whose check finished; NaN where
    none did.
    """
    finished = _finished(scores)
    return sum(score.extracted for score in finished) / len(finished) if finished else math.nan


def verdicts_in_words(scores: Sequence[Score]) -> str:
    """Returns a text such as "an answer in 100% of 8 responses", with the number of samples without
    a verdict.
    """
    unknown_outcomes = Counter(score.outcome for score in scores if not score.known)
    outcomes = counts_in_words(unknown_outcomes)
    if not (finished := _finished(scores)):
        return f"a verdict on none of {len(scores)} responses ({outcomes}){unknown_reasons(scores)}"
    text = f"an answer in {extracted_frac(scores):.0%} of {len(finished)} responses"
    if unknown_outcomes:
        text += f"; {unknown_outcomes.total()} of {len(scores)} have no verdict ({outcomes})"
        text += " and are left out"
        text += unknown_reasons(scores)
    return text


def _finished(scores: Sequence[Score]) -> list[Score]:
    return [score for score in scores if score.known or score.outcome == "unjudged"]


def failure_of(groups: Sequence[Group]) -> str:
    """Describes the failure if every sample failed (error, crash or timeout); empty otherwise."""
    scores = [score for group in groups for score in group.scores]
    if not scores or any(score.outcome not in FAILURES for score in scores):
        return ""
    outcomes = counts_in_words(Counter(score.outcome for score in scores))
    return f"all {len(scores)} samples of a step failed ({outcomes}){unknown_reasons(scores)}"


def unknown_reasons(scores: Sequence[Score]) -> str:
    """Lists the reasons of samples without a reward, the most frequent first."""
    unscored = [score for score in scores if not score.known]
    reasons = Counter(summary(score.detail) for score in unscored if score.detail)
    parts = [reason for reason, _ in reasons.most_common(MAX_REASONS)]
    if any(score.outcome == "unjudged" and not score.detail for score in unscored):
        parts.append("a verifier returned None; a function that is to judge ends with a return")
    return f": {'; '.join(parts)}" if parts else ""


def counts_in_words(counts: Counter[str]) -> str:
    """Returns a text such as "3 error, 1 timeout"."""
    return ", ".join(f"{n} {name}" for name, n in sorted(counts.items()))


def silence(scores: Sequence[Score], rewards: RewardConfig) -> str:
    """Returns NOTHING_EXTRACTED or ALL_WRONG where the rewards carry no information, else an empty
    string. Checks that did not finish are reported elsewhere.
    """
    finished = _finished(scores)
    if not finished:
        return ""
    if not any(score.extracted for score in finished):
        return NOTHING_EXTRACTED
    known = known_rewards(finished)
    return ALL_WRONG if known and max(known) <= rewards.wrong_at else ""


def no_advantage(groups: Sequence[Sequence[Score]], rewards: RewardConfig) -> str:
    """Returns ALL_RIGHT or NO_GROUP_VARIES where no group's known rewards differ, so that every
    advantage of the verifiers is 0; else an empty string. Groups with fewer than two known rewards
    are ignored, and all-wrong rollouts belong to `silence`.
    """
    kinds = {kind_of(scores, rewards) for scores in groups} - {"undecided"}
    if not kinds or "varied" in kinds or kinds == {"all_wrong"}:
        return ""
    return ALL_RIGHT if kinds == {"all_right"} else NO_GROUP_VARIES


def silence_warning(
    kind: str,
    of: str,
    sample: tuple[Prompt, str, Score],
    scores: Sequence[Score],
    rewards: RewardConfig,
    data: DataConfig,
) -> str:
    """Returns the warning about uninformative rewards, with one whole sample.

    Args:
        kind: the result of `silence` or `no_advantage`.
        of: describes the responses, for example "of the first rollout".
        sample: a prompt, a response to it and its score.
        scores: the scores of the responses.
    """
    count = len(_finished(scores) if kind == NOTHING_EXTRACTED else known_rewards(scores))
    responses = f"{count} responses" if count == len(scores) else f"{count} judged responses"
    prompt, response, score = sample
    where, source = data.keyed_sources()[prompt.source]
    places = looked_for(source, rewards.answer_tag)
    if kind == NOTHING_EXTRACTED:
        what = f"no answer could be extracted from any of the {responses} {of}"
        form = form_of(source, rewards.answer_tag)
        ask = "ask for it in the prompt (data.system_prompt)"
        ask = ask if form is None else remedy(form, data)
        option = (
            f"{ask}, or set rewards.answer_tag: another tag, or empty for the whole response; or"
            f" judge by another {where}.verifier"
        )
    elif kind == ALL_RIGHT:
        what = f"all {responses} {of} are right: every advantage of the verifiers is 0"
        option = (
            "take harder prompts, or start from a weaker model; is the reward too generous? A"
            f" reward from rewards.right_at = {rewards.right_at:g} on is right"
        )
    elif kind == NO_GROUP_VARIES:
        what = (
            f"in every group {of} all rewards are equal ({responses}): every advantage"
            " of the verifiers is 0"
        )
        option = (
            "take prompts that the model solves sometimes, a larger rl.group_size, or a reward"
            " that tells the answers to one prompt apart"
        )
    else:
        what = f"all {responses} {of} are wrong: no verifier teaches anything"
        file = isinstance(source, FileSource)
        option = (
            f"compare response and reference below{f' ({where}.answer_field)' if file else ''}; is"
            " the task too hard for this model? A reward up to rewards.wrong_at ="
            f" {rewards.wrong_at:g} is wrong"
        )
    lines = [
        f"warning: {what}",
        f"looked for: {places}",
        f"to change it: {option}",
        f"prompt:    {quoted(prompt.question)}",
        f"response:  {quoted(response)}",
        f"reference: {quoted(prompt.answer)}   reward: {score.reward:g} ({score.outcome})",
    ]
    return "\n  ".join(lines)


def sample_of(
    groups: Sequence[Group], text_of: Callable[[Rollout], str]
) -> tuple[Prompt, str, Score]:
    """Returns the sample that a warning shows: the first that was not truncated, else the first."""
    pairs = [
        (group.prompt, rollout, score)
        for group in groups
        for rollout, score in zip(group.rollouts, group.scores, strict=True)
        if score.known or score.outcome == "unjudged"
    ]
    prompt, rollout, score = next((x for x in pairs if not x[1].truncated), pairs[0])
    return prompt, text_of(rollout), score


def quoted(text: str) -> str:
    """Returns a text on one line, with control characters escaped and the middle of a long text
    left out.
    """
    excess = len(text) - MAX_SHOWN
    if excess > 0:
        head, tail = 2 * MAX_SHOWN // 3, MAX_SHOWN // 3
        text = f"{text[:head]} [... {excess:,} characters ...] {text[-tail:]}"
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f'"{"".join(escaped)}"'
