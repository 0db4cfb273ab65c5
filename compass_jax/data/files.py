"""Rows of JSONL and Parquet files; whatever cannot be read is named with its file and line.

A name with dots is a field inside a field: `reward_model.ground_truth`. A column of exactly that
name comes first.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from compass_jax.errors import UserError
from compass_jax.untrusted import open_regular, parse_json, read_lines

# of an integer in a row: a reference answer may be long; Python writes no number of more than 4,300
MOST_DIGITS = 4000


class DataError(UserError):
    """Data that cannot be used; the message names the file and line (or the source), and what to
    do.
    """


def files_of(pattern: str) -> list[str]:
    """The file of this name, or those that a pattern (`train-*.parquet`) fits, by name. Raises
    DataError where it fits none.
    """
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise DataError(f"{pattern[:200]} does not exist: no file fits this pattern")
    return found


def read_rows(
    path: str, fields: Mapping[str, str], others: Iterable[str] | None = ()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each row of a .jsonl or .parquet file; `where` is "path, line 3" (or "row
    3"), counted from 1.

    fields: the names that every row must have, none of them null, each with the words that say what
        to do where it is missing.
    others: of a Parquet file these columns are read beside `fields`, where it has them; None: all.
        What is not read may hold anything.
    """
    rows = _parquet_rows(path, fields, others) if path.endswith(".parquet") else _jsonl_rows(path)
    empty = True
    for where, row in rows:
        empty = False
        for name, remedy in fields.items():
            if field_of(row, name) is None:
                raise DataError(f"{where}: {_missing(row, name)}; {remedy}")
        yield where, row
    if empty:
        raise _empty(path)


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """What a row has under a name, which may have dots; None where it has nothing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def columns_of(path: str) -> tuple[str, list[str]]:
    """(where, names) of the columns of a .jsonl file's first row, or of a Parquet file; those
    inside others too, with dots.
    """
    if path.endswith(".parquet"):
        with _opened(path) as (_, names):
            return path, names
    where, row = next(_jsonl_rows(path), (path, None))
    if row is None:
        raise _empty(path)
    return where, list(_names("", row))


def _names(before: str, row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield before + name
        if isinstance(value, Mapping):
            yield from _names(f"{before}{name}.", value)


def _parquet_names(before: str, fields: Iterable[Any]) -> Iterator[str]:
    from pyarrow import types

    for field in fields:
        yield before + field.name
        if types.is_struct(field.type):
            yield from _parquet_names(f"{before}{field.name}.", field.type)


def _empty(path: str) -> DataError:
    return DataError(f"{path} is empty: write one JSON object per line, or one row at least")


def _missing(row: Mapping[str, Any], name: str) -> str:
    parent, _, last = name.rpartition(".")
    inside = field_of(row, parent) if parent and name not in row else None
    if name in row or (isinstance(inside, Mapping) and last in inside):
        return f"{name!r} is null"
    has = f"fields: {', '.join(row)}"
    if isinstance(inside, Mapping):
        has += f"; of {parent}: {', '.join(inside)}"
    return f"no field {name!r} ({has[:300]})"


def _jsonl_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in read_lines(path, error=DataError):
        if line.strip():
            yield where, json_object(line, where)


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """The JSON object of one line. Raises DataError, which says so where the line was cut off."""
    try:
        row = parse_json(line, where, error=DataError, most_digits=MOST_DIGITS)
    except DataError as error:
        if line.endswith(b"\n") or not isinstance(
            error.__cause__, json.JSONDecodeError | UnicodeDecodeError
        ):
            raise
        what = f"the last line is cut off ({error.__cause__})"
        raise DataError(
            f"{where}: {what}; the file is half-written: write it again, or delete this line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a JSON {type(row).__name__}, not an object; write one JSON object per line"
        )
    return row


@contextlib.contextmanager
def _opened(path: str) -> Iterator[tuple[Any, list[str]]]:
    """A Parquet file and its columns' names, those inside others too; DataError for another."""
    from pyarrow import parquet

    with open_regular(path, error=DataError) as opened:
        try:
            file = parquet.ParquetFile(opened)
            names = list(_parquet_names("", file.schema_arrow))
        except Exception as error:  # of many classes, pyarrow's own and Python's
            raise DataError(
                f"{path}: not a complete Parquet file ({error}); write it again"
            ) from error
        yield file, names


