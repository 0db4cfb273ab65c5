"""The coverage of predicted pass rates: how often the posterior's 90% interval holds the number of
right answers among fresh samples of the trained policy.

    python -m benchmarks.posterior_coverage RUN [RUN ...] [--prompts 200] [--samples 64] [--out DIR]

Each RUN is a directory of a run with rl.zero_variance.posterior. Its last checkpoint gives the
policy and the posteriors; the prompts are drawn from all training prompts. The interval is that of
the Beta-binomial distribution of the fresh samples. `coverage` counts a number of right answers at
its edge by the part that lies inside (data/posterior.py), so that 0.9 is right for counts too;
`coverage_closed` counts it whole, which is more than 0.9 where answers are nearly always wrong.
`coverage_of_beta` is the share of prompts whose measured rate is inside the interval of the Beta
distribution alone, which leaves out rates of exactly 0 and 1 and the noise of the samples. Writes a
line per run to OUT/posterior_coverage.jsonl; a killed measurement continues.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from benchmarks import experiments
from compass_jax.apps.pipeline.offline_filter import FILE, Bounds, run_filter
from compass_jax.base.records import Prompt
from compass_jax.commands.configured import config_of_run
from compass_jax.config import RunConfig
from compass_jax.data.keep import PassRate, read_pass_rates
from compass_jax.data.posterior import COVERAGE, PosteriorSelector, coverage
from compass_jax.data.predictors.inputs import PredictorInputs
from compass_jax.data.prompts import train_prompts
from compass_jax.data.selectors import prompt_selector
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.allocator import tune_allocator
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import write_atomically
from compass_jax.weights import checkpoint


def run_filter_of(config, *args, **options):
    """Calls `run_filter` with what it reads of a run's settings."""
    return run_filter(config.policy, config.scored, *args, **options)


RESULTS = "posterior_coverage.jsonl"


def selector_of(run: str, config: RunConfig, prompts: Sequence[Prompt]) -> PosteriorSelector:
    """Returns the posteriors of a run's last checkpoint, whose training prompts these are."""
    rl, scale, seed = config.rl, config.rewards, config.seed
    selector = prompt_selector(
        rl.zero_variance,
        rl.group_size,
        scale,
        seed,
        prompts=prompts,
        start=lambda: rl.predictor.start(PredictorInputs(prompts, seed)),
    )
    if not isinstance(selector, PosteriorSelector):
        raise SystemExit(f"{run}: its rl.zero_variance.posterior is off: it has no predictions")
    selector.restore(checkpoint.read_meta(run)["selector"])
    return selector


def covered(
    selector: PosteriorSelector, prompts: Sequence[Prompt], rates: dict[int, PassRate]
) -> dict[str, Any]:
    """Returns the shares of prompts whose fresh samples the intervals hold, in all and by whether
    training sampled the prompt, and the mean distance of predicted and measured rates.
    """
    known = [(prompt, rates[prompt.id]) for prompt in prompts if rates[prompt.id].known]
    alpha, beta = np.transpose([selector.posterior(prompt) for prompt, _ in known])
    samples = np.array([row.known for _, row in known])
    measured = np.array([row.pass_rate for _, row in known])
    low, high = stats.betabinom.interval(COVERAGE, samples, alpha, beta)
    right = np.round(measured * samples)
    closed = (low <= right) & (right <= high)
    inside = coverage(right, samples, alpha, beta)
    low, high = stats.beta.interval(COVERAGE, alpha, beta)
    visited = {prompt for prompt, *_ in selector.state()["counts"]}
    is_visited = np.array([prompt.id in visited for prompt, _ in known])
    return {
        "prompts": len(known),
        "visited": int(is_visited.sum()),
        "coverage": float(inside.mean()),
        "coverage_visited": float(inside[is_visited].mean()) if is_visited.any() else None,
        "coverage_closed": float(closed.mean()),
        "coverage_of_beta": float(((low <= measured) & (measured <= high)).mean()),
        "abs_error": float(np.abs(measured - alpha / (alpha + beta)).mean()),
        "mean_rate": float(measured.mean()),
    }


def measure(run: str, count: int, samples: int, out: Path) -> dict[str, Any]:
    """Samples fresh answers to `count` training prompts of a run; returns its row."""
    config = config_of_run(run)
    every = train_prompts(
        config.data, load_tokenizer(config.data, config.model.vocab_size), config.seed, print
    )
    selector = selector_of(run, config, every)
    chosen = set(np.random.default_rng(config.seed).choice(len(every), count, replace=False))
    prompts = [prompt for i, prompt in enumerate(every) if i in chosen]
    folder = out / f"seed{config.seed}_{experiments.config_hash(config)}"
    folder.mkdir(parents=True, exist_ok=True)
    keep_file = folder / "prompts.jsonl"
    rows = (
        PassRate(x.id, x.label, x.question, 0.0, 0, 1, 0, 0.0, 1.0, i in chosen)
        for i, x in enumerate(every)
    )
    write_atomically(keep_file, "".join(json.dumps(row._asdict()) + "\n" for row in rows))
    data = dataclasses.replace(config.data, keep_file=str(keep_file))
    run_filter_of(dataclasses.replace(config, data=data), run, str(folder), Bounds(samples))
    result = covered(selector, prompts, read_pass_rates(folder / FILE))
    return {"run": run, "seed": config.seed, "samples": samples, **result}


def main(argv: list[str] | None = None) -> None:
    """Measures the runs that have no row yet, and prints all rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", nargs="+", help="directories of runs with posterior selection")
    parser.add_argument("--prompts", type=int, default=200, help="number of prompts")
    parser.add_argument("--samples", type=int, default=64, help="fresh samples of each prompt")
    parser.add_argument("--out", default="runs/posterior_coverage", help="directory of the results")
    args = parser.parse_args(argv)
    if argv is None:
        tune_allocator()
        keep_programs()
    file = Path(args.out) / RESULTS
    for run in args.runs:
        if all(row["run"] != run for row in experiments.finished(file)):
            row = measure(run, args.prompts, args.samples, Path(args.out))
            experiments.append(file, {**row, "commit": experiments.commit()})
    for row in experiments.finished(file):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
