"""Learning rates of the small mixture of experts of configs/mostly_hard_cpu.py, with GRPO: three of
all weights and three of adapters.

    python -m benchmarks.small_moe_rates [--steps 40] [--init-from runs/demo/sft]
                                         [--out runs/small_moe_rates]

Every run starts from one SFT of the configuration, which `compass demo` makes too, and has 16
prompts x 4 samples a step, without selection and screening, with router replay R3, and one seed. A
row has the accuracy of 240 held-out prompts (avg@2) before the first and after the last step, and
the mean reward of the last quarter of the steps; it is appended when its run ends, and runs with a
row are skipped.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.experiments import append, commit, finished, forget_compiled
from compass_jax.commands.configured import load_config
from compass_jax.config import RunConfig, ZeroVarianceConfig
from compass_jax.config.data import HELDOUT
from compass_jax.config.lora import LoRAConfig
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.report.metrics import read_metrics
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "mostly_hard_cpu.py"
RESULTS = Path(__file__).resolve().parent / "results" / "small_moe_rates.jsonl"
RATES = {"all weights": (5e-5, 1.5e-4, 4.5e-4), "adapters": (5e-4, 1.5e-3, 4.5e-3)}
RANK = 16


def configured(out: Path, init_from: str, kind: str, rate: float, steps: int) -> RunConfig:
    """Returns one run of RL."""
    base = load_config(str(CONFIG))
    rl = replace(
        base.rl,
        steps=steps,
        step_policy=None,
        zero_variance=ZeroVarianceConfig(),
        optim=replace(base.rl.optim, learning_rate=rate),
        eval_every=0,
    )
    return replace(
        base,
        rl=rl,
        init_from=init_from,
        lora=LoRAConfig(rank=RANK if kind == "adapters" else 0),
        data=replace(base.data, eval_prompts=240),
        evaluation=replace(base.evaluation, start_prompts=240),
        run_dir=str(out / f"{kind.replace(' ', '_')}_{rate:g}"),
        show_samples_every=0,
    )


def row_of(config: RunConfig, kind: str, rate: float) -> dict[str, float | str | int]:
    """Runs RL, and returns its row."""
    result = run_rl(config)
    series = read_metrics(Path(config.directory) / "metrics.jsonl", "rl")
    rewards = series["reward/mean"][1]
    return {
        "kind": kind,
        "rate": rate,
        "rank": config.lora.rank,
        "steps": config.rl.steps,
        "prompts": 240,
        "before": before_of(Path(config.directory)),
        "after": result["evaluation"].avg_at_k,
        "reward_of_last_quarter": float(np.mean(rewards[-math.ceil(len(rewards) / 4) :])),
        "commit": commit(),
    }


def before_of(folder: Path) -> float:
    """Returns avg@2 before the first step."""
    summary = json.loads((folder / "evaluation_start" / "summary.json").read_text())
    return summary["sets"][HELDOUT]["avg_at_k"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--init-from", default="", help="weights; empty: of an SFT in OUT/sft")
    parser.add_argument("--out", type=Path, default=Path("runs/small_moe_rates"))
    options = parser.parse_args()
    keep_programs()
    init_from = options.init_from or str(options.out / "sft")
    if not options.init_from:
        run_sft(replace(load_config(str(CONFIG)), run_dir=init_from))
    done = {(row["kind"], row["rate"]) for row in finished(RESULTS)}
    for kind, rates in RATES.items():
        for rate in rates:
            if (kind, rate) not in done:
                config = configured(options.out, init_from, kind, rate, options.steps)
                append(RESULTS, row_of(config, kind, rate))
                forget_compiled()


if __name__ == "__main__":
    main()
