"""A whole RL run: trains, evaluates and saves in stages, and ends where it can be resumed."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compass_jax.aliases import JsonObject
from compass_jax.config import RunConfig
from compass_jax.config.data import HELDOUT
from compass_jax.config.io import to_plain
from compass_jax.data.prompts import PromptSet
from compass_jax.distributed import all_gather_bytes, is_main_process
from compass_jax.errors import STRICT
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluate import count_answers, interim_sets, start_sets
from compass_jax.experience.evaluated import answer_rows, write_evaluation
from compass_jax.records import Group
from compass_jax.rewards.detect import notice
from compass_jax.rewards.faults import VerifierError
from compass_jax.runs.machine import record_machine
from compass_jax.runs.profile import check_steps, traced
from compass_jax.runs.rundir import (
    EVALUATION,
    EVALUATION_FOLDER,
    EVALUATION_START,
    write_atomically,
)
from compass_jax.runs.telemetry import Telemetry, plain_numbers
from compass_jax.samplers.pool import Pool
from compass_jax.session import (
    StopSignal,
    carry_tokenizer,
    code_changes,
    open_run,
    open_scorer,
    why_stopped,
    with_date,
)
from compass_jax.training.header import stage_line
from compass_jax.training.loop import RLTrainer
from compass_jax.training.notices import idle_stages
from compass_jax.training.rate_notices import moved_schedule
from compass_jax.training.stops import never_stop
from compass_jax.weights import checkpoint


class Step(NamedTuple):
    """A step of a run, with its metrics by name."""

    number: int
    metrics: dict[str, float]


Steps = Generator[Step, None, JsonObject]  # its return value is the run's result


def run_rl(
    config: RunConfig,
    lost_log: bool = False,
    strict: bool = False,
    enough: Callable[[], bool] = never_stop,
    profile_steps: tuple[int, ...] = (),
) -> JsonObject:
    """Trains until `rl.steps`, resuming the run directory; returns the last metrics and the
    evaluations. The arguments are those of `rl_steps`.
    """
    steps = rl_steps(config, lost_log, strict, enough, profile_steps)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def rl_steps(
    config: RunConfig,
    lost_log: bool = False,
    strict: bool = False,
    enough: Callable[[], bool] = never_stop,
    profile_steps: tuple[int, ...] = (),
) -> Steps:
    """Trains like `run_rl` and yields each step after it is logged; its result is the
    generator's return value. Closing the generator early saves a checkpoint.

    Args:
        lost_log: whether to continue if the logs lack lines that the checkpoint counts.
        strict: whether to end, with the state saved and exit status STRICT, if rewards carry no
            information.
        enough: whether to end before the next step, as if `rl.steps` were reached.
        profile_steps: the first and the last step of a profiler trace; empty: none.
    """
    config.validate_for_rl()
    check_steps(profile_steps)
    config = with_date(config)
    pool = Pool(config.samplers) if config.samplers.acts else None
    exchange = all_gather_bytes if pool is None else pool.exchange
    with (
        pool or contextlib.nullcontext(),
        open_scorer(config, config.directory, exchange) as scorer,
        open_run(config) as run,
        StopSignal() as stop,
        Telemetry(
            config.directory,
            config.rl.steps,
            "rl",
            writes=is_main_process(),
            check=run.check,
            lost_log=lost_log,
            trackers=config.trackers,
            settings=to_plain(config),
        ) as telemetry,
    ):
        if pool is not None:
            pool.note, pool.stopped = telemetry.note, stop.requested_here
        telemetry.phase("loading")
        telemetry.note(notice(config.rewards.sandbox))
        machine = record_machine(Path(config.directory)) if is_main_process() else []
        done = checkpoint.latest(config.directory) or 0
        moved = moved_schedule(getattr(run.before, "rl", None), config.rl, done)
        for line in [*code_changes(run), *machine, *idle_stages(config.rl), *filter(None, [moved])]:
            telemetry.note(line)
        printed: set[str] = set()
        result: JsonObject = {"stopped": False, "steps": -1}
        # A stage ends in a checkpoint, and the next one begins like a resumed run.
        while not result["stopped"] and "evaluation" not in result:
            trainer = partial(RLTrainer, config, scorer, stop, telemetry, printed, pool)
            result = yield from _run_stage(
                trainer, stop, telemetry, strict, printed, enough, profile_steps
            )
        if pool is not None and not result["stopped"]:
            pool.finish()
        return result | {"status": stop.status}


def _run_stage(
    start: Callable[[], RLTrainer],
    stop: StopSignal,
    telemetry: Telemetry,
    strict: bool,
    printed: set[str],
    enough: Callable[[], bool],
    profile_steps: tuple[int, ...],
) -> Steps:
    """Trains to the end of the run's current stage. Its trainer, which `start` returns with its
    arrays on the devices, is released afterwards.
    """
    trainer = start()
    if strict:
        trainer.notices.end = partial(stop.end, STRICT)
    if "header" not in printed:
        printed.add("header")
        for line in trainer.header():
            telemetry.note(line)
        carry_tokenizer(trainer.config.directory, trainer.config.data.tokenizer)
    if trainer.stage.total:
        telemetry.note(stage_line(trainer.rl, trainer.config.rollout, trainer.stage))
    with trainer.checkpoints:
        return (yield from _run(trainer, telemetry, stop, enough, profile_steps))


def _run(
    trainer: RLTrainer,
    telemetry: Telemetry,
    stop: StopSignal,
    enough: Callable[[], bool],
    profile_steps: tuple[int, ...],
) -> Steps:
    steps = traced(
        trainer.steps(),
        trainer.done_steps,
        profile_steps,
        trainer.config.directory,
        telemetry.note,
    )
    with contextlib.closing(steps):
        try:
            return (yield from _run_steps(trainer, steps, telemetry, stop, enough))
        except VerifierError:
            # Saved, so that the same command continues after the verifier is repaired.
            trainer.save()
            raise


def _run_steps(
    trainer: RLTrainer,
    steps: Generator[tuple[int, dict[str, float]]],
    telemetry: Telemetry,
    stop: StopSignal,
    enough: Callable[[], bool],
) -> Steps:
    config, saved = trainer.config, trainer.done_steps
    metrics: dict[str, float] = {}
    evaluated: _Evaluated | None = None
    if trainer.evaluated and config.evaluation.start and not trainer.done_steps:
        sets = start_sets(trainer.evaluated, config)
        # The first rollout warns of uninformative rewards.
        evaluated = _evaluate(trainer, sets, warns=False)
        telemetry.note(f"before the first step, {evaluated.result.line()}")
        if line := _start_in_words(trainer.evaluated, evaluated.result):
            telemetry.note(line)
        else:
            trainer.guard.of_evaluation(0, evaluated.rewards())
        _keep_evaluation(trainer, evaluated, EVALUATION_START)
    trainer.guard.refuse_parted(config.directory)
    finished, began = enough(), time.perf_counter()
    for step, metrics in () if finished else steps:
        every = config.rl.eval_every
        due = step in config.evaluation.at or (every and step % every == 0)
        if trainer.evaluated and due:
            try:
                evaluated = _evaluate(trainer, interim_sets(trainer.evaluated, config))
            except VerifierError:
                # The step is complete: only its evaluation failed.
                telemetry.log(step, metrics)
                raise
            telemetry.note(f"step {step}, {evaluated.result.line()}")
            metrics |= evaluated.result.metrics()
            trainer.guard.of_evaluation(step, evaluated.rewards())
        now = time.perf_counter()
        metrics["time/step_s"], began = now - began, now
        # Without the final evaluation, so that the line is the same wherever the run ends.
        telemetry.log(step, metrics, trainer.histograms)
        _act_on_parting(trainer, telemetry)
        if trainer.guard.ended:
            evaluated = None  # it measured the policy that was replaced
        finished = enough() or trainer.guard.ended
        if (
            step == trainer.stage.end
            or finished
            or stop.requested
            or (config.rl.save_every and step % config.rl.save_every == 0)
        ):
            trainer.save(wait=False)
            saved = step
        try:
            yield Step(step, {name: float(value) for name, value in metrics.items()})
        except GeneratorExit:
            if saved != step:
                trainer.save()
            telemetry.note(f"left after step {step}, which is saved; the same call continues")
            raise
        began = time.perf_counter()
        if finished:
            break
    if trainer.interrupted:
        telemetry.note(
            f"stopped {why_stopped(stop)} in step {trainer.done_steps + 1}: the checkpoint has"
            f" {trainer.done_steps} whole steps and {trainer.buffer.finished} finished rollouts of"
            " the next; the same command continues"
        )
        return {"steps": trainer.done_steps, "stopped": True, **metrics}
    if trainer.done_steps != saved:
        trainer.save(wait=False)
    finished = finished or trainer.guard.ended or trainer.done_steps >= config.rl.steps
    if stop.requested and not finished:
        telemetry.note(
            f"stopped {why_stopped(stop)} after step {trainer.done_steps}; the same command"
            " continues"
        )
        return {"steps": trainer.done_steps, "stopped": True, **metrics}
    if not finished:
        return {"steps": trainer.done_steps, "stopped": False, **metrics}
    result = _last_evaluation(trainer, telemetry, evaluated) if trainer.evaluated else None
    return {"steps": trainer.done_steps, "stopped": False, "evaluation": result, **metrics}


def _act_on_parting(trainer: RLTrainer, telemetry: Telemetry) -> None:
    """Does what rl.guard.action says where reward and gold label parted in the last step."""
    guard = trainer.guard
    if guard.parted != trainer.done_steps:
        return
    if guard.config.action == "stop":
        trainer.save()
        guard.refuse_parted(trainer.config.directory)
    if guard.config.action == "restore":
        telemetry.note(
            f"rl.guard.action = 'restore': the run ends after step {trainer.done_steps} with the"
            f" policy of step {trainer.fall_back()}"
        )


@dataclass(frozen=True)
class _Evaluated:
    """An evaluation of the weights after `step` steps. complete: of all prompts."""

    step: int
    result: Evaluation
    rows: list[JsonObject]
    complete: bool

    def rewards(self) -> dict[str, float]:
        """Returns the mean reward of the sampled answers to each held-out prompt, by its id."""
        known = {
            str(row["id"]): [x["reward"] for x in row["samples"][:-1] if x["outcome"] == "ok"]
            for row in self.rows
            if row["set"] == HELDOUT
        }
        return {key: sum(values) / len(values) for key, values in known.items() if values}


def _last_evaluation(
    trainer: RLTrainer, telemetry: Telemetry, latest: _Evaluated | None
) -> Evaluation:
    """Evaluates the trained policy by the settings of the last stage, unless `latest` is of these
    weights. The run directory keeps its metrics, and its answers for `compass show` and `compass
    compare`.
    """
    if latest is None or not latest.complete or latest.step != trainer.done_steps:
        latest = _evaluate(trainer, trainer.evaluated)
        telemetry.note(latest.result.line())
    _keep_evaluation(trainer, latest, EVALUATION_FOLDER)
    if is_main_process():
        summary = {"step": trainer.done_steps, "metrics": plain_numbers(latest.result.metrics())}
        file = Path(trainer.config.directory) / EVALUATION
        write_atomically(file, json.dumps(summary, indent=2) + "\n")
    return latest.result


def _start_in_words(sets: Sequence[PromptSet], result: Evaluation) -> str:
    """Returns a line on the sets of which the evaluation before the first step had a part; empty
    where it had all.
    """
    parts = [
        f"{result.sets[one.name].prompts} of {len(one.prompts):,} prompts of {one.name}"
        f" (standard error {result.sets[one.name].avg_at_k_se:.3f})"
        for one in sets
        if result.sets[one.name].prompts < len(one.prompts)
    ]
    if not parts:
        return ""
    return (
        f"  that is {', '.join(parts)}, so that training begins soon; the last evaluation has"
        " all of them; evaluation.start_prompts sets the number"
    )


def _evaluate(trainer: RLTrainer, sets: Sequence[PromptSet], warns: bool = True) -> _Evaluated:
    """Evaluates the policy on `sets`."""
    rows: list[JsonObject] = []

    def keep(set_name: str, groups: list[Group]) -> None:
        rows.extend(answer_rows(set_name, groups, trainer.collect.turns.response))

    complete = count_answers(sets) == count_answers(trainer.evaluated)
    return _Evaluated(trainer.done_steps, trainer.evaluate(sets, keep, warns), rows, complete)


def _keep_evaluation(trainer: RLTrainer, evaluated: _Evaluated, name: str) -> None:
    """Writes answers and summary into the folder `name` of the run."""
    if is_main_process():
        config = trainer.config
        folder = Path(config.directory) / name
        folder.mkdir(exist_ok=True)
        weights = f"{config.directory}, step {evaluated.step}"
        write_evaluation(folder, evaluated.result, evaluated.rows, config, weights)
