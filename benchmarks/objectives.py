"""Experiment: ESPO against GSPO, GRPO, DAPO and CISPO, with the paper's ablations, on the same
prompts with the same rollout budget.

    python -m benchmarks.objectives [--out runs/objectives] [--seeds 0 1 2] [--only espo grpo ...]
        [--tasks sums ...] [--smoke]

Three tasks:
    sums        sums of mixed difficulty, from the cold start of configs/tiny_reasoning_cpu.py
    decisions   a few tokens decide: the answer is the product of choices that the cold start leaves
                open, between stretches that it knows by heart
    noise       ESPO's stated failure: the tokens of high entropy are filler words that nothing
                depends on; the answer is in certain tokens
On sums the five objectives, on the other two (a model of two layers, each its own cold start)
ESPO's ablations as well. Each objective has its paper's clip range, and all have one learning rate,
chosen by hand and tuned for none. Uniform groups get nothing from anyone (no RL-ZVP, no dynamic
sampling), so that objectives alone differ. A line per finished run goes to OUT/objectives.jsonl, so
that the same command continues after a kill; at the end OUT/objectives.md and a picture for each
task.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs, synthetic_tasks
from compass_jax.commands.configured import load_config
from compass_jax.config import (
    DataConfig,
    FileSource,
    OptimConfig,
    RLConfig,
    RunConfig,
    ZeroVarianceConfig,
)
from compass_jax.devices.allocator import tune_allocator
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.sft import run_sft

LEARNING_RATE = 2e-4
VARIANTS = {
    "espo": Espo(),
    "gspo": Gspo(),
    "grpo": Grpo(),
    "dapo": dapo_surrogate(),
    "cispo": Cispo(),
    "espo, every token alone": Espo(quantiles=(), every_token=True),
    "espo, clip 3e-4/4e-4": Espo(fixed_clip=True),
    "espo, clip 0.2/0.28": Espo(fixed_clip=True, clip_low=0.2, clip_high=0.28),
}
TASKS = ("sums", "decisions", "noise")
ABLATIONS = tuple(VARIANTS)[5:]


def task_config(task: str, seed: int, folder: Path, smoke: bool) -> RunConfig:
    """Returns the configuration of a task: its cold start, and all of its RL but the objective."""
    config = dataclasses.replace(
        load_config(str(rl_runs.CONFIG)),
        seed=seed,
        run_dir=str(folder / "sft"),
        name=f"objectives_{task}",
    )
    rl = RLConfig(
        steps=40,
        prompts_per_step=32,
        group_size=8,
        updates_per_rollout=4,
        replay="R3",
        buckets=config.rl.buckets,
        micro_batch_tokens=8192,
        step_policy=None,
        zero_variance=ZeroVarianceConfig(),
        save_every=0,
        eval_every=8,
    )
    evaluation = dataclasses.replace(config.evaluation, k=2)
    config = dataclasses.replace(config, rl=rl, evaluation=evaluation)
    config = _sums(config, smoke) if task == "sums" else _synthetic(config, task, folder, seed)
    if not smoke:
        return config
    return dataclasses.replace(
        config,
        rl=dataclasses.replace(config.rl, steps=2, prompts_per_step=4, group_size=4, eval_every=1),
        data=dataclasses.replace(config.data, eval_prompts=8),
        sft=dataclasses.replace(config.sft, steps=10, batch=16),
    )


def _sums(config: RunConfig, smoke: bool) -> RunConfig:
    """Returns the configuration with the data of configs/tiny_reasoning_cpu.py."""
    data = dataclasses.replace(config.data, eval_prompts=256)
    if not smoke:
        return dataclasses.replace(config, data=data)
    few = tuple(dataclasses.replace(s, size=min(s.size, 40)) for s in data.sources[:2])
    sft = dataclasses.replace(config.sft, procedural=(("sum_3x1", 20, 1),), answers=())
    return dataclasses.replace(config, data=dataclasses.replace(data, sources=few), sft=sft)


def _synthetic(config: RunConfig, task: str, folder: Path, seed: int) -> RunConfig:
    """Returns the configuration of a task whose entropy has a known place; a smaller model learns
    it.
    """
    files = synthetic_tasks.write(task, folder, seed)
    data = DataConfig(
        (FileSource(str(files.prompts), label=task),),
        heldout_frac=0.3,
        eval_prompts=128,
        tokenizer=config.data.tokenizer,
    )
    sft = dataclasses.replace(
        config.sft,
        files=(str(files.examples),),
        procedural=(),
        answers=(),
        steps=300,
        buckets=(64, 96),
    )
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=2),
        rollout=dataclasses.replace(config.rollout, prompt_buckets=(48,), max_new_tokens=64),
        data=data,
        sft=sft,
        rl=dataclasses.replace(config.rl, steps=30, eval_every=6),
        evaluation=dataclasses.replace(config.evaluation, k=4),
    )


def with_objective(config: RunConfig, weights: str, name: str, folder: Path) -> RunConfig:
    """Returns the configuration of the RL run of one variant from the task's cold start."""
    objective = VARIANTS[name]
    optim = OptimConfig(learning_rate=LEARNING_RATE, warmup_steps=2)
    safe = name.replace(", ", "_").replace(" ", "_").replace("/", "_")
    return dataclasses.replace(
        config,
        run_dir=str(folder / safe),
        init_from=weights,
        rl=dataclasses.replace(config.rl, objective=objective, optim=optim),
    )


