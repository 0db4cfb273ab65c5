"""Experiment: generated tokens, and minutes, to 90% of the gain with which tuned GRPO ends.

    python -m benchmarks.tokens_to_accuracy [--out runs/tokens_to_accuracy]
        [--cold-starts runs/mostly_hard] [--seeds 0 1 2] [--only grpo screening ...] [--smoke]

The plan, written before its runs:

Task. That of configs/mostly_hard_cpu.py: the sums and products of tiny_reasoning_cpu, and as many
prompts too hard, which the cold start works out at length, nearly always wrongly. Two earlier tasks
taught the policy to guess, or had short uniform groups, which cost little; with 300 worked
solutions of each too hard sum in 1,500 steps it cannot add single digits, and GRPO gains little.
Held-out prompts are of the same mix. The report says whether the task is as planned: accuracy of
the cold start between 0.05 and 0.2, and at least 60% of tuned GRPO's groups uniform.

Budget. 300 thousand generated tokens a run. Filter rollouts and dropped groups count; evaluations
do not. The learning rate is constant after eight steps, so that no schedule depends on the number
of steps. Every step has one update.

Tuning, on seeds that are not used again. Score: the mean of the accuracy curve over the tokens.
    cells    GRPO with 16, 32 or 64 prompts a step and 4 or 8 samples of each, at rate 1.5e-4, on
             seed 100 (12 cells, 4 x 2 to 32 x 8, were tried on an earlier task: fewer than 64
             samples an update make the accuracy fall)
    rates    the two best cells, each at 7.5e-5, 1.5e-4 and 3e-4, on seed 101; the best one is tuned
             GRPO
    trials   every other arm has tuned GRPO's prompts a step and rate, its samples unless the arm
             sets them, and up to five trials of the arm's settings, on seed 101; posterior
             selection, of whose groups more vary, has one with twice the rate and one with half the
             prompts

Arms, each at its best trial, on seeds 0 to 2:
    grpo         tuned GRPO
    dapo         DAPO's clip, mean over tokens and dynamic sampling
    stages       the stages of arXiv 2512.07710: filter, growth, shaping, RL-ZVP (the published
                 rows had selection by streaks, GRESO, too, which is no longer in the package)
    screening    a few samples of each prompt, the others where the group is likely to vary
    posterior    prompts by their predicted pass rate
    screening, posterior    both
    drafts       drafts of a prompt's last visit, with FEW_PROMPTS prompts of each length, so that
                 the budget visits each about eight times; a trial of these prompts without drafts
    rloo, maxrl  other advantages
    replay       recent varied groups in the places of uniform ones, with TIS
    permuted     the arm with the lowest ratio, with rewards shuffled within each group: a control

Measure. a0 is a seed's accuracy before RL, a1 the mean of its tuned GRPO run's last three
evaluations. Tokens to the target: where the curve, smoothed over three evaluations, first stays at
or above a0 + 0.9 (a1 - a0). The ratio to tuned GRPO's tokens is paired by seed; the table has the
geometric mean over seeds and its 95% bootstrap interval. A run that never stays there counts with
its whole budget, as a lower bound, and is marked. Minutes are those of rollouts, rewards and
updates; the tuning leaves compiled programs in JAX's cache, so that the arms hardly compile.

A line per finished run goes to OUT/tokens_to_accuracy.jsonl, so that the same command continues
after a kill; at the end OUT/tokens_to_accuracy.md and OUT/tokens_to_accuracy.png. The same command
in several processes shares the runs among them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from benchmarks import experiments, rl_runs, tokens_report
from compass_jax.apps.pipeline.offline_filter import Bounds, run_filter
from compass_jax.commands.configs.mostly_hard_cpu import TOO_HARD, mostly_hard_cpu
from compass_jax.config import (
    OptimConfig,
    ProceduralSource,
    RLConfig,
    RunConfig,
    ShapingConfig,
    StepHook,
    ZeroVarianceConfig,
)
from compass_jax.config.seam import seam_class
from compass_jax.data.keep import PassRate
from compass_jax.data.prompts import train_prompts
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.allocator import tune_allocator
from compass_jax.experience.evaluate import evaluate_weights
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.advantages.maxrl import MaxRL
from compass_jax.rl.advantages.rloo import Rloo
from compass_jax.rl.corrections.tis import Tis
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate
from compass_jax.rollout.drafts import Coupled, Lenient
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

Change = Callable[[RLConfig], RLConfig]
Row = dict[str, Any]
RESULTS = "tokens_to_accuracy"
PROMPTS, GROUPS, RATES, RATE = (16, 32, 64), (4, 8), (7.5e-5, 1.5e-4, 3e-4), 1.5e-4
CELL_SEEDS, RATE_SEEDS, TRIAL_SEEDS = (100,), (101,), (101,)
BEST_CELLS = 2  # cells that are tried at other rates
FILTER_SAMPLES = 4
FEW_PROMPTS = 16  # training prompts of each length, for drafts
WAIT_S = 5.0  # between two looks for the runs of other processes
CLOCKS = ("rollout", "reward_wait", "score", "update", "handover")
GRPO, PERMUTED = "grpo", "permuted"


class Scale(NamedTuple):
    """The size of the experiment."""

    budget: int = 300_000  # generated tokens of a run
    evaluations: int = 16  # evaluations of a run
    cells: tuple[tuple[int, int], ...] = tuple((p, g) for p in PROMPTS for g in GROUPS)
    rates: tuple[float, ...] = RATES
    trials: int = 5  # trials of an arm, at most
    answer_tokens: int = 40  # expected tokens of an answer, which set the interval of evaluations


FULL = Scale()
SMOKE = Scale(600, 2, ((4, 4),), (RATE,), 1)


class Cell(NamedTuple):
    """The step size of a run: prompts a step, samples of each, learning rate."""

    prompts: int
    group: int
    rate: float

    @property
    def name(self) -> str:
        """The name in the results."""
        return f"{self.prompts} x {self.group}, rate {self.rate:g}"


def zero_variance(**changes: Any) -> Change:
    """Returns a change of settings under rl.zero_variance."""
    return lambda rl: dataclasses.replace(
        rl, zero_variance=dataclasses.replace(rl.zero_variance, **changes)
    )


def with_fields(**changes: Any) -> Change:
    """Returns a change of settings under rl."""
    return lambda rl: dataclasses.replace(rl, **changes)


def compose(first: Change, second: Change) -> Change:
    """Returns a change that makes one change after another."""
    return lambda rl: second(first(rl))


def screening(n0: int, n: int, **thresholds: float) -> Change:
    """Returns the change to screening with n0 of n samples."""
    return with_fields(group_size=n, step_policy=Screening(n0=n0, **thresholds))


def stages(grow: int, **penalties: float) -> Change:
    """Returns the change to the paper's stages, with growth to `grow` times the samples."""

    def change(rl: RLConfig) -> RLConfig:
        zero = zero_variance(rl_zvp=True, grow_to=grow * rl.group_size)
        return dataclasses.replace(zero(rl), shaping=ShapingConfig(**penalties))

    return change


