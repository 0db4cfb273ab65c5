"""Rows of JSONL and Parquet files; whatever cannot be read is named with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from compass_jax.untrusted import open_regular, parse_json, read_lines

# of an integer in a row: a reference answer may be long; Python writes no number of more than 4,300
MOST_DIGITS = 4000


class DataError(ValueError):
    """Data that cannot be used; the message names the file and line (or the source), and what to
    do.
    """


def read_rows(path: str, fields: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each row of a .jsonl or .parquet file; `where` is "path, line 3" (or "row
    3"), counted from 1.

    fields: the names that every row must have, none of them null, each with the words that say what
        to do where it is missing.
    Of a Parquet file these columns alone are read; the others may hold anything.
    """
    rows = _parquet_rows(path, fields) if path.endswith(".parquet") else _jsonl_rows(path)
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


def _parquet_rows(path: str, fields: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    from pyarrow import parquet

    number = 0
    with open_regular(path, error=DataError) as opened:
        try:
            file = parquet.ParquetFile(opened)
            names = file.schema_arrow.names
            batches = file.iter_batches(columns=[name for name in fields if name in names])
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


def check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    """Chat messages as a list of {"role", "content"}, or DataError naming the message that is
    wrong.

    A message with anything else in it (tool calls, a name, images) is refused: what is left of it
    would be another message. Null and empty values say nothing and are passed over.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(
            f"{where}: messages must be a non-empty list of {{'role', 'content'}}, not "
            f"{messages!r:.80}"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(
                f"{where}: messages[{i}] must be an object with 'role' and a string 'content', "
                f"not {message!r:.80}"
            )
        others = [
            key
            for key, value in message.items()
            if key not in ("role", "content") and value not in (None, "", [], {})
        ]
        if others:
            named = ", ".join(map(repr, others))[:200]
            raise DataError(
                f"{where}: messages[{i}] has {named}: only role and content are used; remove "
                "it, or write it into the content"
            )
        if isinstance(message.get("content"), list):
            raise DataError(
                f"{where}: messages[{i}] has a list of parts for content (images, files?): it "
                "must be one text"
            )
        if not isinstance(message.get("content"), str):
            raise DataError(
                f"{where}: messages[{i}] must be an object with 'role' and a string 'content', "
                f"not {message!r:.80}"
            )
        if message.get("role") not in ROLES:
            raise DataError(
                f"{where}: messages[{i}] has the role {message.get('role')!r:.80}; known "
                f"roles: {', '.join(ROLES)}"
            )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def refuse_blank(messages: list[dict[str, str]], role: str, where: str, why: str) -> None:
    """Raises DataError, naming the message, where one of this role has no text."""
    for i, message in enumerate(messages):
        if message["role"] == role and not message["content"].strip():
            raise DataError(
                f"{where}: messages[{i}] of role {role!r} is empty: {why}; write it, or delete "
                "the row"
            )
