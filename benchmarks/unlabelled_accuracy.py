"""Experiment: tokens, and minutes, to tuned GRPO's accuracy where no prompt has a label.

    python -m benchmarks.unlabelled_accuracy PHASE [--seeds 310 311 ...] [--only grpo recipe ...]
        [--out runs/unlabelled] [--results benchmarks/results/unlabelled_accuracy.jsonl] [--smoke]
    PHASE: cold (makes the cold starts of --seeds), tuning, pieces, hard, easy, short, table

The plan, written before its runs:

Tasks. `hard`: the prompts of configs/mostly_hard_cpu.py, of which 58% are too hard, as one file:
every prompt has the same label. `easy`: those of them that are not too hard, from the same cold
starts. `short`: all of them, from cold starts without worked solutions of the too hard sums, which
they then answer with a bare number: uniform groups cost little.

Run. 160 thousand generated tokens; those of evaluations do not count. Every arm evaluates the
averaged weights (rl.optim.average 0.95), but for the arm `no average`: at the start, and about
every 16 thousand tokens on 240 held-out prompts, two answers each; in the phases of results the
end has eight answers each. Cosine decays over the 160 thousand tokens.

Score of a tuning run: the tokens to the first passage of start + 0.03, 0.06, 0.09, 0.12 and 0.15,
by the curve's means over 13% of a whole run's tokens; the mean of the five, the whole run's tokens
for one that is not passed. Several levels, because one is decided by noise.

Runs that only serve a score or a passage end early, as soon as later evaluations cannot change it.

tuning, seeds 300 to 302, which no result uses. GRPO and the recipe (posterior selection by the
    prompt's text, screening 2 of 4), each over rate 7.5e-5, 1.5e-4, 3e-4 x constant or cosine x 16
    or 32 prompts of four samples: all twelve on seed 300 (begun one step of the rate lower, at
    3.75e-5, where GRPO was worse than at 7.5e-5, and at 7.5e-5 worse than at 1.5e-4; those rows
    stay), and on while the best rate is the highest one two cells of twice that rate, constant and
    cosine; the best six on 301 and the best three of these, by mean score, on 302, as whole runs.
    The arm's setting is the best by the mean score of those three that do not end more than 0.01
    below the best of them on 301 and 302. Then GRPO's with b2 = 0.999 on 300 to 302: the better one
    is tuned GRPO. (Clip-higher has no effect here: with one update a step every ratio is 1.) DAPO
    (dynamic sampling in up to two rounds) over GRPO's four best cells on 300, and the best two of
    these on 301. These cells have the rates 3e-4 and 6e-4, at which GRPO itself fails on 301: DAPO
    is tuned less than GRPO, and its row is no comparison of tuned methods.
    (Changes. After 20 runs of seed 300 and before any other: the levels 0.12 and 0.15; the choice
    by ends, not by minutes; early ends; DAPO over four cells. Then the best four cells of 300 went
    on; on 301 GRPO's four learnt nothing, which is why there are six again, as at first.)
pieces, seeds 300 to 302, at the recipe's setting: advantages `shrunk` and `predicted`; up to two
    rounds for as many varied groups as prompts; the rate by varied groups; prediction by state; 2
    of 8; no screening. One whose mean score is above 1.1 times the recipe's on the same seeds is
    not run on further ones. Those whose mean score is lower than the recipe's are tried together,
    best first, as long as the score falls; what comes out is the candidate. (After the rows of seed
    300: compared on the same seeds, not with the recipe's mean over all. After all rows: pieces
    that were dropped here have no run among the results. No result was known.)
hard, seeds 310 to 319, which nothing has used. GRPO and the candidate, whole; up to the passage, as
    controls, the candidate with the sources' labels, GRPO without the too hard prompts (deleted by
    hand), random selection with screening; on 310 to 314 the candidate with permuted rewards, the
    oracle (selection by each candidate's rate, of eight fresh answers of the policy at each step,
    which do not count), DAPO, the paper's stages without its filter (which answers the whole pool:
    more than the budget), replay of groups, one label, and each piece alone that was run on all
    tuning seeds; whole, no average.
easy, short, seeds 310 to 314: GRPO and the candidate, whole.
    (Again, in unlabelled_again.jsonl: seeds 310 to 314 after selection took half its time, with
    cold starts made anew, since the first minutes were taken beside other work. Two runs at once
    and nothing beside those of `hard`; beside `easy`, for half of the time, and beside the oracle
    there was other work on one core. Controls pair with these runs.)

Measures, paired by seed. First passage: the tokens (minutes) at which the curve's means first reach
start + 0.9 x GRPO's gain (its last mean minus the start); a run that does not counts with its whole
cost, is marked, and makes the ratio a lower bound. Geometric mean and 95% interval (t, of logs).
End: difference of avg@8. Stability: greatest mean minus the last, beside that of simulated runs
whose true accuracy is the run's last mean all along. Minutes are those of selection, rollouts,
rewards and updates, on one core of two with the other one busy; a step counts with at most three
times the run's median, since the runs are so short that compilations would decide.

The goals: first passage at most 0.55 of GRPO's tokens, upper end below 0.8; minutes at most 0.9; an
end not lower by more than two standard errors; stability at most 0.01 above the simulated runs'.
Easy: at most 1.1 of the tokens, 1.2 of the minutes. A row goes to the results when a run ends;
runs with a row are skipped, a killed one begins anew. Several processes share the runs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import Timeout

from benchmarks import experiments, rl_runs
from benchmarks.tokens_to_accuracy import (
    ARMS as EARLIER,
)
from benchmarks.tokens_to_accuracy import (
    Change,
    base_config,
    cold_start,
    compose,
    lock,
    replay,
    screening,
    with_fields,
    zero_variance,
)
from benchmarks.unlabelled import Watched, keeping, training_prompts, without_labels
from benchmarks.unlabelled_report import (
    BASELINE,
    BUDGET,
    LEVELS,
    TASKS,
    Row,
    by_seed,
    goal_of,
    key_of,
    passed,
    plot,
    report,
    score,
    smoothed,
)
from compass_jax.base.records import Prompt
from compass_jax.commands.configs.mostly_hard_cpu import TOO_HARD
from compass_jax.config import OptimConfig, RunConfig
from compass_jax.data.posterior import PosteriorSelector
from compass_jax.data.predictors.inputs import Prediction
from compass_jax.data.predictors.label import Label
from compass_jax.data.predictors.state import State
from compass_jax.data.predictors.text import Text
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import answers, evaluate_weights
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.objectives.grpo import dapo_surrogate
from compass_jax.rollout.sampling import Sampler
from compass_jax.runs.compiled import keep_programs
from compass_jax.training.loop import RLTrainer
from compass_jax.training.rl import run_rl

RESULTS = Path(__file__).resolve().parent / "results" / "unlabelled_accuracy.jsonl"
SEEDS, FEW_SEEDS = tuple(range(310, 320)), tuple(range(310, 315))
GROUP, ANSWER_TOKENS = 4, 36  # samples of a prompt; expected tokens of one
AVERAGE = 0.95
WHOLE = (BASELINE, "candidate", "no average")
CLOCKS = ("rollout", "reward_wait", "score", "update", "handover")
MOST_MEDIANS = 3  # of a step's time
ORACLE_SAMPLES = 1000.0  # weight of a rate that the oracle knows
WAIT_S = 5.0


class Scale(NamedTuple):
    """The size of a run."""

    budget: int = BUDGET  # generated tokens
    every: int = 16_000  # tokens between two evaluations
    evaluated: int = 240  # prompts of an evaluation
    end: int = 8  # answers of each at the end
    fresh: int = 8  # answers of each candidate that the oracle has
    cells: int = 12
    tuning_seeds: tuple[int, ...] = (300, 301, 302)
    pieces: int = 7
    most_rate: float = 2.4e-3  # at which tuning goes no further


FULL, SMOKE = Scale(), Scale(400, 200, 4, 2, 2, 1, (300,), 2, 1e-4)


class Cell(NamedTuple):
    """The step size of a run."""

    prompts: int
    rate: float
    schedule: str

    @property
    def name(self) -> str:
        """The name in the results."""
        return f"{self.prompts} x {GROUP}, {self.rate:g}, {self.schedule}"


CELLS = tuple(
    Cell(prompts, rate, schedule)
    for prompts in (16, 32)
    for rate in (7.5e-5, 1.5e-4, 3e-4)
    for schedule in ("constant", "cosine")
)
KEPT = (6, 3)  # cells that go on to the second and to the third seed
DAPO_KEPT = (4, 2)  # cells that DAPO has on the first seed, and that go on to the second
LOWER = 0.01  # end below the best one's, at which a cell is not chosen
WORSE = 1.1  # mean score, in times the recipe's, at which a piece is not run on


def optim(**changes: Any) -> Change:
    """Returns a change of settings under rl.optim."""
    return lambda rl: dataclasses.replace(rl, optim=dataclasses.replace(rl.optim, **changes))


RECIPE = compose(
    compose(zero_variance(posterior=True), with_fields(predictor=Text())), screening(2, GROUP)
)
TRIALS: dict[str, Change] = {
    "grpo": lambda rl: rl,
    "dapo": compose(
        with_fields(objective=dapo_surrogate()),
        zero_variance(dynamic_sampling=True, dynamic_batch=2),
    ),
    "recipe": RECIPE,
}
B2 = "grpo, b2 0.999"
PIECES: dict[str, Change] = {
    "shrunk": with_fields(advantage=Shrunk()),
    "predicted": with_fields(advantage=Predicted()),
    "two rounds": screening(2, GROUP, rounds=2),
    "rate by groups": optim(rate_by_groups=True),
    "state": with_fields(predictor=State()),
    "2 of 8": screening(2, 8),
    "no screening": with_fields(step_policy=None),
}
# on top of the candidate, on all seeds and on few
CONTROLS: dict[str, Change] = {
    "labels": with_fields(predictor=Label()),  # and the sources' labels
}
FEW: dict[str, Change] = {
    "permuted": with_fields(permute_rewards=True),
    "oracle": lambda rl: rl,  # its predictions are replaced
    "replay": replay(2, 0),
    "one label": with_fields(predictor=Label()),
    "no average": optim(average=0.0),
}


Ends = Callable[[Row], bool]  # whether a run with a row's curve ends before its budget is spent


def whole(row: Row) -> bool:
    """Returns False: the run spends its budget."""
    return False


def levels_passed(row: Row) -> bool:
    """Returns whether the run's score is known."""
    return passed(row, row["curve"][0][2] + LEVELS[-1])


