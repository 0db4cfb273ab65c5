"""Experiment: RL over whole conversations in the shop (compass_jax/tasks/shop.py) of 1, 2, 4 and 8
calls; the reward at the end against one for each turn; RL-ZVP and growth on or off.

    python -m benchmarks.turns [--out runs/turns] [--seeds 0 1 2] [--only VARIANT ...] [--smoke]
        [--cold-starts runs/shop]

A variant is "calls, reward, stages". All variants of a number of calls and a seed start from one
cold start; 1 and 2 calls share that of benchmarks/shop.py. Success is that of the final state,
whatever the reward was. A line per finished run goes to OUT/turns.jsonl; at the end OUT/turns.md,
which names the runs that are missing, and OUT/turns_CALLS.png. With --smoke and without --only two
variants run, of one seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import experiments, rl_runs
from benchmarks import shop as shop_rl
from compass_jax.commands.cli import tune_allocator
from compass_jax.config import (
    CorrectionConfig,
    EvalConfig,
    RunConfig,
    TaskSource,
    ZeroVarianceConfig,
)
from compass_jax.runs.rundir import write_atomically
from compass_jax.tasks import shop

REWARDS = {"end": "short", "each turn": "rewarded"}  # name of the shop's task
STAGES = {
    "no stages": ZeroVarianceConfig(rl_zvp=False),
    "RL-ZVP and growth": ZeroVarianceConfig(rl_zvp=True, grow_to=16),
}
# prompt tokens, and tokens after it, that a right conversation of so many calls has room in
ROOM = {1: (64, 64), 2: (64, 128), 4: (96, 256), 8: (160, 608)}
SEEDS = (0, 1, 2)
VARIANTS = {
    f"{calls}, {reward}, {stages}": (calls, reward, stages)
    for calls, reward, stages in itertools.product(shop.CALLS, REWARDS, STAGES)
}


# each number of calls that has a cold start of its own, each reward, stages or none
SMOKE = ("2, end, no stages", "4, each turn, RL-ZVP and growth")


def start_config(calls: int, seed: int, folder: Path, smoke: bool) -> RunConfig:
    """The cold start of a number of calls, on requests of as many and of fewer."""
    config = shop_rl.configuration(seed, folder, smoke)
    if calls <= 2:
        return config
    length = sum(ROOM[calls])
    sft = dataclasses.replace(config.sft, buckets=(192, length))
    model = dataclasses.replace(config.model, max_positions=length)
    return dataclasses.replace(config, sft=sft, model=model)


def start_folder(calls: int, seed: int, starts: Path) -> Path:
    """Where it is; the same for 1 and 2 calls."""
    return starts / (f"seed{seed}" if calls <= 2 else f"seed{seed}_calls{calls}")


def variant_config(name: str, seed: int, folder: Path, smoke: bool) -> RunConfig:
    """The RL run of a variant, without the weights from which it starts."""
    calls, reward, stages = VARIANTS[name]
    config = start_config(calls, seed, folder, smoke)
    prompt, after = ROOM[calls]
    length = prompt + after
    source = TaskSource(f"compass_jax.tasks.shop:{REWARDS[reward]}_{calls}", label=f"shop_{calls}")
    rl = dataclasses.replace(
        config.rl,
        buckets=(length,),
        zero_variance=STAGES[stages],
        correction=CorrectionConfig("tis"),
        save_every=0,
        eval_every=0 if smoke else 6,
        steps=1 if smoke else 12,
    )
    if smoke and rl.zero_variance.grow_to:
        rl = dataclasses.replace(rl, zero_variance=ZeroVarianceConfig(grow_to=4))
    data = dataclasses.replace(config.data, sources=(source,), eval_prompts=4 if smoke else 96)
    return dataclasses.replace(
        config,
        name="turns",
        seed=seed,
        run_dir=str(folder / name.replace(", ", "_").replace(" ", "_") / f"seed{seed}"),
        rollout=dataclasses.replace(
            config.rollout,
            prompt_buckets=(prompt,),
            max_new_tokens=after,
            cache_bucket=length // 2,
            slots=8 if smoke else 128,
        ),
        data=data,
        evaluation=EvalConfig(k=4),
        rl=rl,
    )


def main(argv: list[str] | None = None) -> None:
    """Runs what is not finished, then writes the table and the pictures."""
    if argv is None:
        tune_allocator("benchmarks.turns")
    parser = rl_runs.parser(
        __doc__, "turns", cold_starts="shop", seeds=SEEDS, variants=tuple(VARIANTS)
    )
    args = parser.parse_args(argv)
    if args.smoke and args.only == list(VARIANTS):
        args.seeds, args.only = args.seeds[:1], list(SMOKE)
    out = Path(args.out)
    results = out / "turns.jsonl"
    for seed, name in itertools.product(args.seeds, args.only):
        if (name, seed) in {(r["variant"], r["seed"]) for r in experiments.finished(results)}:
            continue
        calls = VARIANTS[name][0]
        config = variant_config(name, seed, out, args.smoke)
        folder = start_folder(calls, seed, Path(args.cold_starts))
        mine = start_config(calls, seed, folder, args.smoke)
        needed = tuple(n for n in shop.CALLS if n <= max(calls, 2))
        start = shop_rl.cold_start(mine, folder, needed)
        config = dataclasses.replace(config, init_from=start)
        before = rl_runs.start_accuracy(config, start, folder / f"accuracy_{calls}")
        experiments.append(results, {**rl_runs.run(config, before, name), "start": before})
    rows = experiments.finished(results)
    write_atomically(out / "turns.md", report(rows))
    for calls in {VARIANTS[row["variant"]][0] for row in rows}:
        mine = [row for row in rows if VARIANTS[row["variant"]][0] == calls]
        rl_runs.plot_curves(mine, out / f"turns_{calls}.png", f"Shop, {calls} calls")
    print(report(rows))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """A table in Markdown: success before and after RL, and where the signal came from."""
    lines = [
        "| calls | reward | stages | seeds | success before | after | tokens without a signal |",
        "|---" * 7 + "|",
    ]
    for name, found in rl_runs.by_variant(rows).items():
        calls, reward, stages = VARIANTS[name]
        cells = [str(calls), reward, stages, str(len(found))]
        for part in ("start", "accuracy"):
            cells.append(rl_runs.spread([row[part] for row in found]))
        cells.append(rl_runs.spread([row["shares"]["none"] for row in found]))
        lines.append("| " + " | ".join(cells) + " |")
    there = {(row["variant"], row["seed"]) for row in rows}
    missing = [
        f"{name} (seeds {', '.join(absent)})"
        for name in VARIANTS
        if (absent := [str(seed) for seed in SEEDS if (name, seed) not in there])
    ]
    lines += ["", f"Not run: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
