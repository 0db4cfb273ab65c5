"""Runs a pipeline's stages, each in its own process, so that memory does not add up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from rich.console import Console

from compass_jax.apps.pipeline.results import report, results, results_table, status_table
from compass_jax.apps.pipeline.stages import DONE, Pipeline, Stage
from compass_jax.base.errors import CompassError
from compass_jax.config import ConfigError
from compass_jax.devices.processes.start import import_path, module_command
from compass_jax.runs.rundir import FolderLock
from compass_jax.runs.signals import SignalHandler

Do = Callable[[Stage], int]


class StageEnded(CompassError, RuntimeError):
    """The system ended the process of a stage; the message names the signal."""


class OwnProcess(SignalHandler):
    """Runs a stage in a child process, which ends with this one, and forwards SIGINT and SIGTERM to
    it.

    The child has a separate session: otherwise Ctrl-C in a terminal would reach it twice, and a
    second signal ends a run without saving.
    """

    def __init__(self, cache: str = ""):
        self.cache = cache
        self.asked = 0  # number of the last signal, or 0
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self, stage: Stage) -> int:
        """Returns the exit status of the stage's process. Raises StageEnded if it was killed."""
        arguments = [str(stage.folder), str(os.getpid()), self.cache]
        command = module_command(f"{__package__}", *arguments)
        environment = os.environ | {"PYTHONPATH": import_path()}
        sys.stdout.flush()
        self._child = subprocess.Popen(command, env=environment, start_new_session=True)
        if self.asked:
            self._child.send_signal(self.asked)
        status = self._child.wait()
        self._child = None
        if self.asked:
            return 128 + self.asked
        if status < 0:
            raise StageEnded(
                f"stage {stage.name} was ended by {signal.Signals(-status).name}, by the system or"
                " by somebody (was there too little memory?); the same command goes on"
            )
        return status

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = number
        if self._child is not None:
            self._child.send_signal(number)


def run_pipeline(
    pipeline: Pipeline, redo: Sequence[str] = (), do: Do | None = None, cache: str = ""
) -> int:
    """Runs the unfinished stages and writes the table of all; returns the exit status.

    Args:
        redo: stages to run again, together with the stages that depend on them; their folders are
            renamed.
        do: runs a stage; None: `OwnProcess`.
        cache: the folder for compiled programs.

    Raises ConfigError for a stale stage that is not in `redo`.
    """
    pipeline.check_files()
    console = Console(soft_wrap=True, emoji=False, highlight=False)
    with FolderLock(pipeline.folder):
        for name in redo:
            for old, new in pipeline.set_aside(name):
                console.print(f"{old} is now {new}: remove it when nobody needs it", markup=False)
        refuse_stale(pipeline)
        if do is not None:
            status = _stages(pipeline, do, console)
        else:
            with OwnProcess(cache) as process:
                status = _stages(pipeline, process, console)
        if status == 0:
            report(pipeline, console)
    return status


def describe_pipeline(pipeline: Pipeline, status: bool) -> None:
    """Prints the progress of each stage and the results so far (`status`), or checks everything and
    prints the inputs and outputs of each stage.
    """
    console = Console(soft_wrap=True, emoji=False, highlight=False)
    if status:
        console.print(status_table(pipeline))
        if accuracies := results(pipeline):
            console.print(results_table(accuracies))
        return
    pipeline.check_files()
    stale = pipeline.stale()
    for number, stage in enumerate(pipeline.stages, 1):
        sources = ", ".join(x.name for x in pipeline.sources(stage)) or "nothing"
        reason = stale.get(stage.name)
        state = f"stale ({reason})" if reason else pipeline.state(stage)
        line = f"{number} {stage.name}: {stage.kind} of {sources} -> {stage.output}; {state}"
        console.print(line, markup=False)


def refuse_stale(pipeline: Pipeline) -> None:
    """Raises ConfigError if a stage is stale."""
    stale = pipeline.stale()
    if not stale:
        return
    first = next(iter(stale))
    lines = "".join(f"  {name}: {reason}\n" for name, reason in stale.items())
    raise ConfigError(
        f"{pipeline.folder}: stages are stale, they began with other settings or files:\n{lines}"
        f"Put these back, or add --redo {first}: it renames the folders of {first} and of what"
        " takes from it, and runs them again"
    )


def _stages(pipeline: Pipeline, do: Do, console: Console) -> int:
    """Runs the unfinished stages; returns the status of the first that failed or stopped."""
    stages = pipeline.stages
    for number, stage in enumerate(stages, 1):
        if pipeline.state(stage) == DONE:
            continue
        console.rule(f"{number}/{len(stages)} {stage.name}: {stage.kind}")
        pipeline.begin(stage)
        started = time.monotonic()
        status = do(stage)
        signal_number = getattr(do, "asked", 0)
        if status == 0:
            pipeline.end(stage, time.monotonic() - started)
        if status or signal_number:
            return status or 128 + signal_number
    console.print(status_table(pipeline))
    return 0
