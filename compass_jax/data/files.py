"""Sequential reading of JSONL (plain, gzip, zstd), Parquet and ArrayRecord files.

Errors name the file and the line. A field name with dots refers to a nested field, such as
`reward_model.ground_truth`. A column of exactly that name takes precedence.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

from compass_jax.config.files import ENDINGS
from compass_jax.config.foreign import hub_hint
from compass_jax.data.raw import DataError, Raw, open_parquet, raw_rows
from compass_jax.untrusted import parse_json
from compass_jax.verifiers.values import without_nulls

# maximum digits of an integer in a row; Python formats at most 4,300
MOST_DIGITS = 4000
# receives the error of a row; raises it, or returns to skip the row
Bad = Callable[[DataError], None]


def refuse(error: DataError) -> None:
    """Raises `error`: bad rows are not skipped."""
    raise error


class BadRows:
    """A handler for errors of rows. It raises them or, if `skipped`, counts them and reports the
    first ones.
    """

    MOST_TOLD = 3

    def __init__(self, skipped: bool, tell: Callable[[str], None]):
        self.count = 0
        self._skipped, self._tell = skipped, tell

    def __call__(self, error: DataError) -> None:
        """Handles one bad row."""
        if not self._skipped:
            raise error
        self.count += 1
        if self.count <= self.MOST_TOLD:
            self._tell(f"left out: {error}")
        if self.count == self.MOST_TOLD:
            self._tell("further bad rows are counted alone")


def files_of(pattern: str) -> list[str]:
    """Returns the file of this name, the data files in a folder and its subfolders, or the files
    that match a pattern (`train-*.parquet`), sorted by name.

    Data files are those whose names end in ENDINGS. Raises DataError if no file is found.
    """
    if os.path.isdir(pattern):
        paths = glob.iglob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        files = sorted(x for x in paths if x.endswith(ENDINGS) and os.path.isfile(x))
        if not files:
            raise DataError(
                f"{pattern[:200]} is a folder without a file of rows: their names end in"
                f" {', '.join(ENDINGS)}"
            )
        return files
    if hint := hub_hint(pattern, dataset=True):
        raise DataError(f"{pattern}: there is no such file or folder; {hint}")
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    files = sorted(glob.glob(pattern, recursive=True))
    if not files:
        raise DataError(f"{pattern[:200]} does not exist: no file fits this pattern")
    return files


def label_of(path: str) -> str:
    """Returns the name of a file without its ending, or of a folder. For a pattern it is the part
    before the first wildcard, or else the pattern's folder.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    ending = next((one for one in ENDINGS if name.endswith(one)), "")
    stem = name.removesuffix(ending) if ending else name.rsplit(".", 1)[0]
    begins = re.split(r"[-_.]*[*?\[]", stem, maxsplit=1)[0]
    return begins or folder.rpartition("/")[2] or stem


def label_among(path: str, named: Container[str]) -> str:
    """Returns `path` if `named` contains it, else its `label_of`."""
    return path if path in named else label_of(path)


def read_rows(
    path: str,
    fields: Mapping[str, str],
    others: Iterable[str] | None = (),
    bad: Bad = refuse,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, row) for each row of a file.

    `where` is "path, line 3" ("row 3" for a Parquet file, "record 3" for an ArrayRecord file),
    counted from 1.

    Args:
        path: the file.
        fields: the fields that every row must have with a value other than null, each with the
            advice for a missing one.
        others: additional columns of a Parquet file to read if present; None reads all. Columns
            that are not read may hold anything.
        bad: receives the DataError of a row that cannot be used. Errors of the file itself are
            raised.
    """
    empty = True
    for where, raw in raw_rows(path, fields, others):
        try:
            row = row_of(where, raw, fields)
        except DataError as error:
            refuse_half_written(where, raw)
            bad(error)
            continue
        if row is not None:
            empty = False
            yield where, row
    if empty:
        raise empty_file(path)


def refuse_half_written(where: str, raw: Raw) -> None:
    """Raises DataError for an unterminated last line that is not JSON: its writer was
    interrupted.
    """
    if isinstance(raw, bytes) and not raw.endswith(b"\n"):
        row_of(where, raw, {})


def row_of(where: str, raw: Raw, fields: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the row, or None for a blank line. Raises DataError, which names the row, if it
    cannot be used or lacks one of `fields` (see `read_rows`).
    """
    if isinstance(raw, DataError):
        raise raw
    if isinstance(raw, bytes):
        if not raw.strip():
            return None
        raw = json_object(raw, where)
    for name, remedy in fields.items():
        if field_of(raw, name) is None:
            raise DataError(f"{where}: {_missing(raw, name)}; {remedy}")
    return raw


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field, whose name may have dots, or None if it is missing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def columns_of(path: str) -> tuple[str, list[str]]:
    """Returns (where, names) of the columns of a file's first row, or of a Parquet file; nested
    columns have dotted names.
    """
    if path.endswith(".parquet"):
        with open_parquet(path) as (_, names):
            return path, names
    where, row = next(read_rows(path, {}), (path, {}))
    return where, list(_names("", row))


