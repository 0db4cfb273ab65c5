"""The files of an evaluation: answers.jsonl with every answer and summary.json with every number;
and tables for the terminal.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from compass_jax.base.aliases import Json, JsonObject, Tree
from compass_jax.base.records import Group, Rollout
from compass_jax.config import ScoredConfig
from compass_jax.experience.accuracy import Accuracy, Evaluation, SetResult
from compass_jax.experience.metrics import sample_rows
from compass_jax.runs.rundir import ANSWERS, SUMMARY, write_atomically


def answer_rows(
    name: str, groups: Sequence[Group], text_of: Callable[[Rollout], str]
) -> list[JsonObject]:
    """Returns the rows of answers.jsonl for the set `name`: those of rollouts.jsonl with the set
    and the prompt's id. The last sample of a row is the greedy answer.
    """
    rows = sample_rows(groups, text_of)
    return [
        {"step": 0, "stage": "eval", "set": name, "id": group.prompt.id, **row}
        for group, row in zip(groups, rows, strict=True)
    ]


def summary_of(evaluation: Evaluation, config: ScoredConfig, weights: str) -> JsonObject:
    """Returns the content of summary.json: the fields of `Evaluation` with null for an undefined
    number, the weights, and the settings on which the numbers depend.
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
    context = {"weights": weights, "seed": config.seed, "settings": settings}
    return _plain(context | dataclasses.asdict(evaluation))


def _plain(value: Json) -> Tree:
    """Converts `value` to JSON types: None for a number that is not finite, names as text."""
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_evaluation(folder: Path, summary: JsonObject, rows: Sequence[JsonObject]) -> None:
    """Writes answers.jsonl (of `answer_rows`) and summary.json (`summary_of`) into an existing
    folder.
    """
    write_atomically(folder / ANSWERS, "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def table_rows(result: SetResult) -> list[JsonObject]:
    """Returns rows for report.summary_table: each label, then all prompts of the set."""
    accuracies = {**result.by, "all": result}
    return [_row(label, one) for label, one in accuracies.items()]


def _row(label: str, accuracy: Accuracy) -> JsonObject:
    row: JsonObject = {"task": label, "prompts": accuracy.prompts}
    row[f"avg@{accuracy.k}"] = (
        f"{accuracy.avg_at_k:.3f} [{accuracy.interval[0]:.3f}, {accuracy.interval[1]:.3f}]"
    )
    row |= {f"pass@{k}": x for k, x in accuracy.pass_at.items() if k == accuracy.k > 1}
    if not math.isnan(accuracy.maj_at_k):
        row[f"maj@{accuracy.k}"] = accuracy.maj_at_k
    row["reward"] = accuracy.reward
    low, high = accuracy.greedy_interval
    row["greedy"] = f"{accuracy.greedy:.3f} [{low:.3f}, {high:.3f}]"
    return row | {
        "tokens": accuracy.length_mean_tokens,
        "truncated": f"{accuracy.truncated_frac:.1%}",
    }


def words_of(result: SetResult) -> str:
    """Returns the line below a set's table."""
    passed = ", ".join(f"pass@{k} {x:.4g}" for k, x in result.pass_at.items())
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(result.lost.items()))
    lost = f"{result.unscored} ({counts})" if counts else "0"
    line = (
        f"{passed}; reward: the mean of the k samples; an answer was extracted from"
        f" {result.extracted:.1%} of the responses; scores left out because the check"
        f" failed: {lost}; in brackets: 95% intervals, of avg@k by bootstrap over"
        " prompts, of greedy answers by Wilson"
    )
    if result.overlap:
        line += f"; {result.overlap} of the prompts are in data.sources too (overlap/training)"
    return line
