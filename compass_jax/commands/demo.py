"""`compass demo`: the whole pipeline on this machine, offline: SFT, RL, plain GRPO from the same
cold start for comparison, Hugging Face export, and answers of the exported model. Measures accuracy
before and after, and the tokens to the accuracy that plain GRPO reaches.
"""

from __future__ import annotations

import dataclasses
import json
import math
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from compass_jax.aliases import JsonMapping, JsonObject
from compass_jax.commands.configured import SHIPPED, load_config
from compass_jax.config import (
    PolicyConfig,
    RunConfig,
    ScoredConfig,
    ZeroVarianceConfig,
)
from compass_jax.config.data import HELDOUT
from compass_jax.data.prompts import heldout_prompts
from compass_jax.experience.evaluate import Evaluation, answers, decoder_of
from compass_jax.experience.paired import compare, read_evaluation, read_summary
from compass_jax.records import Prompt
from compass_jax.report import read_metrics, run_report, summary_table
from compass_jax.report.metrics import Series
from compass_jax.report.targets import GAIN, Curve, cost_to_stay, means_over, target_of
from compass_jax.rollout.sampling import Sampler
from compass_jax.runs.rundir import EVALUATION_START, FolderLock, write_atomically
from compass_jax.session import open_scorer
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft
from compass_jax.weights.convert import export_hf

CONFIG = SHIPPED / "mostly_hard_cpu.py"
WINDOW_SHARE = 0.25  # share of the run's tokens over which accuracies are averaged
# margin of steps of the baseline, because its answers may become shorter
SPARE_STEPS = 1.15


TOKENS, HELDOUT_METRIC = "waste/tokens_generated", "eval/heldout/avg_at_k"
SIGNALS = {  # text -> metric: the share of a step's tokens
    "the verifier's signal": "waste/frac_verifier_signal",
    "shaping's signal": "waste/frac_shaping_signal",
    "entropy's signal (RL-ZVP)": "waste/frac_entropy_signal",
    "no signal": "waste/frac_none",
}


class Quick(NamedTuple):
    """Settings of a shorter demo, which runs every stage but learns little."""

    sft_steps: int = 150
    rl_steps: int = 4
    eval_every: int = 2
    heldout: int = 64  # number of prompts


def run_demo(out: str = "runs/demo", seed: int = 0, quick: bool = False) -> JsonObject:
    """Runs or resumes all stages in `out`; returns the content of `out`/summary.json."""
    with FolderLock(out) as lock:
        return _run(lock.path, seed, Quick() if quick else None)


def _run(folder: Path, seed: int, quick: Quick | None) -> JsonObject:
    started, console = time.perf_counter(), Console(soft_wrap=True)
    sft, rl = demo_configs(folder, seed, quick)
    before = _spent(folder)
    console.rule("1/5 cold start: supervised fine-tuning on short answers and some worked ones")
    trained = run_sft(sft)
    if trained["stopped"]:
        return trained
    console.rule("2/5 RL: GRPO with posterior selection and screening, router replay R3")
    trained = run_rl(rl)
    if trained["stopped"]:
        return trained
    last: Evaluation = trained["evaluation"]
    first = read_summary(Path(rl.directory) / EVALUATION_START)
    console.rule("3/5 plain GRPO from the same cold start, until it has generated as many tokens")
    baseline = baseline_config(rl)
    # the same weights under the same settings: one evaluation is the start of both runs
    start = Path(baseline.directory) / EVALUATION_START
    shutil.copytree(Path(rl.directory) / EVALUATION_START, start, dirs_exist_ok=True)
    trained = run_rl(baseline, enough=_spent_as_much(rl.directory, baseline.directory))
    if trained["stopped"]:
        return trained
    console.rule("4/5 export to Hugging Face format")
    exported = export_hf(rl.directory, folder / "hf", replace=True)
    console.print(f"exported: {exported}", highlight=False)
    console.rule("5/5 three held-out prompts, answered by the exported folder")
    for prompt, text, reward in answer_from(rl.policy, rl.scored, str(exported), 3):
        console.print(
            f"[bold]{prompt.question}[/]  (reference {prompt.answer}, reward {reward:g})\n{text}\n",
            highlight=False,
        )
    console.rule("results")
    page = run_report([rl.directory, baseline.directory], console=Console(quiet=True))
    seconds = before + time.perf_counter() - started
    comparison = against_grpo(rl.directory, baseline.directory, first, last, trained["evaluation"])
    summary = summarise(first, last, seconds, exported, Path(rl.directory))
    summary |= {
        "seed": rl.seed,
        "rl_steps": rl.rl.steps,
        "peak_memory_bytes": peak_memory(),
        "against_grpo": comparison.rows,
        "difference": comparison.paired,
        "to_target": comparison.to_target,
        "page": str(page),
    }
    write_atomically(folder / "summary.json", json.dumps(summary, indent=2) + "\n")
    rows = difficulty_rows(first, last)
    console.print(summary_table(rows, title="accuracy on held-out prompts, by difficulty"))
    console.print(summary_table(comparison.rows, title=comparison.title))
    console.print(comparison.words, highlight=False)
    console.print(f"[bold]{target_in_words(comparison.to_target)}[/]", highlight=False)
    if quick:
        console.print("a quick demo: everything ran, and little was learnt")
    console.print(last_lines(folder, page, summary), highlight=False)
    return summary