def _parquet_rows(
    path: str, fields: Mapping[str, str], others: Iterable[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    number = 0
    with _opened(path) as (file, every):
        names = file.schema_arrow.names
        for name, remedy in fields.items():
            if every.count(name) != 1:
                what = (
                    f"{every.count(name)} columns {name!r}"
                    if name in every
                    else f"no field {name!r}"
                )
                raise DataError(f"{path}: {what} (fields: {', '.join(names)}); {remedy}")
        read = names if others is None else [n for n in every if n in {*fields, *others}]
        batches = file.iter_batches(columns=read)
        while True:
            try:
                batch = next(batches, None)
                rows = None if batch is None else batch.to_pylist()
            except (
                Exception
            ) as error:  # a damaged page; text that is not UTF-8; a date that Python cannot hold
                raise DataError(
                    f"{path}, after row {number}: cannot be read ({error}); write it again"
                ) from error
            if rows is None:
                return
            for row in rows:
                number += 1
                yield f"{path}, row {number}", row


ROLES = ("system", "user", "assistant", "tool")
# of a message beside role and content; the chat template gets them
TEXTS = ("name", "tool_call_id", "reasoning_content")
NOTHING: tuple[Any, ...] = (None, "", [], {})


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Chat messages as the chat template gets them, or DataError naming the message that is wrong.

    A message has role and content, and may have TEXTS and tool_calls. With anything else in it (an
    image, say) it is refused: what is left of it would be another message. Null and empty values
    say nothing and are passed over.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: messages must be a non-empty list of {{'role', 'content'}}, not "
            f"{messages!r:.80}"
        )
    return [_message(message, f"{where}: messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    shape = "must be an object with 'role' and a string 'content'"
    if not isinstance(message, dict):
        raise DataError(f"{where} {shape}, not {message!r:.80}")
    said = {key: value for key, value in message.items() if value not in NOTHING}
    others = [key for key in said if key not in ("role", "content", "tool_calls", *TEXTS)]
    if others:
        named = ", ".join(map(repr, others))[:200]
        raise DataError(
            f"{where} has {named}: role, content, tool_calls, {', '.join(TEXTS)} are used; remove "
            "it, or write it into the content"
        )
    content = message.get("content")
    if isinstance(content, list):
        raise DataError(
            f"{where} has a list of parts for content (images, files?): it must be one text"
        )
    if content is None and "tool_calls" in said:
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where} {shape}, not {message!r:.80}")
    if message.get("role") not in ROLES:
        raise DataError(
            f"{where} has the role {message.get('role')!r:.80}; known roles: {', '.join(ROLES)}"
        )
    for name in TEXTS:
        if not isinstance(said.get(name, ""), str):
            raise DataError(f"{where} has {name} = {said[name]!r:.80}: it must be text")
    if "tool_calls" in said:
        if message["role"] != "assistant":
            raise DataError(f"{where} has tool_calls: only the assistant calls tools")
        said["tool_calls"] = check_tools(said["tool_calls"], f"{where}, tool_calls")
    return {"role": message["role"], "content": content} | {
        key: value for key, value in said.items() if key not in ("role", "content")
    }


def check_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Tools, or calls of tools, as the chat template gets them: objects; none where `tools` says
    nothing. Raises DataError for anything else.
    """
    if tools in NOTHING:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: must be a list of objects, not {tools!r:.80}")
    return tools


def refuse_blank(messages: list[dict[str, Any]], role: str, where: str, why: str) -> None:
    """Raises DataError, naming the message, where one of this role neither says nor calls."""
    for i, message in enumerate(messages):
        blank = not message["content"].strip() and "tool_calls" not in message
        if message["role"] == role and blank:
            raise DataError(
                f"{where}: messages[{i}] of role {role!r} is empty: {why}; write it, or delete "
                "the row"
            )
