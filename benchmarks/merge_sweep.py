"""Accuracy by task against the weight of the first parent: `compass merge --sweep` on dense and
mixture-of-experts models of two sizes.

    python -m benchmarks.merge_sweep [--out runs/merge_sweep] [--method linear] [--steps 200]

For each of four models a base is tuned on worked solutions of short sums and of counting the bits
of small numbers; then one parent continues with longer sums, the other with larger numbers.
Held-out prompts of both are evaluated for each of five weights of the sums' parent. Results that
exist are not made again. Writes OUT/NAME/METHOD/sweep.png and sweep.json; the last line is one of
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compass_jax.apps.curate.merge import METHODS, method_of
from compass_jax.apps.curate.merge_folders import merge_folders
from compass_jax.apps.curate.merge_sweep import averaged, run_sweep
from compass_jax.base.aliases import JsonObject
from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    ProceduralSource,
    RolloutConfig,
    RunConfig,
    SFTConfig,
)
from compass_jax.training.sft import run_sft
from compass_jax.weights.convert import export_hf

TOKENIZER = Path(__file__).resolve().parent.parent / "configs" / "tiny_tokenizer"
WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
BASE_STEPS = 200
TASKS = {
    "base": (("sum_2", 100, 1), ("bits_2", 60, 1)),
    "sums": (("sum_3", 800, 1),),
    "bits": (("bits_3", 500, 1),),
}


def models() -> dict[str, ModelConfig]:
    """Returns the models by name: dense and with experts, of two sizes."""
    configs = {}
    for size, hidden in (("small", 64), ("larger", 128)):
        dense = ModelConfig(
            "qwen3", 384, hidden, 2, 4, 2, hidden // 4, 2 * hidden, max_positions=160, init_std=0.05
        )
        moe = MoEConfig(experts=8, top_k=2, ffn=hidden)
        configs[f"dense, {size}"] = dense
        configs[f"MoE, {size}"] = dataclasses.replace(dense, family="qwen3_moe", moe=moe)
    return configs


def _sums(terms: int, size: int) -> ProceduralSource:
    names = (("min_terms", terms), ("max_terms", terms), ("min_digits", 1), ("max_digits", 1))
    return ProceduralSource("chain_sum", names, size, f"sum_{terms}")


def _bits(digits: int, size: int) -> ProceduralSource:
    options = (("min_n", 10 ** (digits - 1)), ("max_n", 10**digits - 1))
    return ProceduralSource("count_bits", options, size, f"bits_{digits}")


def config_of(model: ModelConfig, folder: Path, part: str, steps: int) -> RunConfig:
    """Returns the configuration of the run that tunes `part`, one of TASKS; parents start from the
    base.
    """
    return RunConfig(
        name=part,
        run_dir=str(folder / part),
        init_from="" if part == "base" else str(folder / "base"),
        model=model,
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=128, prompt_buckets=(80,), max_new_tokens=64, tokens_per_call=16, cache_bucket=32
        ),
        data=DataConfig(
            sources=(_sums(2, 140), _sums(3, 1100), _bits(2, 80), _bits(3, 700)),
            eval_prompts=100,
            heldout_frac=0.2,
            tokenizer=str(TOKENIZER),
        ),
        sft=SFTConfig(
            procedural=TASKS[part],
            steps=steps,
            batch=32,
            buckets=(64, 128),
            micro_batch_tokens=2048,
            optim=OptimConfig(learning_rate=2e-3, warmup_steps=10, schedule="cosine"),
        ),
        evaluation=EvalConfig(k=2),
    )


def sweep(name: str, model: ModelConfig, out: Path, method: str, steps: int) -> dict[str, Any]:
    """Tunes the base and both parents of one model, sweeps, and returns the rows."""
    started, folder = time.perf_counter(), out / name.replace(", ", "_")
    for part in TASKS:
        if not (folder / f"{part}_model").exists():
            run_sft(config_of(model, folder, part, BASE_STEPS if part == "base" else steps))
            export_hf(folder / part, folder / f"{part}_model")
    base, *parents = (folder / f"{part}_model" for part in TASKS)

    def merge(weights: tuple[float, float], new: Path) -> None:
        merge_folders(base, parents, new, method_of(method, 2, weights=weights))

    config = config_of(model, folder, "base", BASE_STEPS)
    rows = run_sweep(merge, WEIGHTS, config, folder / method, {"model": name, "method": method})
    plot_sweep(rows, folder / method / "sweep.png")
    return {"model": name, "seconds": round(time.perf_counter() - started, 1), "rows": rows}


def plot_sweep(rows: Sequence[JsonObject], path: Path) -> None:
    """Plots the accuracy of each label and set against the first model's weight."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label in rows[0]["labels"]:
        style = {"color": "black", "linewidth": 2} if label == "all" else {"linewidth": 1}
        accuracies = [row["labels"][label]["avg_at_k"] for row in rows]
        heights = [math.nan if x is None else x for x in accuracies]
        places = [row["weight"] for row in rows]
        axes.plot(places, heights, marker="o", markersize=4, label=label, **style)
    axes.set(
        xlabel="weight of the first model (the second has the rest)",
        ylabel=f"accuracy, {averaged(rows)}",
        ylim=(-0.02, 1.02),
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    figure.savefig(path, dpi=120)


def main(argv: list[str] | None = None) -> None:
    """Sweeps and prints the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/merge_sweep", help="(default: %(default)s)")
    parser.add_argument("--method", default="linear", choices=METHODS)
    parser.add_argument("--only", nargs="+", default=list(models()), choices=models())
    parser.add_argument("--steps", type=int, default=200, help="of each parent: %(default)s")
    args = parser.parse_args(argv)
    one = partial(sweep, out=Path(args.out), method=args.method, steps=args.steps)
    results = [one(name, models()[name]) for name in args.only]
    print(json.dumps({"benchmark": "merge_sweep", "method": args.method, "models": results}))


if __name__ == "__main__":
    main()
