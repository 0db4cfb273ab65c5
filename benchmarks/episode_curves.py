"""Whether rewards rise on environments of the package verifiers, which run unmodified.

    python -m benchmarks.episode_curves --python PYTHON [--cases code_golf hangman scratchpad]
        [--seeds 0] [--out runs/episode_curves] [--results benchmarks/results/episode_curves.jsonl]

PYTHON has verifiers 0.4 and textarena; nltk's list `words`, which TextArena downloads; and the
environments scratchpad and code_golf, installed from the folder environments of verifiers'
repository. `code_golf` has one turn: a program, which is run. `hangman` is a game of TextArena in
verifiers' task set. `scratchpad` has two turns: a call of a tool, which a server makes, and a reply
with the word that came back. A mixture of experts of 1M parameters starts from SFT on scripted
episodes (scripted_episodes.py), and GRPO follows.

The plan, written before the runs: at the start at least 5% of the held-out episodes succeed (reward
1; all tasks of code_golf, which has three). Rewards are said to rise where the mean of the last
fifth of the steps is above that of the first fifth, by a 95% interval of their difference (Welch,
over steps), and the share of successes of held-out episodes at the end lies above the interval of
the start. One seed of each environment, then others as time allows. (Change, after a first run of
scratchpad: its cold start had 100 steps, its rate was 1e-3, and the reward fell from 0.125 to 0 in
three steps, when it was stopped. It has 170 steps and a rate of 3e-4.) A row a run; rows that exist
are not run again. The last lines are the table; the picture is beside the results.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scipy import stats

from benchmarks.experiments import append, commit, finished
from compass_jax.config import (
    ComputeConfig,
    DataConfig,
    EpisodeSource,
    EvalConfig,
    ModelConfig,
    MoEConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    SFTConfig,
    ZeroVarianceConfig,
)
from compass_jax.config.data import HELDOUT
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import ANSWERS, SUMMARY
from compass_jax.training.episodes import episode_opener
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

RESULTS = Path(__file__).resolve().parent / "results" / "episode_curves.jsonl"
SCRIPT = Path(__file__).resolve().parent / "scripted_episodes.py"
HARNESS = (("harness", (("id", "compass_chat"),)),)
VERSIONS = "import importlib.metadata as m; print(*map(m.version, ('verifiers', 'textarena')))"


@dataclass(frozen=True)
class Case:
    """An environment, and the sizes of its runs.

    Args:
        env: the task set.
        agent: the role that is trained.
        options: fields of the task set and of the environment.
        tasks: their number; 0: all.
        heldout: the share that is not trained on; 0: the tasks are evaluated that are trained on.
        samples: episodes of a task in an evaluation.
        prompt, length: tokens of the first request and of an episode.
        rate: the learning rate of RL.
    """

    env: str
    agent: str
    sft_steps: int
    steps: int
    prompts: int
    options: tuple = ()
    agent_options: tuple = ()
    tasks: int = 0
    heldout: float = 0.5
    samples: int = 8
    group: int = 8
    prompt: int = 64
    length: int = 128
    turns: int = 4
    rate: float = 1e-3


CASES = {
    "code_golf": Case(
        "code_golf",
        "golfer",
        sft_steps=100,
        steps=20,
        prompts=3,
        group=16,
        agent_options=(("attempts", 1),),
        heldout=0.0,
        samples=32,
    ),
    "hangman": Case(
        "textarena",
        "player",
        sft_steps=100,
        steps=15,
        prompts=3,
        options=(("game", "Hangman-v0"),),
        tasks=300,
        heldout=0.2,
        samples=1,
        length=256,
        turns=14,
    ),
    "scratchpad": Case(
        "scratchpad", "agent", sft_steps=170, steps=12, prompts=6, samples=4, rate=3e-4
    ),
}


def config(case: Case, folder: Path, directory: Path, python: str, seed: int) -> RunConfig:
    """Returns the run of a case in a directory; its rows and tokenizer are in `folder`."""
    env = (*case.agent_options, (case.agent, HARNESS))
    options = (*case.options, ("env", env), ("renderer", (("name", "prime-qwen3"),)))
    source = EpisodeSource(
        f"verifiers:{case.env}", options, size=case.tasks, python=python, turns=case.turns
    )
    heldout = {} if case.heldout else {"eval_sources": (source,)}
    return RunConfig(
        name="episode_curves",
        run_dir=str(directory),
        seed=seed,
        model=ModelConfig(
            family="qwen3_moe",
            vocab_size=384,
            hidden=128,
            layers=2,
            heads=4,
            kv_heads=2,
            head_dim=32,
            ffn=256,
            moe=MoEConfig(experts=8, top_k=2, ffn=128),
            rope_theta=10_000.0,
            max_positions=case.length,
            init_std=0.05,
        ),
        compute=ComputeConfig(scan_layers=False),
        rollout=RolloutConfig(
            slots=case.prompts * case.group,
            prompt_buckets=(case.prompt,),
            max_new_tokens=case.length - case.prompt,
            tokens_per_call=4,
            cache_bucket=64,
        ),
        data=DataConfig(
            sources=(source,),
            heldout_frac=case.heldout,
            eval_prompts=48,
            tokenizer=str(folder / "model"),
            **heldout,
        ),
        sft=SFTConfig(
            files=(str(folder / "episodes.jsonl"),),
            steps=case.sft_steps,
            batch=32,
            buckets=(case.length,),
            micro_batch_tokens=4096,
            optim=OptimConfig(learning_rate=3e-3, warmup_steps=10, schedule="cosine"),
        ),
        rl=RLConfig(
            steps=case.steps,
            prompts_per_step=case.prompts,
            group_size=case.group,
            step_policy=None,
            buckets=(case.length,),
            micro_batch_tokens=4096,
            zero_variance=ZeroVarianceConfig(),
            optim=OptimConfig(learning_rate=case.rate, warmup_steps=0),
            save_every=10,
            eval_every=0,
        ),
        evaluation=EvalConfig(k=case.samples),
    )


def trained_only(run: RunConfig) -> RunConfig:
    """Returns the settings of training: tasks that are also evaluated would be left out of it."""
    without = replace(run.data, eval_sources=())
    return replace(run, data=replace(without, eval_prompts=0) if run.data.eval_sources else without)


def evaluated_only(run: RunConfig) -> RunConfig:
    """Returns the settings of an evaluation, as of `compass eval`."""
    sources = () if run.data.eval_sources else run.data.sources
    return replace(run, data=replace(run.data, sources=sources))


def evaluate(run: RunConfig, weights: Path, out: Path) -> dict[str, Any]:
    """Returns the share of successes of held-out episodes, its interval and the mean reward."""
    if not (out / SUMMARY).exists():
        played = evaluated_only(run)
        played.validate()
        sizes = played.data, played.rollout, played.model.vocab_size, played.seed
        Evaluator(played.policy, played.scored, episode_opener(*sizes))(str(weights), str(out))
    result = json.loads((out / SUMMARY).read_text())["sets"][HELDOUT]
    samples = [x for row in finished(out / ANSWERS) for x in row["samples"][:-1]]
    rewards = [x["reward"] for x in samples if x["outcome"] == "ok"]
    return {
        "tasks": result["prompts"],
        "episodes": len(rewards),
        "lost": len(samples) - len(rewards),
        "success": round(result["avg_at_k"], 4),
        "interval": [round(x, 4) for x in result["interval"]],
        "reward": round(statistics.fmean(rewards), 4),
    }


def run(name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Makes the cold start, trains and evaluates; returns the row."""
    case, folder = CASES[name], options.out.absolute() / name
    cold, rl = folder / f"cold-{seed}", folder / f"rl-{seed}"
    if not (folder / "episodes.jsonl").exists():
        words = [options.python, "-P", str(SCRIPT), name, str(folder / "partial")]
        subprocess.run(words, check=True)
        for written in (folder / "partial").iterdir():
            shutil.move(written, folder / written.name)
    settings = config(case, folder, cold, options.python, seed)
    _whole(run_sft(trained_only(settings)))
    start = evaluate(settings, cold, folder / f"start-{seed}")
    print(json.dumps({"case": name, "start": start}), flush=True)
    began = time.monotonic()
    settings = replace(settings, run_dir=str(rl), init_from=str(cold))
    _whole(run_rl(trained_only(settings)))
    trained_s = time.monotonic() - began
    end = evaluate(settings, rl, folder / f"end-{seed}")
    steps = [row["metrics"] for row in finished(rl / "metrics.jsonl")]
    curves = {
        "rewards": "reward/mean",
        "turns": "episode/turns",
        "branches": "episode/branches",
        "unknown": "reward/unknown_frac",
    }
    versions = subprocess.check_output([options.python, "-c", VERSIONS], text=True).split()
    return {
        "case": name,
        "env": settings.data.sources[0].env,
        "seed": seed,
        "start": start,
        "end": end,
        **{key: [round(step[metric], 4) for step in steps] for key, metric in curves.items()},
        "episodes_per_step": case.prompts * case.group,
        "rl_minutes": round(trained_s / 60, 1),
        "versions": dict(zip(("verifiers", "textarena"), versions, strict=True)),
        "commit": commit(),
    }


