"""Check that programs written by the model cannot read the files with the answers."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence

from compass_jax.config import ConfigError, DataConfig, FileSource, TaskSource
from compass_jax.config.named import file_of
from compass_jax.rewards.checks import sources_with
from compass_jax.verifiers.program_files import package_files, python_files, readable_at


def refuse_readable_sources(data: DataConfig, packages: Sequence[str]) -> None:
    """Raises ConfigError if the model's programs can read the file of a data source.

    packages: the packages that programs may import.
    """
    if not sources_with(data, lambda kind: kind.runs_programs):
        return
    python = python_files()
    allowed = [*python.readable, *package_files(packages)[1]]
    for key, path in _files(data):
        if where := readable_at(path, allowed):
            raise ConfigError(
                f"{key} = {path!r}: the programs that are judged can read {where}, and with it the"
                " answers; move the file out of it"
            )


def _files(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yields (setting, path) for the files of each source."""
    for key, source in data.keyed_sources():
        if isinstance(source, FileSource):
            for path in glob.glob(source.path) or [source.path]:
                yield f"{key}.path", path
                inside = os.listdir(path) if os.path.isdir(path) else ()
                yield from ((f"{key}.path", os.path.join(path, name)) for name in inside)
        elif isinstance(source, TaskSource) and (file := file_of(source.task)):
            yield f"{key}.task", str(file)
