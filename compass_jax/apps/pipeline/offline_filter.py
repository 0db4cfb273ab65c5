"""Stage 0 of the zero-variance elimination: estimates the pass rates of all training prompts before
RL, and selects the prompts to train on.

    compass filter CONFIG --checkpoint DIR --out DIR [--samples 8] [--low 0] [--high 1]

Writes OUT/pass_rates.jsonl, one line for each finished prompt (the same command continues an
interrupted one), and OUT/summary.json. RL reads the file with `data.keep_file`, and reports the
generated tokens of the estimate as waste/filter_tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from compass_jax.apps.curate.pass_rates import uniform_shares
from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Prompt
from compass_jax.config import ConfigError, PolicyConfig, ScoredConfig
from compass_jax.data.keep import PassRate, kept_prompts, read_pass_rates
from compass_jax.data.prompts import fitting, train_prompts
from compass_jax.devices.distributed import (
    SHARED_FOLDER,
    in_main_process,
    is_main_process,
    require_equal_across_processes,
)
from compass_jax.experience.evaluate import answers, decoder_of
from compass_jax.experience.scorer import open_scorer
from compass_jax.rewards.detect import notice
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.runs.report import summary_table
from compass_jax.runs.rundir import FolderLock, write_atomically

FILE = "pass_rates.jsonl"


class Bounds(NamedTuple):
    """The number of samples per prompt, and the pass rates between which a prompt is selected."""

    samples: int = 8
    low: float = 0.0
    high: float = 1.0


def run_filter(
    policy: PolicyConfig, scored: ScoredConfig, checkpoint: str, out: str, bounds: Bounds
) -> JsonObject:
    """Estimates the pass rate of every training prompt, and returns the content of summary.json.

    A prompt is selected if low < pass rate < high. Unknown scores do not count in the rate; a
    prompt without any known score is selected.

    Args:
        checkpoint: weights of a run, a checkpoint or a Hugging Face folder.
        out: folder for the results, where an interrupted estimate continues.
    """
    samples, low, high = bounds
    if samples < 2:
        raise ConfigError(
            f"--samples {samples}: one answer cannot tell an uncertain prompt; give at least 2"
        )
    if not 0 <= low < high <= 1:
        raise ConfigError(f"--low {low} --high {high}: must be 0 <= low < high <= 1")
    lock = FolderLock(out)
    in_main_process(lock.__enter__)
    try:
        rows = _rates(policy, scored, checkpoint, bounds, lock)
        summary = summarise(rows, samples)
        if is_main_process():
            write_atomically(lock.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    finally:
        lock.__exit__()
    console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
    title = f"{checkpoint}: pass rates of the training prompts, {samples} samples each"
    console.print(summary_table(_table(rows), title=title))
    if summary["kept"]:
        console.print(_advice(summary), highlight=False, markup=False)
    line = f"kept {summary['kept']} of {summary['prompts']} prompts"
    console.print(f"{line} for {summary['tokens']:,} tokens: {lock.path / FILE}", highlight=False)
    return summary


def _rates(
    policy: PolicyConfig, scored: ScoredConfig, checkpoint: str, bounds: Bounds, lock: FolderLock
) -> list[PassRate]:
    """Returns the pass rate of each prompt; appends those that FILE lacks to it."""
    path, samples = lock.path / FILE, bounds.samples
    console = Console(soft_wrap=True, emoji=False, quiet=not is_main_process())
    tell = partial(console.print, highlight=False, markup=False)
    data, rewards, rollout, seed = scored.data, scored.rewards, scored.rollout, scored.seed
    engine, decode, tokenizer = decoder_of(policy, data, seed, checkpoint)
    prompts = train_prompts(data, tokenizer, seed, tell)
    prompts = fitting(prompts, rollout.prompt_buckets[-1], data.overlong, tell)
    # continues from the rows that an earlier filter wrote
    prompts = kept_prompts(prompts, data.keep_file).prompts
    done = read_pass_rates(path, complete=False, prompts=prompts) if path.exists() else {}
    _check_same(done, bounds, path)
    require_equal_across_processes({f"the number of rows in {path}": len(done)}, SHARED_FOLDER)
    remaining = [p for p in prompts if p.id not in done]
    sampler = Sampler(rollout.temperature, rollout.top_k, rollout.top_p)
    part = max(1, 8 * rollout.slots // samples)
    tell(notice(rewards.sandbox))
    with open_scorer(rewards, data) as scorer:
        for first in range(0, len(remaining), part):
            chosen = remaining[first : first + part]
            rollouts, scores = answers(
                engine,
                decode,
                chosen,
                tokenizer,
                scorer,
                samples=samples,
                sampler=sampler,
                seed=seed,
                purpose=Purpose.FILTER,
            )
            rows = [
                _rate(*entry, rewards.right_at, bounds.low, bounds.high)
                for entry in zip(chosen, rollouts, scores, strict=True)
            ]
            in_main_process(partial(_append, rows, path, lock))
            done |= {row.id: row for row in rows}
            tell(f"filter {len(done)}/{len(prompts)} prompts")
    return [done[p.id] for p in prompts]


def _append(rows: Sequence[PassRate], path: Path, lock: FolderLock) -> None:
    lock.check()
    with path.open("a") as file:
        file.write("".join(json.dumps(row._asdict()) + "\n" for row in rows))


def _rate(
    prompt: Prompt, samples: Any, verdicts: Any, right_at: float, low: float, high: float
) -> PassRate:
    right = [s.reward >= right_at for s in verdicts if s.known]
    rate = float(np.mean(right)) if right else 0.0
    keep = low < rate < high if right else True
    tokens = sum(r.response_length for r in samples)
    about = prompt.id, prompt.label, prompt.question
    return PassRate(*about, rate, len(right), len(samples), tokens, low, high, keep)


def _check_same(done: dict[int, PassRate], bounds: Bounds, path: Path) -> None:
    for row in done.values():
        if (row.samples, row.low, row.high) != bounds:
            raise ConfigError(
                f"{path} was begun with --samples {row.samples} --low {row.low} --high {row.high};"
                " go on with these, or give another --out"
            )


SIZES = (2, 4, 8, 16, 32, 64)
FEW = 0.1  # maximum share of uniform groups


def summarise(rows: Sequence[PassRate], samples: int) -> JsonObject:
    """Returns the counts of the filter, and for group sizes n the expected share of uniform groups
    among the selected prompts, with an interval (apps/curate/pass_rates.py). Includes the smallest
    n at which the share is at most FEW.
    """
    known = [row for row in rows if row.known]
    right = [round(row.pass_rate * row.known) for row in rows]
    every = range(2, SIZES[-1] + 1)
    shares = uniform_shares(right, [r.known for r in rows], [r.keep for r in rows], every)
    size = next((n for n, share in shares.items() if share.mean <= FEW), None)
    return {
        "prompts": len(rows),
        "kept": sum(row.keep for row in rows),
        "always_right": sum(row.pass_rate == 1 for row in known),
        "always_wrong": sum(row.pass_rate == 0 for row in known),
        "without_verdict": len(rows) - len(known),
        "samples": samples,
        "tokens": sum(row.tokens for row in rows),
        "expected_uniform": {
            n: share._asdict() for n, share in shares.items() if n in (*SIZES, size)
        },
        "suggested_group_size": size,
    }


def _advice(summary: JsonObject) -> str:
    """Returns the suggested group size, with the expected share of uniform groups."""
    size = summary["suggested_group_size"]
    share = summary["expected_uniform"][size or SIZES[-1]]
    expected = (
        f"about {share['mean']:.0%} of the kept prompts' groups come out uniform"
        f" ({share['low']:.0%} to {share['high']:.0%} in 9 of 10 cases)"
    )
    if size is None:
        return (
            f"no rl.group_size up to {SIZES[-1]} makes {FEW:.0%} or less of the groups uniform: at"
            f" {SIZES[-1]} {expected}; filter with more --samples, or a narrower --low and --high"
        )
    return f"suggested rl.group_size: {size} ({expected})"


def _table(rows: Sequence[PassRate]) -> list[JsonObject]:
    out = []
    for label in (*dict.fromkeys(row.label for row in rows), None):
        label_rows = [row for row in rows if label in (None, row.label)]
        known = [row.pass_rate for row in label_rows if row.known]
        out.append(
            {
                "task": label or "all",
                "prompts": len(label_rows),
                "mean pass rate": float(np.mean(known)) if known else 0.0,
                "always right": sum(r == 1 for r in known),
                "always wrong": sum(r == 0 for r in known),
                "kept": sum(row.keep for row in label_rows),
            }
        )
    return out
