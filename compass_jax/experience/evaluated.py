"""What an evaluation leaves: answers.jsonl with every answer, summary.json with every number, and
tables for a person.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compass_jax.config import RunConfig
from compass_jax.experience.accuracy import Accuracy, Evaluation, SetResult
from compass_jax.experience.metrics import sample_rows
from compass_jax.records import Group, Rollout
from compass_jax.runs.rundir import ANSWERS, SUMMARY, write_atomically


def answer_rows(
    name: str, groups: Sequence[Group], text_of: Callable[[Rollout], str]
) -> list[dict[str, Any]]:
    """The rows of answers.jsonl for a set of this name: those of rollouts.jsonl, each with its
    set and the prompt's id; the greedy answer is the last of a row's samples.
    """
    rows = sample_rows(groups, text_of)
    return [
        {"step": 0, "stage": "eval", "set": name, "id": group.prompt.id, **row}
        for group, row in zip(groups, rows, strict=True)
    ]


def summary_of(found: Evaluation, config: RunConfig, weights: str) -> dict[str, Any]:
    """What summary.json holds: the fields of `Evaluation`, with null for a number that nobody
    knows; which weights it is of; and the settings that decide what its numbers mean.
    """
    e = config.evaluation
    settings = {
        "top_k": e.top_k,
        "top_p": e.top_p,
        "max_new_tokens": config.rollout.max_new_tokens,
        "right_at": config.rewards.right_at,
        "answer_tag": config.rewards.answer_tag,
        "system_prompt": config.data.system_prompt,
    }
    told = {"weights": weights, "seed": config.seed, "settings": settings}
    return _plain(told | dataclasses.asdict(found))


def _plain(value: Any) -> Any:
    """`value` as JSON has it: None for a number that is not finite, names as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_evaluation(
    folder: Path,
    found: Evaluation,
    rows: Sequence[dict[str, Any]],
    config: RunConfig,
    weights: str,
) -> None:
    """Writes answers.jsonl, of `answer_rows`, and summary.json into a folder that is there."""
    write_atomically(folder / ANSWERS, "".join(json.dumps(row) + "\n" for row in rows))
    summary = summary_of(found, config, weights)
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def table_rows(found: SetResult) -> list[dict[str, Any]]:
    """Rows for report.summary_table: each label, then all prompts of the set."""
    every = {**found.by, "all": found}
    return [_row(label, one) for label, one in every.items()]


def _row(label: str, one: Accuracy) -> dict[str, Any]:
    row: dict[str, Any] = {"task": label, "prompts": one.prompts}
    row[f"avg@{one.k}"] = f"{one.avg_at_k:.3f} [{one.interval[0]:.3f}, {one.interval[1]:.3f}]"
    row |= {f"pass@{k}": x for k, x in one.pass_at.items() if k in (1, one.k) and k > 1}
    if not math.isnan(one.maj_at_k):
        row[f"maj@{one.k}"] = one.maj_at_k
    row["reward"] = one.reward
    low, high = one.greedy_interval
    row["greedy"] = f"{one.greedy:.3f} [{low:.3f}, {high:.3f}]"
    return row | {"tokens": one.length_mean_tokens, "truncated": f"{one.truncated_frac:.1%}"}


def words_of(found: SetResult) -> str:
    """The line below a set's table."""
    passed = ", ".join(f"pass@{k} {x:.4g}" for k, x in found.pass_at.items())
    line = (
        f"{passed}; reward: the mean of the k samples; an answer was found in"
        f" {found.extracted:.1%} of the responses; scores left out because the check"
        f" failed: {found.unknown}; in brackets: 95% intervals, of avg@k by bootstrap over"
        " prompts, of greedy answers by Wilson"
    )
    if found.overlap:
        line += f"; {found.overlap} of the prompts are in data.sources too (overlap/training)"
    return line
