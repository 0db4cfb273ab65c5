"""`compass merge --sweep`: accuracy by domain against the weight of the first of two parents.

OUT/sweep.jsonl has one line per evaluated weight; the same command resumes after the last one.
OUT/sweep.json has all rows and their settings.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compass_jax.apps.curate.merge import MergeError
from compass_jax.apps.curate.resume import require_same_settings
from compass_jax.base.aliases import JsonObject
from compass_jax.base.untrusted import parse_json, read_lines
from compass_jax.config import RunConfig
from compass_jax.config.data import HELDOUT
from compass_jax.config.io import config_to_json
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.runs.rundir import FolderLock, write_atomically
from compass_jax.weights.digests import of_bytes

LINES, SUMMARY = "sweep.jsonl", "sweep.json"
Merge = Callable[[tuple[float, float], Path], Any]  # (weights, new folder)


def run_sweep(
    merge: Merge,
    weights: Sequence[float],
    config: RunConfig,
    out: str | Path,
    settings: JsonObject,
    keep: bool = False,
    evaluate: Callable[[RunConfig, str], Evaluation] = evaluate_weights,
) -> list[JsonObject]:
    """Merges two parents with weights w and 1 - w for each w, and evaluates each result.

    Args:
        merge: merges into a new folder with two weights.
        weights: the first parent's weights, distinct values in [0, 1].
        config: the evaluation.
        out: the folder of the sweep.
        settings: everything else that determines the rows; `out` must have been begun with the
            same.
        keep: keeps the merged folders, such as OUT/weight_0.25.
        evaluate: evaluates a folder of weights.

    Returns a row for each weight, in increasing order.

    Raises MergeError for invalid weights, and ConfigError if `out` holds another sweep.
    """
    _check(weights)
    digest = of_bytes(config_to_json(config).encode()).value
    settings = json.loads(json.dumps({**settings, "evaluated by": f"{config.name} {digest}"}))
    with FolderLock(out) as lock:
        done = _done(lock.path / LINES, settings)
        for weight in weights:
            if weight in done:
                continue
            folder = lock.path / f"weight_{weight}"
            shutil.rmtree(folder, ignore_errors=True)  # leftover of a killed sweep
            merge((weight, 1 - weight), folder)
            evaluation = evaluate(config, str(folder))
            if not keep:
                shutil.rmtree(folder)
            lock.check()
            done[weight] = _row(weight, evaluation)
            lines = [json.dumps(settings), *map(json.dumps, done.values())]
            write_atomically(lock.path / LINES, "".join(f"{line}\n" for line in lines))
            print(f"weight {weight:g}: {evaluation.line()}", flush=True)
        rows = [done[weight] for weight in sorted(done)]
        text = json.dumps({"settings": settings, "rows": rows}, indent=2)
        write_atomically(lock.path / SUMMARY, text + "\n")
    return rows


def _check(weights: Sequence[float]) -> None:
    for weight in weights:
        if not 0 <= weight <= 1:
            raise MergeError(f"--sweep {weight}: the first model's weight must be from 0 to 1")
    if len(set(weights)) < len(weights):
        raise MergeError("--sweep: a weight comes twice; give each once")


def _row(weight: float, evaluation: Evaluation) -> JsonObject:
    """Returns a row of sweep.jsonl: accuracies by label and set; unknown ones are null."""
    labels = {name: _accuracies(*counts) for name, counts in evaluation.labels.items()}
    sets = {f"set/{name}": one for name, one in evaluation.sets.items() if name != HELDOUT}
    if evaluation.prompts:
        accuracies = evaluation.prompts, evaluation.avg_at_k, evaluation.greedy
        labels["all"] = _accuracies(*accuracies)
    for name, one in sets.items():
        labels[name] = _accuracies(one.prompts, one.avg_at_k, one.greedy) | {"k": one.k}
    return {"weight": weight, "k": evaluation.k, "labels": labels}


def _accuracies(prompts: int, average: float, greedy: float) -> JsonObject:
    known = [x if math.isfinite(x) else None for x in (average, greedy)]
    return {"prompts": prompts, "avg_at_k": known[0], "greedy": known[1]}


def averaged(rows: Sequence[JsonObject]) -> str:
    """Returns the name of the rows' accuracy: "avg@4", or "avg@k" if the sets differ in k."""
    ks = {one.get("k", row["k"]) for row in rows for one in row["labels"].values()}
    return f"avg@{min(ks)}" if len(ks) == 1 else "avg@k"


def _done(file: Path, settings: JsonObject) -> dict[float, JsonObject]:
    """Returns the rows of a sweep in progress, by weight. Raises ConfigError for another's."""
    if not os.path.lexists(file):
        return {}
    lines = [parse_json(line, where, error=MergeError) for where, line in read_lines(file)]
    if not lines or not all(isinstance(line, dict) for line in lines):
        raise MergeError(f"{file} is no sweep's: remove it, or choose another folder")
    header, *rows = lines
    require_same_settings(file.parent, header, settings, ())
    return {row["weight"]: row for row in rows}
