"""The samples in flight in a checkpoint: JSON with arrays in it (weights/state.py).

All tokens stand one sample after the other, so that a checkpoint has no padding. Routes are those
of the whole buffer, since every process saves its own rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.records import Group, Outcome, Prompt, Rollout, SampleKey, Score
from compass_jax.experience.buffer import NO_ROW, ExperienceBuffer, Sample

UNPREDICTED = 1.0, 1.0  # of a checkpoint from before prompts kept their prediction
ARRAYS = {"tokens": np.int32, "logp": np.float32, "entropy": np.float32, "versions": np.int32}


def state(buffer: ExperienceBuffer) -> JsonObject:
    """Returns the samples, with their tokens so far `[tokens]` and the routes of all rows."""
    number = {group: n for n, group in enumerate(buffer.prompts)}
    rollouts = [x.rollout for x in _samples(buffer)]
    tokens = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(x, name) for x in rollouts)])
        for name, dtype in ARRAYS.items()
    }
    return {
        # A dropped group has lost its rows.
        "prompts": [_drawn(buffer, prompt) for prompt in buffer.prompts.values()],
        "held": [_drawn(buffer, group.prompt) for group in buffer.held.values()],
        "samples": [_sample_state(sample) for sample in _samples(buffer)],
        "kept": [number[group] for group in buffer.kept],
        "dropped": [[number[group], *outcome] for group, outcome in buffer.dropped.items()],
        "counts": dict(buffer.counts),  # JSON keeps them and the rewards exactly
        "routes": _routes(buffer),
        **tokens,
    }


def _drawn(buffer: ExperienceBuffer, prompt: Prompt) -> list[float]:
    return [*prompt.key, buffer.first.get(prompt.key, NO_ROW), *prompt.predicted]


def _routes(buffer: ExperienceBuffer) -> Array | None:
    routes = buffer.routes.saved()
    if routes is None:
        return None
    for sample in buffer.samples.values():
        # A preempted turn is sampled anew, so its partial routes are unset.
        if not sample.done and sample.rollout.prompt.turns > 0:
            row, n = sample.rollout.row, len(sample.rollout.tokens)
            routes = routes.at[row, n - 1 :].set(jnp.iinfo(routes.dtype).max)
    return routes


def row_lengths(saved: JsonMapping, rows: int) -> np.ndarray:
    """Returns the number of tokens of the sample in each of the buffer's rows, 0 without one."""
    lengths = np.zeros(rows, np.int32)
    for sample in saved["samples"]:
        if sample["row"] != NO_ROW:
            lengths[sample["row"]] = sample["tokens"]
    return lengths


def restore(
    buffer: ExperienceBuffer, saved: JsonMapping, find: Callable[[int, int], Prompt]
) -> None:
    """Fills an empty buffer from a state; `find(id, visit)` returns a prompt."""
    drawn: dict[tuple[int, int], Prompt] = {}
    for prompt, visit, row, *predicted in (*saved["prompts"], *saved["held"]):
        key = int(prompt), int(visit)
        drawn[key] = dataclasses.replace(find(*key), predicted=tuple(predicted) or UNPREDICTED)
        if row != NO_ROW:
            buffer.first[key] = row
    keys = list(drawn)[: len(saved["prompts"])]
    buffer.prompts = {key: drawn[key] for key in keys}
    buffer.routes.adopt(list(buffer.first.values()), saved["routes"])
    buffer.kept = [keys[n] for n in saved["kept"]]
    buffer.dropped = {keys[n]: Outcome(*outcome) for n, *outcome in saved["dropped"]}
    buffer.counts = dict(saved["counts"])
    of_held: dict[tuple[int, int], list[Sample]] = {
        key: [] for key in list(drawn)[len(saved["prompts"]) :]
    }
    for sample in _restored(saved, drawn):
        if sample.rollout.prompt.key in of_held:
            of_held[sample.rollout.prompt.key].append(sample)
        else:
            buffer.samples[sample.rollout.key] = sample
    buffer.held = {key: _group(samples) for key, samples in of_held.items()}


def _samples(buffer: ExperienceBuffer) -> Iterator[Sample]:
    for _, sample in sorted(buffer.samples.items()):
        yield sample
    for group in buffer.held.values():
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            yield Sample(rollout, True, score)


def _sample_state(sample: Sample) -> dict[str, object]:
    rollout, score = sample.rollout, sample.score
    return {
        "key": list(rollout.key),
        "row": rollout.row,
        "tokens": len(rollout.tokens),
        "done": sample.done,
        "truncated": rollout.truncated,
        "score": None if score is None else dataclasses.asdict(score),
        **({"draft": [rollout.drafted, rollout.draft_tokens]} if rollout.draft_tokens else {}),
    }


def _restored(saved: JsonMapping, drawn: Mapping[tuple[int, int], Prompt]) -> Iterator[Sample]:
    columns, start = {name: np.asarray(saved[name]) for name in ARRAYS}, 0
    for sample in saved["samples"]:
        part = slice(start, start := start + sample["tokens"])
        key, score = SampleKey(*sample["key"]), sample["score"]
        drafted, draft_tokens = sample.get("draft", (0, 0))
        rollout = Rollout(
            drawn[key.prompt, key.visit],
            key.index,
            truncated=sample["truncated"],
            row=sample["row"],
            drafted=drafted,
            draft_tokens=draft_tokens,
            **{name: column[part] for name, column in columns.items()},
        )
        yield Sample(rollout, sample["done"], None if score is None else Score(**score))


def _group(samples: list[Sample]) -> Group:
    scores = tuple(sample.score for sample in samples if sample.score is not None)
    return Group(samples[0].rollout.prompt, tuple(x.rollout for x in samples), scores)
