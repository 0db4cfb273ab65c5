"""Rows of JSONL and Parquet files; whatever cannot be read is named with its file and line."""

from __future__ import annotations

import json
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
            if row.get(name) is None:
                what = (
                    f"{name!r} is null"
                    if name in row
                    else f"no field {name!r} (fields: {', '.join(row)})"
                )
                raise DataError(f"{where}: {what}; {remedy}")
        yield where, row
    if empty:
        raise DataError(f"{path} is empty: write one JSON object per line, or one row at least")


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


def _parquet_rows(
    path: str, fields: Mapping[str, str], others: Iterable[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import parquet

    number = 0
    with open_regular(path, error=DataError) as opened:
        try:
            file = parquet.ParquetFile(opened)
            names = file.schema_arrow.names
            read = names if others is None else [n for n in names if n in {*fields, *others}]
            batches = file.iter_batches(columns=read)
        except Exception as error:  # of many classes, pyarrow's own and Python's
            raise DataError(
                f"{path}: not a complete Parquet file ({error}); write it again"
            ) from error
        for name, remedy in fields.items():
            if names.count(name) != 1:
                what = (
                    f"{names.count(name)} columns {name!r}"
                    if name in names
                    else f"no field {name!r}"
                )
                raise DataError(f"{path}: {what} (fields: {', '.join(names)}); {remedy}")
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
