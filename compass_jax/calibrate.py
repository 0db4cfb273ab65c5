"""How ESPO's alpha clips: clip fraction and clip range against alpha, on one recorded rollout of a
given model.

    compass calibrate-alpha CONFIG --checkpoint DIR --out DIR [--alphas 0.01 0.02 0.05 0.1]
        [--target-clip 0.15]

The first update after a rollout clips nothing (its ratio is 1), so the numbers are of the updates
behind it: set rl.updates_per_rollout as in the run to come. The suggested alpha is the one whose
clip fraction is nearest the target on a logarithmic scale between the measured ones; the default
target is about GSPO's own clip fraction (arXiv 2507.18071, section 5.2).
"""

from __future__ import annotations

import dataclasses
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from compass_jax.config import ConfigError, Objective, RunConfig
from compass_jax.records import StepArrays
from compass_jax.report import summary_table
from compass_jax.rewards.detect import notice
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rundir import NewFolderLock, write_atomically
from compass_jax.telemetry import Telemetry
from compass_jax.train import step
from compass_jax.train.learner import Learner
from compass_jax.train.loop import RLTrainer
from compass_jax.train.session import StopSignal, open_scorer

# column titles; groups of entropy by number
_SHORT = {"clip_frac": "clip", "ratio_dev_max": "|r-1|", "epsilon": "eps", "floor_frac": "floor"}
ALPHAS = (0.01, 0.02, 0.03, 0.05, 0.07, 0.1)


def run_calibration(
    config: RunConfig,
    checkpoint: str,
    out: str,
    alphas: Sequence[float] = ALPHAS,
    target: float = 0.15,
) -> dict[str, Any]:
    """Prints and writes `out`/alpha.json; returns what it holds. Trains nothing that is kept."""
    espo = config.rl.objective
    if not isinstance(espo, Espo) or espo.fixed_clip:
        raise ConfigError(
            "rl.objective: alpha belongs to espo without fixed_clip; set --rl.objective espo"
        )
    if config.rl.updates_per_rollout < 2:
        raise ConfigError(
            "rl.updates_per_rollout = 1: a first update is on policy and clips nothing; set at"
            " least 2"
        )
    if len(alphas) < 2 or min(alphas) <= 0 or list(alphas) != sorted(set(alphas)):
        raise ConfigError(
            f"--alphas {' '.join(map(str, alphas))}: give at least two, positive and increasing"
        )
    if not 0 < target < 1:
        raise ConfigError(f"--target-clip {target}: must be in (0, 1)")
    objectives = [dataclasses.replace(espo, alpha=alpha) for alpha in alphas]
    with NewFolderLock(out):
        measured, columns = _measured(dataclasses.replace(config, init_from=checkpoint), objectives)
        labels = (checkpoint, columns, config.rl.updates_per_rollout)
        return _written(measured, Path(out), labels, alphas, target)


def _measured(
    config: RunConfig, objectives: Sequence[Objective]
) -> tuple[list[list[dict[str, float]]], int]:
    """The diagnostics of each objective, of every update but the first, and the head's columns.

    The run directory of it is thrown away.
    """
    with tempfile.TemporaryDirectory() as scratch:
        config = dataclasses.replace(config, run_dir=scratch)
        with (
            StopSignal() as stop,
            open_scorer(config) as scorer,
            Telemetry(scratch, 1, "rl") as telemetry,
        ):
            telemetry.note(notice(config.rewards.sandbox))
            trainer = RLTrainer(config, scorer, stop, telemetry)
            arrays = trainer.first_rollout()
            found = [] if arrays is None else probe(trainer.learner, arrays, objectives)[1:]
            if stop.requested:
                telemetry.note("stopped on request; there is nothing to save")
                raise SystemExit(stop.status)
            return found, trainer.learner.model.columns


