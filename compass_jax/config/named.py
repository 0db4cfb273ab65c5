"""Names of user code in settings: `module:name` or `path/to/file.py:name`.

A module is looked up on the import path of the process that started the run, then in its working
directory. A file's path is relative to that directory. A setting stores it as an absolute path, so
that the run's config.json names the same file wherever it is read. Such a file can import the
modules in its folder.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from compass_jax.base.aliases import Json
from compass_jax.config.errors import ConfigError, check, first_line, of_file
from compass_jax.config.former import present_name

_FORM = re.compile(r"(?:.+\.py|[^\W\d]\w*(?:\.[^\W\d]\w*)*):[^\W\d]\w*")


def absolute(name: Json) -> Json:
    """Returns `name` with an absolute path of its file, or with the present name of a module of
    this package; names of another form are unchanged.
    """
    if not isinstance(name, str):
        return name
    file, _, attribute = name.rpartition(":")
    return f"{os.path.abspath(file)}:{attribute}" if file.endswith(".py") else present_name(name)


def check_name(name: str, key: str, example: str) -> None:
    """Raises ConfigError for a `name` of neither form. `example` ends the message."""
    check(
        is_name(name),
        f"{key} = {name!r:.200}: must be module:name or path/to/file.py:name, as in {example}",
    )


def is_name(text: str) -> bool:
    """Returns whether a text has the form of a name of user code."""
    return bool(_FORM.fullmatch(text))


def load(name: str, key: str) -> Json:
    """Returns the object that `name` names. Its module is imported once in a process.

    Raises ConfigError, with `key`, the file and the line, for a name of another form, a missing or
    broken module, and a missing attribute.
    """
    check_name(name, key, "'my_code:name'")
    place, _, attribute = name.rpartition(":")
    try:
        module = _module(place)
    except ConfigError as error:
        raise ConfigError(f"{key} = {name!r}: {error}") from error
    if not hasattr(module, attribute):
        matches = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f"; did you mean {matches[0]}?" if matches else "; define it there"
        raise ConfigError(f"{key} = {name!r}: {place} has no {attribute}{hint}")
    return getattr(module, attribute)


def load_module(place: str, key: str) -> ModuleType:
    """Returns the module `place` ("a.b", or "path/to/file.py"), imported once in a process. Raises
    ConfigError like `load`.
    """
    try:
        return _module(place)
    except ConfigError as error:
        raise ConfigError(f"{key}: {place}: {error}") from error


def file_of(name: str) -> Path | None:
    """Returns the file that `load` would import for a name, without importing it; None if there is
    no such Python file.
    """
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place) if Path(place).is_file() else None
    _may_import_from(Path.cwd())
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError, AttributeError):
        return None
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") and Path(origin).is_file() else None


def _module(place: str) -> ModuleType:
    return _of_file(Path(place)) if place.endswith(".py") else _of_path(place)


def _of_file(path: Path) -> ModuleType:
    unique = hashlib.blake2b(os.path.abspath(path).encode(), digest_size=4).hexdigest()
    name = f"compass_file_{path.stem}_{unique}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ConfigError(f"there is no file {path}")
    _may_import_from(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        with of_file(path):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_path(name: str) -> ModuleType:
    _may_import_from(Path.cwd())
    try:
        return importlib.import_module(name)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"there is no module {error.name} on the path of this process or in {Path.cwd()};"
                f" start in its folder, set PYTHONPATH, or name its file: path/to/{name}.py:..."
            ) from error
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"it cannot be imported: {frame.filename}, line {frame.lineno}:"
            f" {type(error).__name__}: {first_line(error)}"
        ) from error


def _may_import_from(folder: Path) -> None:
    """Appends a folder to the import path, so that it shadows no other module."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