def replay(max_age: int, max_route_age: int) -> Change:
    """Returns the change to a replay of all groups up to an age, in steps of one update."""

    def change(rl: RLConfig) -> RLConfig:
        hook = seam_class(StepHook, "examples/group_replay.py:GroupReplay")(
            groups=rl.prompts_per_step * max_age, max_age=max_age, max_route_age=max_route_age
        )
        return dataclasses.replace(rl, correction=Tis(), hooks=(hook,))

    return change


def fewer_prompts(rl: RLConfig) -> RLConfig:
    """Returns the settings with half the prompts a step, for an arm that draws better ones."""
    return dataclasses.replace(
        rl, prompts_per_step=rl.prompts_per_step // 2, eval_every=2 * rl.eval_every
    )


def faster(times: float) -> Change:
    """Returns the change to another learning rate."""

    def change(rl: RLConfig) -> RLConfig:
        rate = times * rl.optim.learning_rate
        return dataclasses.replace(rl, optim=dataclasses.replace(rl.optim, learning_rate=rate))

    return change


class Arm(NamedTuple):
    """An arm of the experiment: its trials by name, whether it pays for an offline filter, and the
    number of training prompts of each length (0: all).
    """

    trials: dict[str, Change]
    filters: bool = False
    prompts: int = 0


