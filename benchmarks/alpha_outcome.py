"""Experiment: what ESPO's alpha is worth, by the accuracy that RL reaches, on two tasks and two
model sizes.

    python -m benchmarks.alpha_outcome [--out runs/alpha_outcome] [--seeds 0 1 2]
        [--only VARIANT ...] [--smoke]

A variant is "task, size, alpha". The tasks are `decisions` and `noise` of benchmarks/objectives.py:
in one the tokens of high entropy decide, in the other nothing depends on them. All alphas of a
task, size and seed start from one cold start; alpha is their only difference. ESPO's authors tested
0.01 to 0.10. A line per finished run goes to OUT/alpha_outcome.jsonl, so that the same command
continues after a kill; at the end OUT/alpha_outcome.md and OUT/alpha_outcome.png.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import alpha, experiments, objectives, rl_runs
from compass_jax.config import OptimConfig, RunConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.rl.objectives.espo import Espo
from compass_jax.runs.rundir import write_atomically

TASKS = ("decisions", "noise")
ALPHAS = (0.005, 0.02, 0.1, 0.5)
SEEDS = (0, 1, 2)
VARIANTS = {
    f"{task}, {size}, {value:g}": (task, size, value)
    for task, size, value in itertools.product(TASKS, alpha.SIZES, ALPHAS)
}


def start_config(task: str, size: str, seed: int, folder: Path, smoke: bool) -> RunConfig:
    """Returns the configuration of a task and a size: its cold start, and all of its RL but the
    objective.
    """
    config = objectives.task_config(task, seed, folder, smoke)
    layers, hidden = alpha.SIZES[size]
    model = dataclasses.replace(config.model, layers=layers, hidden=hidden)
    return dataclasses.replace(config, name="alpha_outcome", model=model)


def with_alpha(config: RunConfig, weights: str, value: float, folder: Path) -> RunConfig:
    """Returns the configuration of the RL run with one alpha from `weights`."""
    optim = OptimConfig(learning_rate=objectives.LEARNING_RATE, warmup_steps=2)
    rl = dataclasses.replace(config.rl, objective=Espo(alpha=value), optim=optim)
    return dataclasses.replace(
        config, rl=rl, init_from=weights, run_dir=str(folder / f"alpha_{value:g}")
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(__doc__ or "", "alpha_outcome", seeds=SEEDS, variants=tuple(VARIANTS))
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "alpha_outcome.jsonl"
    for seed, name in itertools.product(args.seeds, args.only):
        if (name, seed) in {(r["variant"], r["seed"]) for r in experiments.finished(results)}:
            continue
        task, size, value = VARIANTS[name]
        folder = out / f"seed{seed}" / f"{task}_{size.replace(' ', '_')}"
        config = start_config(task, size, seed, folder, args.smoke)
        weights = objectives.run_sft_of(config)
        start = rl_runs.start_accuracy(config, weights, folder)
        run = rl_runs.run(with_alpha(config, weights, value, folder), start, name)
        experiments.append(results, {**run, "start": start})
    order = list(VARIANTS)
    rows = sorted(experiments.finished(results), key=lambda row: order.index(row["variant"]))
    write_atomically(out / "alpha_outcome.md", report(rows))
    plot(rows, out / "alpha_outcome.png")
    print(report(rows))


def _start_key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    task, size, _ = VARIANTS[row["variant"]]
    return task, size, row["seed"]


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in Markdown: clipped share, accuracy before and at the end, and the mean of
    the curve up to the tokens that all runs of a cold start generated.
    """
    budget = {
        _start_key(row): min(r["tokens"] for r in rows if _start_key(r) == _start_key(row))
        for row in rows
    }
    lines = [
        "| task | model | alpha | seeds | clip fraction | accuracy before | at the end"
        " | mean of the curve |",
        "|---" * 8 + "|",
    ]
    for name, runs in rl_runs.by_variant(rows).items():
        task, size, value = VARIANTS[name]
        clipped = [float(np.mean(row["series"]["policy/clip_frac"])) for row in runs]
        height = [rl_runs.mean_height(row["curve"], budget[_start_key(row)]) for row in runs]
        columns = [clipped, [row["start"] for row in runs], [row["accuracy"] for row in runs]]
        cells = [task, size, f"{value:g}", str(len(runs))]
        cells += [rl_runs.spread(values) for values in (*columns, height)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the accuracy at the end against alpha: a panel for each task, a line for each size with
    its seeds.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for panel, task in zip(axes, TASKS, strict=True):
        for colour, size in zip(rl_runs.COLOURS[1:], alpha.SIZES, strict=False):
            size_rows = [row for row in rows if VARIANTS[row["variant"]][:2] == (task, size)]
            if not size_rows:
                continue
            at = {VARIANTS[name][2]: runs for name, runs in rl_runs.by_variant(size_rows).items()}
            for value, runs in at.items():
                ends = [row["accuracy"] for row in runs]
                panel.plot([value] * len(ends), ends, "o", color=colour, alpha=0.35, markersize=4)
            means = [float(np.mean([row["accuracy"] for row in runs])) for runs in at.values()]
            panel.plot(list(at), means, "-", color=colour, linewidth=2, label=size)
            before = float(np.mean([row["start"] for row in size_rows]))
            panel.axhline(before, color=colour, linestyle=":", linewidth=1)
        panel.set(xscale="log", xlabel="ESPO's alpha", title=task)
        panel.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out accuracy at the end, avg@k")
    axes[0].legend(title="model (dotted: before RL)", frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
