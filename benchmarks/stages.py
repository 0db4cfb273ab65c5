"""Experiment: RL in stages of rising difficulty against the same prompts without stages, at one
budget of generated tokens, on a dense model.

    python -m benchmarks.stages [--out runs/stages] [--cold-starts runs/dense_cold_starts]
        [--seeds 0 1 2] [--only stages shuffled] [--smoke]

Both start from the same cold start of configs/compass_thinker_tiny_cpu.py and have its rewards,
growth, shaping and RL-ZVP:
    stages      the configuration's stages: mixes of difficulty, lengths, group size, learning rate
    mix         the stages' mixes alone: lengths, group size and learning rate stay
    shuffled    no stages: prompts in a shuffled order
    labels      no stages: prompts by the chance that their group varies
                (rl.zero_variance.curriculum)
Every variant makes the same number of steps. Compared are the accuracy at the least tokens that
any of them generated, linear between evaluations, and the mean of the curve up to there. A
line per finished run goes to OUT/stages.jsonl, so that the same command continues after a
kill; at the end OUT/stages.md and OUT/stages.png.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.commands.configured import load_config
from compass_jax.config import RLConfig, RLStage, RunConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.sft import run_sft

CONFIG = rl_runs.CONFIG.with_name("compass_thinker_tiny_cpu.py")
EVERY = 5  # steps between evaluations


def _mix_alone(rl: RLConfig) -> RLConfig:
    stages = tuple(RLStage(stage.after_steps, stage.mix) for stage in rl.stages)
    return dataclasses.replace(rl, stages=stages)


def _shuffled(rl: RLConfig) -> RLConfig:
    return dataclasses.replace(rl, stages=())


def _labels(rl: RLConfig) -> RLConfig:
    zero = dataclasses.replace(rl.zero_variance, curriculum=True)
    return dataclasses.replace(rl, stages=(), zero_variance=zero)


VARIANTS: dict[str, Callable[[RLConfig], RLConfig]] = {
    "stages": lambda rl: rl,
    "mix": _mix_alone,
    "shuffled": _shuffled,
    "labels": _labels,
}


def base_config(seed: int, smoke: bool) -> RunConfig:
    """Returns the settings that all variants share; with `smoke` a run takes minutes."""
    config = dataclasses.replace(load_config(str(CONFIG)), seed=seed)
    rl = dataclasses.replace(config.rl, eval_every=EVERY, save_every=0)
    if not smoke:
        return dataclasses.replace(config, rl=rl)
    few = tuple(dataclasses.replace(s, size=min(s.size, 40)) for s in config.data.sources[:2])
    last = dataclasses.replace(rl.stages[-1], after_steps=1, group_size=None)
    zero = dataclasses.replace(rl.zero_variance, grow_to=8)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=1),
        data=dataclasses.replace(config.data, sources=few, eval_prompts=8),
        sft=dataclasses.replace(
            config.sft, steps=10, batch=16, procedural=(("sum_3x1", 20, 1),), answers=()
        ),
        rl=dataclasses.replace(
            rl,
            steps=2,
            prompts_per_step=4,
            group_size=4,
            eval_every=1,
            stages=(RLStage(), last),
            zero_variance=zero,
        ),
    )


def cold_start(config: RunConfig, folder: Path) -> str:
    """Trains the dense model's cold start of this seed, once; returns its directory."""
    config = dataclasses.replace(config, run_dir=str(folder / f"seed{config.seed}"))
    run_sft(config)
    return config.directory


def accuracy_at(curve: Sequence[Sequence[float]], tokens: float) -> float:
    """Returns the held-out accuracy after `tokens` tokens, linear between two evaluations."""
    grid, accuracy = np.asarray(curve, np.float64).T
    return float(np.interp(tokens, grid, accuracy))


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(
        __doc__ or "",
        "stages",
        cold_starts="dense_cold_starts",
        seeds=(0, 1, 2),
        variants=tuple(VARIANTS),
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "stages.jsonl"
    for seed in args.seeds:
        done = {(row["variant"], row["seed"]) for row in experiments.finished(results)}
        missing = [name for name in args.only if (name, seed) not in done]
        if not missing:
            continue
        config, folder = base_config(seed, args.smoke), out / f"seed{seed}"
        weights = cold_start(config, folder if args.smoke else Path(args.cold_starts))
        start = rl_runs.start_accuracy(config, weights, folder)
        for name in missing:
            changed = dataclasses.replace(
                config,
                run_dir=str(folder / name),
                init_from=weights,
                rl=VARIANTS[name](config.rl),
            )
            experiments.append(results, rl_runs.run(changed, start, name))
    rows = sorted(experiments.finished(results), key=lambda r: list(VARIANTS).index(r["variant"]))
    write_atomically(out / "stages.md", report(rows))
    rl_runs.plot_curves(rows, out / "stages.png", "Stages of rising difficulty, and none")
    print(report(rows))


def report(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table in Markdown: accuracy at the budget that all runs of a seed spent, the mean
    of the curve up to it, and at each run's own end; tokens; where the signal came from.
    """
    budget = {
        seed: min(r["tokens"] for r in rows if r["seed"] == seed)
        for seed in {r["seed"] for r in rows}
    }
    lines = [
        "| variant | seeds | accuracy at the same tokens | mean of the curve | accuracy at the end"
        " | thousand tokens | verifier | none |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in rl_runs.by_variant(rows).items():
        at = [accuracy_at(r["curve"], budget[r["seed"]]) for r in runs]
        height = [rl_runs.mean_height(r["curve"], budget[r["seed"]]) for r in runs]
        cells = [name, str(len(runs)), rl_runs.spread(at), rl_runs.spread(height)]
        cells.append(rl_runs.spread([r["accuracy"] for r in runs]))
        cells.append(rl_runs.spread([r["tokens"] / 1e3 for r in runs], "{:.0f}"))
        cells += [
            rl_runs.spread([100 * r["shares"][signal] for r in runs], "{:.0f}") + " %"
            for signal in ("verifier_signal", "none")
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
