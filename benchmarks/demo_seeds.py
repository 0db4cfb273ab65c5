"""The demo on several seeds: first passage, ends and processor seconds.

    python -m benchmarks.demo_seeds [--seeds 0 1 2 3 4] [--out runs/demo_seeds]
        [--results benchmarks/results/demo.jsonl]

The goals: the mean over seeds of the recipe's tokens to 90% of plain GRPO's gain is at most 0.6 of
plain GRPO's, no seed is above 1.0, and the recipe does not end lower than plain GRPO by more than
two standard errors of the mean difference (avg@8). A recipe that never has this gain counts with
its whole run; a seed on which plain GRPO gains nothing has no ratio.

Processor seconds are those of the process and of its reward workers. A run that finds its programs
in JAX's cache compiles less than a first one. A row goes to the results when a demo ends; seeds
with a row are skipped, and the same command continues after a kill, without the processor seconds
from before.
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments
from compass_jax.commands import demo
from compass_jax.devices.allocator import tune_allocator
from compass_jax.runs.compiled import keep_programs
from compass_jax.training.sft import run_sft

RESULTS = Path(__file__).resolve().parent / "results" / "demo.jsonl"
SEEDS = (0, 1, 2, 3, 4)
Row = dict[str, Any]


def processor_s() -> float:
    """Returns the processor seconds of this process and of its finished children."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def row_of_seed(folder: Path, seed: int) -> Row:
    """Runs the demo and returns its row."""
    started = processor_s()
    if run_sft(demo.demo_configs(folder, seed)[0])["stopped"]:
        raise SystemExit("stopped: the same command continues")
    cold_started = processor_s()
    summary = demo.run_demo(str(folder), seed)
    if summary.get("stopped"):
        raise SystemExit("stopped: the same command continues")
    return {
        "seed": seed,
        "commit": experiments.commit(),
        "cold_start_processor_s": round(cold_started - started),
        "processor_s": round(processor_s() - started),
        **{name: x for name, x in summary.items() if "_at_" in name or name == "heldout_prompts"},
        **{name: _costs(folder / name, summary) for name in demo.RUNS[1:]},
    }


def _costs(directory: Path, summary: Row) -> Row:
    arm, passage = demo.read_arm(directory), summary["first_passage_tokens"][directory.name]
    tokens = float(arm.tokens[-1]) if passage is None else passage
    return {
        "passed": passage is not None,
        "first_passage_tokens": round(tokens),
        "first_passage_minutes": round(float(np.interp(tokens, arm.tokens, arm.minutes)), 3),
        "tokens": int(arm.tokens[-1]),
        "minutes": round(float(arm.minutes[-1]), 3),
        "steps": len(arm.tokens) - 1,
        "taught_tokens": round(arm.taught),
        "curve": [[round(tokens), round(accuracy, 5)] for tokens, accuracy in arm.curve],
    }


def ratios(rows: Sequence[Row], cost: str = "first_passage_tokens") -> list[float]:
    """Returns the ratios to plain GRPO's first passage, without seeds on which it gains nothing."""
    return [row["rl"][cost] / row["grpo"][cost] for row in rows if row["grpo"]["passed"]]


def report(rows: Sequence[Row]) -> str:
    """Returns the numbers of the goals in words."""
    tokens, count = ratios(rows), len(rows)
    ends = np.array([row["rl_avg_at_8"] - row["grpo_avg_at_8"] for row in rows])
    error = ends.std(ddof=1) / np.sqrt(count) if count > 1 else np.nan
    seconds = (np.mean([row[x] for row in rows]) for x in ("cold_start_processor_s", "processor_s"))
    return (
        f"{count} seeds: first passage at {np.mean(tokens):.2f} of plain GRPO's tokens (mean),"
        f" {max(tokens):.2f} at most; end {ends.mean():+.3f} ± {error:.3f}; processor seconds:"
        " {:.0f} of {:.0f} in the cold start".format(*seconds)
    )


def main() -> None:
    """Runs the seeds that have no row yet, and prints the report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--out", type=Path, default=Path("runs/demo_seeds"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    tune_allocator()
    keep_programs()
    for seed in args.seeds:
        if seed not in {row["seed"] for row in experiments.finished(args.results)}:
            experiments.append(args.results, row_of_seed(args.out / f"seed{seed}", seed))
            experiments.forget_compiled()
    print(report(experiments.finished(args.results)))


if __name__ == "__main__":
    main()