class Run(NamedTuple):
    """One run of the experiment."""

    phase: str
    task: str
    seed: int
    arm: str
    cell: Cell
    change: Change
    ends: Ends = whole

    @property
    def key(self) -> tuple[Any, ...]:
        """Returns what a row is found by."""
        return self.phase, self.task, self.seed, self.arm, self.cell.name


class Experiment:
    """The runs of the experiment in one folder."""

    def __init__(self, out: Path, results: Path, smoke: bool):
        self.out, self.results, self.smoke = out, results, smoke
        self.scale = SMOKE if smoke else FULL

    def all(self, runs: Sequence[Run]) -> list[Row]:
        """Returns the rows of runs. Those that another process runs are waited for."""
        while True:
            rows = {key_of(row): row for row in experiments.finished(self.results)}
            missing = [run for run in runs if run.key not in rows]
            if not missing:
                return [rows[run.key] for run in runs]
            if not any([self.run(run) for run in missing]):
                time.sleep(WAIT_S)

    def run(self, run: Run) -> bool:
        """Makes a run and adds its row, unless another process has it or prepares its seed; returns
        whether it did.
        """
        name = "".join(x if x.isalnum() or x == "." else "_" for x in " ".join(map(str, run.key)))
        try:
            with lock(self.out / name):
                if run.key in {key_of(row) for row in experiments.finished(self.results)}:
                    return True
                with lock(self._cold(run)):
                    config = self._configured(run, self.out / name)
                shutil.rmtree(self.out / name, ignore_errors=True)
                row = self._train(run, config)
                with lock(self.results, wait_s=60):
                    experiments.append(self.results, row)
                shutil.rmtree(self.out / name)
        except Timeout:
            return False
        return True

    def _cold(self, run: Run) -> Path:
        """Returns the folder of a run's cold start."""
        kind = "short" if run.task == "short" else "hard"
        return self.out / "cold_starts" / f"{kind}{run.seed}"

    def cold_config(self, run: Run) -> RunConfig:
        """Returns the configuration of a run's cold start."""
        config = base_config(run.seed, self._cold(run), self.smoke)
        if run.task != "short":
            return config
        sft = dataclasses.replace(config.sft, procedural=config.sft.procedural[: -len(TOO_HARD)])
        return dataclasses.replace(config, sft=sft)

    def _configured(self, run: Run, directory: Path) -> RunConfig:
        config = self.cold_config(run)
        cold_start(config)
        start, labelled = config.directory, config
        data, scale, cell = config.data, self.scale, run.cell
        if run.task == "easy":
            data = dataclasses.replace(data, sources=data.sources[: -len(TOO_HARD)])
        data = dataclasses.replace(data, eval_prompts=scale.evaluated)
        config = dataclasses.replace(config, data=data)
        if run.arm != "labels":
            config = without_labels(config)
        if run.arm == "hard deleted":
            hard = too_hard(labelled)
            file = directory.with_name(f"{directory.name}.jsonl")
            config = keeping(config, file, lambda prompt: prompt.question not in hard)
        per_step = cell.prompts * GROUP * ANSWER_TOKENS
        decay = {"schedule": "cosine", "schedule_tokens": scale.budget}
        rl = dataclasses.replace(
            config.rl,
            steps=math.ceil(20 * scale.budget / per_step),  # the budget ends the run before
            prompts_per_step=cell.prompts,
            group_size=GROUP,
            optim=OptimConfig(
                learning_rate=cell.rate,
                warmup_steps=8,
                average=AVERAGE,
                **(decay if cell.schedule == "cosine" else {}),
            ),
            eval_every=max(1, round(scale.every / per_step)),
        )
        evaluation = dataclasses.replace(
            config.evaluation, start=True, start_prompts=scale.evaluated
        )
        place = {"run_dir": str(directory), "init_from": start}
        return dataclasses.replace(config, rl=run.change(rl), evaluation=evaluation, **place)

    def _train(self, run: Run, config: RunConfig) -> Row:
        """Trains, and returns the row."""
        log, watched = Path(config.directory) / "metrics.jsonl", Watched()
        began = time.perf_counter()

        def spent() -> bool:
            steps = _metrics(log)
            if sum(x["waste/tokens_generated"] for x in steps) >= self.scale.budget:
                return True
            evaluated = bool(steps) and "eval/heldout/avg_at_k" in steps[-1]
            return evaluated and run.ends({"curve": _curve(config, steps, watched.seconds)})

        def made(trainer: RLTrainer) -> None:
            selector = trainer.parts.prompts.selector
            if run.arm == "oracle":
                assert isinstance(selector, PosteriorSelector)
                selector.prediction = TrueRates(trainer, self.scale.fresh)

        with watched.watching(made):
            if run_rl(config, enough=spent)["stopped"]:
                raise SystemExit("stopped: the same command continues")
        hard = too_hard(base_config(run.seed, self._cold(run), self.smoke))
        row = {
            "phase": run.phase,
            "task": run.task,
            "seed": run.seed,
            "arm": run.arm,
            "cell": run.cell.name,
            "commit": experiments.commit(),
            **self._account(config, watched.seconds),
            "hard_drawn": round(float(np.mean([x in hard for x in watched.questions])), 4),
        }
        if run.phase in TASKS and run.ends is whole:
            wide = dataclasses.replace(config.evaluation, k=self.scale.end)
            last = str(Path(config.directory) / "checkpoints")
            checkpoint = str(max(Path(last).glob("step_*")))
            end = evaluate_weights(dataclasses.replace(config, evaluation=wide), checkpoint)
            row["end"] = round(end.avg_at_k, 5)
        experiments.forget_compiled()
        return {**row, "wall_s": round(time.perf_counter() - began)}

    def _account(self, config: RunConfig, selecting: Sequence[float]) -> Row:
        """Returns the curve [[tokens, minutes, accuracy], ...] and the shares of a finished run."""
        folder = Path(config.directory)
        steps = _metrics(folder / "metrics.jsonl")
        curve, minutes = _curve(config, steps, selecting), _minutes(steps, selecting)
        generated = np.array([x["waste/tokens_generated"] for x in steps])
        signals = ("verifier_signal", "prediction_signal", "entropy_signal", "none")
        return {
            "steps": len(steps),
            "tokens": int(generated.sum()),
            "minutes": round(float(minutes[-1]), 4),
            "curve": curve,
            "uniform": round(1 - float(np.mean([x["groups/varied_frac"] for x in steps])), 4),
            "signals": {
                name: round(
                    float(
                        np.average(
                            [x.get(f"waste/frac_{name}", 0.0) for x in steps], weights=generated
                        )
                    ),
                    4,
                )
                for name in signals
            },
            "answer_tokens": round(float(np.mean([x["response_length/mean"] for x in steps])), 1),
            "select_minutes": round(sum(selecting) / 60, 3),
        }


