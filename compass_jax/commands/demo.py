"""`compass demo`: the whole pipeline on this machine, offline: SFT, RL by the default recipe, plain
GRPO from the same cold start for comparison, Hugging Face export and the report page. Ends with
three sentences: the accuracy before and after, what plain GRPO needed for the same accuracy, and
the share of the tokens that taught.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from compass_jax.base.aliases import JsonObject
from compass_jax.commands.configured import SHIPPED, load_config
from compass_jax.config import RunConfig, ZeroVarianceConfig
from compass_jax.config.predictor import default_predictor
from compass_jax.experience.paired import read_summary
from compass_jax.runs.report import read_metrics, run_report
from compass_jax.runs.report.metrics import Series, hours
from compass_jax.runs.report.targets import first_passage, means_over
from compass_jax.runs.rundir import EVALUATION_START, FolderLock, write_atomically
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights.convert import export_hf

CONFIG = SHIPPED / "mostly_hard_cpu.py"
WINDOW_SHARE = 0.25  # share of the run's tokens over which accuracies are averaged
SPARE_STEPS = 1.15  # margin of the baseline's steps, because its answers may become shorter
TOKENS, NO_SIGNAL = "waste/tokens_generated", "waste/frac_none"
HELDOUT_METRIC = "eval/heldout/avg_at_k"


class Quick(NamedTuple):
    """Settings of a shorter demo, which runs every stage but learns little."""

    sft_steps: int = 150
    rl_steps: int = 4
    eval_every: int = 2
    heldout: int = 64  # number of prompts


class Arm(NamedTuple):
    """A trained run: its metrics, and its held-out accuracy (avg@k) before and after."""

    series: Series
    before: float
    after: float

    def has(self, *names: str) -> bool:
        """Returns whether the metrics were logged and all their values are finite."""
        return all(x in self.series and np.isfinite(self.series[x][1]).all() for x in names)

    @property
    def tokens(self) -> float:
        """The number of generated tokens."""
        return float(np.sum(self.series[TOKENS][1]))

    def curve(self) -> list[list[float]]:
        """Returns points (generated tokens, known held-out accuracy), with the start and the
        end.
        """
        steps, tokens = self.series[TOKENS]
        total = np.cumsum(tokens)
        evaluated, accuracy = self.series.get(HELDOUT_METRIC, (np.zeros(0), np.zeros(0)))
        spent = total[np.searchsorted(steps, evaluated)]
        points = [[0.0, self.before], *np.stack([spent, accuracy], 1).tolist()]
        points.append([self.tokens, self.after])
        return [point for point in points if math.isfinite(point[1])]

    def spent(self, tokens: float) -> str:
        """Returns a number of tokens and the minutes that the run needed for them, in words."""
        steps, of_steps = self.series[TOKENS]
        ends = hours(self.series, [int(x) for x in steps])
        if not ends:
            return f"{tokens:,.0f} tokens (its minutes were not logged)"
        total = np.cumsum([0.0, *of_steps])
        return f"{tokens:,.0f} tokens and {60 * np.interp(tokens, total, [0, *ends]):.1f} minutes"


def run_demo(out: str = "runs/demo", seed: int = 0, quick: bool = False) -> JsonObject:
    """Runs or resumes all stages in `out`; returns the content of `out`/summary.json."""
    with FolderLock(out) as lock:
        return _run(lock.path, seed, Quick() if quick else None)


def _run(folder: Path, seed: int, quick: Quick | None) -> JsonObject:
    console = Console(soft_wrap=True, emoji=False, highlight=False)
    sft, rl = demo_configs(folder, seed, quick)
    console.rule("1/4 cold start: supervised fine-tuning on short answers and some worked ones")
    trained = run_sft(sft)
    if trained["stopped"]:
        return trained
    console.rule("2/4 RL: GRPO with posterior selection and screening, router replay R3")
    trained = run_rl(rl)
    if trained["stopped"]:
        return trained
    last = trained["evaluation"]
    first = read_summary(Path(rl.directory) / EVALUATION_START)
    console.rule("3/4 plain GRPO from the same cold start, until it has generated as many tokens")
    baseline = baseline_config(rl)
    # the same weights under the same settings: one evaluation is the start of both runs
    start = Path(baseline.directory) / EVALUATION_START
    shutil.copytree(Path(rl.directory) / EVALUATION_START, start, dirs_exist_ok=True)
    trained = run_rl(baseline, enough=_spent_as_much(rl.directory, baseline.directory))
    if trained["stopped"]:
        return trained
    console.rule("4/4 export to Hugging Face format")
    exported = export_hf(rl.directory, folder / "hf", replace=True)
    console.print(f"exported: {exported}")
    page = run_report([rl.directory, baseline.directory], console=Console(quiet=True))
    run, grpo = (
        Arm(read_metrics(Path(config.directory) / "metrics.jsonl", "rl"), first.avg_at_k, accuracy)
        for config, accuracy in ((rl, last.avg_at_k), (baseline, trained["evaluation"].avg_at_k))
    )
    sentences = results(run, grpo, first.prompts, first.k)
    summary = {
        "seed": rl.seed,
        "heldout_prompts": first.prompts,
        f"sft_avg_at_{first.k}": run.before,
        f"rl_avg_at_{first.k}": run.after,
        f"grpo_avg_at_{first.k}": grpo.after,
        "sentences": sentences,
        "hf_dir": str(exported),
        "page": str(page),
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    console.rule("results")
    console.print(*sentences, last_lines(folder, page), sep="\n")
    return summary


def results(run: Arm, grpo: Arm, prompts: int, k: int) -> list[str]:
    """Returns the three sentences at the end."""
    ends = (f"{x:.3f}" if math.isfinite(x) else "not known" for x in (run.before, run.after))
    first = (
        f"On {prompts} held-out prompts the model's accuracy (avg@{k}) was {next(ends)} before RL"
        f" and is {next(ends)} after it."
    )
    return [first, cost_sentence(run, grpo), taught_sentence(run, grpo)]


def cost_sentence(run: Arm, grpo: Arm) -> str:
    """Returns what both runs spent until they first had the accuracy of the first run's end.
    Accuracies are means over WINDOW_SHARE of that run's tokens around a point.
    """
    if not (math.isfinite(run.before + run.after) and run.has(TOKENS) and grpo.has(TOKENS)):
        missing = f"an accuracy is missing, or {TOKENS} in a metrics.jsonl"
        return f"What plain GRPO needed for the same accuracy is not known: {missing}."
    width = WINDOW_SHARE * run.tokens
    means, of_grpo = (means_over(arm.curve(), width) for arm in (run, grpo))
    target = means[-1][1] - 1e-9  # means of equal accuracies may differ by rounding
    best = max(accuracy for _, accuracy in of_grpo)
    result = f"reached {best:.3f} with {grpo.spent(grpo.tokens)}"
    if target <= run.before:
        return f"This run gained no accuracy to compare costs at, and plain GRPO {result}."
    cost, needed = first_passage(means, target), first_passage(of_grpo, target)
    assert cost is not None  # the target is the end of this curve
    goal = f"An accuracy of {target:.3f} (a mean over {WINDOW_SHARE:.0%} of the tokens)"
    if needed is None:
        return f"{goal} took this run {run.spent(cost)}; plain GRPO never had it and {result}."
    return f"{goal} took this run {run.spent(cost)}, and plain GRPO {grpo.spent(needed)}."


def taught_sentence(run: Arm, grpo: Arm) -> str:
    """Returns which share of the generated tokens had a training signal, in both runs."""
    arms = (run, grpo)
    if not all(arm.has(TOKENS, NO_SIGNAL) for arm in arms):
        missing = f"{TOKENS} or {NO_SIGNAL} is missing in a metrics.jsonl"
        return f"What share of the tokens taught is not known: {missing}."
    share, grpo_share = (
        1 - np.average(arm.series[NO_SIGNAL][1], weights=arm.series[TOKENS][1]) for arm in arms
    )
    return (
        f"Of this run's {run.tokens:,.0f} tokens {share:.0%} taught (they had a training signal),"
        f" of plain GRPO's {grpo.tokens:,.0f} tokens {grpo_share:.0%}."
    )


def last_lines(folder: Path, page: Path) -> str:
    """Returns the place of the report page, and the next commands."""
    return (
        f"report page of both runs: {page} (open it in a browser)\n"
        "next:\n"
        f"  compass show {folder / 'rl'} --varied   # best and worst answers of some groups\n"
        f"  compass compare {folder / 'grpo'} {folder / 'rl'}   # prompt by prompt\n"
        f"  compass serve {folder / 'hf'}   # an HTTP API: docs/serving.md"
    )


def baseline_config(rl: RunConfig) -> RunConfig:
    """Returns the baseline: the demo's RL run as GRPO was published (arXiv 2402.03300), without its
    KL penalty.

    It has no selection, screening or router replay. Model, data, prompts per step, samples per
    group and learning rate are those of `rl`, whose run must have finished: the baseline has steps
    for as many tokens, with a margin, and evaluations after about as many samples.
    """
    series = read_metrics(Path(rl.directory) / "metrics.jsonl", "rl")
    samples = float(np.sum(series[TOKENS][1] / series["response_length/mean"][1]))
    size = rl.rl.prompts_per_step * rl.rl.group_size
    sampled_share = samples / (size * len(series[TOKENS][1]))  # of a step's prompts x group
    return dataclasses.replace(
        rl,
        run_dir=str(Path(rl.directory).with_name("grpo")),
        rl=dataclasses.replace(
            rl.rl,
            steps=math.ceil(SPARE_STEPS * samples / size),
            eval_every=max(1, round(rl.rl.eval_every * sampled_share)),
            replay="off",
            step_policy=None,
            zero_variance=ZeroVarianceConfig(),
            predictor=default_predictor(),
        ),
        # the other run's start evaluation is used
        evaluation=dataclasses.replace(rl.evaluation, start=False),
    )


def _spent_as_much(run_dir: str, baseline_dir: str) -> Callable[[], bool]:
    """Returns a stop predicate: whether the baseline has generated as many tokens as the RL run."""

    def spent(directory: str) -> float:
        log = Path(directory) / "metrics.jsonl"
        series = read_metrics(log, "rl") if log.exists() else {}
        return float(np.sum(series[TOKENS][1])) if TOKENS in series else 0.0

    budget = spent(run_dir)
    return lambda: spent(baseline_dir) >= budget


def demo_configs(
    folder: Path, seed: int, quick: Quick | None = None
) -> tuple[RunConfig, RunConfig]:
    """Returns the SFT run, and the RL run that starts from it."""
    config = dataclasses.replace(load_config(str(CONFIG)), seed=seed)
    if quick is not None:
        config = dataclasses.replace(
            config,
            sft=dataclasses.replace(config.sft, steps=quick.sft_steps),
            rl=dataclasses.replace(config.rl, steps=quick.rl_steps, eval_every=quick.eval_every),
            data=dataclasses.replace(config.data, eval_prompts=quick.heldout),
        )
    first = dataclasses.replace(config, run_dir=str(folder / "sft"))
    return first, dataclasses.replace(config, run_dir=str(folder / "rl"), init_from=first.run_dir)
