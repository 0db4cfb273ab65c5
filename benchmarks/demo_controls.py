"""Two controls for the demo: what doubled SFT gains instead of RL, and what RL gains from rewards
permuted within each group.

    compass demo --out runs/demo --seed 0
    python -m benchmarks.demo_controls --demo runs/demo --seed 0          ends with one JSON line

Both start where the demo started: the first trains the same SFT run for twice the updates, the
second the same RL run from the demo's SFT weights. Gains are in points of avg@k over the demo's SFT
checkpoint, on the same held-out prompts.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from compass_jax.commands.demo import demo_configs
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft


def main() -> None:
    """Runs the controls that are not finished in `--demo`/controls and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--demo", default="runs/demo", help="directory of a finished demo (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(args.demo)
    summary = json.loads((folder / "summary.json").read_text())
    if summary["seed"] != args.seed:
        parser.error(f"{folder} was run with seed {summary['seed']}: give --seed {summary['seed']}")
    sft, rl = demo_configs(folder, args.seed)
    longer = dataclasses.replace(
        sft,
        run_dir=str(folder / "controls" / "sft_doubled"),
        sft=dataclasses.replace(sft.sft, steps=2 * sft.sft.steps),
    )
    run_sft(longer)
    doubled = evaluate_weights(rl, longer.run_dir)
    permuted = run_rl(
        dataclasses.replace(
            rl,
            run_dir=str(folder / "controls" / "rl_permuted"),
            rl=dataclasses.replace(rl.rl, permute_rewards=True),
        )
    )["evaluation"]
    start = summary[f"sft_avg_at_{doubled.k}"]
    gains = {
        "rl": summary[f"rl_avg_at_{doubled.k}"],
        "sft_doubled": doubled.avg_at_k,
        "rl_permuted": permuted.avg_at_k,
    }
    out = {
        "seed": args.seed,
        "sft_avg": start,
        **{f"{name}_avg": avg for name, avg in gains.items()},
    }
    out |= {f"{name}_gain_points": round(100 * (avg - start), 1) for name, avg in gains.items()}
    print(json.dumps(out))


if __name__ == "__main__":
    tune_allocator()
    main()
