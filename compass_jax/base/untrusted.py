"""Readers for untrusted files and texts: they check size, encoding, nesting depth and numbers.

Configurations, tokenizers, indexes, manifests, rows and requests are JSON. Python's parser accepts
more than JSON (NaN, lone surrogates, duplicate keys, integers of any length) and raises
RecursionError for deeply nested brackets. Here each of these is an error that names its place.
"""

from __future__ import annotations

import codecs
import itertools
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import IO

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import UserError

MOST_LINE_BYTES = 8 * 2**20  # maximum length of a JSON line: several million characters
MOST_DEPTH = 64
MOST_DIGITS = 19  # maximum length of an integer: 64 bits

# a span of code within a line, or a block, whose language may have attributes: ```python title="f"
_FENCED = re.compile(
    r"```[^`\n]+```|```[ \t]*+(?:\{\.?+)?+([\w+#.-]*+)(?:[ \t:=,}][^`\n]*+)?+\n(.*?)```", re.DOTALL
)
_SURROGATE = re.compile("[\ud800-\udfff]")


class UntrustedError(UserError):
    """A file or text that cannot be used. The message names the file, the place in it and a remedy.
    Other modules derive their own errors from it.
    """


def open_regular(path: str | os.PathLike, *, error: type[Exception] = UntrustedError) -> IO[bytes]:
    """Returns a regular file, opened for reading bytes. Raises `error` for anything else, such as a
    folder or a pipe. It never blocks.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise error(f"{path} is not a file: a folder, a pipe or a device lies there")
        return open(path, "rb")
    except FileNotFoundError as cause:
        raise error(f"{path} does not exist") from cause
    except (OSError, ValueError) as cause:  # ValueError: a name with a NUL in it
        raise error(_unreadable(path, cause)) from cause


def _unreadable(path: Path, cause: Exception) -> str:
    return f"{str(path)[:200]} cannot be read: {getattr(cause, 'strerror', None) or cause}"


def read_bytes(path: str | os.PathLike, *, error: type[Exception] = UntrustedError) -> bytes:
    """Returns the content of a regular file. Raises `error` like `open_regular`."""
    with open_regular(path, error=error) as file:
        try:
            return file.read()
        except OSError as cause:
            raise error(_unreadable(Path(path), cause)) from cause


def read_lines(
    path: str | os.PathLike,
    *,
    error: type[Exception] = UntrustedError,
    most_bytes: int = MOST_LINE_BYTES,
) -> Iterator[tuple[str, bytes]]:
    """Yields (where, line) of a regular file; `where` is "path, line 3", and the line keeps its
    line feed.

    Raises `error` like `open_regular`, and for a line of more than `most_bytes`.
    """
    with open_regular(path, error=error) as file:
        for number in itertools.count(1):
            where = f"{path}, line {number}"
            try:
                line = file.readline(most_bytes + 1)
            except OSError as cause:
                raise error(_unreadable(Path(path), cause)) from cause
            if len(line) > most_bytes:
                raise error(
                    f"{where}: more than {most_bytes:,} bytes, the most that a line may have; split"
                    " it, or leave the row out"
                )
            if not line:
                return
            yield where, line


def read_text(path: str | os.PathLike, *, error: type[Exception] = UntrustedError) -> str:
    """Returns the text of a UTF-8 file. Raises `error` like `read_bytes`, for another encoding, and
    for a byte order mark, because other readers of such files fail on it and exports copy the file.
    """
    data = read_bytes(path, error=error)
    if data.startswith(codecs.BOM_UTF8):
        raise error(f"{path} begins with a byte order mark; save it as UTF-8 without one")
    return decode_utf8(data, str(path), error=error)


def decode_utf8(data: bytes, where: str, *, error: type[Exception] = UntrustedError) -> str:
    """Returns `data` as text, without a byte order mark at its start. Raises `error`, naming the
    invalid byte, if `data` is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(
            f"{where}: not UTF-8 (byte {cause.start}: {cause.reason}); convert it to UTF-8"
        ) from cause