def probe(
    learner: Learner, arrays: StepArrays, objectives: Sequence[Objective]
) -> list[list[dict[str, float]]]:
    """The diagnostics that each of `objectives` would report before each update of one rollout,
    which is then made as in training.

    Entry [u][i]: objective i on the rows of update u, at the parameters that the u updates before
    it left.
    """
    scored, temperature, out = learner.score(arrays), learner.config.rollout.temperature, []
    for rows in learner.updates:
        prepared, _ = learner.prepare(scored, rows)
        parts: list[list[Diagnostics]] = [[] for _ in objectives]
        for batch in learner.batches(scored, rows, prepared):
            logp, *_ = step.score(
                learner.model,
                learner.state.params,
                batch.tokens,
                batch.lengths,
                batch.routes,
                temperature=temperature,
            )
            for part, objective in zip(parts, objectives, strict=True):
                found = step.objective_diagnostics(logp, batch, objective, learner.model.columns)
                part.append(found)
        merged = jax.device_get([finalize_diagnostics(merge_diagnostics(part)) for part in parts])
        out.append([{name: float(x) for name, x in one.items()} for one in merged])
        learner.update(scored, rows)
    return out


def _written(
    measured: list,
    out: Path,
    labels: tuple[str, int, int],
    alphas: Sequence[float],
    target: float,
) -> dict[str, Any]:
    """What was measured as a table on the console and as `out`/alpha.json; returns what that holds.

    labels: where the weights are from, the head's columns, updates to a rollout.
    """
    checkpoint, columns, updates = labels
    rows = [_row(alpha, [update[i] for update in measured]) for i, alpha in enumerate(alphas)]
    suggestion = suggest([row["alpha"] for row in rows], [row["clip_frac"] for row in rows], target)
    result: dict[str, Any] = {
        "vocab_size": columns,
        "updates_per_rollout": updates,
        "target_clip": target,
    }
    result |= {"suggested_alpha": suggestion, "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "alpha.json", json.dumps(result, indent=2) + "\n")
    console = Console(soft_wrap=True)
    short = [{_title(name): value for name, value in row.items()} for row in rows]
    console.print(
        summary_table(
            short, title=f"{checkpoint}: ESPO's clipping against alpha, updates 2 to {updates}"
        )
    )
    console.print(
        f"suggested alpha for a clip fraction of {target:g}: {suggestion:.3g}", highlight=False
    )
    return result


def _title(name: str) -> str:
    """ "group_1 epsilon" -> "eps 1": nine columns have to fit in a terminal."""
    *group, what = name.split()
    return " ".join([_SHORT.get(what, what), *(g.removeprefix("group_") for g in group)])


def _row(alpha: float, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Means over the updates; epsilon and the floor of the groups of entropy from low to high."""

    def mean(name: str) -> float:
        return sum(update[name] for update in updates) / len(updates)

    row = {
        "alpha": alpha,
        "clip_frac": mean("policy/clip_frac"),
        "ratio_dev_max": max(update["policy/ratio_dev_max"] for update in updates),
    }
    groups = sorted(name.split("/")[1] for name in updates[0] if name.endswith("/epsilon"))
    for group in groups:
        row |= {
            f"{group} {what}": mean(f"espo/{group}/{what}")
            for what in ("epsilon", "clip_frac", "floor_frac")
        }
    return row


def suggest(alphas: Sequence[float], clip_fracs: Sequence[float], target: float) -> float:
    """The alpha at which the clip fraction passes `target`, interpolated in log(alpha); the end of
    the range where it does not.

    A wider range clips less, so the fractions fall with alpha.
    """
    if clip_fracs[0] <= target:
        return alphas[0]
    for i in range(1, len(alphas)):
        if clip_fracs[i] <= target:
            share = (clip_fracs[i - 1] - target) / (clip_fracs[i - 1] - clip_fracs[i])
            return math.exp((1 - share) * math.log(alphas[i - 1]) + share * math.log(alphas[i]))
    return alphas[-1]