def _whole(result: dict[str, Any]) -> None:
    """Ends the process after a run that a signal stopped; the same command goes on with it."""
    if result.get("stopped"):
        sys.exit("stopped")


def rise(row: dict[str, Any]) -> dict[str, float]:
    """Returns the mean rewards of the first and the last fifth of the steps, and the 95% interval
    of their difference.
    """
    fifth = max(2, len(row["rewards"]) // 5)
    first, last = row["rewards"][:fifth], row["rewards"][-fifth:]
    low, high = stats.ttest_ind(last, first, equal_var=False).confidence_interval(0.95)
    means = (statistics.fmean(first), statistics.fmean(last))
    values = dict(zip(("first", "last", "low", "high"), (*means, low, high), strict=True))
    return {name: round(float(value), 3) for name, value in values.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the table of docs/howto/environments.md."""
    lines = [
        "| environment | success at the start | after RL | reward, first to last fifth | steps |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        ends = [
            "{:.0%} ({:.0%} to {:.0%})".format(row[end]["success"], *row[end]["interval"])
            for end in ("start", "end")
        ]
        found = rise(row)
        reward = f"{found['first']:.2f} to {found['last']:.2f}"
        name = f"`{row['case']}`, seed {row['seed']}"
        lines.append(f"| {name} | {ends[0]} | {ends[1]} | {reward} | {len(row['rewards'])} |")
    return "\n".join(lines)


def picture(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draws the reward of each step."""
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(3.2 * len(names), 2.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for row in rows:
            if row["case"] == name:
                steps = range(1, len(row["rewards"]) + 1)
                axes.plot(steps, row["rewards"], label=f"seed {row['seed']}")
        axes.set(title=name, xlabel="step", ylabel="mean reward")
        axes.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def main(words: Sequence[str] | None = None) -> None:
    """Makes the runs that have no row, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", required=True, help="an interpreter that has verifiers")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, default=Path("runs/episode_curves"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    keep_programs()
    for seed in options.seeds:
        for name in options.cases:
            rows = finished(options.results)
            if (name, seed) not in {(row["case"], row["seed"]) for row in rows}:
                append(options.results, run(name, seed, options))
    rows = finished(options.results)
    for row in rows:
        print(json.dumps({"case": row["case"], "seed": row["seed"], **rise(row)}))
    print(table(rows))
    picture(rows, options.results.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
