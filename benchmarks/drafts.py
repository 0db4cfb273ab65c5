"""Experiment: tokens that RL samples with drafts, the earlier answers whose first tokens are kept.

    python -m benchmarks.drafts [--out runs/drafts] [--cold-starts runs/mostly_hard]
        [--seeds 0 1 2] [--only "no drafts" "lenience 1.65" ...] [--smoke]

The plan, written before its runs:

The task, the cold starts and tuned GRPO (16 x 4, 1.5e-4) are those of
benchmarks/tokens_to_accuracy.py, with every fourth training prompt of each length, so that an epoch
is 197 steps. Three epochs, the same steps for every variant. (Two trials, on seed 101, had the same
number of prompts of each length, 64 and 256: GRPO's held-out accuracy fell with that mixture, with
and without drafts.) In an epoch the file of the task visits a prompt of the shortest sums eight
times, of the products ten times and of sums of three terms of two digits twice.

    no drafts           every token is sampled
    lenience 1          accepted by the ratio of probabilities
    lenience 1.65       SPEC-RL's (arXiv 2509.23232)
    coupled, refresh 4  accepted where the sampler draws the same token; four visits share noise

Measure: the tokens that were sampled in the second and the third epoch, without drafts over with
drafts, paired by seed; and held-out accuracy at the end, the mean of the last three evaluations
(avg@2 of 480 prompts), with the standard error of its difference over the seeds. Rejected parts of
drafts are scored, not sampled: a separate column has their tokens.

A line per finished run goes to OUT/drafts.jsonl, so that the same command continues after a kill;
at the end OUT/drafts.md.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs, tokens_report
from benchmarks.targets import means_of_evaluations
from benchmarks.tokens_to_accuracy import (
    Cell,
    Scale,
    base_config,
    cold_start,
    kept_prompts,
    sized,
)
from compass_jax.config import Drafts, RunConfig
from compass_jax.devices.allocator import tune_allocator
from compass_jax.rollout.drafts import Coupled, Lenient
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.rl import run_rl

RESULTS, BASELINE = "drafts", "no drafts"
VARIANTS: dict[str, Drafts | None] = {
    BASELINE: None,
    "lenience 1": Lenient(lenience=1.0),
    "lenience 1.65": Lenient(lenience=1.65),
    "coupled, refresh 4": Coupled(refresh=4),
}
TUNED = Cell(16, 4, 1.5e-4)
EPOCH_STEPS, EPOCHS = 197, 3
ONE_OF, ONE_OF_SMOKE = 4, 50  # of this many prompts one is used
SAMPLED = "waste/tokens_generated"
TOKENS = {"sampled": SAMPLED, "kept": "waste/tokens_drafted", "scored": "drafts/scored_tokens"}


def run_config(variant: str, seed: int, cold_starts: Path, out: Path, smoke: bool) -> RunConfig:
    """Makes the cold start and the file of prompts of a run; returns its configuration."""
    config = base_config(seed, cold_starts / f"seed{seed}", smoke)
    cold_start(config)
    config = dataclasses.replace(config, init_from=config.directory)
    config = sized(config, TUNED._replace(prompts=4) if smoke else TUNED, Scale())
    rl = dataclasses.replace(
        config.rl,
        steps=(3 if smoke else EPOCH_STEPS) * EPOCHS,
        eval_every=3 if smoke else 25,
        drafts=VARIANTS[variant],
    )
    file = out / f"seed{seed}" / "prompts.jsonl"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        one_of = ONE_OF_SMOKE if smoke else ONE_OF
        write_atomically(file, kept_prompts(config, lambda number: number % one_of == 1))
    directory = out / f"seed{seed}" / variant.replace(" ", "_").replace(",", "")
    data = dataclasses.replace(config.data, keep_file=str(file))
    return dataclasses.replace(config, name=RESULTS, data=data, rl=rl, run_dir=str(directory))


def run(variant: str, config: RunConfig) -> dict[str, Any]:
    """Trains, or resumes the training, and returns the run's row."""
    if run_rl(config)["stopped"]:
        raise SystemExit("stopped: the same command continues")
    lines = (Path(config.directory) / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    experiments.forget_compiled()
    epochs = np.array_split(np.arange(len(steps)), EPOCHS)
    return {
        "variant": variant,
        "seed": config.seed,
        "hash": experiments.config_hash(config),
        "commit": experiments.commit(),
        "steps": len(steps),
        "seconds": round(sum(step["time/rollout_s"] for step in steps), 1),
        "curve": [
            [i, step["eval/heldout/avg_at_k"]]
            for i, step in enumerate(steps, 1)
            if "eval/heldout/avg_at_k" in step
        ],
        "epochs": [
            {name: sum(steps[i].get(key, 0.0) for i in epoch) for name, key in TOKENS.items()}
            for epoch in epochs
        ],
    }


def later(row: dict[str, Any], column: str) -> float:
    """Returns the tokens of a column after the first epoch."""
    return sum(epoch[column] for epoch in row["epochs"][1:])


def at_end(row: dict[str, Any]) -> float:
    """Returns the mean of the last three evaluations."""
    return means_of_evaluations(row["curve"])[-1][1]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the measures of each variant as a table."""
    lines = [
        "| variant | seeds | sampled tokens, times fewer | by seed | kept of drafts | "
        "time of rollouts | accuracy at the end | minus without drafts |",
        "|---|---|---|---|---|---|---|---|",
    ]
    variants = rl_runs.by_variant(rows)
    base = {row["seed"]: row for row in variants[BASELINE]}
    for name, runs in variants.items():
        ratios = [later(base[row["seed"]], "sampled") / later(row, "sampled") for row in runs]
        times = [row["seconds"] / base[row["seed"]]["seconds"] for row in runs]
        kept_share = sum(later(row, "kept") for row in runs)
        kept_share /= max(sum(later(row, "scored") for row in runs), 1.0)
        change = [at_end(row) - at_end(base[row["seed"]]) for row in runs]
        several = len(change) > 1
        error = f" ± {np.std(change, ddof=1) / len(change) ** 0.5:.3f}" if several else ""
        mean, low, high = tokens_report.interval(
            [tokens_report.Ratio(x, True, True) for x in ratios]
        )
        lines.append(
            f"| {name} | {len(runs)} | {mean:.2f} ({low:.2f} to {high:.2f}) |"
            f" {', '.join(f'{x:.2f}' for x in ratios)} | {kept_share:.0%} |"
            f" {rl_runs.spread(times, '{:.2f}')} |"
            f" {rl_runs.spread([at_end(row) for row in runs])} |"
            f" {np.mean(change):+.3f}{error} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table."""
    if argv is None:
        tune_allocator()
        keep_programs()
    parser = rl_runs.parser(
        __doc__ or "", RESULTS, cold_starts="mostly_hard", seeds=(0, 1, 2), variants=tuple(VARIANTS)
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    cold_starts = out / "cold_starts" if args.smoke else Path(args.cold_starts)
    file = out / f"{RESULTS}.jsonl"
    for seed in args.seeds:
        for variant in dict.fromkeys((BASELINE, *args.only)):
            done = {(row["variant"], row["seed"]) for row in experiments.finished(file)}
            if (variant, seed) not in done:
                config = run_config(variant, seed, cold_starts, out, args.smoke)
                experiments.append(file, run(variant, config))
    text = table(experiments.finished(file))
    write_atomically(out / f"{RESULTS}.md", text)
    print(text)


if __name__ == "__main__":
    main()
