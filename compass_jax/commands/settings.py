"""Descriptions of settings in help texts and reports: sentences, values and defaults."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import MISSING
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from compass_jax.base.aliases import Hint, Json, Settings
from compass_jax.config import RunConfig, Seam
from compass_jax.config.ranges import field_hints, type_name
from compass_jax.config.verifiers import Options

WIDTH = 80
MAX_SHOWN = 200  # maximum characters of a value


class Setting(NamedTuple):
    """A setting of a configuration, such as rl.optim.b1: its sentence, value, default and type.

    The default is that of the section or of the class, or MISSING for a required setting.
    """

    key: str
    text: str
    value: Json
    default: Json
    hint: Hint

    def words(self, value: Json) -> str:
        """Returns a value of this setting as the command line writes it, of bounded length."""
        text = json.dumps(value) if self.hint == Options and value else " ".join(_leaves(value))
        return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def field_docs(cls: type) -> dict[str, str]:
    """Returns the sentence after each field in the source of a class and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    docs[name] = " ".join(words.split())
    return docs


def describe(cls: Settings) -> None:
    """Attaches the sentences of a class's fields and sections, which tyro shows as help."""
    docs = field_docs(cls)
    for field in dataclasses.fields(cls):
        field.metadata = MappingProxyType({"help": docs.get(field.name)})
    for hint in field_hints(cls).values():
        for section in sections_of(hint):
            describe(section)


def sections_of(hint: Hint) -> list[type]:
    """Returns the configuration classes that a type may hold."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [section for part in typing.get_args(hint) for section in sections_of(part)]


def settings(config: Settings, key: str = "", usual: Settings = None) -> Iterator[Setting]:
    """Yields every setting of a configuration that the command line can change, those of sections
    last.

    usual: the section's default instance, whose values are the defaults.
    """
    cls: Settings = type(config)
    docs, hints = field_docs(cls), field_hints(cls)
    usual = usual if type(usual) is cls else None
    sections = []
    for field in dataclasses.fields(config):
        name = f"{key}.{field.name}" if key else field.name
        value, hint = getattr(config, field.name), hints[field.name]
        default = getattr(usual, field.name) if usual is not None else default_of(field)
        if dataclasses.is_dataclass(value):
            sections.append((name, value, default))
        elif isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value)):
            sections += [(f"{name}.{i}", x, None) for i, x in enumerate(value)]
        elif isinstance(default, Seam):  # switched off
            yield Setting(name, class_sentence(default), "none", default.name, str)
        # an absent section can be set only in the file, unless it is a list of named classes
        elif value or not sections_of(hint) or are_named(hint):
            yield Setting(name, docs.get(field.name, ""), value, default, hint)
    for name, value, default in sections:
        if isinstance(value, Seam):
            first = next(iter(value.classes), "none")
            usual_name = default.name if isinstance(default, Seam) else first
            yield Setting(name, class_sentence(value), value.name, usual_name, str)
        yield from settings(value, name, default)


def class_sentence(part: Seam) -> str:
    """Returns the sentence of a setting whose value is a class."""
    names = [*part.classes, *part.recipes]
    of_package = f"{', '.join(names)}, or " if names else ""
    return f"Class: {of_package}your own file.py:Class."


def are_named(hint: Hint) -> bool:
    """Returns whether a type is a list of classes that are found by their names."""
    is_list = typing.get_origin(hint) is tuple
    return is_list and all(issubclass(section, Seam) for section in sections_of(hint))


def default_of(field: dataclasses.Field) -> Json:
    """Returns the default of a field; MISSING if it is required."""
    return field.default if field.default_factory is MISSING else field.default_factory()


# The most frequently changed settings of each command.
FIRST = {
    "train": "run_dir rl.steps rl.prompts_per_step rl.group_size rl.eval_every"
    " rl.optim.learning_rate rollout.max_new_tokens",
    "sft": "run_dir sft.files sft.steps sft.batch sft.optim.learning_rate",
    "eval": "data.eval_prompts evaluation.k evaluation.temperature rollout.max_new_tokens",
}


def first_settings(command: str) -> str:
    """Returns a help text of the settings that a command's users change most; or ""."""
    lines = ["settings that are changed most often, after the options:"]
    for key in FIRST.get(command, "").split():
        cls: Settings = RunConfig
        *sections, name = key.split(".")
        for section in sections:
            cls = field_hints(cls)[section]
        lines.append(f"  --{key.replace('_', '-')} {type_name(field_hints(cls)[name]).upper()}")
        indent = " " * 6
        text = field_docs(cls)[name]
        lines += textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines) if len(lines) > 1 else ""


def _leaves(value: Json) -> list[str]:
    return (
        [x for part in value for x in _leaves(part)] if isinstance(value, tuple) else [str(value)]
    )
