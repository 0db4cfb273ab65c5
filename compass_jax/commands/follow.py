"""`compass eval --follow`: evaluates the checkpoints of a run that is still training, in a separate
process on other devices, so that training does not wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.base.untrusted import read_text
from compass_jax.config import ConfigError
from compass_jax.config.io import read_config
from compass_jax.devices.distributed import (
    LOST,
    DistributedError,
    from_main_process,
    in_main_process,
    process_index_and_count,
)
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.rundir import SUMMARY, FolderLock, write_atomically
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.weights import checkpoint, sound

METRICS = "metrics.jsonl"
STAGE = "eval"  # stage of the lines in metrics.jsonl
PAUSE_S = 2.0  # interval between checks for a new checkpoint


class CheckpointRemoved(DistributedError):
    """A checkpoint was removed while several processes read it; the same command continues."""

    exit_status = LOST


class _Next(NamedTuple):
    """The next action: wait for a checkpoint, evaluate one, or, with empty fields, end."""

    waits_for: str = ""
    step: int = 0
    path: str = ""  # of the checkpoint
    folder: str = ""  # of its evaluation


class _Followed:
    """A run, and the folder of its evaluations, which is locked until `stack` closes. The errors
    are those of `follow`.
    """

    def __init__(self, run: str, out: str, stack: ExitStack):
        read_config(run)
        if (Path(out) / "config.json").exists() or (Path(out) / "checkpoints").exists():
            raise ConfigError(
                f"--out {out} is the directory of a run or a model: name another folder"
            )
        self.run, self.folder = run, stack.enter_context(FolderLock(out)).path
        self.rows = read_rows(self.folder)

    def next(self) -> _Next:
        """Returns the oldest checkpoint without an evaluation, or whether one will come."""
        config, checkpoints = read_config(self.run), sound.steps(Path(self.run))
        for step, path in checkpoints.items():
            folder = self._folder(step)
            if step not in self.rows or not (folder / SUMMARY).exists():
                return _Next("", step, str(path), str(folder))
        ends = config.rl.steps, config.sft.steps
        if checkpoints and max(checkpoints) >= _last_step(self.run, *ends):
            return _Next()
        return _Next("a later" if checkpoints else "the first")

    def add(self, step: int, evaluation: Evaluation) -> None:
        """Writes the line of a checkpoint's evaluation."""
        metrics = plain_numbers(evaluation.metrics())
        self.rows[step] = {"stage": STAGE, "step": step, "metrics": metrics}
        lines = [json.dumps(self.rows[n]) + "\n" for n in sorted(self.rows)]
        write_atomically(self.folder / METRICS, "".join(lines))

    def _folder(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"


def follow(
    evaluator: Evaluator,
    run: str,
    out: str,
    *,
    pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
    strict: bool = False,
) -> str:
    """Evaluates every checkpoint of `run`, the oldest first, up to that of its last step. Returns
    the warning of the last evaluation.

    OUT/step_00000010/ gets the files of `compass eval --out` for step 10. OUT/metrics.jsonl gets a
    line for each step with the metrics that the run itself would have logged, except that a stage's
    settings (`rl.stages`) do not apply. Steps that OUT already has are not evaluated again. A
    checkpoint that the training removes (`keep_checkpoints`) before it is read is reported and
    skipped; with several processes, of which some may have read it, it ends them, and the same
    command continues. Process 0 looks for the checkpoints.

    Args:
        evaluator: evaluates a checkpoint.
        run: directory of a run; it is only read.
        out: folder of the evaluations.
        pause: waits before the next look for checkpoints.
        strict: end at the first evaluation that warns.

    Raises ConfigError if `run` is not a run directory (any more), or if `out` is one or holds other
    metrics; and the errors of an evaluation.
    """
    warning = ""
    with ExitStack() as stack:
        followed: list[_Followed] = []  # in process 0
        in_main_process(lambda: followed.append(_Followed(run, out, stack)))
        while True:
            fields = from_main_process(lambda: followed[0].next()._asdict())
            waits_for, step, path, folder = _Next(**fields)
            if waits_for:
                evaluator.say_once(f"waiting for {waits_for} checkpoint")
                pause()
                continue
            if not path:
                return warning
            try:
                evaluation = evaluator(path, folder)
            except CompassError as error:
                if not _is_removed(Path(path)):
                    raise
                notice = f"the checkpoint of step {step} went before it was read"
                if process_index_and_count()[1] > 1:
                    raise CheckpointRemoved(f"{notice}: the same command continues") from error
                evaluator.say_once(f"{notice}: the training keeps few (keep_checkpoints)")
                continue
            in_main_process(partial(_add, followed, step, evaluation))
            evaluator.say_once(f"step {step}, {evaluation.line()}")
            warning = evaluation.warning
            if strict and warning:
                return warning


def _add(followed: list[_Followed], step: int, evaluation: Evaluation) -> None:
    followed[0].add(step, evaluation)


def _is_removed(checkpoint: Path) -> bool:
    """Returns whether the training has removed a checkpoint, or does so within the next seconds:
    its files are deleted one by one.
    """
    for _ in range(50):
        if not checkpoint.is_dir():
            return True
        time.sleep(0.1)
    return not checkpoint.is_dir()


def read_rows(folder: Path) -> dict[int, JsonObject]:
    """Returns step -> line of the metrics.jsonl in a folder of evaluations. Raises ConfigError if
    it has other metrics, which would be overwritten.
    """
    file, rows = folder / METRICS, dict[int, JsonObject]()
    lines = read_text(file, error=ConfigError).splitlines() if file.exists() else ()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows[int(row["step"])] = {"stage": {STAGE: STAGE}[row["stage"]], **row}
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{file}:{number} is no line of --follow: name another folder for --out, or"
                " remove the file, and every checkpoint is evaluated again"
            ) from error
    return rows


def _last_step(run: str, rl_steps: int, sft_steps: int) -> int:
    return rl_steps if checkpoint.read_meta(run).get("kind") == "rl" else sft_steps
