"""Clip fraction and clip range of ESPO against alpha, on one recorded rollout of a given model.

    python -m benchmarks.calibrate_alpha CONFIG --checkpoint DIR --out DIR [--target-clip 0.15]
        [--rl.objective espo ...]

Other options are settings, as of `compass train`.

The first update after a rollout clips nothing (its ratio is 1), so the numbers are those of the
updates after it: set rl.updates_per_rollout as in the planned run. The suggested alpha is the one
whose clip fraction is nearest the target, interpolated between the measured ones on a logarithmic
scale. If they do not reach the target, no alpha is suggested, and a message says whether the target
is above or below. The default target is about GSPO's own clip fraction (arXiv 2507.18071, section
5.2).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
from jaxtyping import Array, Float
from rich.console import Console

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.base.records import StepArrays
from compass_jax.commands.configured import load_config
from compass_jax.config import ConfigError, Objective, RunConfig, ScoredConfig, apply
from compass_jax.config.curriculum import at_step
from compass_jax.config.errors import check
from compass_jax.config.io import flatten
from compass_jax.config.words import read_arguments
from compass_jax.devices.allocator import tune_allocator
from compass_jax.devices.distributed import (
    in_main_process,
    is_main_process,
    processes,
    require_equal_across_processes,
)
from compass_jax.experience.scorer import open_scorer
from compass_jax.rewards.detect import notice
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.policy import policy_objective
from compass_jax.runs.report import summary_table
from compass_jax.runs.rundir import NewFolderLock, write_atomically
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.building import Building
from compass_jax.training.learner import Learner
from compass_jax.training.loop import RLTrainer
from compass_jax.training.session import RunState
from compass_jax.training.step import UpdateBatch, score

# column titles; entropy groups are numbered
_SHORT = {"clip_frac": "clip", "ratio_dev_max": "|r-1|", "epsilon": "eps", "floor_frac": "floor"}
# another diagnostic costs little compared with the shared rollout
ALPHAS = (1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.3, 1.0, 3.0, 10.0)


def run_calibration(
    config: RunConfig,
    checkpoint: str,
    out: str,
    alphas: Sequence[float] = ALPHAS,
    target: float = 0.15,
) -> JsonObject:
    """Measures the alphas, prints the table, writes `out`/alpha.json and returns its content.

    Saves no trained weights. A run in stages is measured in its first stage. Several processes
    measure together, of which the first prints and writes.
    """
    rl, rollout = at_step(config.rl, config.rollout, 0)
    config = dataclasses.replace(config, rl=rl, rollout=rollout)
    espo = config.rl.objective
    if not isinstance(espo, Espo) or espo.fixed_clip:
        raise ConfigError(
            "rl.objective: alpha belongs to espo without fixed_clip; set --rl.objective espo"
        )
    message = "a first update is on policy and clips nothing; set at least 2"
    check(config.rl.updates_per_rollout > 1, f"rl.updates_per_rollout = 1: {message}")
    check(0 < target < 1, f"--target-clip {target}: must be in (0, 1)")
    objectives = [dataclasses.replace(espo, alpha=alpha) for alpha in alphas]
    require_equal_across_processes(
        flatten(config) | {"--checkpoint": checkpoint, "--target-clip": target},
        "start the same command in every process",
    )
    lock = NewFolderLock(out)
    in_main_process(lock.__enter__)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            run = dataclasses.replace(config, init_from=checkpoint, run_dir=scratch)
            measured, columns = _measure(partial(Building, run), run.scored, scratch, objectives)
        rows = [_row(alpha, [u[i] for u in measured]) for i, alpha in enumerate(alphas)]
        result = {
            "vocab_size": columns,
            "updates_per_rollout": config.rl.updates_per_rollout,
            "target_clip": target,
            "suggested_alpha": suggest(alphas, [row["clip_frac"] for row in rows], target),
            "rows": rows,
        }
        in_main_process(partial(_write, result, Path(out)))
    finally:
        lock.__exit__()
    if is_main_process():
        _print(result, checkpoint)
    return result


def _write(result: JsonObject, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "alpha.json", json.dumps(result, indent=2) + "\n")


def _measure(
    building: Callable[..., Building],
    scored: ScoredConfig,
    scratch: str,
    objectives: Sequence[Objective],
) -> tuple[list[list[dict[str, float]]], int]:
    """Returns the diagnostics of each objective for every update but the first, and the number of
    columns of the LM head.
    """
    with (
        RunState() as stop,
        open_scorer(scored.rewards, scored.data) as scorer,
        Telemetry(scratch, 1, "rl", writes=is_main_process()) as telemetry,
    ):
        telemetry.note(notice(scored.rewards.sandbox))
        trainer = building(scorer, stop, telemetry).trainer()
        arrays = rollout(trainer)
        diagnostics = [] if arrays is None else probe(trainer.learner, arrays, objectives)[1:]
        if stop.interrupted:
            telemetry.note("stopped on request; there is nothing to save")
            raise SystemExit(stop.status)
        return diagnostics, trainer.learner.model.columns


def rollout(trainer: RLTrainer) -> StepArrays | None:
    """Runs the trainer's next rollout without training on it; returns None if a stop came first."""
    collected = trainer._rollout(trainer.done_steps + 1, trainer._stopped)()
    return None if collected is None else trainer._assemble(trainer.buffer.step_groups(), {})


