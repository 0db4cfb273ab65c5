"""How an option of a command is written down, and the commands that have a file of their own."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar, cast, get_args, get_origin

from compass_jax.commands.settings_help import field_docs
from compass_jax.config.ranges import field_hints, type_name

T = TypeVar("T")

# These commands are a file of this package each, `prepare-sft` is prepare_sft.py. They have no
# configuration file. The file is read with every command line, so it imports what is slow in `run`.
OWN_FILES: tuple[str, ...] = ("compare", "distil", "merge", "pipeline", "prepare-sft")


class Command(Protocol):
    """What the file of a command holds."""

    HELP: str
    """A line that says what the command does."""
    options: Callable[[argparse.ArgumentParser], None]
    """Writes its arguments down."""
    run: Callable[[argparse.Namespace], int]
    """Does the work; the exit status."""


def own_file(name: str) -> Command:
    """The file of a command of OWN_FILES."""
    return cast(Command, importlib.import_module(f"{__package__}.{name.replace('-', '_')}"))


def add_option(parser: argparse.ArgumentParser, name: str, text: str, **options: Any) -> None:
    """Adds --name, whose help is `text` and its default; options are those of argparse."""
    default = options.get("default")
    if "type" in options:
        options.setdefault("metavar", "N")
    if isinstance(default, list):
        text += f" (default: {' '.join(map(str, default))})" if default else ""
    elif default not in (None, ""):
        text += " (default: %(default)s)"
    parser.add_argument(f"--{name}", help=text, **options)


def add_settings(parser: argparse.ArgumentParser, cls: type) -> None:
    """Adds an option for each field of a configuration class without sections: its help is the
    sentence after the field, a field without a default must be given.
    """
    docs, hints = field_docs(cls), field_hints(cls)
    for field in dataclasses.fields(cls):
        text = docs[field.name].rstrip(".").replace("%", "%%")
        form = _form(field, hints[field.name])
        add_option(parser, field.name.replace("_", "-"), text, **form)


def _form(field: dataclasses.Field, hint: Any) -> dict[str, Any]:
    """How argparse reads a field."""
    kind = type_name(hint)
    if field.default is dataclasses.MISSING:
        many = {"nargs": "+"} if kind.startswith("tuple") else {}
        return {"required": True, "metavar": "NAME", **many}
    if get_origin(hint) is Literal:
        return {"choices": list(get_args(hint)), "default": field.default}
    if kind == "bool":
        return {"choices": ["on", "off"], "default": "on" if field.default else "off"}
    if kind.startswith("tuple"):
        return {"nargs": "+", "default": list(field.default), "metavar": "NAME"}
    if kind == "str":
        return {"default": field.default, "metavar": "NAME"}
    return {"default": field.default, "type": {"int": int, "float": float}[kind]}


def settings_of(args: argparse.Namespace, cls: type[T]) -> T:
    """The configuration that the options of `add_settings` say."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # each is a dataclass
        value = getattr(args, field.name)
        value = tuple(value) if isinstance(value, list) else value
        given[field.name] = value == "on" if isinstance(field.default, bool) else value
    return cls(**given)


def programs_option(parser: argparse.ArgumentParser) -> None:
    """Adds --compilation-cache, which every command that compiles has."""
    text = "Compiled programs are kept in this folder for later starts; off: every start "
    text += "compiles (default: ~/.cache/compass_jax/programs, at most 4 GiB)"
    add_option(parser, "compilation-cache", text, metavar="DIR")


def keep_programs(args: argparse.Namespace) -> None:
    """Compiled programs outlive the command (`--compilation-cache`). Of several processes each has
    its own disk, and one alone would write: there a folder that all share has to be named.
    """
    import sys

    import jax

    from compass_jax.runs.compiled import keep_programs

    alone = jax.process_count() == 1
    told = keep_programs(args.compilation_cache or "") if args.compilation_cache or alone else ""
    if told:
        print(told, file=sys.stderr)