def _names(prefix: str, row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _names(f"{prefix}{name}.", value)


def empty_file(path: str) -> DataError:
    """Returns the error for a file without rows."""
    return DataError(f"{path} is empty: write one JSON object per line, or one row at least")


def _missing(row: Mapping[str, Any], name: str) -> str:
    parent, _, last = name.rpartition(".")
    parent_value = field_of(row, parent) if parent and name not in row else None
    if name in row or (isinstance(parent_value, Mapping) and last in parent_value):
        return f"{name!r} is null"
    has = f"fields: {', '.join(row)}"
    if isinstance(parent_value, Mapping):
        has += f"; of {parent}: {', '.join(parent_value)}"
    return f"no field {name!r} ({has[:300]})"


def json_object(line: bytes, where: str) -> dict[str, Any]:
    """Returns the JSON object of one line. Raises DataError, whose message says if the line was
    truncated.
    """
    try:
        row = parse_json(line, where, error=DataError, most_digits=MOST_DIGITS)
    except DataError as error:
        if line.endswith(b"\n") or not isinstance(
            error.__cause__, json.JSONDecodeError | UnicodeDecodeError
        ):
            raise
        problem = f"the last line is cut off ({error.__cause__})"
        raise DataError(
            f"{where}: {problem}; the file is half-written: write it again, or delete this line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a JSON {type(row).__name__}, not an object; write one JSON object per line"
        )
    return row


ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles of messages that are not part of the question
# optional fields of a message, passed to the chat template
TEXTS = ("name", "tool_call_id", "reasoning_content")
NOTHING: tuple[Any, ...] = (None, "", [], {})


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Returns chat messages in the form that chat templates take.

    A message has role and content (a text, or a list of text parts) and may have the fields TEXTS
    and tool_calls. Raises DataError, which names the message, for any other field (such as an
    image), because dropping it would change the message. Null and empty values are dropped.
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
    fields = {key: value for key, value in message.items() if value not in NOTHING}
    unknown_fields = [key for key in fields if key not in ("role", "content", "tool_calls", *TEXTS)]
    if unknown_fields:
        named = ", ".join(map(repr, unknown_fields))[:200]
        raise DataError(
            f"{where} has {named}: role, content, tool_calls, {', '.join(TEXTS)} are used; remove "
            "it, or write it into the content"
        )
    content = _content(message.get("content"), where)
    if content is None and "tool_calls" in fields:
        content = ""
    if not isinstance(content, str):
        raise DataError(f"{where} {shape}, not {message!r:.80}")
    if message.get("role") not in ROLES:
        raise DataError(
            f"{where} has the role {message.get('role')!r:.80}; known roles: {', '.join(ROLES)}"
        )
    for name in TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise DataError(f"{where} has {name} = {fields[name]!r:.80}: it must be text")
    if "tool_calls" in fields:
        if message["role"] != "assistant":
            raise DataError(f"{where} has tool_calls: only the assistant calls tools")
        fields["tool_calls"] = without_nulls(
            check_tools(fields["tool_calls"], f"{where}, tool_calls")
        )
    return {"role": message["role"], "content": content} | {
        key: value for key, value in fields.items() if key not in ("role", "content")
    }


def _content(content: Any, where: str) -> Any:
    """Returns a list of text parts joined without a separator; any other content unchanged. Raises
    DataError for a part of another kind.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        fields = part if isinstance(part, dict) else {}
        fields = {key: value for key, value in fields.items() if value is not None}
        if set(fields) != {"type", "text"} or fields["type"] != "text":
            raise DataError(
                f"{where} has a list of parts for content (images, files?), of which part {i} is"
                f" {part!r:.80}: a part must be {{'type': 'text', 'text': ...}}"
            )
        texts.append(fields["text"])
    return "".join(texts) if all(isinstance(text, str) for text in texts) else texts


def check_tools(tools: Any, where: str) -> list[dict[str, Any]]:
    """Returns tools, or calls of tools, as a list of objects; an empty list if `tools` is empty.
    Raises DataError for any other value.
    """
    if tools in NOTHING:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: must be a list of objects, not {tools!r:.80}")
    return tools


def refuse_blank(messages: list[dict[str, Any]], role: str, where: str, why: str) -> None:
    """Raises DataError, which names the message, for a message of this role with neither text nor
    tool calls.
    """
    for i, message in enumerate(messages):
        blank = not message["content"].strip() and "tool_calls" not in message
        if message["role"] == role and blank:
            raise DataError(
                f"{where}: messages[{i}] of role {role!r} is empty: {why}; write it, or delete "
                "the row"
            )
