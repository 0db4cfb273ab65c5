"""`compass init`: writes a commented configuration from a model's folder and files of data."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from pathlib import Path

from compass_jax.base.aliases import Json, Settings
from compass_jax.commands.settings import default_of, field_docs
from compass_jax.config import ConfigError, RunConfig

_INDENT = "    "
_WIDTH = 98  # columns of a comment


def source_of(config: RunConfig) -> str:
    """Returns the source of a Python file whose one function returns `config`: the settings that
    differ from their defaults, each with its comment.
    """
    classes: set[type] = set()
    body = _expression(config, 1, classes)
    modules: dict[str, list[str]] = {}
    for cls in classes:
        public = "compass_jax.config"
        module = public if cls.__module__.startswith(public) else cls.__module__
        modules.setdefault(module, []).append(cls.__name__)
    imports = "\n".join(
        f"from {module} import {', '.join(sorted(names))}"
        for module, names in sorted(modules.items())
    )
    name = re.sub(r"\W", "_", config.name) or "run"
    name = name if name[0].isalpha() else f"run_{name}"
    return (
        f'"""RL of {config.init_from}. Everything that is not here has its default;\n'
        "`compass train THIS_FILE --help` lists all settings.\n"
        f'"""\n\n{imports}\n\n\ndef {name}() -> RunConfig:\n'
        f'    """What `compass init` chose."""\n    return {body}\n'
    )


def _expression(value: Json, depth: int, classes: set[type]) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _call(value, depth, classes)
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(x) for x in value):
        inner = _INDENT * (depth + 1)
        items = "".join(f"{inner}{_expression(x, depth + 1, classes)},\n" for x in value)
        return f"(\n{items}{_INDENT * depth})"
    return repr(value)


def _call(config: Settings, depth: int, classes: set[type]) -> str:
    classes.add(type(config))
    docs, inner, lines = field_docs(type(config)), _INDENT * (depth + 1), []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == default_of(field):
            continue
        words = textwrap.wrap(docs.get(field.name, ""), _WIDTH - len(inner))
        lines += [f"{inner}# {line}\n" for line in words]
        lines.append(f"{inner}{field.name}={_expression(value, depth + 1, classes)},\n")
    return (
        f"{type(config).__name__}(\n{''.join(lines)}{_INDENT * depth})"
        if lines
        else (f"{type(config).__name__}()")
    )


def write_initial(source: str, out: str) -> Path:
    """Writes a configuration file and returns its path. Raises ConfigError unless it is a new .py
    file.
    """
    path = Path(out)
    if path.suffix != ".py":
        raise ConfigError(f"{out}: a configuration is a Python file; name it something.py")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(source)
    except FileExistsError:
        raise ConfigError(f"{out} is there already: choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from error
    return path