def last_lines(folder: Path, page: Path, summary: JsonObject) -> str:
    """Returns the closing text: the places of the results, and the next commands."""
    runs = folder / "rl"
    return (
        f"wall time: {summary['wall_s'] / 60:.1f} min,"
        f" peak memory {summary['peak_memory_bytes'] / 2**30:.1f} GiB\n"
        f"summary: {folder / 'summary.json'}\n"
        f"report page of both runs: {page} (open it in a browser)\n"
        "next:\n"
        f"  compass show {runs} --varied   # the best and the worst answers of some groups\n"
        f"  compass compare {folder / 'grpo'} {runs}   # prompt by prompt\n"
        f"  compass serve {folder / 'hf'}   # an HTTP API: docs/serving.md\n"
        f"your own data and reward, from {folder / 'sft'}: docs/quickstart.md"
    )


class Comparison(NamedTuple):
    """The comparison at the end: the rows of a table, its title, the paired difference of the
    accuracies (`averages` of experience/paired.py), a sentence about it, and the tokens of both
    runs to 90% of the baseline's gain (`costs_to_target`).
    """

    rows: list[dict[str, str]]
    title: str
    paired: JsonObject
    words: str
    to_target: JsonObject


def against_grpo(
    run_dir: str, baseline_dir: str, first: Evaluation, last: Evaluation, plain: Evaluation
) -> Comparison:
    """Compares the RL run with the baseline, by their directories.

    first: the evaluation of their common start. last, plain: the evaluations after the RL run and
    after the baseline.
    """
    series = {
        name: read_metrics(Path(directory) / "metrics.jsonl", "rl")
        for name, directory in (("this run", run_dir), ("plain GRPO", baseline_dir))
    }
    accuracy = [(first.avg_at_k, after.avg_at_k) for after in (last, plain)]
    rows = comparison_rows(series, accuracy, last.k)
    run, other = (float(np.sum(x[TOKENS][1])) for x in series.values())
    excess = other / run - 1
    title = "the same data and cold start, at equal generated tokens"
    if abs(excess) > 0.05:
        more = "more" if excess > 0 else "fewer"
        title = f"the same data and cold start; GRPO generated {abs(excess):.0%} {more} tokens"
    pair = read_evaluation(baseline_dir), read_evaluation(run_dir)
    paired = compare(*pair)["sets"][HELDOUT]["avg_at_k"]
    curves = [curve(x, *ends) for x, ends in zip(series.values(), accuracy, strict=True)]
    costs = costs_to_target(*curves)
    return Comparison(rows, title, paired, difference_in_words(paired), costs)


def curve(series: Series, start: float, end: float) -> list[list[float]]:
    """Returns points (generated tokens, held-out accuracy) of a run, with its start and its end.

    Evaluations without a known accuracy are left out.
    """
    steps, tokens = series[TOKENS]
    total = np.cumsum(tokens)
    evaluated, accuracy = series.get(HELDOUT_METRIC, (np.zeros(0), np.zeros(0)))
    spent = total[np.searchsorted(steps, evaluated)]
    points = [[0.0, start], *np.stack([spent, accuracy], 1).tolist(), [float(total[-1]), end]]
    return [point for point in points if math.isfinite(point[1])]


def costs_to_target(run: Curve, baseline: Curve) -> JsonObject:
    """Returns the generated tokens of both runs from which their accuracy stays at the target, and
    their ratio.

    An accuracy is the mean over WINDOW_SHARE of the run's tokens around a point, the same width for
    both. The target is the start plus the share GAIN of the baseline's gain. If the baseline
    gained nothing, the result has only the target, which is None. `reached`: whether the run stays
    at the target at its end; if not, its tokens are all that it generated, a lower bound.
    """
    width = WINDOW_SHARE * run[-1][0]
    means, baseline_means = (means_over(points, width) for points in (run, baseline))
    target = target_of(baseline_means)
    if target is None:
        return {"target": None}
    cost, baseline_cost = (cost_to_stay(x, target) for x in (means, baseline_means))
    return {
        "target": target,
        "tokens": cost.cost,
        "baseline_tokens": baseline_cost.cost,
        "reached": cost.reached,
        "ratio": cost.cost / baseline_cost.cost if baseline_cost.cost else None,
    }


def target_in_words(costs: JsonMapping) -> str:
    """Returns a sentence on the result of `costs_to_target`."""
    if costs["target"] is None or costs["ratio"] is None:
        return "plain GRPO gained nothing, so no tokens to its accuracy can be compared"
    target = f"accuracy {costs['target']:.3f}, {GAIN:.0%} of plain GRPO's gain"
    tokens, baseline = (f"{costs[name]:,.0f}" for name in ("tokens", "baseline_tokens"))
    if not costs["reached"]:
        return f"{target}: not reached with {tokens} tokens; plain GRPO needed {baseline}"
    return (
        f"{target}: reached after {tokens} generated tokens; plain GRPO needed {baseline}"
        f" (ratio {costs['ratio']:.2f}, one seed)"
    )


