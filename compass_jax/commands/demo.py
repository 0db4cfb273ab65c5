"""`compass demo`: the whole pipeline on this machine, offline: a cold start by SFT, RL by a recipe
for unlabelled prompts, plain GRPO from the same cold start, evaluation, export and the report page.
The sentences of its last screen are computed from the runs, whatever they show.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from compass_jax.base.aliases import JsonObject
from compass_jax.commands.configured import SHIPPED, load_config
from compass_jax.config import RunConfig, apply
from compass_jax.experience.evaluate import Evaluator
from compass_jax.experience.paired import read_summary
from compass_jax.runs.report import read_metrics, run_report
from compass_jax.runs.report.targets import Curve, first_passage, means_over
from compass_jax.runs.rundir import (
    EVALUATION_FOLDER,
    EVALUATION_START,
    SUMMARY,
    FolderLock,
    write_atomically,
)
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights.convert import export_hf

CONFIG = SHIPPED / "demo_cpu.py"
RUNS = ("sft", "rl", "grpo")
ANSWERS = 8  # samples of each held-out prompt, for the accuracies before and after
GAIN = 0.9  # share of plain GRPO's gain at which costs are compared
WINDOW_SHARE = 0.13  # share of plain GRPO's tokens over which accuracies are averaged
TOKENS = "waste/tokens_generated"


# a shorter demo, which runs every stage but learns little
QUICK = {
    "sft.steps": 150,
    "rl.optim.schedule_tokens": 5000,
    "rl.eval_every": 2,
    "data.eval_prompts": 64,
}


class Arm(NamedTuple):
    """What an RL run spent up to the end of each step, from 0 on, and what it gained."""

    tokens: np.ndarray
    minutes: np.ndarray  # evaluations and compilation included
    taught: float  # tokens with a training signal
    curve: Curve  # points (generated tokens, held-out accuracy)

    def spent(self, tokens: float) -> str:
        """Returns a number of tokens and the minutes that the run needed for them, in words."""
        minutes = np.interp(tokens, self.tokens, self.minutes)
        return f"{tokens:,.0f} tokens and {minutes:.1f} minutes"


def run_demo(out: str = "runs/demo", seed: int = 0, quick: bool = False) -> JsonObject:
    """Runs or resumes all stages in `out`; returns the content of `out`/summary.json."""
    with FolderLock(out) as lock:
        return _run(lock.path, seed, quick)


def _run(folder: Path, seed: int, quick: bool) -> JsonObject:
    console = Console(soft_wrap=True, emoji=False, highlight=False)
    sft, rl, grpo = demo_configs(folder, seed, quick)
    console.rule("1/4 cold start: supervised fine-tuning on short answers and some worked ones")
    trained = run_sft(sft)
    if trained["stopped"]:
        return trained
    budget = rl.rl.optim.schedule_tokens
    console.rule(f"2/4 RL on unlabelled prompts, with selection and screening: {budget:,} tokens")
    trained = run_rl(rl, enough=_has_spent(rl.directory, budget))
    if trained["stopped"]:
        return trained
    console.rule("3/4 plain GRPO from the same cold start, with as many tokens")
    # the same weights under the same settings: one evaluation is the start of both runs
    start = Path(rl.directory) / EVALUATION_START
    shutil.copytree(start, Path(grpo.directory) / EVALUATION_START, dirs_exist_ok=True)
    trained = run_rl(grpo, enough=_has_spent(grpo.directory, budget))
    if trained["stopped"]:
        return trained
    console.rule(f"4/4 {ANSWERS} answers to each held-out prompt, export to Hugging Face format")
    evaluator = Evaluator(rl.policy, apply(rl, {"evaluation.k": ANSWERS}).scored)
    for name in RUNS:
        if not (folder / "evaluations" / name / SUMMARY).is_file():
            evaluator(str(folder / name), str(folder / "evaluations" / name))
    exported = export_hf(rl.directory, folder / "hf", replace=True)
    page = run_report([rl.directory, grpo.directory], console=Console(quiet=True))
    summary = {"seed": seed, **results(folder), "hf_dir": str(exported), "page": str(page)}
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.rule("results")
    console.print(last_screen(folder, summary["sentences"], page))
    return summary


def results(folder: Path) -> JsonObject:
    """Returns the accuracies of a finished demo, the tokens at which its RL runs first passed GAIN
    of plain GRPO's gain, and the sentences of the last screen.
    """
    evaluations = [read_summary(folder / "evaluations" / name) for name in RUNS]
    before, after, after_grpo = (evaluation.avg_at_k for evaluation in evaluations)
    run, grpo = (read_arm(folder / name) for name in RUNS[1:])
    passages = first_passages(run, grpo)
    prompts, k = evaluations[0].prompts, evaluations[0].k
    accuracy = (
        f"On {prompts} held-out prompts the model's accuracy (avg@{k}) was {before:.3f} before RL"
        f" and is {after:.3f} after it; after plain GRPO it is {after_grpo:.3f}."
    )
    taught = (
        f"{run.taught:,.0f} of this run's {run.tokens[-1]:,.0f} tokens taught (they had a training"
        f" signal), and {grpo.taught:,.0f} of plain GRPO's {grpo.tokens[-1]:,.0f}."
    )
    return {
        "heldout_prompts": prompts,
        **{f"{name}_avg_at_{x.k}": x.avg_at_k for name, x in zip(RUNS, evaluations, strict=True)},
        "first_passage_tokens": dict(zip(RUNS[1:], passages, strict=True)),
        "sentences": [accuracy, _cost_sentence(run, grpo, *passages), taught],
    }


def _cost_sentence(run: Arm, grpo: Arm, passage: float | None, grpo_passage: float | None) -> str:
    if grpo_passage is None:
        return f"Plain GRPO gained no accuracy with {grpo.spent(grpo.tokens[-1])}."
    cost = f"For {GAIN:.0%} of its gain plain GRPO needed {grpo.spent(grpo_passage)}"
    if passage is None:
        return f"{cost}; this run did not get there with {run.spent(run.tokens[-1])}."
    return f"{cost}, and this run {run.spent(passage)}."


def first_passages(run: Arm, grpo: Arm) -> tuple[float | None, float | None]:
    """Returns the tokens at which each run first has GAIN of plain GRPO's gain: None for a run that
    never has, and for both if plain GRPO gained nothing.
    """
    width = WINDOW_SHARE * float(grpo.tokens[-1])
    means, grpo_means = (means_over(arm.curve, width) for arm in (run, grpo))
    start = grpo.curve[0][1]
    gain = grpo_means[-1][1] - start
    if gain <= 0:
        return None, None
    goal = start + GAIN * gain
    return first_passage(means, goal), first_passage(grpo_means, goal)


def read_arm(directory: Path) -> Arm:
    """Returns the costs and the accuracies of a finished RL run."""
    series = read_metrics(directory / "metrics.jsonl", "rl")
    steps, generated = series[TOKENS]
    tokens = np.cumsum([0.0, *generated])
    no_points = np.zeros(0, int), np.zeros(0)
    evaluated, accuracies = series.get("eval/heldout/avg_at_k", no_points)
    start, end = (
        read_summary(directory / x).avg_at_k for x in (EVALUATION_START, EVALUATION_FOLDER)
    )
    points = np.array(
        [
            [0.0, *tokens[1 + np.searchsorted(steps, evaluated)], tokens[-1]],
            [start, *accuracies, end],
        ]
    )
    return Arm(
        tokens,
        np.cumsum([0.0, *series["time/step_s"][1]]) / 60,
        float(generated @ (1 - series["waste/frac_none"][1])),
        points[:, np.isfinite(points[1])].T.tolist(),
    )


def last_screen(folder: Path, sentences: Sequence[str], page: Path) -> str:
    """Returns the sentences, the place of the report page, and the next commands."""
    evaluations = folder / "evaluations"
    lines = (
        f"report page of both runs: {page} (open it in a browser)",
        "next:",
        f"  compass show {folder / 'rl'} --varied   # best and worst answers of some groups",
        f"  compass compare {evaluations / 'grpo'} {evaluations / 'rl'}   # prompt by prompt",
        f"  compass serve {folder / 'hf'}   # an HTTP API: docs/serving.md",
    )
    return "\n".join([*sentences, *lines])


def _has_spent(directory: str, budget: int) -> Callable[[], bool]:
    """Returns a stop predicate: whether a run has generated `budget` tokens."""
    log = Path(directory) / "metrics.jsonl"

    def spent() -> bool:
        series = read_metrics(log, "rl") if log.exists() else {}
        return TOKENS in series and bool(np.sum(series[TOKENS][1]) >= budget)

    return spent


def demo_configs(
    folder: Path, seed: int, quick: bool = False
) -> tuple[RunConfig, RunConfig, RunConfig]:
    """Returns the cold start, the RL run that starts from it, and the baseline: GRPO as it was
    published (arXiv 2402.03300), without its KL penalty.

    The RL runs see no labels. The baseline has the run's data, step size and average of the
    weights, but no selection, screening, router replay or decay. Its steps generate about twice as
    many tokens.
    """
    place = {"seed": seed, "run_dir": str(folder / "sft")}
    sft = apply(load_config(str(CONFIG)), {**place, **(QUICK if quick else {})})
    no_labels = {f"data.sources.{i}.label": "unlabelled" for i in range(len(sft.data.sources))}
    place = {"run_dir": str(folder / "rl"), "init_from": sft.run_dir}
    run = apply(sft, {**place, **no_labels})
    plain = {
        "steps": run.rl.steps // 2,
        "eval_every": max(1, run.rl.eval_every // 2),
        "replay": "off",
        "step_policy": "none",
        "zero_variance.posterior": False,
        "optim": {"schedule": "constant", "schedule_tokens": 0},
    }
    # the other run's start evaluation is used
    place = {"run_dir": str(folder / "grpo"), "evaluation.start": False}
    return sft, run, apply(run, {**place, "rl": plain})
