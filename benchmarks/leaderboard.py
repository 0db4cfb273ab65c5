"""The table that recipes of training can beat: tokens and minutes to 90% of tuned GRPO's gain.

    python -m benchmarks.leaderboard --recipe my_recipe.py [--name NAME]     runs it, and adds a row
    python -m benchmarks.leaderboard                                         prints the table

A recipe is a file with a function of the settings of tuned GRPO, which returns its own:

    def recipe(rl):
        return dataclasses.replace(rl, step_policy=Screening(n0=2))

The task, the seeds and the measures are those of the phase `hard` of
benchmarks/unlabelled_accuracy.py: prompts of configs/mostly_hard_cpu.py in one file without labels,
of which 58% are too hard; 160 thousand generated tokens from the same cold starts, seeds 310 to
312. Model, data, budget and evaluations are no part of a recipe. GRPO runs on the same machine, so
that minutes can be compared; each run takes 3 to 6 minutes on a core, and each cold start 10 to 15.
A run that ends has a line in OUT/runs.jsonl, and the same command continues. A row of the table has
the hash of the recipe's file and the commit.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import math
from collections.abc import Sequence
from pathlib import Path

from benchmarks import experiments
from benchmarks.unlabelled_accuracy import GROUP, TRIALS, Cell, Change, Experiment, Run
from benchmarks.unlabelled_report import BASELINE, Row, by_seed, end_difference, ratio
from compass_jax.config import ConfigError, RLConfig
from compass_jax.config.named import load
from compass_jax.devices.allocator import tune_allocator
from compass_jax.runs.compiled import keep_programs

RESULTS = Path(__file__).resolve().parent / "results" / "leaderboard.jsonl"
TASK, SEEDS = "hard", (310, 311, 312)
GRPO = Cell(16, 1.5e-4, "constant")  # tuned: benchmarks/results/unlabelled_accuracy.jsonl
COST = 2_304  # expected tokens of a step of GRPO, for the steps between two evaluations


def within_rules(recipe: Change) -> Change:
    """Returns a recipe whose budget and evaluations are those of the table."""

    def change(rl: RLConfig) -> RLConfig:
        changed = recipe(rl)
        if not isinstance(changed, RLConfig):
            raise ConfigError(
                f"recipe(rl) returned a {type(changed).__name__}: return the changed RLConfig"
            )
        if changed.stages:
            raise ConfigError("recipe(rl) has rl.stages, whose steps are not known: leave them out")
        step = COST * changed.prompts_per_step * changed.group_size // (GRPO.prompts * GROUP)
        every = max(1, round(rl.eval_every * COST / step))
        steps = math.ceil(rl.steps * COST / step)
        kept = {"save_every": rl.save_every, "guard": rl.guard, "eval_every": every}
        return dataclasses.replace(changed, steps=steps, **kept)

    return change


def row_of(rows: Sequence[Row], arm: str, name: str, file_hash: str) -> Row:
    """Returns the table's row of an arm, whose runs are among `rows`. Raises ConfigError where a
    seed has no run.
    """
    runs = by_seed(rows, TASK, arm)
    if missing := [seed for seed in SEEDS if seed not in runs]:
        raise ConfigError(f"{arm} has no run of seed {missing[0]}")
    some = [row for row in rows if row["seed"] in SEEDS]
    tokens, minutes = (ratio(some, TASK, arm, cost) for cost in (0, 1))
    end = end_difference(some, TASK, arm)
    if tokens is None or minutes is None or end is None:
        raise ConfigError("GRPO gained nothing on any seed: there is no goal to compare with")
    return {
        "recipe": name,
        "file": file_hash,
        "commit": runs[SEEDS[0]]["commit"],
        "tokens": [*tokens],
        "minutes": [*minutes],
        "end": [*end],
    }


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table, the fewest tokens first."""
    lines = [
        "| recipe | tokens | minutes | end, minus GRPO's | commit |",
        "|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["tokens"][0]):
        cells = [row["recipe"], *(_cell(*row[name]) for name in ("tokens", "minutes"))]
        cells += ["{:+.3f} ± {:.3f}".format(*row["end"]), row["commit"][:8]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(mean: float, low: float, high: float, missed: int) -> str:
    text = f"{mean:.2f} ({low:.2f} to {high:.2f})"
    return f"> {text}" if missed else text


def main(argv: list[str] | None = None) -> None:
    """Runs a recipe and adds its row, and prints the table."""
    if argv is None:
        tune_allocator()
        keep_programs()
    first, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=first, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", type=Path, help="file with a function recipe(rl)")
    parser.add_argument("--name", default="", help="in the table; without it the file's")
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--smoke", action="store_true", help="runs of a few steps")
    args = parser.parse_args(argv)
    if args.recipe is not None:
        name = args.name or args.recipe.stem
        change = within_rules(load(f"{args.recipe}:recipe", "--recipe"))
        file_hash = hashlib.sha256(args.recipe.read_bytes()).hexdigest()[:12]
        experiment = Experiment(args.out, args.out / "runs.jsonl", args.smoke)
        arms = {BASELINE: TRIALS[BASELINE], f"{name} {file_hash}": change}
        runs = [Run(TASK, TASK, s, arm, GRPO, of) for s in SEEDS for arm, of in arms.items()]
        rows = experiment.all(runs)
        if args.smoke:  # too short to gain anything
            print(f"{len(rows)} runs of a few steps ended")
            return
        experiments.append(args.results, row_of(rows, f"{name} {file_hash}", name, file_hash))
    print(markdown(experiments.finished(args.results)))


if __name__ == "__main__":
    main()
