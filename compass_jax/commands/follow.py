"""`compass eval --follow`: evaluates the checkpoints of a run that is still training, in a separate
process on other devices, so that training does not wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError, EvalRunConfig
from compass_jax.config.io import read_config
from compass_jax.errors import CompassError
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.rundir import SUMMARY, FolderLock, write_atomically
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.untrusted import read_text
from compass_jax.weights import checkpoint, sound

METRICS = "metrics.jsonl"
STAGE = "eval"  # stage of the lines in metrics.jsonl
GONE = "{} went before it was read: the training keeps few (keep_checkpoints)"
PAUSE_S = 2.0  # interval between checks for a new checkpoint


def follow(
    config: EvalRunConfig,
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
    skipped.

    Args:
        config: settings of the sampling and of the verifiers.
        run: directory of a run; it is only read.
        out: folder of the evaluations.
        pause: waits before the next look for checkpoints.
        strict: end at the first evaluation that warns.

    Raises ConfigError if `run` is not a run directory, or if `out` is one or holds other metrics;
    RunGone if `run` is removed meanwhile; and the errors of an evaluation.
    """
    read_config(run)
    if (Path(out) / "config.json").exists() or (Path(out) / "checkpoints").exists():
        raise ConfigError(f"--out {out} is the directory of a run or a model: name another folder")
    try:
        return _follow(config, run, out, pause, strict)
    except (CompassError, OSError):
        require_there(run)  # if the run is gone, report that as the cause
        raise


def _follow(
    config: EvalRunConfig, run: str, out: str, pause: Callable[[], None], strict: bool
) -> str:
    evaluator, warning = Evaluator(config), ""
    with FolderLock(out) as lock:
        done = Followed(lock.path)
        before = max(done.steps, default=0)
        while True:
            require_there(run)
            steps = sound.steps(Path(run))
            remaining = [step for step in steps if step not in done.steps]
            if not remaining:
                if steps and max(steps) >= ends_and_saves(run)[0]:
                    return warning
                evaluator.say_once(
                    f"waiting for {'the first' if not steps else 'a later'} checkpoint"
                )
                pause()
                continue
            step = remaining[0]
            if saved_between(run, before, step):
                evaluator.say_once(GONE.format(f"what was saved between steps {before} and {step}"))
            before = max(before, step)
            try:
                evaluation = evaluator(str(steps[step]), str(done.folder(step)))
            except CompassError:
                require_there(run)
                if not _removed(steps[step]):
                    raise
                evaluator.say_once(GONE.format(f"the checkpoint of step {step}"))
                continue
            done.add(step, evaluation)
            evaluator.say_once(f"step {step}, {evaluation.line()}")
            warning = evaluation.warning
            if strict and warning:
                return warning


def _removed(checkpoint: Path, tries: int = 50) -> bool:
    """Returns whether the training has removed a checkpoint, or does so within the next seconds:
    its files are deleted one by one.
    """
    while checkpoint.is_dir() and tries:
        time.sleep(0.1)
        tries -= 1
    return not checkpoint.is_dir()


class RunGone(CompassError, RuntimeError):
    """The directory of the followed run was removed."""


def require_there(run: str) -> None:
    """Raises RunGone if the run's directory, or the configuration in it, no longer exists."""
    if not (Path(run) / "config.json").is_file():
        what = "config.json is gone from it" if Path(run).is_dir() else "the directory is gone"
        raise RunGone(
            f"{run}: {what}, and no further checkpoint comes; the evaluations of those that came"
            " are in --out"
        )


class Followed:
    """The evaluations in a folder.

    Raises ConfigError if its metrics.jsonl has other metrics, which would be overwritten.
    """

    def __init__(self, folder: Path):
        self.path, self.rows = folder, dict[int, dict[str, Any]]()
        file = folder / METRICS
        lines = read_text(file, error=ConfigError).splitlines() if file.exists() else ()
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                if row["stage"] != STAGE:
                    raise ValueError(row["stage"])
                self.rows[int(row["step"])] = row
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigError(
                    f"{file}:{number} is no line of --follow: name another folder for --out, or"
                    " remove the file, and every checkpoint is evaluated again"
                ) from error

    @property
    def steps(self) -> set[int]:
        """The evaluated steps."""
        return {step for step in self.rows if (self.folder(step) / SUMMARY).exists()}

    def folder(self, step: int) -> Path:
        """Returns the folder of the answers of one step."""
        return self.path / f"step_{step:08d}"

    def add(self, step: int, evaluation: Evaluation) -> None:
        """Adds an evaluation whose answers are in its folder."""
        self.rows[step] = {
            "stage": STAGE,
            "step": step,
            "metrics": plain_numbers(evaluation.metrics()),
        }
        lines = [json.dumps(self.rows[step]) + "\n" for step in sorted(self.rows)]
        write_atomically(self.path / METRICS, "".join(lines))


def ends_and_saves(run: str) -> tuple[int, int]:
    """Returns the last step of the run and its checkpoint interval in steps, by its current
    configuration.
    """
    config = read_config(run)
    rl = checkpoint.read_meta(run).get("kind") == "rl"
    part = config.rl if rl else config.sft
    return part.steps, part.save_every


def saved_between(run: str, before: int, after: int) -> bool:
    """Returns whether the run has saved a checkpoint between two of its steps."""
    every = ends_and_saves(run)[1]
    return every > 0 and (before // every + 1) * every < after
