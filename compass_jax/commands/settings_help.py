"""What `compass COMMAND CONFIG --help` says of the settings: their texts are those after the fields
of the configuration's classes.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from compass_jax.config import (
    DataConfig,
    EvalConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    Seam,
    SFTConfig,
)
from compass_jax.config.ranges import field_hints, options, type_name
from compass_jax.config.verifiers import Options

WIDTH = 80
MOST_SHOWN = 200  # characters of a value
# Recipes that the command line takes for a class, by setting.
RECIPES = {"rl.objective": ("dapo", "dr_grpo")}


class Setting(NamedTuple):
    """One setting of a configuration, or a section of them (without `kind`)."""

    key: str  # as the command line writes it: rl.optim.b1
    text: str  # what the class says of it
    value: Any
    kind: str = ""  # of its value
    default: Any = MISSING  # the section's, or the class's; MISSING: it must be given

    @property
    def words(self) -> str:
        """The value as the command line writes it, of bounded length; empty where there is none."""
        return _words(self.value, self.kind)

    @property
    def default_words(self) -> str | None:
        """The same of the default; None where it must be given."""
        return None if self.default is MISSING else _words(self.default, self.kind)


def field_docs(cls: type) -> dict[str, str]:
    """What the source of a configuration class says of its fields: the text after each of them."""
    said: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(one))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in pairwise(body.body):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(words))),
                ):
                    said[name] = " ".join(words.split())
    return said


def settings(config: Any, key: str = "", usual: Any = None) -> Iterator[Setting]:
    """Every setting of a configuration that the command line can change, those of a section after
    it; a class's own ones come before its sections.

    usual: the section that stands there by default, if there is one; its values are the defaults.
    """
    cls: Any = type(config)
    docs, hints = field_docs(cls), field_hints(cls)
    usual = usual if type(usual) is cls else None
    inner = []
    for field in dataclasses.fields(config):
        name = f"{key}.{field.name}" if key else field.name
        value, text = getattr(config, field.name), docs.get(field.name, "")
        default = getattr(usual, field.name) if usual is not None else _default(field)
        if dataclasses.is_dataclass(value):
            inner.append((name, text, value, default))
        elif isinstance(value, tuple) and any(dataclasses.is_dataclass(x) for x in value):
            inner += [(f"{name}.{i}", text, x, None) for i, x in enumerate(value)]
        elif value or not _sections(hints[field.name]):  # an absent one is given in the file
            yield Setting(name, text, value, kind_of(hints[field.name]), default)
    for name, text, value, default in inner:
        yield Setting(name, text, value)
        if isinstance(value, Seam):
            names = ", ".join([*value.classes, *RECIPES.get(value.key, ())])
            sentence = f"The class: {names}, or your own file.py:Class."
            usual = default.name if isinstance(default, Seam) else next(iter(value.classes))
            yield Setting(name, sentence, value.name, "NAME", usual)
        yield from settings(value, name, default)


def settings_help(config: Any) -> str:
    """All settings with their values in `config`, in lines of at most 80 columns but for words that
    are longer.
    """
    lines = ["settings, each with its value here:"]
    for setting in settings(config):
        if not setting.kind:
            lines += ["", *_wrapped(f"{setting.key}: {setting.text}", "")]
            continue
        option = f"--{setting.key.replace('_', '-')} {setting.kind}"
        lines += _wrapped(option, "  ")
        lines += _wrapped(f"{setting.text} (default: {setting.words or 'none'})", "      ")
    return "\n".join(lines)


# what people change first, by command; others have all settings alike
FIRST: dict[str, tuple[tuple[type, str, str], ...]] = {
    "train": (
        (RunConfig, "", "run_dir"),
        (RLConfig, "rl.", "steps"),
        (RLConfig, "rl.", "prompts_per_step"),
        (RLConfig, "rl.", "group_size"),
        (RLConfig, "rl.", "eval_every"),
        (OptimConfig, "rl.optim.", "learning_rate"),
        (RolloutConfig, "rollout.", "max_new_tokens"),
    ),
    "sft": (
        (RunConfig, "", "run_dir"),
        (SFTConfig, "sft.", "files"),
        (SFTConfig, "sft.", "steps"),
        (SFTConfig, "sft.", "batch"),
        (OptimConfig, "sft.optim.", "learning_rate"),
    ),
    "eval": (
        (DataConfig, "data.", "eval_prompts"),
        (EvalConfig, "evaluation.", "k"),
        (EvalConfig, "evaluation.", "temperature"),
        (RolloutConfig, "rollout.", "max_new_tokens"),
    ),
}


def first_settings(command: str) -> str:
    """The settings that people change first, for a command's help without a configuration; empty
    for a command that has none.
    """
    lines = ["settings that people change first, after the options:"]
    for cls, section, name in FIRST.get(command, ()):
        kind = kind_of(field_hints(cls)[name])
        lines += _wrapped(f"--{section}{name.replace('_', '-')} {kind}", "  ")
        lines += _wrapped(field_docs(cls)[name], "      ")
    return "\n".join(lines) if len(lines) > 1 else ""


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return field.default


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _sections(hint: Any) -> bool:
    """Whether a type can hold a section."""
    is_one = isinstance(hint, type) and dataclasses.is_dataclass(hint)
    return is_one or any(map(_sections, get_args(hint)))


def kind_of(hint: Any) -> str:
    """A type as an option's value: INT, {a,b}, [INT ...]; JSON for values of many types."""
    hint = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    inner = get_args(hint)
    if get_origin(hint) is Literal:
        return "{" + ",".join(x or "''" for x in inner) + "}"
    if hint == Options:
        return "JSON"
    if get_origin(hint) is tuple:
        kinds = " ".join(kind_of(x) for x in inner if x is not Ellipsis)
        return f"[{kinds} ...]" if inner[-1] is Ellipsis else kinds
    if len(options(hint)) > 1:
        return "|".join(map(kind_of, options(hint)))
    names = {bool: "{True,False}", int: "INT", float: "FLOAT", str: "TEXT"}
    return names.get(hint, type_name(hint).upper())


def _words(value: Any, kind: str) -> str:
    text = json.dumps(value) if kind == "JSON" and value else " ".join(map(str, _flat(value)))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _flat(value: Any) -> list[Any]:
    return [x for part in value for x in _flat(part)] if isinstance(value, tuple) else [value]
