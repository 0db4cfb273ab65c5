"""Experiment: what each stage of the zero-variance elimination is worth, on prompts of which two
thirds give plain GRPO nothing.

    python -m benchmarks.zero_variance_audit [--out runs/zero_variance] [--seeds 0 1 2] [--only grpo
        all ...] [--smoke]

For each seed: the cold start of configs/tiny_reasoning_cpu.py; pass rates of 1,800 of its prompts
from 12 samples each; a prompt set of one third always right, one third always wrong and one third
mixed ones, 240 each; then the same RL with the stages added one by one. Stage 0 estimates the set's
pass rates with 4 samples that it draws and pays for. Two ways for the last uniform groups replace
RL-ZVP: a curriculum (instead of the selection), and an ensemble of verifiers; and the curriculum in
place of filter and selection, too, for it costs nothing. Every variant has the same number of
updates, of 32 prompts a step, and of 16 in three variants: where all groups teach, half as many may
do. The axis has all generated tokens, filter rollouts and dropped groups included. A line per
finished run goes to OUT/zero_variance.jsonl, so that the same command continues after a kill; at
the end OUT/zero_variance.md and OUT/zero_variance.png. Selection is by predicted pass rates; the
published rows had it by streaks of uniform groups (GRESO), which is no longer in the package.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from compass_jax.apps.pipeline.offline_filter import Bounds, run_filter
from compass_jax.base.records import Prompt
from compass_jax.commands.configured import load_config
from compass_jax.config import (
    OptimConfig,
    RLConfig,
    RunConfig,
    ShapingConfig,
    ZeroVarianceConfig,
)
from compass_jax.data.keep import PassRate
from compass_jax.data.prompts import train_prompts
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import answers, decoder_of
from compass_jax.rewards.score import Scorer
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.sft import run_sft

# samples of a prompt's pass rate, by which the prompt set is put together; and the prompts from
# which it is chosen
SAMPLES, LOOKED_AT = 12, 1800
FILTER_SAMPLES = 4
KINDS = ("always right", "always wrong", "mixed")


def _with(**changes: Any) -> Callable[[RLConfig], RLConfig]:
    def apply(rl: RLConfig) -> RLConfig:
        zero = changes.get("zero_variance", {})
        rest = {name: value for name, value in changes.items() if name != "zero_variance"}
        return dataclasses.replace(
            rl, zero_variance=dataclasses.replace(rl.zero_variance, **zero), **rest
        )

    return apply


def _halved(change: Callable[[RLConfig], RLConfig]) -> Callable[[RLConfig], RLConfig]:
    return lambda rl: dataclasses.replace(change(rl), prompts_per_step=rl.prompts_per_step // 2)


SHAPING = ShapingConfig(length_penalty=0.05, repetition_penalty=0.02)
GROW = {"posterior": True, "grow_to": 16}
CURRICULUM = {"curriculum": True, "grow_to": 16}
# name -> (whether stage 0 runs, changes to plain GRPO)
VARIANTS: dict[str, tuple[bool, Callable[[RLConfig], RLConfig]]] = {
    "grpo": (False, _with()),
    "filter": (True, _with()),
    "filter+select": (True, _with(zero_variance={"posterior": True})),
    "filter+select+grow": (True, _with(zero_variance=GROW)),
    "filter+select+grow+shaping": (True, _with(zero_variance=GROW, shaping=SHAPING)),
    "all": (True, _with(zero_variance={**GROW, "rl_zvp": True}, shaping=SHAPING)),
    "all but the filter": (False, _with(zero_variance={**GROW, "rl_zvp": True}, shaping=SHAPING)),
    "all, curriculum in place of filter": (
        False,
        _with(zero_variance={**CURRICULUM, "rl_zvp": True}, shaping=SHAPING),
    ),
    "dapo": (
        False,
        _with(objective=dapo_surrogate(), zero_variance={"dynamic_sampling": True}),
    ),
    "curriculum in place of RL-ZVP": (True, _with(zero_variance=CURRICULUM, shaping=SHAPING)),
}
# The ensemble also scores the length, of right and wrong answers: a group that is alike in one is
# seldom alike in both.
ENSEMBLE = "ensemble in place of RL-ZVP"
VARIANTS[ENSEMBLE] = (True, _with(zero_variance=GROW))
VERIFIERS = (("reasoning_gym", 0.9), ("length", 0.1))
LENGTHS = (("most_chars", 96), ("free_chars", 8))
VARIANTS |= {
    f"{name}, half the prompts a step": (VARIANTS[name][0], _halved(VARIANTS[name][1]))
    for name in ("grpo", "all", "all but the filter")
}


def base_config(seed: int, folder: Path, smoke: bool) -> tuple[RunConfig, int]:
    """Returns (plain GRPO on configs/tiny_reasoning_cpu.py, prompts of each kind)."""
    config = dataclasses.replace(
        load_config(str(rl_runs.CONFIG)), seed=seed, run_dir=str(folder / "sft")
    )
    rl = RLConfig(
        steps=40,
        prompts_per_step=32,
        group_size=8,
        updates_per_rollout=2,
        replay="R3",
        buckets=config.rl.buckets,
        micro_batch_tokens=8192,
        objective=Grpo(),
        step_policy=None,
        zero_variance=ZeroVarianceConfig(),
        optim=OptimConfig(learning_rate=1e-4, warmup_steps=2),
        save_every=0,
        eval_every=8,
    )
    single_sources = tuple(dataclasses.replace(source, repeat=1) for source in config.data.sources)
    data, evaluation, sft = (
        dataclasses.replace(config.data, eval_prompts=256, sources=single_sources),
        dataclasses.replace(config.evaluation, k=2),
        config.sft,
    )
    if smoke:
        rl = dataclasses.replace(rl, steps=2, prompts_per_step=4, group_size=4, eval_every=1)
        sources = tuple(dataclasses.replace(s, size=min(s.size, 60)) for s in data.sources[:3])
        data = dataclasses.replace(data, eval_prompts=8, sources=sources)
        few = (("sum_2x1", 20, 4), ("sum_3x1", 20, 4))
        sft = dataclasses.replace(sft, steps=30, batch=16, procedural=few[1:], answers=few)
    return dataclasses.replace(config, rl=rl, data=data, evaluation=evaluation, sft=sft), (
        16 if smoke else 240
    )


def with_verifiers(config: RunConfig, name: str) -> RunConfig:
    """Returns `config` with a variant's verifiers; accuracy stays the share of right answers."""
    if name != ENSEMBLE:
        return config
    sources = tuple(
        dataclasses.replace(source, verifier=VERIFIERS, verifier_args=LENGTHS)
        for source in config.data.sources
    )
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, sources=sources),
        rewards=dataclasses.replace(config.rewards, right_at=0.9, wrong_at=0.1),
    )


