"""The functions behind `import compass_jax`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.commands.run import Run
from compass_jax.config.apply import apply, flat_settings
from compass_jax.devices.distributed import in_main_process, is_main_process
from compass_jax.rewards.checks import code_of
from compass_jax.rewards.written import FILE, NotWritable, source_with_names
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.report import run_report
from compass_jax.runs.rundir import FolderLock, RunDir, recorded_sizes, write_atomically
from compass_jax.runs.signals import prepare_streams
from compass_jax.training.from_files import rl_config, run_name
from compass_jax.training.rl import Step, rl_steps


def train(*arguments: Any) -> Run:
    """Trains like `compass train --model MODEL --data DATA ... --run-dir RUN_DIR`, with its report
    at the end. `compass_jax.train` is this function with defaults; arguments and errors are those
    of `steps`.
    """
    iterator = steps(*arguments)
    for _ in iterator:
        pass
    return Run(iterator.run.directory, iterator.result)


def steps(
    model: str,
    data: Sequence[str],
    reward: str | Callable[..., Any] | Mapping[str, float],
    evaluation: str,
    method: str,
    run_dir: str,
    settings: JsonMapping,
) -> Steps:
    """Returns the steps of a training. The source of a reward that no worker can import is then in
    the run's directory.

    Args:
        model: a Hugging Face folder or a checkpoint.
        data: files of prompts, folders of them, or tasks.
        reward: a verifier's name, a function, or weights of several names.
        evaluation: a file of held-out prompts; empty: a part of `data` is held out.
        method: one of presets.PRESETS.
        run_dir: the run's directory; an existing run is resumed.
        settings: values by their dotted names, such as {"rl.steps": 4}.

    Raises ConfigError, DataError, TokenizerError or WeightsError for arguments that cannot be used.
    """
    prepare_streams()
    settings = flat_settings(settings)
    run_dir = settings.pop("run_dir", run_dir)
    run_dir = run_dir or f"runs/{settings.get('name') or run_name(model, data)}/rl"
    name, source = reward_name(reward, run_dir) if callable(reward) else (reward, "")
    settings = {**settings, "run_dir": run_dir}
    config = rl_config(model, data, name, evaluation, method, settings)
    keep_programs()
    config = apply(config, recorded_sizes(Path(config.directory), settings))
    if source:
        RunDir(config.validate_for_rl(), code_of(config.data)).look()
        in_main_process(lambda: _write_reward(run_dir, source))
    return Steps(run_dir, rl_steps(config))


class Steps:
    """The steps of a run, as an iterator and a context manager. Leaving a loop over it, or calling
    `close`, saves a checkpoint and frees everything. `run` reads the metrics, samples and
    checkpoints written so far; `result` is that of `run_rl`, empty before the end.
    """

    def __init__(self, directory: str, training: Generator[Step, None, JsonObject]):
        """Creates the iterator over `rl_steps` of the run in a directory, which may not exist."""
        self.run = Run(directory, {})
        self.result: JsonObject = {}
        self._steps = self._iterate(training)

    def _iterate(self, training: Generator[Step, None, JsonObject]) -> Generator[Step]:
        self.result = yield from training
        if not self.result["stopped"] and is_main_process():
            run_report([self.run.directory])

    def __iter__(self) -> Iterator[Step]:
        # A new generator, which ends with the loop even if a variable still refers to this object.
        with self:
            yield from self._steps

    def __next__(self) -> Step:
        return next(self._steps)

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the run after its last complete step, with a checkpoint."""
        self._steps.close()


def _write_reward(run_dir: str, source: str) -> None:
    with FolderLock(run_dir) as folder:
        write_atomically(folder.path / FILE, source)


def reward_name(function: Callable[..., Any], run_dir: str) -> tuple[str, str]:
    """Returns the name by which workers import a function, and a source to be written into the
    run's directory. The source is empty for a function of an importable module, and for one of the
    main module whose source cannot be written, if the module is a file.

    Raises ConfigError for a function that workers cannot get.
    """
    name, place = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    module = sys.modules.get(place)
    is_at_top = getattr(module, name, None) is function
    if is_at_top and place != "__main__":
        return f"{place}:{name}", ""
    try:
        source = source_with_names(function)
    except NotWritable:
        file = getattr(module, "__file__", None)
        if is_at_top and file:
            return f"{file}:{name}", ""
        raise
    return f"{run_dir}/{FILE}:{inspect.unwrap(function).__name__}", source