def run_sft_of(config: RunConfig) -> str:
    """Trains the task's cold start and returns its directory."""
    run_sft(config)
    return config.directory


def main(argv: list[str] | None = None) -> None:
    """Runs the variants that are not finished yet, then writes the table and the pictures."""
    if argv is None:
        tune_allocator()
    parser = rl_runs.parser(
        __doc__, "objectives", cold_starts="cold_starts", seeds=(0, 1, 2), variants=VARIANTS
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    args = parser.parse_args(argv)
    out = Path(args.out)
    results = out / "objectives.jsonl"
    for seed in args.seeds:
        for task in args.tasks:
            done = {
                (row["task"], row["variant"], row["seed"]) for row in experiments.finished(results)
            }
            missing = [
                n
                for n in args.only
                if (task, n, seed) not in done and not (task == "sums" and n in ABLATIONS)
            ]
            if missing:
                folder = out / f"seed{seed}" / task
                config = task_config(task, seed, folder, args.smoke)
                shared = task == "sums" and not args.smoke
                weights = (
                    rl_runs.cold_start(seed, Path(args.cold_starts))
                    if shared
                    else run_sft_of(config)
                )
                start = rl_runs.start_accuracy(config, weights, folder)
                for name in missing:
                    experiments.append(
                        results,
                        {
                            "task": task,
                            **rl_runs.run(
                                with_objective(config, weights, name, folder), start, name
                            ),
                        },
                    )
    rows = sorted(
        experiments.finished(results), key=lambda row: list(VARIANTS).index(row["variant"])
    )
    write_atomically(out / "objectives.md", report(rows))
    for task in TASKS:
        if task_rows := [row for row in rows if row["task"] == task]:
            rl_runs.plot_curves(task_rows, out / f"objectives_{task}.png", f"Objectives on {task}")
    print(report(rows))


def report(rows: Sequence[dict[str, Any]]) -> str:
    """Returns a table in Markdown for each task: accuracy before, at the end and over the whole
    run, tokens, clip fraction, entropy at the end.
    """
    lines = []
    for task in TASKS:
        if not (task_rows := [row for row in rows if row["task"] == task]):
            continue
        lines += [
            "",
            f"**{task}**, from {rl_runs.spread([r['curve'][0][1] for r in task_rows])}",
            "",
        ]
        lines += [
            "| objective | seeds | accuracy | mean of the curve | thousand tokens | clip fraction |"
            " entropy at the end, nats |"
        ]
        lines += ["|---|---|---|---|---|---|---|"]
        budget = min(r["tokens"] for r in task_rows)
        for name, runs in rl_runs.by_variant(task_rows).items():
            cells = [name, str(len(runs)), rl_runs.spread([r["accuracy"] for r in runs])]
            cells.append(rl_runs.spread([rl_runs.mean_height(r["curve"], budget) for r in runs]))
            cells.append(rl_runs.spread([r["tokens"] / 1e3 for r in runs], "{:.0f}"))
            cells += [
                rl_runs.spread([float(np.mean(r["series"]["policy/clip_frac"])) for r in runs])
            ]
            cells += [rl_runs.spread([r["series"]["entropy_nats"][-1] for r in runs])]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    main()
