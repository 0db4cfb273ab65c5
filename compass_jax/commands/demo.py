"""The main job on this machine, offline: SFT -> evaluation -> RL -> evaluation -> Hugging Face
export -> answers from the export.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from compass_jax.commands.comparison import comparison_rows, read_recorded, spending
from compass_jax.commands.configured import SHIPPED, load_config
from compass_jax.config import RunConfig
from compass_jax.data.prompts import heldout_prompts
from compass_jax.experience.evaluate import Evaluation, answers, decoder_of, evaluate_weights
from compass_jax.records import Prompt
from compass_jax.report import plot_curves, read_metrics, summary_table
from compass_jax.rollout.sampling import Sampler
from compass_jax.runs.rundir import FolderLock, write_atomically
from compass_jax.session import open_scorer
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights.convert import export_hf

CONFIG = SHIPPED / "tiny_reasoning_cpu.py"
GRPO = SHIPPED / "tiny_reasoning_grpo.json"  # benchmarks/demo_grpo.py writes it


class Quick(NamedTuple):
    """A shorter demo: everything runs, little is learnt."""

    sft_steps: int = 150
    rl_steps: int = 4
    heldout: int = 64  # prompts


def run_demo(out: str = "runs/demo", seed: int = 0, quick: bool = False) -> dict[str, Any]:
    """Runs everything into `out` and returns what it writes to `out`/summary.json. An interrupted
    demo continues where it was.
    """
    with FolderLock(out) as lock:
        return _run(lock.path, seed, Quick() if quick else None)


def _run(folder: Path, seed: int, quick: Quick | None) -> dict[str, Any]:
    started, console = time.perf_counter(), Console(soft_wrap=True)
    sft, rl = demo_configs(folder, seed, quick)
    before = _spent(folder)
    console.rule(
        "1/4 cold start: supervised fine-tuning on short answers and a few worked solutions"
    )
    tuned = run_sft(sft)
    if tuned["stopped"]:
        return tuned
    first = evaluate_weights(rl, sft.directory)
    console.print(
        f"held-out: avg@{first.k} {first.avg_at_k:.3f}, greedy {first.greedy:.3f} on"
        f" {first.prompts} prompts"
    )
    console.rule(
        "2/4 reinforcement learning: ESPO, router replay R3; curriculum, growth, shaping and RL-ZVP"
        " against groups without variance"
    )
    trained = run_rl(rl)
    if trained["stopped"]:
        return trained
    last: Evaluation = trained["evaluation"]
    console.rule("3/4 export to Hugging Face format")
    exported = export_hf(rl.directory, folder / "hf", replace=True)
    console.print(f"exported: {exported}", highlight=False)
    console.rule("4/4 three held-out prompts, answered by the exported folder")
    shown = answer_from(rl, str(exported), 3)
    for prompt, text, reward in shown:
        console.print(
            f"[bold]{prompt.question}[/]  (reference {prompt.answer}, reward {reward:g})\n{text}\n",
            highlight=False,
        )
    picture = folder / "curves.png"
    plot_curves(Path(rl.directory) / "metrics.jsonl", picture, "rl", "compass demo: RL")
    seconds = before + time.perf_counter() - started
    found = against_grpo(rl, first, last)
    summary = summarise(first, last, seconds, exported, rl)
    summary |= {"peak_memory_bytes": peak_memory(), "against_grpo": found.rows}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.print(
        summary_table(
            difficulty_rows(first, last), title="accuracy on held-out prompts, by difficulty"
        )
    )
    console.print(summary_table(found.rows, title=found.title))
    console.print(found.note, highlight=False)
    if quick:
        console.print("a quick demo: everything ran, and little was learnt")
    console.print(
        f"curves: {picture}\nsummary: {folder / 'summary.json'}\nwall time: {seconds / 60:.1f} min,"
        f" peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB",
        highlight=False,
    )
    return summary


class Against(NamedTuple):
    """The comparison at the end: rows of a table, its title, and where the other run is from."""

    rows: list[dict[str, str]]
    title: str
    note: str


def against_grpo(rl: RunConfig, first: Evaluation, last: Evaluation) -> Against:
    """This RL run beside the recorded one of plain GRPO after as many generated tokens; `first` and
    `last` are the evaluations before and after.
    """
    recorded = read_recorded(GRPO, rl.seed)
    ours = spending(read_metrics(Path(rl.directory) / "metrics.jsonl", "rl"))
    theirs = spending(recorded.series, ours.tokens)
    accuracy = (
        (first.avg_at_k, last.avg_at_k),
        (recorded.accuracy_at(0), recorded.accuracy_at(theirs.tokens)),
    )
    rows = comparison_rows(("this run", "plain GRPO"), (ours, theirs), accuracy, last.k)
    title = "the same data, at equal generated tokens"
    if theirs.tokens < ours.tokens:
        title = "the same data; the recorded run of GRPO ended earlier"
    note = f"plain GRPO was recorded before, with seed {recorded.seed}:\n  {recorded.source}"
    return Against(rows, title, note)


def peak_memory() -> int:
    """Bytes: the most memory that this process has held, or the largest of its workers."""
    unit = 1 if sys.platform == "darwin" else 1024
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return unit * max(resource.getrusage(x).ru_maxrss for x in who)


def demo_configs(
    folder: Path, seed: int, quick: Quick | None = None
) -> tuple[RunConfig, RunConfig]:
    """The SFT run and the RL run that starts from it."""
    config = dataclasses.replace(load_config(str(CONFIG)), seed=seed)
    if quick is not None:
        config = dataclasses.replace(
            config,
            sft=dataclasses.replace(config.sft, steps=quick.sft_steps),
            rl=dataclasses.replace(config.rl, steps=quick.rl_steps),
            data=dataclasses.replace(config.data, eval_prompts=quick.heldout),
        )
    first = dataclasses.replace(config, run_dir=str(folder / "sft"))
    return first, dataclasses.replace(config, run_dir=str(folder / "rl"), init_from=first.run_dir)


def answer_from(config: RunConfig, weights: str, count: int) -> list[tuple[Prompt, str, float]]:
    """Greedy answers to `count` held-out prompts, spread over the difficulties, with their
    rewards.
    """
    engine, decode, tokenizer = decoder_of(config, weights)
    prompts = heldout_prompts(config.data, tokenizer, config.seed)
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    with open_scorer(config) as scorer:
        rollouts, scores = answers(
            engine,
            decode,
            chosen,
            tokenizer,
            scorer,
            samples=1,
            sampler=Sampler(0.0),
            seed=config.seed,
        )
    return [
        (p, tokenizer.decode(r[0].response), s[0].reward)
        for p, r, s in zip(chosen, rollouts, scores, strict=True)
    ]


def summarise(
    first: Evaluation, last: Evaluation, seconds: float, exported: Path, rl: RunConfig
) -> dict[str, Any]:
    """What summary.json holds: the first keys are the ones to quote."""
    series = read_metrics(Path(rl.directory) / "metrics.jsonl", "rl")
    at_first_step = {
        name.split("/")[-1]: float(series[name][1][0])
        for name in ("zero_variance/rate_all_right", "zero_variance/rate_all_wrong")
    }
    return {
        f"sft_avg_at_{first.k}": first.avg_at_k,
        f"rl_avg_at_{last.k}": last.avg_at_k,
        "sft_greedy": first.greedy,
        "rl_greedy": last.greedy,
        f"sft_pass_at_{first.k}": first.pass_at_k,
        f"rl_pass_at_{last.k}": last.pass_at_k,
        "heldout_prompts": last.prompts,
        "wall_s": seconds,
        "hf_dir": str(exported),
        "seed": rl.seed,
        "rl_steps": rl.rl.steps,
        "first_step": at_first_step,
        "by_difficulty": {
            row["task"]: {k: v for k, v in row.items() if k != "task"}
            for row in difficulty_rows(first, last)
        },
    }


def difficulty_rows(first: Evaluation, last: Evaluation) -> list[dict[str, Any]]:
    """One row per label, and one for all prompts."""
    rows = []
    for label, (count, sampled, greedy) in first.labels.items():
        after = last.labels[label]
        rows.append(
            {
                "task": label,
                "prompts": count,
                "SFT avg@4": sampled,
                "RL avg@4": after[1],
                "SFT greedy": greedy,
                "RL greedy": after[2],
            }
        )
    total = {
        "task": "all",
        "prompts": first.prompts,
        "SFT avg@4": first.avg_at_k,
        "RL avg@4": last.avg_at_k,
    }
    return [*rows, {**total, "SFT greedy": first.greedy, "RL greedy": last.greedy}]


def _spent(folder: Path) -> float:
    """Seconds that an earlier, interrupted demo in this folder took: from its first file until its
    last.
    """
    files = [p.stat().st_mtime for p in folder.rglob("metrics.jsonl")]
    starts = [p.stat().st_mtime for p in folder.rglob("config.json")]
    return max(0.0, max(files) - min(starts)) if files and starts else 0.0
