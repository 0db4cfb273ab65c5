"""An object out of a person's own Python file or module, named `file.py:NAME` or `module:NAME`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from compass_jax.config import ConfigError
from compass_jax.errors import of_file


def load(reference: str, setting: str) -> Any:
    """The object that `reference` names: `path/file.py:NAME` (from the working directory) or
    `module:NAME`. `setting` begins every message.

    Raises ConfigError where the reference has another form, there is no such file, module or name,
    or the file raises; it names the file and its line.
    """
    place, colon, name = reference.rpartition(":")
    if not (colon and place and name.isidentifier()):
        raise ConfigError(
            f"{setting} = {reference[:200]!r}: expected path/file.py:NAME or module:NAME"
        )
    module = _file(Path(place), setting) if place.endswith(".py") else _module(place, setting)
    if not hasattr(module, name):
        raise ConfigError(f"{setting} = {reference!r}: {place} has no {name}")
    return getattr(module, name)


def _file(path: Path, setting: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{setting}: there is no file {path} (from {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"compass_own_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    with of_file(path):
        spec.loader.exec_module(module)
    return module


def _module(name: str, setting: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        first = str(error).split("\n")[0][:300]
        raise ConfigError(
            f"{setting}: {name} cannot be imported: {type(error).__name__}: {first}"
        ) from error
