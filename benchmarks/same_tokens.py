"""How many of 1,024 sequences change when the same requests run in another order, on other slots,
or are preempted.

    python -m benchmarks.same_tokens [--weights DIR] [--cold-starts runs/cold_starts] [--smoke]

128 training prompts of the demo, 8 samples each, from its cold start (or the run directory
--weights), in float32, bfloat16, and with 8-bit weights on top of bfloat16. Draws belong to
requests, so in exact arithmetic all of them would be equal. Against the run in order on 128 slots:
    again            the same once more
    other order      prompts shuffled
    64 slots         other shapes, other programs: sums are rounded otherwise, and a draw between
                     two nearly equal tokens may fall otherwise
    few pages        a cache of an eighth of the pages, of 4 tokens each: samples are preempted, and
                     continue with their recorded routes
    few pages, live  the same without recorded routes
`first` is the median position in the response of the first other token; `gap` the median distance,
at that position, of the two log-probs of the token before it (in float32 a few rounding errors), of
sequences whose first token is the same.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.base.records import Rollout
from compass_jax.commands.configured import load_config
from compass_jax.config import RunConfig
from compass_jax.data.prompts import train_prompts
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import decoder_of
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose

PRECISIONS = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantize": "int8"},
    "e4m3": {"dtype": "bfloat16", "quantize": "e4m3"},
}
SAMPLES = 8


def collect(
    config: RunConfig, weights: str, prompts: list[Any], keep_routes: bool = True
) -> tuple[dict[tuple[int, int], Rollout], int]:
    """Returns ((prompt id, sample) -> rollout, number of preemptions)."""
    engine, decode, tokenizer = decoder_of(config.policy, config.data, config.seed, weights)
    engine = Engine(
        config.model,
        config.policy.rollout_compute,
        config.rollout,
        tokenizer.end_ids,
        known=tokenizer.vocab_size,
    )
    collection = Collection(
        engine, decode, prompts, SAMPLES, Purpose.TRAIN, config.seed, keep_routes=keep_routes
    )
    rollouts = {(r.prompt.id, r.sample): r for r in collection}
    return rollouts, collection.stats.preempted


def compare(
    base: dict[tuple[int, int], Rollout], other: dict[tuple[int, int], Rollout]
) -> dict[str, float]:
    """Returns the number of sequences that differ, and the places where they begin to differ."""
    first, gaps = [], []
    for key, a in base.items():
        b = other[key]
        n = min(len(a.tokens), len(b.tokens))
        differ = np.flatnonzero(a.tokens[:n] != b.tokens[:n])
        if len(differ) or len(a.tokens) != len(b.tokens):
            at = int(differ[0]) if len(differ) else n
            first.append(at - len(a.prompt.tokens))
            if first[-1]:
                gaps.append(abs(float(a.logp[at - 1] - b.logp[at - 1])))
    return {
        "sequences": len(base),
        "differ": len(first),
        "first": float(np.median(first)) if first else float("nan"),
        "gap": float(np.median(gaps)) if gaps else float("nan"),
    }


def measure(config: RunConfig, weights: str, prompts: list[Any]) -> list[dict[str, Any]]:
    """Returns the rows of one precision."""
    rollout = config.rollout

    def with_rollout(**changes: Any) -> RunConfig:
        return dataclasses.replace(config, rollout=dataclasses.replace(rollout, **changes))

    shuffled = [prompts[i] for i in np.random.default_rng(0).permutation(len(prompts))]
    few = with_rollout(page_tokens=4, tokens_per_call=4)
    few = dataclasses.replace(
        few,
        rollout=dataclasses.replace(
            few.rollout, cache_pages=rollout.slots * few.rollout.pages_per_slot // 8
        ),
    )
    base, _ = collect(config, weights, prompts)
    runs = {
        "again": (config, prompts, True),
        "other order": (config, shuffled, True),
        "64 slots": (with_rollout(slots=rollout.slots // 2), prompts, True),
        "few pages": (few, prompts, True),
        "few pages, live": (few, prompts, False),
    }
    rows = []
    for name, (changed, requests, keep_routes) in runs.items():
        rollouts, preempted = collect(changed, weights, requests, keep_routes)
        rows.append({"run": name, **compare(base, rollouts), "preempted": preempted})
    return rows


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the table and a JSON line."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(__doc__, cold_starts="cold_starts")
    parser.add_argument(
        "--weights",
        default="",
        help="a run directory, checkpoint or Hugging Face folder (default: the demo's cold start)",
    )
    args = parser.parse_args(argv)
    config = load_config(str(rl_runs.CONFIG))
    weights = args.weights or ("" if args.smoke else rl_runs.cold_start(0, Path(args.cold_starts)))
    if args.smoke:
        config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, slots=8, max_new_tokens=16)
        )
    rows = []
    for precision, changes in PRECISIONS.items():
        precision_config = dataclasses.replace(
            config, rollout=dataclasses.replace(config.rollout, **changes)
        )
        _, _, tokenizer = decoder_of(
            precision_config.policy, precision_config.data, precision_config.seed, weights
        )
        prompts = train_prompts(precision_config.data, tokenizer, precision_config.seed)
        chosen = np.random.default_rng(precision_config.seed).permutation(len(prompts))[
            : 4 if args.smoke else 128
        ]
        rows += [
            {"precision": precision, **row}
            for row in measure(precision_config, weights, [prompts[i] for i in chosen])
        ]
    print(report(rows))
    rows = [{key: None if value != value else value for key, value in row.items()} for row in rows]
    print(
        json.dumps(
            {
                "benchmark": "same_tokens",
                "smoke": args.smoke,
                "rows": rows,
                "commit": experiments.commit(),
            }
        ),
        flush=True,
    )


def report(rows: list[dict[str, Any]]) -> str:
    """Returns the table in Markdown."""
    lines = [
        "| precision | run | sequences | differ | first | gap, nats | preempted |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row["precision"],
            row["run"],
            row["sequences"],
            row["differ"],
            f"{row['first']:.0f}",
            f"{row['gap']:.1e}",
            row["preempted"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
