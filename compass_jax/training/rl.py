"""A whole RL run: trains, evaluates and saves in stages, and ends where it can be resumed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import STRICT
from compass_jax.base.records import Group, Prompt
from compass_jax.config import RunConfig
from compass_jax.config.curriculum import largest_stage
from compass_jax.config.io import to_plain
from compass_jax.config.seam import ComponentFailed
from compass_jax.data.prompts import in_words
from compass_jax.devices.distributed import (
    all_gather_bytes,
    is_main_process,
    process_index_and_count,
)
from compass_jax.experience.assemble import assemble, columns_of
from compass_jax.experience.scorer import open_scorer
from compass_jax.rewards.checks import code_of
from compass_jax.rewards.detect import notice
from compass_jax.rewards.faults import VerifierError
from compass_jax.rollout.remote.pool import Pool
from compass_jax.runs.machine import record_machine
from compass_jax.runs.profile import check_steps, traced
from compass_jax.runs.rundir import RunDir
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.ahead import compile_first, every_program, run_empty
from compass_jax.training.building import Building, OpenTransport
from compass_jax.training.episodes import check_episodes, open_episodes
from compass_jax.training.evaluations import Evaluations
from compass_jax.training.hand_over import transport_of
from compass_jax.training.header import describe_model, header, rl_method, stage_line
from compass_jax.training.hooks.base import HookFailed, StepRecord
from compass_jax.training.hooks.guard import Guard
from compass_jax.training.hooks.notices import Notices
from compass_jax.training.idle_settings import idle_stages
from compass_jax.training.loop import RLTrainer
from compass_jax.training.memory import memory_line
from compass_jax.training.optim import check_optimizer
from compass_jax.training.own_engine import OpenEngine
from compass_jax.training.rate_notices import moved_schedule
from compass_jax.training.session import (
    RunState,
    carry_tokenizer,
    code_changes,
    open_run,
    stall_s,
    with_date,
)
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
    open_engine: OpenEngine | None = None,
    transport: OpenTransport = transport_of,
) -> JsonObject:
    """Trains until `rl.steps`, resuming the run directory; returns the last metrics and the
    evaluations. The arguments are those of `rl_steps`.
    """
    options = lost_log, strict, enough, profile_steps
    steps = rl_steps(config, *options, open_engine, transport)
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
    open_engine: OpenEngine | None = None,
    transport: OpenTransport = transport_of,
) -> Steps:
    """Trains like `run_rl` and yields each step after it is logged; its result is the
    generator's return value. Closing the generator early saves a checkpoint.

    Args:
        lost_log: whether to continue if the logs lack lines that the checkpoint counts.
        strict: whether to end, with the state saved and exit status STRICT, if rewards carry no
            information.
        enough: whether to end before the next step, as if `rl.steps` were reached.
        profile_steps: the first and the last step of a profiler trace; empty: none.
        open_engine, transport: an engine and a weight transport from outside (Building).
    """
    config.validate_for_rl()
    check_steps(profile_steps)
    check_optimizer(config.rl.optim, config.rl.total_updates, "rl.optim")
    data = with_date(config.data, config.model.vocab_size, config.directory)
    config = replace(config, data=data)
    check_episodes(data, config.rollout, config.rl, config.samplers.acts)
    longest = largest_stage(config.rl, config.rollout)[1]
    of_episodes = data, longest, config.model.vocab_size, config.seed, config.directory
    pool = Pool(config.samplers) if config.samplers.acts else None
    exchange = all_gather_bytes if pool is None else pool.exchange
    with (
        pool or contextlib.nullcontext(),
        open_scorer(config.rewards, data, config.directory, exchange) as scorer,
        open_run(RunDir(config, code_of(data))) as run,
        open_episodes(*of_episodes) as episodes,
        RunState() as run_state,
        Telemetry(
            config.directory,
            config.rl.steps,
            "rl",
            writes=is_main_process(),
            check=run.check,
            lost_log=lost_log,
            trackers=config.trackers,
            settings=to_plain(config),
            stall_s=stall_s(config.log),
            part_steps=config.log.part_steps,
        ) as telemetry,
    ):
        if pool is not None:
            pool.note, pool.stopped = telemetry.note, run_state.interrupted_here
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
            shared = scorer, run_state, telemetry, printed, pool, transport, open_engine
            start = Building(config, *shared, episodes)
            result = yield from _run_stage(start, run_state, strict, printed, enough, profile_steps)
        if pool is not None and not result["stopped"]:
            pool.finish()
        return result | {"status": run_state.status}


def _run_stage(
    start: Building,
    run_state: RunState,
    strict: bool,
    printed: set[str],
    enough: Callable[[], bool],
    profile_steps: tuple[int, ...],
) -> Steps:
    """Trains to the end of the run's current stage. Its trainer, which `start` makes with its
    arrays on the devices, is released afterwards.
    """
    trainer = start.trainer()
    config, telemetry = trainer.config, trainer.telemetry
    if strict:
        stop = partial(run_state.interrupt, "by --strict", STRICT)
        trainer.hooks.find(Notices).end = stop
    if "header" not in printed:
        printed.add("header")
        for line in _header(trainer):
            telemetry.note(line)
        carry_tokenizer(config.directory, config.data.tokenizer)
    if process_index_and_count()[1] > 1 and trainer.done_steps < trainer.stage.end:
        _run_first(trainer)
    if trainer.stage.total:
        telemetry.note(stage_line(trainer.rl, config.rollout, trainer.stage))
    steps = traced(
        trainer.steps(),
        lambda step: step.number,
        trainer.done_steps,
        profile_steps,
        config.directory,
        telemetry.note,
    )
    with trainer.parts.saved.checkpoints, contextlib.closing(steps):
        try:
            return (yield from _run_steps(trainer, steps, enough))
        except (VerifierError, HookFailed):
            # Saved, so that the same command continues after the cause is mended.
            trainer.save()
            raise
        except ComponentFailed as error:
            raise ComponentFailed(
                f"step {trainer.done_steps + 1}: {error}; mend it, then run the same command again:"
                " it continues from the newest checkpoint"
            ) from error


def _run_first(trainer: RLTrainer) -> None:
    """Compiles the training's programs, and runs its gradients on a step without samples."""
    learner, rl = trainer.learner, trainer.rl
    learner.progress = progress = partial(trainer.telemetry.phase, "compiling")
    compile_first(every_program(learner), progress)
    absent = [Group(Prompt.of_tokens((0,), 0), (), ())] * rl.prompts_per_step
    columns = columns_of(rl, trainer.config.data.labelled)
    options = rl.capacity, rl.buckets[-1], rl.shaping.repetition_ngram, None, columns
    run_empty(learner, assemble(absent, *options, () if rl.held_groups else None))


