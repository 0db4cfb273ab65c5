"""Setup that SFT and RL runs share: the run directory, the stop signal, the newest checkpoint, the
date and the tokenizer's files. With several processes, process 0 writes the files.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import jax

from compass_jax.config import DataConfig, LogConfig
from compass_jax.config.io import flatten, read_config
from compass_jax.data.templates import TODAY
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices import distributed
from compass_jax.devices.tpu_versions import check_versions
from compass_jax.rewards.checks import changed
from compass_jax.runs.rundir import RunDir, nothing_trained
from compass_jax.runs.signals import SignalHandler
from compass_jax.runs.trackers.opened import check_trackers
from compass_jax.weights import checkpoint, sound
from compass_jax.weights.carried import carry_files

STOPPING = (
    "\n{}: the run saves what it has and ends as soon as it can. A second signal ends it"
    "\nat once; what came after the last checkpoint is then done again.\n"
)


class RunState(SignalHandler):
    """Whether a run goes on, and why not: the only thing that ends a step.

    It is interrupted, as soon as what the run has can be saved, by SIGTERM, by SIGINT (Ctrl-C) and
    by `interrupt`; a second signal ends the process at once. It is ended, after the step and as if
    that were the last one, by `end`. `why` says who asked; `status` is the exit status of a run
    that was interrupted.
    """

    def __init__(self) -> None:
        self._interrupted = False
        self._agreed = False
        self.ended = False
        self.why = "on request"
        self.status = 128 + signal.SIGTERM

    @property
    def interrupted(self) -> bool:
        """Whether the run is to be saved and left.

        A request in any process stops all of them, so all processes must read this property at the
        same places.
        """
        self._agreed = self._agreed or distributed.any_process(self._interrupted)
        return self._agreed

    def interrupted_here(self) -> bool:
        """Returns whether this process was asked, without an exchange with others."""
        return self._interrupted

    def interrupt(self, why: str, status: int = 128 + signal.SIGTERM) -> None:
        """Asks for an end from which the same command continues, with this exit status."""
        self._interrupted, self.why, self.status = True, why, status

    def end(self, why: str) -> None:
        """Asks for an end after the step. All processes must ask in the same step."""
        self.ended, self.why = True, why

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            before = self._before.get(number)
            if callable(before) and before is not signal.default_int_handler:
                before(number, frame)  # the handler of a command; it does not return
            raise SystemExit(128 + number)
        self.interrupt("on request", 128 + number)
        with contextlib.suppress(OSError):
            os.write(2, STOPPING.format(signal.Signals(number).name).encode())


@contextlib.contextmanager
def open_run(run: RunDir) -> Iterator[RunDir]:
    """Opens a run directory for writing in process 0; an error there is raised in every process.

    Raises RunDirectoryGone if the directory was removed during the run, and ConfigError if the
    processes have different configurations.
    """
    model = run.config.model
    if jax.devices()[0].platform == "tpu" and model.moe_layers:
        check_versions(model.mixture.experts)
    distributed.require_equal_across_processes(
        flatten(run.config), "start the same command in every process"
    )

    def enter() -> None:
        check_trackers(run.config.trackers)
        run.__enter__()

    distributed.in_main_process(enter)
    try:
        yield run
        run.check()
    finally:
        run.__exit__()


def stall_s(log: LogConfig) -> int:
    """Returns the seconds that this process may stand still; 0: for ever, since no other one waits
    for it.
    """
    return log.stall_s if distributed.process_index_and_count()[1] > 1 else 0


def code_changes(run: RunDir) -> list[str]:
    """Returns warnings about user verifiers whose files changed since the last start."""
    before = run.before.rewards.code if run.before else ()
    return [f"warning: {text}" for text in changed(before, run.config.rewards.code)]


def newest_checkpoint(
    directory: str, tell: Callable[[str], None]
) -> checkpoint.ValidCheckpoint | None:
    """Returns the newest valid checkpoint of a run directory that is open for writing, or None if
    it has no checkpoint.

    Damaged checkpoints after the valid one are reported through `tell` and renamed to
    `damaged_...`, since the run will write those steps again. Raises CheckpointError if all
    checkpoints are damaged, and ConfigError if the processes see different ones.
    """
    newest = checkpoint.latest(directory)
    distributed.require_equal_across_processes(
        {f"the newest checkpoint in {directory}": newest}, distributed.SHARED_FOLDER
    )
    if newest is None:
        return None
    valid = checkpoint.find(directory, tell=tell)
    for renamed in sound.set_aside(valid) if distributed.is_main_process() else ():
        tell(f"it is kept as {renamed}: remove it when nobody needs it")
    return valid


def with_date(data: DataConfig, vocab_size: int, directory: str) -> DataConfig:
    """Returns `data` with the date of the first start of the run in `directory`, if its chat
    template reads the date: a resumed run renders the prompts of its first start.
    """
    path, date = Path(directory), ""
    reads = data.tokenizer and load_tokenizer(data, vocab_size).template_names(TODAY)
    if reads and not data.date:
        has_begun = (path / "config.json").is_file() and not nothing_trained(path)
        today = datetime.date.today().isoformat()
        date = read_config(path).data.date if has_begun else today
    # process 0's, as midnight may pass between the processes; all of them call this
    first_date = distributed.all_gather_bytes(date.encode())[0].decode()
    return replace(data, date=first_date) if date else data


def carry_tokenizer(directory: str, tokenizer: str) -> None:
    """Copies the tokenizer's files into the run directory, from which an export takes them."""
    if distributed.is_main_process():
        target = Path(directory) / "tokenizer"
        target.mkdir(exist_ok=True)
        carry_files(tokenizer, target)
