"""A whole RL run: its rooms are opened, it trains, evaluates and saves, and ends where it can."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from compass_jax.config import RunConfig
from compass_jax.config.io import to_plain
from compass_jax.distributed import is_main_process
from compass_jax.errors import STRICT
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluated import answer_rows, write_evaluation
from compass_jax.records import Group
from compass_jax.rewards.detect import notice
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.shared import AnyScorer
from compass_jax.runs.rundir import EVALUATION, EVALUATION_FOLDER, write_atomically
from compass_jax.runs.telemetry import Telemetry, plain_numbers
from compass_jax.session import (
    StopSignal,
    carry_tokenizer,
    code_changes,
    open_run,
    open_scorer,
    why_stopped,
)
from compass_jax.training.header import stage_line
from compass_jax.training.loop import RLTrainer
from compass_jax.training.notices import idle_stages


def run_rl(config: RunConfig, lost_log: bool = False, strict: bool = False) -> dict[str, Any]:
    """Trains until `rl.steps`, resuming what the run directory holds; returns the last metrics and
    the evaluations.

    Args:
        lost_log: go on where lines of the logs are missing that the checkpoint counts.
        strict: end, with the state saved and exit status STRICT, where rewards say nothing.
    """
    config.validate_for_rl()
    with (
        open_scorer(config, config.directory) as scorer,
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
        telemetry.phase("loading")
        telemetry.note(notice(config.rewards.sandbox))
        for line in [*code_changes(run), *idle_stages(config)]:
            telemetry.note(line)
        said: set[str] = set()
        found: dict[str, Any] = {"stopped": False, "steps": -1}
        # a stage ends in a checkpoint, and the next one begins like a run that goes on from it
        while not found["stopped"] and found["steps"] < config.rl.steps:
            found = _run_stage(config, scorer, stop, telemetry, strict, said)
        return found | {"status": stop.status}


def _run_stage(
    config: RunConfig,
    scorer: AnyScorer,
    stop: StopSignal,
    telemetry: Telemetry,
    strict: bool,
    said: set[str],
) -> dict[str, Any]:
    """Trains to the end of the stage in which the run is. Its trainer is gone afterwards, and with
    it what it had on the devices.
    """
    trainer = RLTrainer(config, scorer, stop, telemetry, said)
    if strict:
        trainer.notices.end = partial(stop.end, STRICT)
    if "header" not in said:
        said.add("header")
        for line in trainer.header():
            telemetry.note(line)
        carry_tokenizer(config)
    if trainer.stage.total:
        telemetry.note(stage_line(trainer.config, trainer.stage))
    return _run(trainer, config, telemetry, stop)


def _run(
    trainer: RLTrainer, config: RunConfig, telemetry: Telemetry, stop: StopSignal
) -> dict[str, Any]:
    try:
        return _run_steps(trainer, config, telemetry, stop)
    except VerifierError:  # once it is mended the same command goes on
        trainer.save()
        raise


def _run_steps(
    trainer: RLTrainer, config: RunConfig, telemetry: Telemetry, stop: StopSignal
) -> dict[str, Any]:
    saved = trainer.done_steps
    last: dict[str, float] = {}
    for number, last in trainer.steps():
        every = config.rl.eval_every
        due = number in config.evaluation.at or (every and number % every == 0)
        if trainer.evaluated and due:
            try:
                found = trainer.evaluate()
            except VerifierError:
                telemetry.log(number, last)
                raise
            telemetry.note(f"step {number}, {found.line()}")
            last |= found.metrics()
        # the same line wherever the run ends: the final evaluation is not in it
        telemetry.log(number, last)
        if (
            number == trainer.stage.end
            or stop.requested
            or (config.rl.save_every and number % config.rl.save_every == 0)
        ):
            trainer.save()
            saved = number
    if trainer.interrupted:
        telemetry.note(
            f"stopped {why_stopped(stop)} in step {trainer.done_steps + 1}: the checkpoint has"
            f" {trainer.done_steps} whole steps and {trainer.buffer.finished} finished rollouts of"
            " the next; the same command continues"
        )
        return {"steps": trainer.done_steps, "stopped": True, **last}
    if trainer.done_steps != saved:
        trainer.save()
    if stop.requested and trainer.done_steps < config.rl.steps:
        telemetry.note(
            f"stopped {why_stopped(stop)} after step {trainer.done_steps}; the same command"
            " continues"
        )
        return {"steps": trainer.done_steps, "stopped": True, **last}
    if trainer.done_steps < config.rl.steps:
        return {"steps": trainer.done_steps, "stopped": False, **last}
    result = _last_evaluation(trainer, telemetry) if trainer.evaluated else None
    return {"steps": trainer.done_steps, "stopped": False, "evaluation": result, **last}


def _last_evaluation(trainer: RLTrainer, telemetry: Telemetry) -> Evaluation:
    """That of the trained policy, by the settings of the last stage. The run directory keeps its
    metrics, and its answers for `compass show` and `compass compare`.
    """
    config, rows = trainer.config, list[dict[str, Any]]()

    def keep(name: str, groups: list[Group]) -> None:
        rows.extend(answer_rows(name, groups, trainer.tokenizer.decode))

    found = trainer.evaluate(keep)
    telemetry.note(found.line())
    if is_main_process():
        directory, step = Path(config.directory), trainer.done_steps
        said = {"step": step, "metrics": plain_numbers(found.metrics())}
        write_atomically(directory / EVALUATION, json.dumps(said, indent=2) + "\n")
        folder = directory / EVALUATION_FOLDER
        folder.mkdir(exist_ok=True)
        write_evaluation(folder, found, rows, config, f"{directory}, step {step}")
    return found