def pass_rates(config: RunConfig, weights: str) -> list[tuple[Prompt, float, int]]:
    """Returns (prompt, pass rate of SAMPLES samples, known ones) of every training prompt; 0 known
    for a prompt that was not sampled.

    The draws differ from those of RL and of the filter.
    """
    engine, decode, tokenizer = decoder_of(config.policy, config.data, config.seed, weights)
    every = train_prompts(config.data, tokenizer, config.seed)
    picked = np.sort(np.random.default_rng(config.seed).permutation(len(every))[:LOOKED_AT])
    prompts = [every[i] for i in picked]
    sampler = Sampler(config.rollout.temperature, config.rollout.top_k, config.rollout.top_p)
    with Scorer(config.rewards, config.data) as scorer:
        scores = answers(
            engine,
            decode,
            prompts,
            tokenizer,
            scorer,
            samples=SAMPLES,
            sampler=sampler,
            seed=config.seed + 1_000_003,
            purpose=Purpose.FILTER,
        )[1]
    right = {
        p.id: [s.reward >= config.rewards.right_at for s in row if s.known]
        for p, row in zip(prompts, scores, strict=True)
    }
    return [
        (p, float(np.mean(right[p.id])) if right.get(p.id) else 0.0, len(right.get(p.id, ())))
        for p in every
    ]


def choose(rates: Sequence[tuple[Prompt, float, int]], each: int, seed: int) -> dict[int, str]:
    """Returns the kinds of the chosen prompts by id: `each` prompts of each kind, fewer where a
    kind has fewer, but the same number of all kinds.
    """
    kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
    for prompt, rate, known in rates:
        if known:
            kinds["always right" if rate == 1 else "always wrong" if rate == 0 else "mixed"].append(
                prompt.id
            )
    count = min(each, *(len(ids) for ids in kinds.values()))
    if not count:
        raise SystemExit(
            f"no prompt set: { ({kind: len(ids) for kind, ids in kinds.items()}) } prompts of the"
            " kinds"
        )
    rng = np.random.default_rng(seed)
    return {int(i): kind for kind, ids in kinds.items() for i in rng.permutation(ids)[:count]}


