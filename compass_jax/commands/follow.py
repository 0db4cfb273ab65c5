"""`compass eval --follow`: the evaluations of a run that is still training, in a process and on
devices of their own, so that training does not wait for them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError, RunConfig
from compass_jax.errors import CompassError
from compass_jax.experience.accuracy import Evaluation
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.rundir import SUMMARY, FolderLock, read_config, write_atomically
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.untrusted import read_text
from compass_jax.weights import checkpoint, sound

METRICS = "metrics.jsonl"
STAGE = "eval"  # of its lines
GONE = "{} went before it was read: the training keeps few (keep_checkpoints)"
PAUSE_S = 2.0  # between two looks for a new checkpoint


def follow(
    config: RunConfig,
    run: str,
    out: str,
    *,
    pause: Callable[[], None] = lambda: time.sleep(PAUSE_S),
    strict: bool = False,
) -> str:
    """Evaluates every checkpoint of `run`, the oldest first, until that of its last step; what the
    last evaluation warned of.

    OUT/step_00000010/ gets what `compass eval --out` writes of step 10, and OUT/metrics.jsonl a
    line for each step, with the metrics that the run itself would have logged (but for the settings
    of a stage, `rl.stages`). Steps that OUT has are not evaluated again. A checkpoint that the
    training removes (`keep_checkpoints`) before it is read is told and left out.

    Args:
        config: what the answers are sampled and judged by.
        run: the directory of a run, in which nothing is written.
        out: the folder of the evaluations.
        pause: waits before the next look.
        strict: end at the first evaluation that warns.

    Raises ConfigError where `run` is no run's directory, or `out` is one or holds other metrics,
    RunGone where `run` is removed meanwhile, and what an evaluation raises.
    """
    read_config(run)
    if (Path(out) / "config.json").exists() or (Path(out) / "checkpoints").exists():
        raise ConfigError(f"--out {out} is the directory of a run or a model: name another folder")
    try:
        return _follow(config, run, out, pause, strict)
    except (CompassError, OSError):
        require_there(run)  # where it is gone, that is the cause
        raise


def _follow(config: RunConfig, run: str, out: str, pause: Callable[[], None], strict: bool) -> str:
    evaluator, told = Evaluator(config), ""
    with FolderLock(out) as lock:
        done = Followed(lock.path)
        before = max(done.steps, default=0)
        while True:
            require_there(run)
            steps = sound.steps(Path(run))
            left = [step for step in steps if step not in done.steps]
            if not left:
                if steps and max(steps) >= ends_and_saves(run)[0]:
                    return told
                evaluator.say_once(
                    f"waiting for {'the first' if not steps else 'a later'} checkpoint"
                )
                pause()
                continue
            step = left[0]
            if saved_between(run, before, step):
                evaluator.say_once(GONE.format(f"what was saved between steps {before} and {step}"))
            before = max(before, step)
            try:
                found = evaluator(str(steps[step]), str(done.folder(step)))
            except CompassError:
                require_there(run)
                if not _removed(steps[step]):
                    raise
                evaluator.say_once(GONE.format(f"the checkpoint of step {step}"))
                continue
            done.add(step, found)
            evaluator.say_once(f"step {step}, {found.line()}")
            told = found.warning
            if strict and told:
                return told


def _removed(checkpoint: Path, tries: int = 50) -> bool:
    """Returns whether the training removed a checkpoint, or does so within the next seconds: its
    files go one by one.
    """
    while checkpoint.is_dir() and tries:
        time.sleep(0.1)
        tries -= 1
    return not checkpoint.is_dir()


class RunGone(CompassError, RuntimeError):
    """The directory of the run that is followed was removed."""


def require_there(run: str) -> None:
    """Raises RunGone where the run's directory, or the configuration in it, is no longer there."""
    if not (Path(run) / "config.json").is_file():
        what = "config.json is gone from it" if Path(run).is_dir() else "the directory is gone"
        raise RunGone(
            f"{run}: {what}, and no further checkpoint comes; the evaluations of those that came"
            " are in --out"
        )


class Followed:
    """The evaluations in a folder. ConfigError where its metrics.jsonl is not that of evaluations:
    it would be written over.
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
        """The steps that have been evaluated."""
        return {step for step in self.rows if (self.folder(step) / SUMMARY).exists()}

    def folder(self, step: int) -> Path:
        """Returns the folder of the answers of one step."""
        return self.path / f"step_{step:08d}"

    def add(self, step: int, found: Evaluation) -> None:
        """Remembers an evaluation whose answers are in its folder."""
        self.rows[step] = {"stage": STAGE, "step": step, "metrics": plain_numbers(found.metrics())}
        lines = [json.dumps(self.rows[step]) + "\n" for step in sorted(self.rows)]
        write_atomically(self.path / METRICS, "".join(lines))


def ends_and_saves(run: str) -> tuple[int, int]:
    """The step after which the run ends, and how often it saves, by its configuration of today."""
    config = read_config(run)
    rl = checkpoint.read_meta(run).get("kind") == "rl"
    part = config.rl if rl else config.sft
    return part.steps, part.save_every


def saved_between(run: str, before: int, after: int) -> bool:
    """Whether the run has saved between two of its steps."""
    every = ends_and_saves(run)[1]
    return every > 0 and (before // every + 1) * every < after