def _header(trainer: RLTrainer) -> list[str]:
    """Returns the run's first lines."""
    config, prompts = trainer.config, trainer.parts.prompts
    lines = header(
        describe_model(config.model, sum(x.size for x in jax.tree.leaves(trainer.learner.params))),
        config.init_from,
        (config.mesh, config.rollout_mesh),
        config.directory,
        f"{len(prompts.stream):,} prompts, {in_words(prompts.evaluated, config.data)}",
        trainer.done_steps,
        config.rl.steps,
        memory_line(config.policy, config.rl),
        rl_method(config.rl, config.rollout),
    )
    return [config.name, *lines]


def _run_steps(
    trainer: RLTrainer, steps: Iterator[StepRecord], enough: Callable[[], bool]
) -> Steps:
    telemetry, run_state, rl = trainer.telemetry, trainer.run_state, trainer.rl
    saved, evaluations = trainer.done_steps, Evaluations(trainer)
    metrics: dict[str, float] = {}
    evaluations.at_start()
    trainer.hooks.find(Guard).refuse_parted(trainer.config.directory)
    _end_if(enough, run_state)
    began = time.perf_counter()
    for step in () if run_state.ended else steps:
        metrics = step.metrics
        try:
            metrics |= evaluations.between(step.number)
        except (VerifierError, HookFailed):
            # The step is complete: only its evaluation failed.
            telemetry.log(step.number, metrics)
            raise
        now = time.perf_counter()
        metrics["time/step_s"], began = now - began, now
        # Without the final evaluation, so that the line is the same wherever the run ends.
        telemetry.log(step.number, metrics, step.histograms)
        if step.failure is not None:
            raise step.failure
        if _fell_back(trainer):
            evaluations.forget()
        _end_if(enough, run_state)
        due = rl.save_every and step.number % rl.save_every == 0
        ends = step.number == trainer.stage.end or run_state.ended or run_state.interrupted
        if due or ends:
            trainer.save(wait=False)
            saved = step.number
        try:
            yield Step(step.number, {name: float(value) for name, value in metrics.items()})
        except GeneratorExit:
            if saved != step.number:
                trainer.save()
            telemetry.note(
                f"left after step {step.number}, which is saved; the same call continues"
            )
            raise
        began = time.perf_counter()
        if run_state.ended:
            break
    if trainer.interrupted:
        telemetry.note(
            f"stopped {run_state.why} in step {trainer.done_steps + 1}: the checkpoint has"
            f" {trainer.done_steps} whole steps and {trainer.buffer.finished} finished rollouts of"
            " the next; the same command continues"
        )
        return {"steps": trainer.done_steps, "stopped": True, **metrics}
    if trainer.done_steps != saved:
        trainer.save(wait=False)
    if run_state.ended or trainer.done_steps >= rl.steps:
        result = evaluations.last()
        return {"steps": trainer.done_steps, "stopped": False, "evaluation": result, **metrics}
    if run_state.interrupted:
        telemetry.note(
            f"stopped {run_state.why} after step {trainer.done_steps}; the same command continues"
        )
    return {"steps": trainer.done_steps, "stopped": run_state.interrupted, **metrics}


def _end_if(enough: Callable[[], bool], run_state: RunState) -> None:
    """Ends the run if its caller has enough."""
    if enough():
        run_state.end("by its caller")


def _fell_back(trainer: RLTrainer) -> bool:
    """Does what rl.guard.action says where reward and gold label parted in the last step; returns
    whether the run ends with an earlier policy.
    """
    guard = trainer.hooks.find(Guard)
    if guard.parted != trainer.done_steps:
        return False
    if guard.config.action == "stop":
        trainer.save()
        guard.refuse_parted(trainer.config.directory)
    if guard.config.action != "restore":
        return False
    step, guard.ended = trainer.fall_back(guard.last_sound), True
    trainer.run_state.end("by rl.guard")
    trainer.telemetry.note(
        f"rl.guard.action = 'restore': the run ends after step {trainer.done_steps} with the"
        f" policy of step {step}"
    )
    return True
