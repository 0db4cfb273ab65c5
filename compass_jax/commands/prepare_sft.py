"""`compass prepare-sft`: conversations without duplicates, contamination and bad answers."""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial
from typing import Any

from compass_jax.commands.options import add_option
from compass_jax.commands.settings_help import field_docs
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import field_hints, type_name

HELP = (
    "take duplicates, evaluation questions, broken and wrong answers out of conversations; the "
    "same command goes on after a stop"
)


def options(parser: argparse.ArgumentParser) -> None:
    """An option for each field of PrepareConfig, and the folder that is written."""
    text = "This folder gets train.jsonl, report.json and report.md"
    add_option(parser, "out", text, required=True, metavar="DIR")
    docs, hints = field_docs(PrepareConfig), field_hints(PrepareConfig)
    for field in dataclasses.fields(PrepareConfig):
        name = field.name.replace("_", "-")
        text = docs[field.name].rstrip(".").replace("%", "%%")
        add_option(parser, name, text, **_form(field, type_name(hints[field.name])))


def _form(field: dataclasses.Field, kind: str) -> dict[str, Any]:
    """How argparse reads a field."""
    if field.default is dataclasses.MISSING:
        return {"nargs": "+", "required": True, "metavar": "FILE"}
    if kind == "bool":
        return {"choices": ["on", "off"], "default": "on" if field.default else "off"}
    if kind.startswith("tuple"):
        return {"nargs": "+", "default": [], "metavar": "NAME"}
    if kind == "str":
        return {"default": field.default, "metavar": "NAME"}
    return {"default": field.default, "type": {"int": int, "float": float}[kind]}


def config_of(args: argparse.Namespace) -> PrepareConfig:
    """What the options say."""
    given: dict[str, Any] = {}
    for field in dataclasses.fields(PrepareConfig):
        value = getattr(args, field.name)
        value = tuple(value) if isinstance(value, list) else value
        given[field.name] = value == "on" if isinstance(field.default, bool) else value
    return PrepareConfig(**given)


def run(args: argparse.Namespace) -> int:
    """Writes the folder, and prints the counts."""
    from rich.console import Console

    from compass_jax.data.prepare.report import overlaps, table
    from compass_jax.data.prepare.run import prepare
    from compass_jax.report import summary_table

    console = Console(soft_wrap=True)
    tell = partial(console.print, highlight=False, markup=False)
    tally = prepare(config_of(args), args.out, tell)
    console.print(summary_table(table(tally), title=f"{tally.rows:,} rows"))
    for line in overlaps(tally):
        tell(line)
    if args.reward:
        tell(f"{tally.judged} answers were judged; {tally.unjudged} without a verdict stay")
    tell(f"kept {tally.kept:,} rows: {args.out}/train.jsonl; examples: {args.out}/report.md")
    return 0