def read_json(
    path: str | os.PathLike,
    *,
    error: type[Exception] = UntrustedError,
    most_digits: int = MOST_DIGITS,
) -> Json:
    """Returns the value of a JSON file. Raises `error` like `read_text` and `parse_json`."""
    return parse_json(read_text(path, error=error), str(path), error=error, most_digits=most_digits)


def parse_json(
    text: str | bytes,
    where: str,
    *,
    error: type[Exception] = UntrustedError,
    most_digits: int = MOST_DIGITS,
) -> Json:
    """Returns the value of a JSON text with finite numbers, whole characters and unique keys.

    Args:
        text: bytes must be UTF-8.
        where: the place that messages begin with ("rows.jsonl, line 3").
        error: the class to raise, constructed from one message.
        most_digits: maximum number of digits of an integer. Reference answers may be long; sizes
            and settings fit in 19.
    """
    if isinstance(text, bytes):
        text = decode_utf8(text, where, error=error)

    def parse_integer(digits: str) -> int:
        if len(digits.lstrip("-")) > most_digits:
            long = f"has more than {most_digits} digits; write it as a string"
            raise error(f"{where}: the integer {digits[:20]}... {long}")
        return int(digits)

    def parse_real(digits: str) -> float:
        if not math.isfinite(value := float(digits)):
            big = "is not finite; write it as a string, or a smaller one"
            raise error(f"{where}: the number {digits[:40]} {big}")
        return value

    def constant(name: str) -> float:
        raise error(f"{where}: {name} is no number of JSON; remove it, or write it as a string")

    def unique_keys(pairs: list[tuple[str, Json]]) -> JsonObject:
        value = dict(pairs)
        if len(value) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise error(f"{where}: the key {twice[:80]!r} comes twice; keep one")
        return value

    try:
        value = json.loads(
            text,
            parse_int=parse_integer,
            parse_float=parse_real,
            parse_constant=constant,
            object_pairs_hook=unique_keys,
        )
    except json.JSONDecodeError as cause:
        raise error(f"{where}: not JSON: {cause}") from cause
    except RecursionError as cause:
        raise error(f"{where}: nested deeper than {MOST_DEPTH} levels") from cause
    if text.count("[") + text.count("{") > MOST_DEPTH or re.search(r"\\u[dD][89a-fA-F]", text):
        _check_parts(value, where, "", error)
    return value


def whole_text(text: str, where: str, *, error: type[Exception] = UntrustedError) -> str:
    """Returns `text`. Raises `error` if it has a lone surrogate (half a character)."""
    if half := _SURROGATE.search(text):
        place = f"character {half.start()}, {half[0]!r}"
        raise error(
            f"{where}: half a character (a lone surrogate: {place}); write the text as UTF-8, or"
            " remove it"
        )
    return text


def _check_parts(
    value: Json, where: str, path: str, error: type[Exception], depth: int = 0
) -> None:
    place = f"{where}: {path}" if path else where
    if isinstance(value, str):
        whole_text(value, place, error=error)
    if not isinstance(value, dict | list):
        return
    if depth == MOST_DEPTH:
        raise error(f"{where}: nested deeper than {MOST_DEPTH} levels")
    if isinstance(value, list):
        for i, part in enumerate(value):
            _check_parts(part, where, f"{path}[{i}]", error, depth + 1)
        return
    for key, part in value.items():
        whole_text(key, f"{place}, a key" if path else f"{where}: a key", error=error)
        _check_parts(part, where, f"{path}.{key[:80]}" if path else key[:80], error, depth + 1)


def fenced_blocks(text: str, labels: Set[str]) -> list[re.Match[str]]:
    """Returns the fenced blocks of Markdown whose language (group 1), in lower case, is in
    `labels`; "" is a block without one. Group 2 is the content.

    All fences are paired first, whatever their language: otherwise the end of a block in another
    language would begin one.
    """
    blocks = (block for block in _FENCED.finditer(text) if block[1] is not None)
    return [block for block in blocks if block[1].lower() in labels]
