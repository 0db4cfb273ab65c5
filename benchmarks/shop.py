"""The gain of a tiny model in the shop (examples/shop) from RL over whole conversations.

    python -m benchmarks.shop [--out runs/shop] [--seeds 0 1] [--smoke]

A seed is a cold start on the conversations of careful and careless clerks, RL from it, and the
success of both on the same held-out requests with the same draws. A line per seed goes to
OUT/shop.jsonl.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.commands.configured import load_config
from compass_jax.config import MoEConfig, RunConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from examples.shop import shop

EXAMPLE = Path(shop.__file__).resolve().parent
CARELESS = 0.5  # of the goals in the cold start's conversations
EACH = 100  # requests of each number of calls and language in the cold start


def write_conversations(file: Path, seed: int, calls: Sequence[int], careless: float) -> None:
    """Writes the cold start's conversations, as `python examples/shop/shop.py` does."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, shop.cold_start(seed, calls, EACH, careless))


def cold_start(
    config: RunConfig, folder: Path, calls: Sequence[int] = (1, 2), careless: float = CARELESS
) -> str:
    """Trains on the conversations, once; returns the directory of the run, folder/sft."""
    write_conversations(folder / "shop.jsonl", config.seed, calls, careless)
    config = dataclasses.replace(config, run_dir=str(folder / "sft"))
    run_sft(config)
    return config.directory


def configuration(seed: int, folder: Path, smoke: bool) -> RunConfig:
    """Returns the configuration of a seed's runs, without their directory; each held-out request is
    sampled 8 times.
    """
    config = load_config(str(EXAMPLE / "shop_tiny_cpu.py"))
    sft = dataclasses.replace(config.sft, files=(str(folder / "shop.jsonl"),))
    data = dataclasses.replace(config.data, eval_prompts=256)
    evaluation, rl = dataclasses.replace(config.evaluation, k=8), config.rl
    if smoke:
        # most of a smoke run's time is compilation, which is shorter for fewer layers and rows
        moe = MoEConfig(experts=4, top_k=2, ffn=16)
        model = dict(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, ffn=32, moe=moe)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
        sft = dataclasses.replace(sft, steps=2, batch=4, micro_batch_tokens=768)
        rl = dataclasses.replace(rl, steps=1, prompts_per_step=2, group_size=2)
        rl = dataclasses.replace(rl, micro_batch_tokens=768)
        data, evaluation = (
            dataclasses.replace(data, eval_prompts=4),
            dataclasses.replace(evaluation, k=2),
        )
    return dataclasses.replace(config, seed=seed, sft=sft, rl=rl, data=data, evaluation=evaluation)


def standard_error(rewards: Sequence[Sequence[float]]) -> float:
    """Returns the standard error of the mean of (requests, conversations) rewards, in points, over
    requests: conversations of one request are not independent.
    """
    shares = np.mean(rewards, axis=1)
    return 100 * float(np.std(shares, ddof=1) / np.sqrt(len(shares)))


def success(config: RunConfig, weights: str, out: Path) -> dict[str, Any]:
    """Returns the share of right conversations with its standard error over requests, in points,
    and the greedy one's share; all and by the calls that requests need.
    """
    evaluation = evaluate_weights(config, weights, str(out))
    groups = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    rewards = [[sample["reward"] for sample in group["samples"][:-1]] for group in groups]
    by_label = {name: [n, round(100 * avg, 1)] for name, (n, avg, _) in evaluation.labels.items()}
    return {
        "success": round(100 * evaluation.avg_at_k, 1),
        "standard_error": round(standard_error(rewards), 1),
        "greedy": round(100 * evaluation.greedy, 1),
        "requests": evaluation.prompts,
        "conversations": evaluation.prompts * evaluation.k,
        "by_label": by_label,
    }


def measure(seed: int, folder: Path, smoke: bool) -> dict[str, Any]:
    """Returns the row of a seed: success before and after, seconds of the clock and of the
    processor.
    """
    config = configuration(seed, folder, smoke)
    started, worked = time.perf_counter(), time.process_time()
    clock = {}

    def lap(name: str) -> None:
        clock[name] = round(time.perf_counter() - started)

    start, end = cold_start(config, folder), str(folder / "rl")
    lap("cold start")
    before = success(config, start, folder / "before")
    lap("evaluation")
    data = dataclasses.replace(config.data, eval_prompts=0)
    run_rl(dataclasses.replace(config, run_dir=end, init_from=start, data=data))
    lap("RL")
    after = success(config, end, folder / "after")
    lap("evaluation again")
    experiments.forget_compiled()
    steps = (json.loads(line) for line in (folder / "rl" / "metrics.jsonl").open())
    return {
        "seed": seed,
        "commit": experiments.commit(),
        "hash": experiments.config_hash(config),
        "gain_points": round(after["success"] - before["success"], 1),
        "before": before,
        "after": after,
        "reward_by_step": [round(step["metrics"]["reward/mean"], 3) for step in steps],
        "seconds_until": clock,
        "processor_seconds": round(time.process_time() - worked),
        "load": [round(load, 1) for load in os.getloadavg()],
    }


def main(argv: list[str] | None = None) -> None:
    """Measures the seeds that are not measured yet."""
    if argv is None:
        tune_allocator()
    args = rl_runs.parser(__doc__, "shop", seeds=(0, 1)).parse_args(argv)
    results = Path(args.out) / "shop.jsonl"
    for seed in args.seeds:
        if seed not in {row["seed"] for row in experiments.finished(results)}:
            row = measure(seed, Path(args.out) / f"seed{seed}", args.smoke)
            experiments.append(results, row)
    print(results.read_text(), end="")


if __name__ == "__main__":
    main()
