"""Plain GRPO from the demo's cold starts, recorded for the comparison at the demo's end.

    python -m benchmarks.demo_grpo [--seeds 0 1] [--steps N] [--cold-starts runs/cold_starts]

GRPO as published (arXiv 2402.03300) without its KL penalty: no selection, growth, shaping, RL-ZVP,
correction or router replay. Model, data, prompts a step, samples a group, updates a rollout and
learning rate are the demo's; so many steps generate at least the demo's tokens. Held-out accuracy
is measured every 8 steps. Writes configs/tiny_reasoning_grpo.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.commands.cli import tune_allocator
from compass_jax.commands.comparison import TOKENS, record_of
from compass_jax.commands.demo import GRPO, demo_configs
from compass_jax.config import CorrectionConfig, RunConfig, ShapingConfig, ZeroVarianceConfig
from compass_jax.report import read_metrics
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.rl import run_rl

EVERY = 8


def plain(folder: Path, cold_start: str, seed: int, steps: int) -> RunConfig:
    """The demo's RL run as plain GRPO."""
    config = demo_configs(folder, seed)[1]
    rl = dataclasses.replace(
        config.rl,
        objective=Grpo(),
        replay="off",
        correction=CorrectionConfig(),
        shaping=ShapingConfig(),
        zero_variance=ZeroVarianceConfig(rl_zvp=False),
        steps=steps,
        eval_every=EVERY,
    )
    return dataclasses.replace(
        config, run_dir=str(folder / f"grpo{seed}"), init_from=cold_start, rl=rl
    )


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=80, help="of each run (default: %(default)s)")
    for name, text, default in (
        ("--cold-starts", "cold starts that experiments share", "runs/cold_starts"),
        ("--out", "directory of the runs", "runs/demo_grpo"),
        ("--record", "file of the record", str(GRPO)),
    ):
        parser.add_argument(name, default=default, help=f"{text} (default: %(default)s)")
    return parser.parse_args()


def main() -> None:
    """Runs what is not finished, and writes the record."""
    args = arguments()
    folder, found = Path(args.out), []
    for seed in args.seeds:
        cold_start = rl_runs.cold_start(seed, Path(args.cold_starts))
        config = plain(folder, cold_start, seed, args.steps)
        start = rl_runs.start_accuracy(config, cold_start, folder / f"start{seed}")
        run_rl(config)
        series = read_metrics(Path(config.directory) / "metrics.jsonl", "rl")
        steps, values = series["eval/heldout/avg_at_k"]
        tokens = np.cumsum(series[TOKENS][1])
        measured = [(tokens[int(n) - 1], v) for n, v in zip(steps, values, strict=True)]
        found.append(record_of(seed, series, [(0.0, start), *measured]))
        experiments.forget_compiled()
    record = {
        "what": "plain GRPO from the demo's cold start",
        "command": f"python -m benchmarks.demo_grpo --steps {args.steps}",
        "commit": experiments.commit(),
        "runs": found,
    }
    write_atomically(Path(args.record), json.dumps(record) + "\n")
    print(json.dumps({"seeds": args.seeds, "written": args.record}))


if __name__ == "__main__":
    tune_allocator()
    main()
