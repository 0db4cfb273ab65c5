"""Stage 0 of the zero-variance elimination: pass rates of all training prompts before RL, and which
of them are worth training on.

    compass filter CONFIG --checkpoint DIR --out DIR [--samples 8] [--low 0] [--high 1]

Writes OUT/pass_rates.jsonl, a line per prompt as it is done (the same command again continues),
OUT/histogram.png and OUT/summary.json. RL reads the file with `data.keep_file`. What the estimate
costs is counted: RL reports it as waste/filter_tokens.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from compass_jax.config import ConfigError, RunConfig
from compass_jax.data.keep import PassRate, kept_prompts, read_pass_rates
from compass_jax.data.prompts import fitting, train_prompts
from compass_jax.evaluate import answers, decoder_of
from compass_jax.records import Prompt
from compass_jax.report import summary_table
from compass_jax.rewards.detect import notice
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rundir import FolderLock, write_atomically
from compass_jax.train.session import open_scorer


def run_filter(
    config: RunConfig,
    checkpoint: str,
    out: str,
    samples: int = 8,
    low: float = 0.0,
    high: float = 1.0,
) -> dict[str, Any]:
    """Estimates the pass rate of every training prompt with `samples` rollouts; a prompt is kept
    where low < pass rate < high.

    Unknown scores are left out of the rate; a prompt without any known score is kept. Returns what
    summary.json holds.
    """
    if samples < 2:
        raise ConfigError(
            f"--samples {samples}: one answer cannot tell an uncertain prompt; give at least 2"
        )
    if not 0 <= low < high <= 1:
        raise ConfigError(f"--low {low} --high {high}: must be 0 <= low < high <= 1")
    with FolderLock(out) as lock:
        return _filter(config, checkpoint, lock, samples, low, high)


def _filter(
    config: RunConfig, checkpoint: str, lock: FolderLock, samples: int, low: float, high: float
) -> dict[str, Any]:
    folder, path = lock.path, lock.path / "pass_rates.jsonl"
    console = Console(soft_wrap=True)
    tell = partial(console.print, highlight=False, markup=False)
    engine, decode, tokenizer = decoder_of(config, checkpoint)
    prompts = train_prompts(config.data, tokenizer, config.seed, tell)
    prompts = fitting(prompts, config.rollout.prompt_buckets[-1], config.data.overlong, tell)
    if config.data.keep_file:  # of an earlier filter: this one goes on from what it kept
        prompts, _ = kept_prompts(prompts, config.data.keep_file)
    done = read_pass_rates(path, complete=False, prompts=prompts) if os.path.lexists(path) else {}
    _check_same(done, samples, low, high, path)
    left = [p for p in prompts if p.id not in done]
    sampler = Sampler(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    part = max(1, 8 * config.rollout.slots // samples)
    tell(notice(config.rewards.sandbox))
    with open_scorer(config) as scorer:
        for first in range(0, len(left), part):
            chosen = left[first : first + part]
            found = answers(
                engine,
                decode,
                chosen,
                tokenizer,
                scorer,
                samples=samples,
                sampler=sampler,
                seed=config.seed,
                purpose=Purpose.FILTER,
            )
            rows = list(_rows(chosen, *found, config.rewards.right_at, low, high))
            lock.check()
            with path.open("a") as file:
                file.write("".join(json.dumps(row._asdict()) + "\n" for row in rows))
            done |= {row.id: row for row in rows}
            console.print(f"filter {len(done)}/{len(prompts)} prompts")
    rows = [done[p.id] for p in prompts]
    summary = summarise(rows, samples)
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    plot_histogram([row.pass_rate for row in rows if row.known], samples, folder / "histogram.png")
    console.print(
        summary_table(
            _table(rows),
            title=f"{checkpoint}: pass rates of the training prompts, {samples} samples each",
        )
    )
    if (size := summary["suggested_group_size"]) is not None:
        console.print(
            f"suggested rl.group_size: {size} (of the prompts that can vary, at most 1 group in 10"
            " comes out uniform)",
            highlight=False,
        )
    console.print(
        f"kept {summary['kept']} of {summary['prompts']} prompts for {summary['tokens']:,} tokens:"
        f" {path}",
        highlight=False,
    )
    return summary


def _rows(prompts: Sequence[Prompt], rollouts, scores, right_at: float, low: float, high: float):
    for prompt, mine, verdicts in zip(prompts, rollouts, scores, strict=True):
        right = [s.reward >= right_at for s in verdicts if s.known]
        rate = float(np.mean(right)) if right else 0.0
        keep = low < rate < high if right else True
        tokens = sum(r.response_length for r in mine)
        yield PassRate(
            prompt.id,
            prompt.label,
            prompt.question,
            rate,
            len(right),
            len(mine),
            tokens,
            low,
            high,
            keep,
        )


def _check_same(
    done: dict[int, PassRate], samples: int, low: float, high: float, path: Path
) -> None:
    for row in done.values():
        if (row.samples, row.low, row.high) != (samples, low, high):
            raise ConfigError(
                f"{path} was begun with --samples {row.samples} --low {row.low} --high {row.high};"
                " go on with these, or give another --out"
            )


def summarise(rows: Sequence[PassRate], samples: int) -> dict[str, Any]:
    """Counts; the share of uniform groups to expect for each group size n, mean of p^n + (1 - p)^n
    over the prompts' pass rates p; a suggested n.
    """
    known = [row for row in rows if row.known]
    rates = np.array([row.pass_rate for row in known])
    return {
        "prompts": len(rows),
        "kept": sum(row.keep for row in rows),
        "always_right": sum(row.pass_rate == 1 for row in known),
        "always_wrong": sum(row.pass_rate == 0 for row in known),
        "without_verdict": len(rows) - len(known),
        "samples": samples,
        "tokens": sum(row.tokens for row in rows),
        "expected_uniform": {n: expected_uniform(rates, n) for n in (2, 4, 8, 16, 32)},
        "suggested_group_size": suggest_group_size(rates),
    }


def expected_uniform(rates: np.ndarray, n: int) -> float:
    """Share of groups of n samples that come out uniform: mean of p^n + (1 - p)^n over pass rates p
    `[prompts]`; 0 without prompts.
    """
    return float(np.mean(rates**n + (1 - rates) ** n)) if len(rates) else 0.0


def suggest_group_size(rates: np.ndarray, uniform: float = 0.1, largest: int = 64) -> int | None:
    """The smallest n whose groups of the prompts that can vary (0 < p < 1) are uniform in at most
    `uniform` of all cases.

    More samples rescue ever fewer groups, and prompts at 0 and 1 none at all (as far as the
    estimate tells): those are the filter's. `largest` where no smaller n does; None where no prompt
    can vary.
    """
    mixed = rates[(rates > 0) & (rates < 1)]
    if not len(mixed):
        return None
    return next((n for n in range(2, largest) if expected_uniform(mixed, n) <= uniform), largest)


def _table(rows: Sequence[PassRate]) -> list[dict[str, Any]]:
    out = []
    for label in (*dict.fromkeys(row.label for row in rows), None):
        here = [row for row in rows if label in (None, row.label)]
        known = [row.pass_rate for row in here if row.known]
        out.append(
            {
                "task": label or "all",
                "prompts": len(here),
                "mean pass rate": float(np.mean(known)) if known else 0.0,
                "always right": sum(r == 1 for r in known),
                "always wrong": sum(r == 0 for r in known),
                "kept": sum(row.keep for row in here),
            }
        )
    return out


def plot_histogram(rates: Sequence[float], samples: int, path: Path) -> None:
    """Prompts by pass rate, the two ends that give no signal in another colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counts = np.bincount(np.rint(np.asarray(rates) * samples).astype(int), minlength=samples + 1)
    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    colours = ["#B8B8B8" if i in (0, samples) else "#0072B2" for i in range(samples + 1)]
    axes.bar(np.arange(samples + 1) / samples, counts, width=0.8 / samples, color=colours)
    axes.set(
        xlabel=f"pass rate of {samples} samples (grey: always wrong, always right)",
        ylabel="prompts",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
