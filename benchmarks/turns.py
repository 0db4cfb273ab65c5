"""Experiment: RL over whole conversations in the shop (compass_jax/tasks/shop.py) of 1, 2, 4 and 8
calls; the reward at the end against one for each turn; RL-ZVP and growth on or off.

    python -m benchmarks.turns [--out runs/turns] [--seeds 0 1 2] [--only VARIANT ...] [--smoke]

A variant is "calls, reward, stages". All variants of a number of calls and a seed start from one
cold start. Success is that of the final state, whatever the
reward was. A line per finished run goes to OUT/turns.jsonl; at the end OUT/turns.md and
OUT/turns_CALLS.png.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import experiments, rl_runs
from compass_jax.cli import load_config, tune_allocator
from compass_jax.config import CorrectionConfig, RunConfig, TaskSource, ZeroVarianceConfig
from compass_jax.rundir import write_atomically
from compass_jax.tasks import shop
from compass_jax.training.sft import run_sft

CONFIG = Path(__file__).resolve().parent.parent / "configs" / "shop_tiny_cpu.py"
REWARDS = {"end": "short", "each turn": "rewarded"}  # name of the shop's task
STAGES = {
    "no stages": ZeroVarianceConfig(rl_zvp=False),
    "RL-ZVP and growth": ZeroVarianceConfig(rl_zvp=True, grow_to=16),
}
# prompt tokens, and tokens after it, that a right conversation of so many calls has room in
ROOM = {1: (64, 64), 2: (64, 128), 4: (96, 256), 8: (160, 512)}
VARIANTS = {
    f"{calls}, {reward}, {stages}": (calls, reward, stages)
    for calls, reward, stages in itertools.product(shop.CALLS, REWARDS, STAGES)
}


def variant_config(name: str, seed: int, folder: Path, smoke: bool) -> RunConfig:
    """The RL run of a variant, without the weights from which it starts; its SFT is the cold start
    that all variants of its number of calls share.
    """
    calls, reward, stages = VARIANTS[name]
    config = load_config(str(CONFIG))
    prompt, after = ROOM[calls]
    length = prompt + after
    source = TaskSource(f"compass_jax.tasks.shop:{REWARDS[reward]}_{calls}", label=f"shop_{calls}")
    rl = dataclasses.replace(
        config.rl,
        buckets=(length,),
        zero_variance=STAGES[stages],
        correction=CorrectionConfig("tis"),
        save_every=0,
        eval_every=10,
    )
    sft = dataclasses.replace(config.sft, files=(str(folder / f"shop_{calls}.jsonl"),))
    sft = dataclasses.replace(sft, buckets=(length,), steps=200 + 100 * calls)
    data = dataclasses.replace(config.data, sources=(source,))
    if smoke:
        rl = dataclasses.replace(rl, steps=1, prompts_per_step=2, group_size=2, eval_every=0)
        if rl.zero_variance.grow_to:
            rl = dataclasses.replace(rl, zero_variance=ZeroVarianceConfig(grow_to=4))
        sft, data = (
            dataclasses.replace(sft, steps=2, batch=4),
            dataclasses.replace(data, eval_prompts=4),
        )
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
        sft=sft,
        rl=rl,
        model=dataclasses.replace(config.model, max_positions=2 * length),
    )


def cold_start(config: RunConfig, calls: int, folder: Path) -> str:
    """The directory of the cold start of a number of calls and a seed, trained once."""
    file = folder / f"shop_{calls}.jsonl"
    rows = shop.rows(config.seed, (calls,), 100, ("en",))
    lines = (json.dumps({"messages": shop.conversation(row)}) + "\n" for row in rows)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(file, "".join(lines))
    start = folder / "cold_starts" / f"{calls}_seed{config.seed}"
    run_sft(dataclasses.replace(config, run_dir=str(start)))
    return str(start)


def main(argv: list[str] | None = None) -> None:
    """Runs what is not finished, then writes the table and the pictures."""
    if argv is None:
        tune_allocator("benchmarks.turns")
    parser = rl_runs.parser(__doc__, "turns", seeds=(0, 1, 2), variants=tuple(VARIANTS))
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "turns.jsonl"
    for seed, name in itertools.product(args.seeds, args.only):
        if (name, seed) in {(r["variant"], r["seed"]) for r in experiments.finished(results)}:
            continue
        config = variant_config(name, seed, out, args.smoke)
        start = cold_start(config, VARIANTS[name][0], out)
        config = dataclasses.replace(config, init_from=start)
        folder = out / "cold_starts" / f"{VARIANTS[name][0]}_seed{seed}"
        before = rl_runs.start_accuracy(config, start, folder / "accuracy")
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
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
