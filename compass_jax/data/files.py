"""Rows of JSONL and Parquet files; whatever cannot be read is named with its file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class DataError(ValueError):
    """Data that cannot be used; the message names the file and line (or the source), and what to do."""


def read_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each row of a .jsonl or .parquet file; `where` is "path, line 3" (or "row 3"), counted from 1."""
    if not Path(path).is_file():
        raise DataError(f"{path} does not exist or is not a file: correct the path (a relative one starts at the working directory)")
    return _parquet_rows(path) if path.endswith(".parquet") else _jsonl_rows(path)


def _jsonl_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    empty = True
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            empty = False
            where = f"{path}, line {number}"
            yield where, _json_object(line, where)
    if empty:
        raise DataError(f"{path} is empty: write one JSON object per line")


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8 ({error}); convert the file to UTF-8") from error
    except ValueError as error:
        if not line.endswith(b"\n"):
            raise DataError(f"{where}: the last line is cut off ({error}); the file is half-written: write it again, or delete this line") from error
        raise DataError(f"{where}: not JSON ({error}); write one JSON object per line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: a JSON {type(row).__name__}, not an object; write one JSON object per line")
    return row


def _parquet_rows(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a complete Parquet file ({error}); write it again") from error
    if number == 0:
        raise DataError(f"{path} has no rows")


ROLES = ("system", "user", "assistant", "tool")


def check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    """Chat messages as a list of {"role", "content"}, or DataError naming the message that is wrong."""
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a non-empty list of {{'role', 'content'}}, not {messages!r:.80}")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise DataError(f"{where}: messages[{i}] must be an object with 'role' and a string 'content', not {message!r:.80}")
        if message.get("role") not in ROLES:
            raise DataError(f"{where}: messages[{i}] has the role {message.get('role')!r}; known roles: {', '.join(ROLES)}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
