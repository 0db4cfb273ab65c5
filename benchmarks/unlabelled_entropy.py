"""Experiment: whether holding the entropy up keeps the answers to prompts at the frontier apart.

    python -m benchmarks.unlabelled_entropy [--seeds 310 311 312] [--only candidate ...]
        [--out runs/unlabelled] [--results benchmarks/results/unlabelled_entropy.jsonl] [--smoke]

The plan, written before its runs: the task `hard` of benchmarks/unlabelled_accuracy.py, its cold
starts, its candidate, whole runs. Arms: the candidate; with a temperature that holds the entropy at
0.7 or 1 times that of the first steps (rl.entropy.keep, with a gain of 0.1, at most 1.5); with a
bonus of 0.01 or 0.03 (rl.entropy_bonus). All on seed 310; the better one of each pair, by the goal
below, on 311 and 312.

The end has eight answers of each held-out prompt at temperature 1. Frontier: the prompts of those
kinds of sums of which the start answers 10 to 90% rightly (pooled over the kind). Equal: the share
of triples among a prompt's eight answers whose texts are the same, mean over the frontier.

The goal, paired by seed: equal falls by a third, at an end not lower by more than two standard
errors of the mean difference; an arm that misses it is dropped, and its numbers stay. A row is
appended when a run ends; runs with a row are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import experiments, rl_runs
from benchmarks.tokens_to_accuracy import Change, compose, with_fields
from benchmarks.unlabelled_accuracy import RECIPE, Experiment, Run, candidate, joined
from benchmarks.unlabelled_accuracy import RESULTS as ACCURACY
from benchmarks.unlabelled_report import Row
from compass_jax.config import RunConfig
from compass_jax.config.entropy import EntropyConfig
from compass_jax.data.questions import questions
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import ANSWERS

RESULTS = Path(__file__).resolve().parent / "results" / "unlabelled_entropy.jsonl"
SEEDS = (310, 311, 312)
ARMS: dict[str, Change] = {
    "candidate": lambda rl: rl,
    "temperature, 0.7": with_fields(entropy=EntropyConfig(keep=0.7)),
    "temperature, 1": with_fields(entropy=EntropyConfig(keep=1.0)),
    "bonus 0.01": with_fields(entropy_bonus=0.01),
    "bonus 0.03": with_fields(entropy_bonus=0.03),
}
LOW, HIGH = 0.1, 0.9  # rate of a kind at the start that makes it the frontier
TRIPLE = 3


class Ends(Experiment):
    """Runs whose ends are looked at answer by answer."""

    def _train(self, run: Run, config: RunConfig) -> Row:
        row = super()._train(run, config)
        folder = Path(config.directory)
        wide = dataclasses.replace(config.evaluation, k=self.scale.end)
        checkpoint = max((folder / "checkpoints").glob("step_*"))
        out = folder / "end"
        end = evaluate_weights(
            dataclasses.replace(config, evaluation=wide), str(checkpoint), str(out)
        )
        kinds = _kinds(self.cold_config(run))
        start = _rows(folder / "evaluation_start" / ANSWERS)
        frontier = frontier_of(start, kinds)
        last = [x for x in _rows(out / ANSWERS) if kinds[x["prompt"]] in frontier]
        entropy = [x.get("entropy_nats", math.nan) for x in _metrics(folder)]
        tenth = max(1, len(entropy) // 10)
        return row | {
            "end": round(end.avg_at_k, 5),
            "frontier": sorted(frontier),
            "frontier_prompts": len(last),
            "equal": _mean([equal_triples(texts(x)) for x in last]),
            "entropy": [_mean(entropy[:tenth]), _mean(entropy[-tenth:])],
        }


def _mean(values: Sequence[float]) -> float | None:
    """Returns the mean of the finite values; None where there are none, as in a smoke run."""
    finite = [x for x in values if math.isfinite(x)]
    return round(float(np.mean(finite)), 5) if finite else None


def texts(row: dict[str, Any]) -> list[str]:
    """Returns the sampled answers of a row of answers.jsonl, without the greedy one."""
    return [sample["response"] for sample in row["samples"][:-1]]


def equal_triples(answers: Sequence[str]) -> float:
    """Returns the share of triples of answers that are the same text."""
    counts = Counter(answers).values()
    return sum(math.comb(n, TRIPLE) for n in counts) / max(math.comb(len(answers), TRIPLE), 1)


def frontier_of(start: Sequence[dict[str, Any]], kinds: dict[str, str]) -> set[str]:
    """Returns the kinds of prompts of which the start answers LOW to HIGH rightly."""
    rewards = defaultdict(list)
    for row in start:
        rewards[kinds[row["prompt"]]] += [sample["reward"] for sample in row["samples"][:-1]]
    return {kind for kind, one in rewards.items() if LOW <= float(np.mean(one)) <= HIGH}


def _kinds(labelled: RunConfig) -> dict[str, str]:
    """Returns the label of each question."""
    return {x.text: x.label for x in questions(labelled.data, labelled.seed, lambda _: None)}


def _rows(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _metrics(folder: Path) -> list[dict[str, float]]:
    return [row["metrics"] for row in _rows(folder / "metrics.jsonl")]


def report(rows: Sequence[Row]) -> str:
    """Returns the table: means, and differences to the candidate by seed."""
    of = {(row["arm"], row["seed"]): row for row in rows if row["phase"] == "entropy"}
    lines = ["| arm | seeds | equal | ratio | end | difference of the end (se) |", "|" + "---|" * 6]
    for arm in ARMS:
        seeds = [seed for name, seed in of if name == arm and ("candidate", seed) in of]
        seeds = [seed for seed in seeds if of["candidate", seed]["equal"]]
        if not seeds:
            continue
        runs, base = ([of[x, seed] for seed in seeds] for x in (arm, "candidate"))
        equal, before = (float(np.mean([x["equal"] for x in one])) for one in (runs, base))
        gaps = [x["end"] - y["end"] for x, y in zip(runs, base)]
        se = float(np.std(gaps, ddof=1) / math.sqrt(len(gaps))) if len(gaps) > 1 else math.nan
        end = float(np.mean([x["end"] for x in runs]))
        lines.append(
            f"| {arm} | {len(seeds)} | {equal:.3f} | {equal / before:.2f} | {end:.3f}"
            f" | {float(np.mean(gaps)):+.3f} ({se:.3f}) |"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Makes the runs that have no row yet, and prints the table."""
    if argv is None:
        tune_allocator()
        keep_programs()
    parser = rl_runs.parser(__doc__ or "", "unlabelled")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--only", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    # the candidate's setting is that of the rows of unlabelled_accuracy
    cell, pieces = candidate(Experiment(Path(args.out), ACCURACY, args.smoke))
    best = joined(RECIPE, *pieces.values())
    experiment = Ends(Path(args.out), args.results, args.smoke)
    experiment.all(
        [
            Run("entropy", "hard", seed, arm, cell, compose(best, ARMS[arm]))
            for seed in args.seeds
            for arm in args.only
        ]
    )
    print(report(experiments.finished(args.results)))


if __name__ == "__main__":
    main()
