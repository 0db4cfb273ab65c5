"""Rows of JSONL (plain, gzip, zstd), Parquet and ArrayRecord files, from the first to the last;
whatever cannot be read is named with its file and line.

A name with dots is a field inside a field: `reward_model.ground_truth`. A column of exactly that
name comes first.
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

# of an integer in a row: a reference answer may be long; Python writes no number of more than 4,300
MOST_DIGITS = 4000
# gets what is wrong with a row, and raises it, or returns where the row is to be left out
Bad = Callable[[DataError], None]


def refuse(error: DataError) -> None:
    """Raises `error`: no bad row is left out."""
    raise error


class BadRows:
    """Called with what is wrong with a row: raises it, or counts it and tells of the first
    ones where it may be left out (`skipped`).
    """

    MOST_TOLD = 3

    def __init__(self, skipped: bool, tell: Callable[[str], None]):
        self.count = 0
        self._skipped, self._tell = skipped, tell

    def __call__(self, error: DataError) -> None:
        """One bad row."""
        if not self._skipped:
            raise error
        self.count += 1
        if self.count <= self.MOST_TOLD:
            self._tell(f"left out: {error}")
        if self.count == self.MOST_TOLD:
            self._tell("further bad rows are counted alone")


def files_of(pattern: str) -> list[str]:
    """The file of this name, those of a folder and its folders whose names end as ENDINGS say, or
    those that a pattern (`train-*.parquet`) fits; by name. Raises DataError where there is none.
    """
    if os.path.isdir(pattern):
        inside = glob.iglob(os.path.join(glob.escape(pattern), "**"), recursive=True)
        found = sorted(x for x in inside if x.endswith(ENDINGS) and os.path.isfile(x))
        if not found:
            raise DataError(
                f"{pattern[:200]} is a folder without a file of rows: their names end in"
                f" {', '.join(ENDINGS)}"
            )
        return found
    if hint := hub_hint(pattern, dataset=True):
        raise DataError(f"{pattern}: there is no such file or folder; {hint}")
    if os.path.lexists(pattern) or not glob.has_magic(pattern):
        return [pattern]
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise DataError(f"{pattern[:200]} does not exist: no file fits this pattern")
    return found


def label_of(path: str) -> str:
    """The name of a file without its ending, or of a folder; of a pattern what precedes its first
    wildcard, or its folder.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    ending = next((one for one in ENDINGS if name.endswith(one)), "")
    stem = name.removesuffix(ending) if ending else name.rsplit(".", 1)[0]
    begins = re.split(r"[-_.]*[*?\[]", stem, maxsplit=1)[0]
    return begins or folder.rpartition("/")[2] or stem


def label_among(path: str, named: Container[str]) -> str:
    """`path` itself where `named` has it as it is written, else its `label_of`."""
    return path if path in named else label_of(path)


def read_rows(
    path: str,
    fields: Mapping[str, str],
    others: Iterable[str] | None = (),
    bad: Bad = refuse,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, row) for each row of a file; `where` is "path, line 3" (of a Parquet file "row 3", of
    an ArrayRecord file "record 3"), counted from 1.

    fields: the names that every row must have, none of them null, each with the words that say what
        to do where it is missing.
    others: of a Parquet file these columns are read beside `fields`, where it has them; None: all.
        What is not read may hold anything.
    bad: gets the DataError of a row that cannot be used. What is wrong with the file itself is
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
    """Raises DataError for a last line without an end that is no JSON: its writer was stopped."""
    if isinstance(raw, bytes) and not raw.endswith(b"\n"):
        row_of(where, raw, {})


def row_of(where: str, raw: Raw, fields: Mapping[str, str]) -> dict[str, Any] | None:
    """The row; None for a blank line. Raises DataError, naming it, where it cannot be used or lacks
    one of `fields` (see `read_rows`).
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
    """What a row has under a name, which may have dots; None where it has nothing."""
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def columns_of(path: str) -> tuple[str, list[str]]:
    """(where, names) of the columns of a file's first row, or of a Parquet file; those inside
    others too, with dots.
    """
    if path.endswith(".parquet"):
        with open_parquet(path) as (_, names):
            return path, names
    where, row = next(read_rows(path, {}), (path, {}))
    return where, list(_names("", row))


def _names(before: str, row: Mapping[str, Any]) -> Iterator[str]:
    for name, value in row.items():
        yield before + name
        if isinstance(value, Mapping):
            yield from _names(f"{before}{name}.", value)


def empty_file(path: str) -> DataError:
    """The error that a file without a row is."""
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


ROLES = ("system", "developer", "user", "assistant", "tool")
INSTRUCTIONS = ("system", "developer")  # roles of messages that ask nothing themselves
# of a message beside role and content; the chat template gets them
TEXTS = ("name", "tool_call_id", "reasoning_content")
NOTHING: tuple[Any, ...] = (None, "", [], {})


def check_messages(messages: Any, where: str) -> list[dict[str, Any]]:
    """Chat messages as the chat template gets them, or DataError naming the message that is wrong.

    A message has role and content (a text, or a list of text parts), and may have TEXTS and
    tool_calls. With anything else in it (an
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
    content = _content(message.get("content"), where)
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
        said["tool_calls"] = without_nulls(check_tools(said["tool_calls"], f"{where}, tool_calls"))
    return {"role": message["role"], "content": content} | {
        key: value for key, value in said.items() if key not in ("role", "content")
    }


def _content(content: Any, where: str) -> Any:
    """A content whose parts are texts as one text, with nothing between them; any other as it is.
    Raises DataError for a part of another kind.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for i, part in enumerate(content):
        said = part if isinstance(part, dict) else {}
        said = {key: value for key, value in said.items() if value is not None}
        if set(said) != {"type", "text"} or said["type"] != "text":
            raise DataError(
                f"{where} has a list of parts for content (images, files?), of which part {i} is"
                f" {part!r:.80}: a part must be {{'type': 'text', 'text': ...}}"
            )
        texts.append(said["text"])
    return "".join(texts) if all(isinstance(text, str) for text in texts) else texts


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
