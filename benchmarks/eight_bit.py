"""Experiment: 200 steps of RL with an 8-bit rollout against the same run with a float32 rollout.

    python -m benchmarks.eight_bit [--out runs/eight_bit] [--seeds 0] [--only float32 int8 ...]
        [--smoke]

The demo's model from its cold start, ESPO with router replay R3; training is float32 throughout.
The 8-bit rollouts have weights of 8 bits (on top of bfloat16, emulated: model/quantize.py) and
truncated importance sampling. The prompts and the number of samples are the same. The weights are
judged by a float32 sampler before and after training, and by the run's sampler during it. A line
per finished run goes to OUT/eight_bit.jsonl, so that the same command continues after a kill; at
the end OUT/eight_bit.md and OUT/eight_bit.png.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.commands.configured import load_config
from compass_jax.config import RolloutConfig, RunConfig, named_correction
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.runs.report import read_metrics
from compass_jax.runs.rundir import write_atomically

VARIANTS = {"float32": {}, "bfloat16": {"dtype": "bfloat16"}}
VARIANTS |= {kind: {"dtype": "bfloat16", "quantize": kind} for kind in ("int8", "e4m3")}
GAPS = ("mismatch/logp_abs_diff", "mismatch/kl_k3", "mismatch/extreme_frac", "replay/flip_frac")


def run_config(variant: str, seed: int, folder: Path, weights: str, smoke: bool) -> RunConfig:
    """Returns the configuration of the RL run in one precision."""
    config = dataclasses.replace(
        rl_runs.without_stages(), seed=seed, run_dir=str(folder), init_from=weights
    )
    correction = named_correction("off" if variant == "float32" else "tis")
    rl = dataclasses.replace(
        config.rl,
        steps=2 if smoke else 200,
        prompts_per_step=4 if smoke else 32,
        group_size=4 if smoke else 8,
        correction=correction,
        eval_every=1 if smoke else 20,
        save_every=0 if smoke else 50,
    )
    data, evaluation = (
        dataclasses.replace(config.data, eval_prompts=8 if smoke else 256),
        dataclasses.replace(config.evaluation, k=2),
    )
    rollout: RolloutConfig = dataclasses.replace(config.rollout, **VARIANTS[variant])
    return dataclasses.replace(config, rl=rl, data=data, evaluation=evaluation, rollout=rollout)


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(
        __doc__, "eight_bit", cold_starts="cold_starts", seeds=(0,), variants=VARIANTS
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "eight_bit.jsonl"
    for seed in args.seeds:
        weights = "" if args.smoke else rl_runs.cold_start(seed, Path(args.cold_starts))
        for variant in args.only:
            if (variant, seed) in {
                (row["variant"], row["seed"]) for row in experiments.finished(results)
            }:
                continue
            config = run_config(variant, seed, out / f"seed{seed}" / variant, weights, args.smoke)
            exact = dataclasses.replace(config, rollout=load_config(str(rl_runs.CONFIG)).rollout)
            row = rl_runs.run(
                config, rl_runs.start_accuracy(exact, weights, out / f"seed{seed}"), variant
            )
            row["float32_accuracy"] = evaluate_weights(exact, config.directory).avg_at_k
            series = read_metrics(Path(config.directory) / "metrics.jsonl", "rl")
            experiments.append(
                results, {**row, "gaps": {name: float(np.mean(series[name][1])) for name in GAPS}}
            )
    rows = sorted(
        experiments.finished(results), key=lambda row: list(VARIANTS).index(row["variant"])
    )
    write_atomically(out / "eight_bit.md", report(rows))
    rl_runs.plot_curves(rows, out / "eight_bit.png", "RL with 8-bit rollouts")
    print(report(rows))
    accuracy = {f"{r['variant']}, seed {r['seed']}": r["float32_accuracy"] for r in rows}
    print(json.dumps({"benchmark": "eight_bit", "smoke": args.smoke, "accuracy": accuracy}))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table in Markdown: accuracy before, at the end and at best; the gap of rollout
    and training.
    """
    lines = [
        "| rollout | seeds | before | accuracy, float32 sampler | own sampler | best on the way |"
    ]
    lines[0] += " mean gap, nats | k3 | ratios beyond 2 | routed otherwise |"
    lines += ["|---" * 10 + "|"]
    for name, runs in rl_runs.by_variant(rows).items():
        cells = [name, str(len(runs))]
        for values in (
            [r["curve"][0][1] for r in runs],
            [r["float32_accuracy"] for r in runs],
            [r["accuracy"] for r in runs],
        ):
            cells.append(rl_runs.spread(values))
        cells.append(rl_runs.spread([max(a for _, a in r["curve"]) for r in runs]))
        cells += [rl_runs.spread([r["gaps"][gap] for r in runs], "{:.1e}") for gap in GAPS]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