def comparison_rows(
    runs: Mapping[str, Series], accuracy: Sequence[tuple[float, float]], k: int
) -> list[dict[str, str]]:
    """Returns the rows of a table (report.summary_table) that compares runs by their generated
    tokens, these by their training signal, and their accuracies. A signal that is 0% in each run
    has no row.

    accuracy: avg@k before and after, for each run.
    """

    def row(label: str, cell: Callable[[Series], str]) -> dict[str, str]:
        return {"": label, **{name: cell(series) for name, series in runs.items()}}

    def share(metric: str) -> Callable[[Series], str]:
        return lambda x: f"{np.average(x[metric][1], weights=x[TOKENS][1]):.0%}"

    last = {"": f"accuracy, avg@{k}"}
    for name, (before, after) in zip(runs, accuracy, strict=True):
        last[name] = f"{before:.3f} -> {after:.3f}"
    signals = (row(f"tokens with {text}", share(metric)) for text, metric in SIGNALS.items())
    return [
        row("generated tokens", lambda x: f"{np.sum(x[TOKENS][1]):,.0f}"),
        row("steps", lambda x: f"{len(x[TOKENS][1])}"),
        row("groups without variance", lambda x: f"{1 - np.mean(x['groups/varied_frac'][1]):.0%}"),
        *(cells for cells in signals if any(cells[name] != "0%" for name in runs)),
        last,
    ]


def difference_in_words(paired: JsonMapping) -> str:
    """Returns a sentence on the paired difference of two accuracies in percentage points, with its
    interval.

    paired: `averages` of experience/paired.py, from the baseline to this run.
    """
    if None in (paired["difference"], *paired["interval"]):
        return "the difference of the accuracies is not known"
    points, low, high = (100 * x for x in (paired["difference"], *paired["interval"]))
    side = "above" if points > 0 else "below"
    sentence = (
        f"accuracy: {abs(points):.1f} points {side} plain GRPO's (95% interval of the difference:"
        f" {low:+.1f} to {high:+.1f}, {paired['prompts']} prompts, one seed)"
    )
    return sentence + (": these prompts show no difference" if low <= 0 <= high else "")


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


def peak_memory() -> int:
    """Returns the peak resident memory in bytes of this process or of its largest worker."""
    unit = 1 if sys.platform == "darwin" else 1024
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return unit * max(resource.getrusage(x).ru_maxrss for x in who)


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


def answer_from(
    policy: PolicyConfig, scored: ScoredConfig, weights: str, count: int
) -> list[tuple[Prompt, str, float]]:
    """Returns greedy answers to `count` held-out prompts over all difficulties, with rewards."""
    data, seed = scored.data, scored.seed
    engine, decode, tokenizer = decoder_of(policy, data, seed, weights)
    prompts = heldout_prompts(data, tokenizer, seed)
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    with open_scorer(scored.rewards, data) as scorer:
        rollouts, scores = answers(
            engine,
            decode,
            chosen,
            tokenizer,
            scorer,
            samples=1,
            sampler=Sampler(0.0),
            seed=seed,
        )
    return [
        (p, tokenizer.decode_response(r[0].response), s[0].reward)
        for p, r, s in zip(chosen, rollouts, scores, strict=True)
    ]


def summarise(
    first: Evaluation, last: Evaluation, seconds: float, exported: Path, rl: Path
) -> JsonObject:
    """Returns the content of summary.json, with the main results first."""
    series = read_metrics(rl / "metrics.jsonl", "rl")
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
        "first_step": at_first_step,
        "by_difficulty": {
            row["task"]: {k: v for k, v in row.items() if k != "task"}
            for row in difficulty_rows(first, last)
        },
    }


def difficulty_rows(first: Evaluation, last: Evaluation) -> list[JsonObject]:
    """Returns a row for each label, and one for all prompts."""
    rows = []
    for label, (count, sampled, greedy) in first.labels.items():
        after = last.labels[label]
        rows.append(
            {
                "task": label,
                "prompts": count,
                f"SFT avg@{first.k}": sampled,
                f"RL avg@{last.k}": after[1],
                "SFT greedy": greedy,
                "RL greedy": after[2],
            }
        )
    total = {
        "task": "all",
        "prompts": first.prompts,
        f"SFT avg@{first.k}": first.avg_at_k,
        f"RL avg@{last.k}": last.avg_at_k,
    }
    return [*rows, {**total, "SFT greedy": first.greedy, "RL greedy": last.greedy}]


def _spent(folder: Path) -> float:
    """Returns the seconds that an interrupted demo took, from its first file to its last."""
    files = [p.stat().st_mtime for p in folder.rglob("metrics.jsonl")]
    starts = [p.stat().st_mtime for p in folder.rglob("config.json")]
    return max(0.0, max(files) - min(starts)) if files and starts else 0.0