PENALTIES = {"length_penalty": 0.05, "repetition_penalty": 0.02}
POSTERIOR = zero_variance(posterior=True)
ARMS: dict[str, Arm] = {
    GRPO: Arm({"": lambda rl: rl}),
    "dapo": Arm(
        {
            f"rounds of {n}": compose(
                with_fields(objective=dapo_surrogate()),
                zero_variance(dynamic_sampling=True, dynamic_batch=n),
            )
            for n in (1, 2, 3)
        }
    ),
    "stages": Arm(
        {
            "growth x2": stages(2, **PENALTIES),
            "growth x4": stages(4, **PENALTIES),
            "growth x4, no shaping": stages(4),
        },
        filters=True,
    ),
    "screening": Arm(
        {
            "2 of 4": screening(2, 4),
            "2 of 8": screening(2, 8),
            "4 of 8, strict": screening(4, 8, min_chance=1.0, min_chance_hard=1.0),
        }
    ),
    "posterior": Arm(
        {
            f"target {target}, discount {discount}": zero_variance(
                posterior=True, posterior_target=target, posterior_discount=discount
            )
            for target, discount in ((0.3, 0.9), (0.5, 0.9), (0.5, 0.7))
        }
        | {
            "target 0.5, twice the rate": compose(POSTERIOR, faster(2)),
            "target 0.5, half the prompts": compose(POSTERIOR, fewer_prompts),
        }
    ),
    "screening, posterior": Arm(
        {f"{n0} of {n}": compose(screening(n0, n), POSTERIOR) for n0, n in ((2, 4), (2, 8), (4, 8))}
        | {"2 of 8, half the prompts": compose(compose(screening(2, 8), POSTERIOR), fewer_prompts)}
    ),
    "drafts": Arm(
        {
            "no drafts": with_fields(drafts=None),
            "lenience 1.65": with_fields(drafts=Lenient(lenience=1.65)),
            "coupled, refresh 4": with_fields(drafts=Coupled(refresh=4)),
        },
        prompts=FEW_PROMPTS,
    ),
    "rloo": Arm({"": with_fields(advantage=Rloo())}),
    "maxrl": Arm({"": with_fields(advantage=MaxRL())}),
    "replay": Arm(
        {
            "age 1, recorded routes": replay(1, 1),
            "age 2, live routes": replay(2, 0),
            "age 4, live routes": replay(4, 0),
        }
    ),
}


def base_config(seed: int, folder: Path, smoke: bool) -> RunConfig:
    """Returns the configuration of a seed, whose cold start is in `folder`, without the step
    size.
    """
    config = mostly_hard_cpu()
    if smoke:
        config = _few_and_short(config)
    rl = RLConfig(
        replay=config.rl.replay,
        buckets=config.rl.buckets,
        micro_batch_tokens=config.rl.micro_batch_tokens,
        objective=Grpo(),
        step_policy=None,
        zero_variance=ZeroVarianceConfig(),
        save_every=0,
    )
    return dataclasses.replace(
        config,
        name=RESULTS,
        seed=seed,
        run_dir=str(folder / "sft"),
        sft=dataclasses.replace(config.sft, save_every=0),
        rl=rl,
        evaluation=dataclasses.replace(config.evaluation, start=False),
    )


def _few_and_short(config: RunConfig) -> RunConfig:
    """Returns the configuration with few prompts, one layer and short answers."""
    easy, hard = config.data.sources[: -len(TOO_HARD)], config.data.sources[-len(TOO_HARD) :]
    assert all(isinstance(source, ProceduralSource) for source in hard)
    sources = (*easy, *(dataclasses.replace(source, size=30) for source in hard))
    worked = config.sft.procedural[: -len(TOO_HARD)]
    worked += tuple((source.label, 5, 1) for source in hard)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=1),
        rollout=dataclasses.replace(config.rollout, max_new_tokens=24),
        data=dataclasses.replace(config.data, sources=sources, eval_prompts=8),
        sft=dataclasses.replace(config.sft, procedural=worked, steps=4),
        rl=dataclasses.replace(config.rl, buckets=(config.rollout.prompt_buckets[-1] + 24,)),
    )


