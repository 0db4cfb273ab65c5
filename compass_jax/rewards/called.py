"""Calls of verifier functions. The names of a function's parameters select its arguments, for
built-in and user functions alike.

    prompt, response, row       texts, and the row with all its columns as a dict
    answer_tag                  rewards.answer_tag
    chat_format                 the name of the form of answers (data.chat_format)
    any other name              the row's column of this name if it is not null; else the source's
                                verifier_args; else the parameter's default. `answer` is the
                                reference, whatever its column in the file
    **anything                  all other columns and arguments

A function with a parameter `responses` receives a batch: prompts, responses, rows and columns are
then lists (with None for a missing column), and the function returns a list. An `async def` is run
to completion.

Reward workers import this module, so it must not import jax.
"""

from __future__ import annotations

import asyncio
import difflib
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO
from compass_jax.base.errors import CompassError
from compass_jax.config import ConfigError

Row = JsonMapping
_PACKAGE = Path(__file__).parents[1]
_REMEDY = "define it as `def {}(prompt, response, **row)`, and return a number"


class MissingColumn(CompassError, LookupError):
    """The row lacks a column that the verifier requires."""


class Case(NamedTuple):
    """A response to score, with its row and prompt."""

    row: Row
    response: str
    prompt: str = ""


class Called(NamedTuple):
    """A verifier function with the names of its parameters."""

    function: Callable[..., Any]
    name: str
    required: tuple[str, ...]  # required parameters
    offered: tuple[str, ...]  # optional parameters
    rest: bool  # whether it has **kwargs
    batch: bool
    verifier_args: Row
    tag: str
    chat_format: str = AUTO

    def __call__(self, cases: Sequence[Case]) -> list[Json]:
        """Returns the function's result for each case, unchanged.

        Raises MissingColumn for a missing column, ValueError if a batch returns a wrong number of
        results, and any exception of the function.
        """
        named = [self._values_by_name(case) for case in cases]
        if not self.batch:
            return [_resolve(self.function(**self._select_arguments(one))) for one in named]
        lists = {name: [one.get(name) for one in named] for one in named for name in one}
        results = _resolve(self.function(**self._select_arguments(lists)))
        results = results.tolist() if hasattr(results, "tolist") else results
        if not isinstance(results, list | tuple) or len(results) != len(cases):
            many = len(results) if isinstance(results, list | tuple) else type(results).__name__
            raise ValueError(f"{self.name} returned {many} for {len(cases)} responses")
        return list(results)

    def _values_by_name(self, case: Case) -> JsonObject:
        """Returns the values of one response, by name."""
        s = "s" if self.batch else ""
        texts = {f"prompt{s}": case.prompt, f"response{s}": case.response}
        return {**case.row, **texts, f"row{s}": case.row}

    def _select_arguments(self, values: JsonObject) -> JsonObject:
        """Returns the function's arguments, selected from the values of a response or a batch."""
        # a column that only other rows have is null in Parquet and absent in JSONL
        columns = {k: x for k, x in values.items() if x is not None or k not in self.verifier_args}
        known = {**self.verifier_args, **columns, "answer_tag": self.tag}
        known["chat_format"] = self.chat_format
        missing = [name for name in self.required if name not in known]
        if missing:
            rows = values.get("rows") or [values.get("row")]
            matches = difflib.get_close_matches(missing[0], [str(x) for x in rows[0]], n=1)
            raise MissingColumn(
                f"{self.name}{_place(self.function)} takes {missing[0]!r}, and the row has no such"
                f" column{f'; did you mean {matches[0]}?' if matches else ''} (it has:"
                f" {', '.join(map(str, rows[0]))})"
            )
        names = [*self.required, *(x for x in self.offered if known.get(x) is not None)]
        if self.rest:
            hidden = {"rows" if self.batch else "row", "answer_tag", "chat_format", *names}
            names += [name for name in known if isinstance(name, str) and name not in hidden]
        return {name: known[name] for name in names}


def called(
    function: Any, where: str, verifier_args: Row, tag: str, chat_format: str = AUTO
) -> Called:
    """Returns `function` with the names of its parameters. Raises ConfigError, whose message begins
    with `where`, if it cannot be called with the available arguments.
    """
    name = getattr(function, "__name__", "score")
    if not callable(function):
        raise ConfigError(
            f"{where}: a {type(function).__name__}, and no function; {_REMEDY.format('score')}"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{where}: {name}(...) has no signature ({error}); {_REMEDY.format(name)}"
        ) from error
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    required = tuple(p.name for p in by_name if p.default is p.empty)
    offered = tuple(p.name for p in by_name if p.default is not p.empty)
    rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = {*required, *offered}
    batch, one = "responses" in names, "response" in names
    foreign = next((x for x in ("completions", "completion") if x in names), "")
    only = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    problem = ""
    if foreign and not (one or batch):
        parameter = "responses" if foreign == "completions" else "response"
        problem = (
            f"what other libraries call {foreign} is {parameter} here, and a response is a text:"
            f" rename it {parameter}"
        )
    elif only:
        problem = f"{only[0]} can only be given by position"
    elif batch and (singles := names & {"prompt", "response", "row"}):
        problem = f"responses makes it a batch, and {min(singles)} does not"
    elif not (rest or one or batch):
        problem = "it takes no response"
    if problem:
        signature = inspect.signature(function)
        raise ConfigError(
            f"{where}: {name}{signature} cannot be called ({problem}); {_REMEDY.format(name)}"
        )
    return Called(function, name, required, offered, rest, batch, verifier_args, tag, chat_format)


def _place(function: Any) -> str:
    """Returns the file and line of a user's function, in brackets; empty for others."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or Path(code.co_filename).is_relative_to(_PACKAGE):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno})"


def _resolve(value: Json) -> Json:
    """Returns `value`, or its result if it is awaitable."""

    async def run() -> Json:
        return await value

    return asyncio.run(run()) if hasattr(type(value), "__await__") else value