@partial(jax.jit, static_argnames=("objective", "vocab_size"))
def objective_diagnostics(
    logp: Float[Array, "b t"], batch: UpdateBatch, objective: Objective, vocab_size: int
) -> Diagnostics:
    """Returns an objective's diagnostics of one micro-batch whose current log-probs are `logp`."""
    return policy_objective(
        logp,
        batch.old_logp,
        batch.old_entropy,
        batch.advantage,
        batch.weight,
        objective,
        mask=batch.mask,
        entropy_group=batch.entropy_group,
        ref_logp=batch.ref_logp,
        kl_weight=batch.kl_weight,
        vocab_size=vocab_size,
    )[1]


def probe(
    learner: Learner, arrays: StepArrays, objectives: Sequence[Objective]
) -> list[list[dict[str, float]]]:
    """Returns the diagnostics that each of `objectives` would report before each update of one
    rollout.

    Trains on the rollout as a run does. Entry [u][i] is objective i on the rows of update u, at the
    parameters after u updates.
    """
    scored, temperature, out = learner.score(arrays), learner.config.rollout.temperature, []
    for rows in learner.updates:
        prepared, _ = learner.prepare(scored, rows)
        parts: list[list[Diagnostics]] = [[] for _ in objectives]
        for batch in learner._passes(scored).batches(scored.update_of(rows), prepared):
            logp, *_ = score(
                learner.model,
                learner.params,
                batch.tokens,
                batch.lengths,
                batch.routes,
                temperature=temperature,
            )
            for part, objective in zip(parts, objectives, strict=True):
                part.append(objective_diagnostics(logp, batch, objective, learner.model.columns))
        merged = jax.device_get([finalize_diagnostics(merge_diagnostics(part)) for part in parts])
        out.append([{name: float(x) for name, x in one.items()} for one in merged])
        learner.update(scored, rows)
    return out


def _print(result: JsonObject, checkpoint: str) -> None:
    console, rows, target = Console(soft_wrap=True), result["rows"], result["target_clip"]
    short = [{_title(name): value for name, value in row.items()} for row in rows]
    updates = f"updates 2 to {result['updates_per_rollout']}"
    title = f"{checkpoint}: ESPO's clipping against alpha, {updates}"
    console.print(summary_table(short, title=title))
    if (suggestion := result["suggested_alpha"]) is None:
        alphas, clips = ([row[name] for row in rows] for name in ("alpha", "clip_frac"))
        message = out_of_range(alphas, clips, target)
    else:
        message = f"suggested alpha for a clip fraction of {target:g}: {suggestion:.3g}"
    console.print(message, highlight=False)


def _title(name: str) -> str:
    """Returns a column's short title ("group_1 epsilon" -> "eps 1"): nine must fit a terminal."""
    *group, what = name.split()
    return " ".join([_SHORT.get(what, what), *(g.removeprefix("group_") for g in group)])


def _row(alpha: float, updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the means over the updates; epsilon and floor of each entropy group, from low."""

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


def suggest(alphas: Sequence[float], clip_fracs: Sequence[float], target: float) -> float | None:
    """Returns the alpha at which the clip fraction passes `target`, interpolated in log(alpha), or
    None if it does not.

    A wider range clips less, so the fractions fall with alpha.
    """
    for i in range(1, len(alphas)):
        if clip_fracs[i] <= target <= clip_fracs[i - 1] and clip_fracs[i] < clip_fracs[i - 1]:
            share = (clip_fracs[i - 1] - target) / (clip_fracs[i - 1] - clip_fracs[i])
            return math.exp((1 - share) * math.log(alphas[i - 1]) + share * math.log(alphas[i]))
    return None


def out_of_range(alphas: Sequence[float], clip_fracs: Sequence[float], target: float) -> str:
    """Returns the message for a target above or below all measured clip fractions."""
    if max(clip_fracs) < target:
        side, remedy = "above", "policies this close are hardly clipped by any alpha; lower"
    else:
        side, remedy = "below", "every alpha clips more than that; raise"
    return (
        f"no alpha from {alphas[0]:.3g} to {alphas[-1]:.3g} gives a clip fraction of {target:g}: it"
        f" lies {side} the {min(clip_fracs):.3g} to {max(clip_fracs):.3g} that were measured;"
        f" {remedy} --target-clip"
    )


def main(argv: list[str] | None = None) -> int:
    """Calibrates by a command line; returns the exit status, that of a stop on request too."""
    if argv is None:
        tune_allocator()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("config", metavar="CONFIG")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="weights")
    parser.add_argument("--out", required=True, metavar="DIR", help="new folder for the results")
    parser.add_argument("--target-clip", type=float, default=0.15, help="default: %(default)s")
    args, settings = parser.parse_known_args(argv)
    try:
        config = apply(load_config(args.config), read_arguments(settings)).validate_for_rl()
        with processes():
            try:
                run_calibration(config, args.checkpoint, args.out, target=args.target_clip)
            except SystemExit as stop:  # on request; other processes wait for this one to leave
                return int(stop.code or 0)
    except CompassError as error:
        parser.exit(error.exit_status, f"{parser.prog}: {error}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
