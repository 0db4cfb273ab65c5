"""`compass init`: a configuration file from a model's folder and files of data, with a word on each
setting that was chosen.
"""

from __future__ import annotations

import dataclasses
import inspect
import io
import re
import tokenize
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError, RunConfig

_INDENT = "    "


def field_comments(cls: type) -> dict[str, str]:
    """What the source of a configuration class says of its fields: the comment behind a field, or
    those in the lines above it.
    """
    said: dict[str, str] = {}
    above: list[str] = []
    name = ""
    for token in tokenize.generate_tokens(io.StringIO(inspect.getsource(cls)).readline):
        text = token.string
        if token.type == tokenize.COMMENT:
            words = text.lstrip("# ")
            if token.line.lstrip().startswith("#"):
                above.append(words)
            elif name:
                said[name] = words
        elif token.type == tokenize.NAME and re.match(rf"\s*{re.escape(text)}\s*:", token.line):
            name = text
            if above:
                said.setdefault(name, " ".join(above))
            above = []
        elif token.type == tokenize.NAME and token.line.lstrip().startswith(("def ", "@")):
            above, name = [], ""
    known = {f.name for f in dataclasses.fields(cls)}
    return {name: words for name, words in said.items() if name in known}


def source_of(config: RunConfig) -> str:
    """A Python file whose one function returns `config`: what differs from the defaults, each
    setting with its comment.
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


def _expression(value: Any, depth: int, classes: set[type]) -> str:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _call(value, depth, classes)
    if isinstance(value, tuple) and any(dataclasses.is_dataclass(x) for x in value):
        inner = _INDENT * (depth + 1)
        items = "".join(f"{inner}{_expression(x, depth + 1, classes)},\n" for x in value)
        return f"(\n{items}{_INDENT * depth})"
    return repr(value)


def _call(config: Any, depth: int, classes: set[type]) -> str:
    classes.add(type(config))
    comments, inner, lines = field_comments(type(config)), _INDENT * (depth + 1), []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == _default(field):
            continue
        words = comments.get(field.name, "")
        if words:
            lines.append(f"{inner}# {words}\n")
        lines.append(f"{inner}{field.name}={_expression(value, depth + 1, classes)},\n")
    return (
        f"{type(config).__name__}(\n{''.join(lines)}{_INDENT * depth})"
        if lines
        else (f"{type(config).__name__}()")
    )


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def write_initial(config: RunConfig, out: str) -> Path:
    """Writes the file. ConfigError where something lies there already, or where its name is not one
    of a Python file.
    """
    path = Path(out)
    if path.suffix != ".py":
        raise ConfigError(f"{out}: a configuration is a Python file; name it something.py")
    try:
        with open(path, "x") as file:
            file.write(source_of(config))
    except FileExistsError:
        raise ConfigError(f"{out} is there already: choose another name, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from error
    return path
