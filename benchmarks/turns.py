"""Experiment: RL over whole conversations in the shop (examples/shop) of 1, 2, 4 and 8
calls; the reward at the end against one for each turn; RL-ZVP and growth on or off.

    python -m benchmarks.turns [--out runs/turns] [--seeds 0 1 2] [--only VARIANT ...] [--smoke]
        [--cold-starts runs/turns_cold_starts]

A variant is "calls, reward, stages"; a request of one call or two is for one change, so that both
rewards are the same there. All variants of a seed start from one cold start, on conversations of
every number of calls in which each goal meets a careless clerk with the same probability: the more
calls, the fewer conversations succeed. Success is that of the final state, whatever the reward was.
A line per finished run goes to OUT/turns.jsonl; at the end OUT/turns.md, which names the runs that
are missing, and OUT/turns.png.
With --smoke and without --only two variants run, of one seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from benchmarks import shop as shop_rl
from benchmarks.tokenizer_training import train_tokenizer
from compass_jax.config import (
    EvalConfig,
    RunConfig,
    TaskSource,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.devices.allocator import tune_allocator
from compass_jax.runs.rundir import write_atomically
from examples.shop import shop

TASKS = shop_rl.EXAMPLE / "shop.py"
REWARDS = {"end": "short", "each turn": "rewarded"}  # name of the shop's task
STAGES = {
    "no stages": ZeroVarianceConfig(rl_zvp=False),
    "RL-ZVP and growth": ZeroVarianceConfig(rl_zvp=True, grow_to=16),
}
# calls -> prompt tokens, and later tokens, in which a right conversation has room
ROOM = {1: (16, 32), 2: (16, 72), 4: (32, 144), 8: (48, 304)}
SEEDS = (0, 1, 2)
VARIANTS = {
    f"{calls}, {reward}, {stages}": (calls, reward, stages)
    for calls, reward, stages in itertools.product(shop.CALLS, REWARDS, STAGES)
    if calls > 2 or reward == "end"
}
SMOKE = ("2, end, no stages", "4, each turn, RL-ZVP and growth")
VOCABULARY = 512
CARELESS = 0.3  # of the goals in the cold start's conversations
STEPS = 1200  # of the cold start: after half of them 0.15 of four calls' requests succeed, not 0.27


def tokenizer(folder: Path) -> str:
    """Returns `folder`, with a tokenizer that has the shop's words whole: conversations are half as
    long, and an item is copied as one token.
    """
    if not folder.exists():
        talks = (shop.conversation(row) for row in shop.rows(7, shop.CALLS, 60))
        texts = [message["content"] for talk in talks for message in talk]
        train_tokenizer([*texts, *["user\nassistant\ntool\n"] * 20], VOCABULARY, folder)
    return str(folder)


def start_config(seed: int, folder: Path, smoke: bool) -> RunConfig:
    """Returns the configuration of a seed's cold start, which all of its RL runs share; `folder` is
    that of all seeds' cold starts.
    """
    config = shop_rl.configuration(seed, folder / f"seed{seed}", smoke)
    buckets = tuple(sum(ROOM[calls]) for calls in shop.CALLS)
    sft = dataclasses.replace(config.sft, buckets=buckets)
    if not smoke:
        sft = dataclasses.replace(sft, steps=STEPS)
    model = dataclasses.replace(config.model, vocab_size=VOCABULARY, max_positions=buckets[-1])
    data = dataclasses.replace(config.data, tokenizer=tokenizer(folder / "tokenizer"))
    return dataclasses.replace(config, name="turns", sft=sft, model=model, data=data)


def variant_config(name: str, seed: int, folder: Path, cold_starts: Path, smoke: bool) -> RunConfig:
    """Returns the RL run of a variant in `folder`, without the weights from which it starts."""
    calls, reward, stages = VARIANTS[name]
    config = start_config(seed, cold_starts, smoke)
    prompt, after = ROOM[calls]
    length = prompt + after
    source = TaskSource(f"{TASKS}:{REWARDS[reward]}_{calls}", label=f"shop_{calls}")
    rl = dataclasses.replace(
        config.rl,
        buckets=(length,),
        zero_variance=STAGES[stages],
        correction=named_correction("tis"),
        save_every=0,
        eval_every=0,
        steps=1 if smoke else 12,
        prompts_per_step=config.rl.prompts_per_step if smoke else 16,
    )
    if smoke and rl.zero_variance.grow_to:
        rl = dataclasses.replace(rl, zero_variance=ZeroVarianceConfig(rl_zvp=True, grow_to=4))
    data = dataclasses.replace(config.data, sources=(source,), eval_prompts=4 if smoke else 96)
    return dataclasses.replace(
        config,
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
    """Runs the variants that are not finished yet, then writes the table and the pictures."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(
        __doc__, "turns", cold_starts="turns_cold_starts", seeds=SEEDS, variants=tuple(VARIANTS)
    )
    args = parser.parse_args(argv)
    if args.smoke and args.only == list(VARIANTS):
        args.seeds, args.only = args.seeds[:1], list(SMOKE)
    out = Path(args.out)
    results = out / "turns.jsonl"
    for seed, name in itertools.product(args.seeds, args.only):
        if (name, seed) in {(r["variant"], r["seed"]) for r in experiments.finished(results)}:
            continue
        calls, cold = VARIANTS[name][0], Path(args.cold_starts)
        cold_config = start_config(seed, cold, args.smoke)
        start = shop_rl.cold_start(cold_config, cold / f"seed{seed}", shop.CALLS, CARELESS)
        config = variant_config(name, seed, out, cold, args.smoke)
        config = dataclasses.replace(config, init_from=start)
        before = rl_runs.start_accuracy(config, start, cold / f"seed{seed}" / f"accuracy_{calls}")
        experiments.append(results, {**rl_runs.run(config, before, name), "start": before})
    rows = experiments.finished(results)
    write_atomically(out / "turns.md", report(rows))
    plot(rows, out / "turns.png")
    print(report(rows))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: success before and after RL, tokens, tokens without a signal."""
    lines = [
        "| calls | reward | stages | seeds | success before | after | points gained"
        " | thousand tokens | tokens without a signal |",
        "|---" * 9 + "|",
    ]
    order = list(VARIANTS)
    for name, runs in rl_runs.by_variant(
        sorted(rows, key=lambda row: order.index(row["variant"]))
    ).items():
        calls, reward, stages = VARIANTS[name]
        cells = [str(calls), reward if calls > 2 else "either", stages, str(len(runs))]
        for part in ("start", "accuracy"):
            cells.append(rl_runs.spread([row[part] for row in runs]))
        gained = [100 * (row["accuracy"] - row["start"]) for row in runs]
        cells.append(rl_runs.spread(gained, "{:+.1f}"))
        cells.append(rl_runs.spread([row["tokens"] / 1e3 for row in runs], "{:.0f}"))
        cells.append(rl_runs.spread([row["shares"]["none"] for row in runs]))
        lines.append("| " + " | ".join(cells) + " |")
    finished = {(row["variant"], row["seed"]) for row in rows}
    missing = [
        f"{name} (seeds {', '.join(absent)})"
        for name in VARIANTS
        if (absent := [str(seed) for seed in SEEDS if (name, seed) not in finished])
    ]
    lines += ["", f"Not run: {'; '.join(missing)}."] if missing else []
    return "\n".join(lines) + "\n"


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws success before and after RL by the number of calls: means over seeds as bars, the seeds
    as dots.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    kinds = list(itertools.product(REWARDS, STAGES))
    for place, calls in enumerate(shop.CALLS):
        calls_rows = [row for row in rows if VARIANTS[row["variant"]][0] == calls]
        if calls_rows:
            before = float(np.mean([row["start"] for row in calls_rows]))
            axes.hlines(before, place - 0.42, place + 0.42, color="black", linestyle=":")
        for name, runs in rl_runs.by_variant(calls_rows).items():
            kind = kinds.index(VARIANTS[name][1:])
            ends, at = [row["accuracy"] for row in runs], place + 0.2 * (kind - 1.5)
            colour = rl_runs.COLOURS[1 + kind]
            axes.bar(at, float(np.mean(ends)), 0.18, color=colour, alpha=0.6)
            axes.plot([at] * len(ends), ends, "o", color=colour, markersize=4)
    for kind, (reward, stages) in enumerate(kinds):
        label = f"reward {'at the ' if reward == 'end' else ''}{reward}, {stages}"
        axes.bar(0, 0, color=rl_runs.COLOURS[1 + kind], alpha=0.6, label=label)
    axes.set_xticks(range(len(shop.CALLS)), [f"{n} call{'s' * (n > 1)}" for n in shop.CALLS])
    axes.set(ylabel="success on held-out requests", title="The shop, by calls (dotted: before RL)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