def sized(config: RunConfig, cell: Cell, scale: Scale) -> RunConfig:
    """Returns the configuration with a step size, and with evaluations and steps for the budget."""
    per_step = cell.prompts * cell.group * scale.answer_tokens
    rl = dataclasses.replace(
        config.rl,
        steps=math.ceil(20 * scale.budget / per_step),  # the budget ends the run before
        prompts_per_step=cell.prompts,
        group_size=cell.group,
        optim=OptimConfig(learning_rate=cell.rate, warmup_steps=8),
        eval_every=max(1, round(scale.budget / scale.evaluations / per_step)),
    )
    return dataclasses.replace(config, rl=rl)


class Experiment:
    """The runs of the experiment in one folder."""

    def __init__(self, out: Path, cold_starts: Path, smoke: bool):
        self.out, self.cold_starts, self.smoke = out, cold_starts, smoke
        self.scale = SMOKE if smoke else FULL
        self.file = out / f"{RESULTS}.jsonl"

    def budget(self, phase: str) -> int:
        """Returns the generated tokens of a run of a phase."""
        return self.scale.budget

    def rows(self, phase: str) -> list[Row]:
        """Returns the finished runs of a phase."""
        return [row for row in experiments.finished(self.file) if row["phase"] == phase]

    def tuned(self) -> Cell:
        """Runs GRPO's tuning and returns its step size."""
        cells = [Cell(prompts, group, RATE) for prompts, group in self.scale.cells]
        if len(cells) == 1:
            return cells[0]
        scores = self._scores("cells", {cell: (GRPO, "", cell) for cell in cells}, CELL_SEEDS)
        best = sorted(cells, key=lambda cell: -scores[cell])[:BEST_CELLS]
        tried = [cell._replace(rate=rate) for cell in best for rate in self.scale.rates]
        scores = self._scores("rates", {cell: (GRPO, "", cell) for cell in tried}, RATE_SEEDS)
        return max(tried, key=lambda cell: scores[cell])

    def best_trials(self, arms: Sequence[str], cell: Cell) -> dict[str, str]:
        """Runs the trials of the arms and returns the best one's name of each."""
        names = {arm: list(ARMS[arm].trials)[: self.scale.trials] for arm in arms}
        several = [arm for arm in arms if len(names[arm]) > 1]
        tried = {arm: {name: (arm, name, cell) for name in names[arm]} for arm in several}
        self.all(
            [
                (f"trials of {arm}", seed, *what)
                for arm in several
                for what in tried[arm].values()
                for seed in TRIAL_SEEDS
            ]
        )
        best = {arm: names[arm][0] for arm in arms}
        for arm in several:
            scores = self._scores(f"trials of {arm}", tried[arm], TRIAL_SEEDS)
            best[arm] = max(names[arm], key=lambda name, scores=scores: scores[name])
        return best

    def all(self, runs: Sequence[tuple[Any, ...]]) -> list[Row]:
        """Returns the rows of runs, each the arguments of `run`. Those that another process runs
        are waited for.
        """
        rows: dict[int, Row] = {}
        while len(rows) < len(runs):
            before = len(rows)
            for i, arguments in enumerate(runs):
                row = None if i in rows else self.run(*arguments)
                if row is not None:
                    rows[i] = row
            if len(rows) == before:
                time.sleep(WAIT_S)
        return [rows[i] for i in range(len(runs))]

    def run(
        self, phase: str, seed: int, arm: str, trial: str, cell: Cell, permuted=False
    ) -> Row | None:
        """Returns the row of a run, which is run unless it is finished; None while another process
        runs it or prepares its seed.
        """
        variant = PERMUTED if permuted else arm
        name = ", ".join(filter(None, (variant, trial, cell.name)))

        def finished() -> Row | None:
            rows = (row for row in self.rows(phase) if (row["name"], row["seed"]) == (name, seed))
            return next(rows, None)

        if row := finished():
            return row
        folder = "".join(x if x.isalnum() or x == "." else "_" for x in f"{phase} {name}")
        directory = self.out / f"seed{seed}" / folder
        directory.mkdir(parents=True, exist_ok=True)
        try:
            with lock(self.out / f"seed{seed}"):
                config, start, minutes = self._configured(seed, arm, trial, cell)
            with lock(directory):
                if row := finished():  # a process that held the lock finished it
                    return row
                rl = dataclasses.replace(config.rl, permute_rewards=permuted)
                config = dataclasses.replace(config, rl=rl, run_dir=str(directory))
                row = {"phase": phase, "variant": variant, "name": name, "seed": seed}
                row |= _train(config, start, minutes, self.budget(phase))
                with lock(self.out, wait_s=60):
                    experiments.append(self.file, row)
        except Timeout:
            return None
        return row

    def _configured(
        self, seed: int, arm: str, trial: str, cell: Cell
    ) -> tuple[RunConfig, float, float]:
        """Returns the configuration of a run, its cold start's accuracy and its filter's
        minutes.
        """
        config, start = self._seed(seed)
        config = sized(config, cell, self.scale)
        config = dataclasses.replace(config, rl=ARMS[arm].trials[trial](config.rl))
        minutes = 0.0
        if ARMS[arm].filters:
            config, minutes = self._filtered(config)
        if ARMS[arm].prompts:
            config = self._with_prompts(config, ARMS[arm].prompts)
        return config, start, minutes

    def _scores(
        self, phase: str, tried: dict[Any, tuple[str, str, Cell]], seeds: Sequence[int]
    ) -> dict[Any, float]:
        """Returns the mean height of the curves of each trial, over seeds."""
        results = iter(
            self.all([(phase, seed, *what) for what in tried.values() for seed in seeds])
        )
        rows = {key: [next(results) for _ in seeds] for key in tried}
        until = min(row["tokens"] for runs in rows.values() for row in runs)
        return {
            key: float(
                np.mean([rl_runs.mean_height(tokens_report.by_tokens(row), until) for row in runs])
            )
            for key, runs in rows.items()
        }

    def _seed(self, seed: int) -> tuple[RunConfig, float]:
        """Returns the configuration of a seed with its cold start, trained once, and the start's
        accuracy.
        """
        config = base_config(seed, self.cold_starts / f"seed{seed}", self.smoke)
        accuracy = cold_start(config)
        return dataclasses.replace(config, init_from=config.directory), accuracy

    def _filtered(self, config: RunConfig) -> tuple[RunConfig, float]:
        """Returns the configuration with the offline filter's prompts, and the filter's minutes."""
        folder, weights = self.out / f"seed{config.seed}" / "filter", config.init_from
        file, started = folder / "minutes.json", time.perf_counter()
        if not file.exists():
            run_filter(config.policy, config.scored, weights, str(folder), Bounds(FILTER_SAMPLES))
            if self.smoke:  # a cold start of seconds is never right
                _keep_all(folder / "pass_rates.jsonl")
            write_atomically(file, json.dumps((time.perf_counter() - started) / 60))
        data = dataclasses.replace(config.data, keep_file=str(folder / "pass_rates.jsonl"))
        return dataclasses.replace(config, data=data), json.loads(file.read_text())

    def _with_prompts(self, config: RunConfig, count: int) -> RunConfig:
        """Returns the configuration with `count` training prompts of each length. The held-out
        prompts stay.
        """
        file = self.out / f"seed{config.seed}" / f"prompts_{count}.jsonl"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, kept_prompts(config, lambda number: number <= count))
        return dataclasses.replace(
            config, data=dataclasses.replace(config.data, keep_file=str(file))
        )