def prepare(
    seed: int, out: Path, cold_starts: Path, smoke: bool
) -> tuple[RunConfig, Path, Path, float]:
    """Returns (plain GRPO's config, file of the prompt set, stage 0's file, accuracy of the start).
    Each is made once for a seed.
    """
    folder = out / f"seed{seed}"
    config, each = base_config(seed, folder, smoke)
    folder.mkdir(parents=True, exist_ok=True)
    if smoke:
        run_sft(config)
    weights = config.directory if smoke else rl_runs.cold_start(seed, cold_starts)
    chosen_file, filtered = folder / "prompts.jsonl", folder / "filter"
    if not chosen_file.exists():
        rates = pass_rates(config, weights)
        if smoke:  # a cold start of seconds has no prompt that is always right: kinds by number
            rates = [(p, (0.0, 0.5, 1.0)[i % 3], SAMPLES) for i, (p, _, _) in enumerate(rates)]
        chosen = choose(rates, each, seed)
        lines = [
            PassRate(p.id, p.label, p.question, rate, known, SAMPLES, 0, 0.0, 1.0, p.id in chosen)
            for p, rate, known in rates
        ]
        write_atomically(chosen_file, "".join(json.dumps(line._asdict()) + "\n" for line in lines))
    config = dataclasses.replace(
        config, init_from=weights, data=dataclasses.replace(config.data, keep_file=str(chosen_file))
    )
    if not (filtered / "summary.json").exists():
        run_filter(config.policy, config.scored, weights, str(filtered), Bounds(FILTER_SAMPLES))
    _complete(filtered / "pass_rates.jsonl", chosen_file)
    return (
        config,
        chosen_file,
        filtered / "complete.jsonl",
        rl_runs.start_accuracy(config, weights, folder),
    )


def _complete(filtered: Path, chosen: Path) -> None:
    """Writes stage 0's file with the prompts outside the set, which it does not keep and which cost
    nothing: RL asks for every training prompt.
    """
    by_id = {row["id"]: row for row in map(json.loads, filtered.read_text().splitlines())}
    rows = [
        by_id.get(row["id"], {**row, "keep": False})
        for row in map(json.loads, chosen.read_text().splitlines())
    ]
    write_atomically(
        filtered.parent / "complete.jsonl", "".join(json.dumps(row) + "\n" for row in rows)
    )


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(
        __doc__, "zero_variance", cold_starts="cold_starts", seeds=(0, 1, 2), variants=VARIANTS
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "zero_variance.jsonl"
    for seed in args.seeds:
        missing = [
            name
            for name in args.only
            if (name, seed)
            not in {(r["variant"], r["seed"]) for r in experiments.finished(results)}
        ]
        if not missing:
            continue
        config, chosen, filtered, start = prepare(seed, out, Path(args.cold_starts), args.smoke)
        for name in missing:
            uses_filter, change = VARIANTS[name]
            data = dataclasses.replace(
                config.data, keep_file=str(filtered if uses_filter else chosen)
            )
            folder = out / f"seed{seed}" / name.translate(str.maketrans("+ ,", "___"))
            experiments.append(
                results,
                rl_runs.run(
                    with_verifiers(
                        dataclasses.replace(
                            config, run_dir=str(folder), data=data, rl=change(config.rl)
                        ),
                        name,
                    ),
                    start,
                    name,
                ),
            )
    rows = sorted(
        experiments.finished(results), key=lambda row: list(VARIANTS).index(row["variant"])
    )
    table = report(rows)
    write_atomically(out / "zero_variance.md", table)
    rl_runs.plot_curves(
        rows,
        out / "zero_variance.png",
        "Stages of the zero-variance elimination, one added at a time",
    )
    print(table)


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown: accuracy, tokens, tokens to plain GRPO's final accuracy over its
    own, where the tokens' signal came from.
    """
    grouped = rl_runs.by_variant(rows)
    plain = {row["seed"]: row for row in grouped.get("grpo", [])}
    lines = [
        (
            "| stages | seeds | accuracy | thousand tokens | tokens to plain GRPO's accuracy |"
            " verifier | shaping | entropy | none |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in grouped.items():
        ratios = [_ratio(row, plain[row["seed"]]) for row in runs if row["seed"] in plain]
        reached = [r for r in ratios if r is not None]
        ratio = rl_runs.spread(reached, "{:.2f}") if reached else "-"
        ratio += f", {len(ratios) - len(reached)} not" if len(reached) < len(ratios) else ""
        shares = [
            rl_runs.spread([100 * row["shares"][signal] for row in runs], "{:.1f}") + " %"
            for signal in rl_runs.SIGNALS
        ]
        cells = [name, str(len(runs)), rl_runs.spread([row["accuracy"] for row in runs])]
        cells += [rl_runs.spread([row["tokens"] / 1e3 for row in runs], "{:.0f}"), ratio, *shares]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _ratio(row: dict[str, Any], plain: dict[str, Any]) -> float | None:
    tokens = rl_runs.tokens_to_reach(row["curve"], plain["accuracy"])
    return None if tokens is None else tokens / plain["tokens"]


if __name__ == "__main__":
    main()
