"""`compass eval --follow`: evaluates the checkpoints of a run that is still training, in a separate
process on other devices, so that training does not wait.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

from compass_jax.aliases import JsonObject
from compass_jax.config import ConfigError, EvalRunConfig
from compass_jax.config.io import read_config
from compass_jax.errors import CompassError
from compass_jax.experience.evaluate import Evaluator
from compass_jax.runs.rundir import SUMMARY, FolderLock, write_atomically
from compass_jax.runs.telemetry import plain_numbers
from compass_jax.untrusted import read_text
from compass_jax.weights import checkpoint, sound

METRICS = "metrics.jsonl"
STAGE = "eval"  # stage of the lines in metrics.jsonl
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

    Raises ConfigError if `run` is not a run directory (any more), or if `out` is one or holds other
    metrics; and the errors of an evaluation.
    """
    read_config(run)
    if (Path(out) / "config.json").exists() or (Path(out) / "checkpoints").exists():
        raise ConfigError(f"--out {out} is the directory of a run or a model: name another folder")
    evaluator, warning = Evaluator(config), ""
    with FolderLock(out) as lock:
        rows = read_rows(lock.path)
        while True:
            run_config, checkpoints = read_config(run), sound.steps(Path(run))
            folders = {step: lock.path / f"step_{step:08d}" for step in checkpoints}
            done = {step for step in rows if (lock.path / f"step_{step:08d}" / SUMMARY).exists()}
            step = next((step for step in folders if step not in done), None)
            if step is None:
                ends = run_config.rl.steps, run_config.sft.steps
                if checkpoints and max(checkpoints) >= _last_step(run, *ends):
                    return warning
                which = "a later" if checkpoints else "the first"
                evaluator.say_once(f"waiting for {which} checkpoint")
                pause()
                continue
            try:
                evaluation = evaluator(str(checkpoints[step]), str(folders[step]))
            except CompassError:
                if not _is_removed(checkpoints[step]):
                    raise
                notice = f"the checkpoint of step {step} went before it was read"
                evaluator.say_once(f"{notice}: the training keeps few (keep_checkpoints)")
                continue
            metrics = plain_numbers(evaluation.metrics())
            rows[step] = {"stage": STAGE, "step": step, "metrics": metrics}
            lines = [json.dumps(rows[n]) + "\n" for n in sorted(rows)]
            write_atomically(lock.path / METRICS, "".join(lines))
            evaluator.say_once(f"step {step}, {evaluation.line()}")
            warning = evaluation.warning
            if strict and warning:
                return warning


def _is_removed(checkpoint: Path, tries: int = 50) -> bool:
    """Returns whether the training has removed a checkpoint, or does so within the next seconds:
    its files are deleted one by one.
    """
    while checkpoint.is_dir() and tries:
        time.sleep(0.1)
        tries -= 1
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