def lock(folder: Path, wait_s: float = 0) -> FileLock:
    """Returns the lock of a folder among processes, in a file next to it, since a run has another
    lock inside. Raises filelock's Timeout if another process holds it.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    return FileLock(folder.with_name(f"{folder.name}.shared"), timeout=wait_s)


def kept_prompts(config: RunConfig, keeps: Callable[[int], bool]) -> str:
    """Returns the lines of a `data.keep_file` that has no cost, and that keeps the training prompts
    whose number within their label, from 1 on, `keeps` accepts.
    """
    seen: Counter[str] = Counter()
    lines = []
    for prompt in train_prompts(
        config.data, load_tokenizer(config.data, config.model.vocab_size), config.seed, print
    ):
        seen[prompt.label] += 1
        keep = keeps(seen[prompt.label])
        row = PassRate(prompt.id, prompt.label, prompt.question, 0.0, 0, 1, 0, 0.0, 1.0, keep)
        lines.append(json.dumps(row._asdict()) + "\n")
    return "".join(lines)


def _keep_all(file: Path) -> None:
    rows = [{**json.loads(line), "keep": True} for line in file.read_text().splitlines()]
    write_atomically(file, "".join(json.dumps(row) + "\n" for row in rows))


def cold_start(config: RunConfig) -> float:
    """Returns the accuracy of the cold start, which is trained once."""
    file = Path(config.directory).with_name("cold_start.json")
    if not file.exists():
        if run_sft(config)["stopped"]:
            raise SystemExit("stopped: the same command continues")
        result = {"accuracy": evaluate_weights(config, config.directory).avg_at_k}
        write_atomically(file, json.dumps(result))
        experiments.forget_compiled()
    return json.loads(file.read_text())["accuracy"]


def _train(config: RunConfig, start: float, minutes: float, budget: int) -> Row:
    """Trains, or resumes the training, until the budget is spent; returns the run's part of its
    row.
    """
    file = Path(config.directory) / "metrics.jsonl"

    def spent() -> bool:
        steps = _metrics(file)
        filtered = steps[0].get("waste/filter_tokens", 0.0) if steps else 0.0
        return filtered + sum(step["waste/tokens_generated"] for step in steps) >= budget

    result = run_rl(config, enough=spent)
    if result["stopped"]:
        raise SystemExit("stopped: the same command continues")
    final, steps = result["evaluation"], _metrics(file)
    row = rl_runs.accounts(steps, start, final.avg_at_k)
    clocks = [sum(step.get(f"time/{name}_s", 0.0) for name in CLOCKS) for step in steps]
    at = {0: minutes} | dict(enumerate(minutes + np.cumsum(clocks) / 60, 1))
    evaluated = [i for i, step in enumerate(steps, 1) if "eval/heldout/avg_at_k" in step]
    points = [0, *evaluated, len(steps)][: len(row["curve"])]
    curve = [
        [tokens, round(float(at[i]), 4), accuracy]
        for (tokens, accuracy), i in zip(row["curve"], points, strict=True)
    ]
    experiments.forget_compiled()
    return {
        "hash": experiments.config_hash(config),
        "commit": experiments.commit(),
        "steps": len(steps),
        "tokens": row["tokens"],
        "filter_tokens": row["filter_tokens"],
        "shares": row["shares"],
        "uniform_frac": 1 - float(np.mean([step["groups/varied_frac"] for step in steps])),
        "response_tokens": float(np.mean([step["response_length/mean"] for step in steps])),
        "curve": curve,
    }


def _metrics(file: Path) -> list[dict[str, float]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line)["metrics"] for line in lines]


def main(argv: list[str] | None = None) -> None:
    """Runs the arms that are not finished yet, then writes the table and the picture."""
    if argv is None:
        tune_allocator()
        keep_programs()
    parser = rl_runs.parser(
        __doc__ or "",
        RESULTS,
        cold_starts="mostly_hard",
        seeds=(0, 1, 2),
        variants=(*ARMS, PERMUTED),
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    cold_starts = out / "cold_starts" if args.smoke else Path(args.cold_starts)
    experiment = Experiment(out, cold_starts, args.smoke)
    cell = experiment.tuned()
    arms = [name for name in ARMS if name in (*args.only, GRPO)]  # ratios need tuned GRPO
    trials = experiment.best_trials(arms, cell)
    experiment.all([("arms", seed, arm, trials[arm], cell) for seed in args.seeds for arm in arms])
    if PERMUTED in args.only:
        ratios = tokens_report.ratios(experiment.rows("arms"))
        arm = min(arms, key=lambda name: tokens_report.interval(ratios.get(name, [])).mean)
        experiment.all([("arms", seed, arm, trials[arm], cell, True) for seed in args.seeds])
    rows = experiment.rows("arms")
    table = tokens_report.report(rows, cell.name)
    write_atomically(out / f"{RESULTS}.md", table)
    tokens_report.plot(rows, out / f"{RESULTS}.png")
    print(table)


if __name__ == "__main__":
    main()