def _minutes(steps: Sequence[dict[str, float]], selecting: Sequence[float]) -> np.ndarray:
    """Returns the minutes of training up to the end of each step."""
    clocks = np.array([sum(x.get(f"time/{name}_s", 0.0) for name in CLOCKS) for x in steps])
    clocks += sum(selecting) / len(steps)  # a step may draw several times
    return np.cumsum(np.minimum(clocks, MOST_MEDIANS * np.median(clocks))) / 60


def _curve(
    config: RunConfig, steps: Sequence[dict[str, float]], selecting: Sequence[float]
) -> list[list[float]]:
    """Returns [tokens, minutes, accuracy] of the start and of each evaluation."""
    summary = Path(config.directory) / "evaluation_start" / "summary.json"
    start = json.loads(summary.read_text())["sets"]["heldout"]["avg_at_k"]
    tokens = np.cumsum([x["waste/tokens_generated"] for x in steps])
    minutes = _minutes(steps, selecting)
    return [[0, 0.0, start]] + [
        [int(tokens[i]), round(float(minutes[i]), 4), x["eval/heldout/avg_at_k"]]
        for i, x in enumerate(steps)
        if "eval/heldout/avg_at_k" in x
    ]


class TrueRates(Prediction):
    """The rates of the candidates by fresh answers of the policy at each step: what no predictor
    can know.
    """

    def __init__(self, trainer: RLTrainer, samples: int):
        self._trainer, self._samples = trainer, samples
        self._rates: dict[int, float] = {}

    def prepare(self, prompts: Sequence[Prompt]) -> None:
        """Answers the candidates."""
        trainer = self._trainer
        several = answers(
            trainer.collect.engine,
            trainer.parts.weights.params,
            prompts,
            trainer.parts.tokenizer,
            trainer.collect.scorer,
            samples=self._samples,
            sampler=Sampler(trainer.config.rollout.temperature),
            seed=trainer.config.seed + 7919 * (trainer.done_steps + 1),
        )[1]
        rates = [float(np.mean([score.reward for score in one])) for one in several]
        self._rates = {x.id: rate for x, rate in zip(prompts, rates, strict=True)}

    def priors(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Returns alpha and beta, narrow about each known rate."""
        rates = np.array([self._rates.get(prompt.id, 0.5) for prompt in prompts])
        rates = np.clip(rates, 1e-3, 1 - 1e-3)
        return ORACLE_SAMPLES * np.stack([rates, 1 - rates], axis=1)


def _metrics(file: Path) -> list[dict[str, float]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["metrics"] for line in lines]


def too_hard(labelled: RunConfig) -> set[str]:
    """Returns the questions of the too hard training prompts."""
    hard = {source.label for source in labelled.data.sources[-len(TOO_HARD) :]}
    return {x.question for x in training_prompts(labelled) if x.label in hard}


class Tuning:
    """The runs of an arm's tuning, and their mean scores."""

    def __init__(self, experiment: Experiment, arm: str):
        self.experiment, self.arm = experiment, arm
        self.rows: dict[Cell, list[Row]] = {}

    def run(self, cells: Sequence[Cell], seed: int, ends: Ends = levels_passed) -> None:
        """Runs cells with a seed."""
        change = TRIALS[self.arm]
        runs = [Run("tuning", "hard", seed, self.arm, cell, change, ends) for cell in cells]
        for cell, row in zip(cells, self.experiment.all(runs), strict=True):
            self.rows.setdefault(cell, []).append(row)

    def mean(self, cell: Cell) -> float:
        """Returns the mean score of a cell."""
        return float(np.mean([score(row) for row in self.rows[cell]]))

    def end(self, cell: Cell) -> float:
        """Returns the mean end of a cell's whole runs."""
        later = self.rows[cell][1:] or self.rows[cell]
        return float(np.mean([smoothed(row)[-1][1] for row in later]))

    def best(self, most: int) -> list[Cell]:
        """Returns the `most` best cells, the best first."""
        return sorted(self.rows, key=self.mean)[:most]


def cells_kept(experiment: Experiment, arm: str) -> Tuning:
    """Runs an arm's cells on the first tuning seed."""
    scale, tuning = experiment.scale, Tuning(experiment, arm)
    seed = scale.tuning_seeds[0]
    tuning.run(CELLS[: scale.cells], seed)
    while (top := tuning.best(1)[0]).rate == max(x.rate for x in tuning.rows) < scale.most_rate:
        faster = [top._replace(rate=2 * top.rate, schedule=x) for x in ("constant", "cosine")]
        tuning.run(faster, seed)
    return tuning


def tuned(experiment: Experiment, arm: str) -> Cell:
    """Runs an arm's tuning, and returns its best cell."""
    tuning = cells_kept(experiment, arm)
    left = tuning.best(KEPT[0])
    for seed, kept in zip(experiment.scale.tuning_seeds[1:], KEPT):
        left = sorted(left, key=tuning.mean)[:kept]
        tuning.run(left, seed, whole)
    most = max(tuning.end(cell) for cell in left)
    return min((x for x in left if tuning.end(x) >= most - LOWER), key=tuning.mean)


def tuned_dapo(experiment: Experiment) -> Cell:
    """Runs DAPO with GRPO's best cells, and returns its best one."""
    first, *later = experiment.scale.tuning_seeds
    tuning = Tuning(experiment, "dapo")
    tuning.run(cells_kept(experiment, "grpo").best(DAPO_KEPT[0]), first)
    left = tuning.best(DAPO_KEPT[1])
    for seed in later[:1]:
        tuning.run(left, seed)
    return min(left, key=tuning.mean)


def tuned_grpo(experiment: Experiment) -> tuple[Cell, Change]:
    """Returns the setting of tuned GRPO."""
    cell = tuned(experiment, "grpo")
    changes = {"grpo": TRIALS["grpo"], B2: compose(TRIALS["grpo"], optim(b2=0.999))}
    best = min(changes, key=lambda arm: mean_score(experiment, "tuning", arm, cell, changes[arm]))
    return cell, changes[best]


def mean_score(experiment: Experiment, phase: str, arm: str, cell: Cell, change: Change) -> float:
    """Runs an arm on the tuning seeds, and returns its mean score."""
    seeds = experiment.scale.tuning_seeds
    runs = [Run(phase, "hard", seed, arm, cell, change, levels_passed) for seed in seeds]
    return float(np.mean([score(row) for row in experiment.all(runs)]))


def alone(experiment: Experiment, cell: Cell) -> tuple[float, dict[str, float]]:
    """Runs each piece on top of the recipe, on further seeds as long as its scores sum to at most
    WORSE times the recipe's; returns the mean scores of the recipe and of the pieces that remain.
    """
    pieces = dict(list(PIECES.items())[: experiment.scale.pieces])
    scores: dict[str, list[float]] = {name: [] for name in pieces}
    of_recipe: list[float] = []
    for seed in experiment.scale.tuning_seeds:
        recipe = Run("tuning", "hard", seed, "recipe", cell, RECIPE, levels_passed)
        of_recipe.append(score(experiment.all([recipe])[0]))
        runs = [
            Run("pieces", "hard", seed, x, cell, compose(RECIPE, pieces[x]), levels_passed)
            for x in scores
        ]
        for run, row in zip(runs, experiment.all(runs), strict=True):
            scores[run.arm].append(score(row))
        scores = {x: of for x, of in scores.items() if sum(of) <= WORSE * sum(of_recipe)}
    return float(np.mean(of_recipe)), {x: float(np.mean(of)) for x, of in scores.items()}


def candidate(experiment: Experiment) -> tuple[Cell, dict[str, Change]]:
    """Runs the pieces, alone and then together; returns the candidate's cell and its pieces."""
    cell = tuned(experiment, "recipe")
    best, means = alone(experiment, cell)
    chosen: dict[str, Change] = {}
    for name in sorted((x for x in means if means[x] < best), key=lambda name: means[name]):
        together = {**chosen, name: PIECES[name]}
        value = mean_score(
            experiment, "pieces", " + ".join(together), cell, joined(RECIPE, *together.values())
        )
        if value >= best:
            break
        best, chosen = value, together
    return cell, chosen


def joined(*changes: Change) -> Change:
    """Returns a change that makes all of them in turn."""
    first, *rest = changes
    for change in rest:
        first = compose(first, change)
    return first


def results(experiment: Experiment, task: str, seeds: Sequence[int]) -> list[Run]:
    """Returns the runs of a task's results on some seeds, the baseline's first."""
    plain, grpo = tuned_grpo(experiment)
    cell, pieces = candidate(experiment)
    best = joined(RECIPE, *pieces.values())
    arms = {BASELINE: (plain, grpo), "candidate": (cell, best)}
    few: dict[str, tuple[Cell, Change]] = {}
    if task == "hard":
        arms |= {"hard deleted": (plain, grpo), "screening": (cell, screening(2, GROUP))}
        arms |= {name: (cell, compose(best, change)) for name, change in CONTROLS.items()}
        few |= {name: (cell, compose(best, change)) for name, change in FEW.items()}
        _, kept = alone(experiment, cell)
        few |= {name: (cell, compose(RECIPE, PIECES[name])) for name in kept}
        few |= {"recipe": (cell, RECIPE)} if pieces else {}
        few |= {"stages": (plain, EARLIER["stages"].trials["growth x2"])}
        few |= {"dapo": (tuned_dapo(experiment), TRIALS["dapo"])}
    return [
        Run(task, task, seed, arm, *setting, whole if arm in WHOLE else reached(experiment, seed))
        for seed in seeds
        for arm, setting in {**arms, **(few if seed in FEW_SEEDS else {})}.items()
    ]


def reached(experiment: Experiment, seed: int) -> Ends:
    """Returns that a run's passage is known, once the baseline's row of the seed is."""

    def known(row: Row) -> bool:
        base = by_seed(experiments.finished(experiment.results), "hard", BASELINE).get(seed)
        return base is not None and passed(row, goal_of(base))

    return known


def main(argv: list[str] | None = None) -> None:
    """Makes the runs of a phase that have no row yet, and prints the table."""
    if argv is None:
        tune_allocator()
        keep_programs()
    parser = rl_runs.parser(__doc__ or "", "unlabelled")
    phases = ("cold", "tuning", "pieces", "hard", "easy", "short", "table")
    parser.add_argument("phase", choices=phases)
    parser.add_argument("--seeds", type=int, nargs="+", help="some of a phase of results")
    parser.add_argument("--only", nargs="+", help="some arms of a phase of results")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    experiment = Experiment(Path(args.out), args.results, args.smoke)
    if args.phase == "cold":
        for seed in args.seeds:
            run = Run("cold", "hard", seed, "grpo", CELLS[0], TRIALS["grpo"])
            cold_start(experiment.cold_config(run))
    elif args.phase == "tuning":
        chosen = {
            "grpo": lambda: tuned_grpo(experiment)[0],
            "recipe": lambda: tuned(experiment, "recipe"),
            "dapo": lambda: tuned_dapo(experiment),
        }
        for arm in args.only or TRIALS:
            print(arm, chosen[arm]().name)
    elif args.phase == "pieces":
        cell, pieces = candidate(experiment)
        print(cell.name, *pieces)
    elif args.phase != "table":
        seeds = args.seeds or (SEEDS if args.phase == "hard" else FEW_SEEDS)
        runs = results(experiment, args.phase, seeds)
        experiment.all([run for run in runs if not args.only or run.arm in args.only])
    rows = experiments.finished(args.results)
    print(report(rows))
    plot(rows, args.results.with_suffix(".png"))


if __name__ == "__main__":
    main()
