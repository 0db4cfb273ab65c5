"""Rows of JSON-lines (plain, gzip, zstd), Parquet and ArrayRecord files, in order or by index.

Errors name the file and the line. A field name with dots refers to a nested field, such as
`reward_model.ground_truth`. A column of exactly that name takes precedence.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import re
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from pydantic import ValidationError

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.errors import UserError
from compass_jax.base.untrusted import MOST_LINE_BYTES, parse_json
from compass_jax.config.files import ARRAY_RECORDS, ENDINGS
from compass_jax.config.foreign import hub_hint

MOST_DIGITS = 4000  # maximum digits of an integer in a row; Python formats at most 4,300
CODECS = (".gz", ".zst")
AT_ONCE = 256  # records of an ArrayRecord file per read: single reads cost milliseconds each
FORMAT = 2  # version of the cache files
PARTS, PART_BYTES = 16, 4 * 2**10  # samples of a file's content that determine its key
OFFSET = np.dtype("<u8")


class DataError(UserError):
    """Data that cannot be used. The message names the place and a remedy."""


Raw = bytes | JsonObject | DataError  # JSON bytes, a Parquet row, or the error of a row
OnBadRow = Callable[[DataError], None]  # receives the error of a row; raises it, or skips the row


def refuse(error: DataError) -> None:
    """Raises `error`: bad rows are not skipped."""
    raise error


def validation_problem(error: ValidationError) -> str:
    """Returns the first problem that pydantic found, in one line."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))} = {first['input']!r:.80}: {first['msg']}"


class BadRows:
    """A handler for errors of rows: raises them, or counts them and reports the first ones."""

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


# ---- names of files ------------------------------------------------------------------------------


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
    if path.endswith("/"):  # a folder's name may have a dot, or be one
        return os.path.basename(os.path.abspath(path))
    folder, _, name = path.rpartition("/")
    ending = next((one for one in ENDINGS if name.endswith(one)), "")
    stem = name.removesuffix(ending) if ending else name.rsplit(".", 1)[0]
    begins = re.split(r"[-_.]*[*?\[]", stem, maxsplit=1)[0]
    return begins or folder.rpartition("/")[2] or stem


def label_among(path: str, named: Container[str]) -> str:
    """Returns `path` if `named` contains it, else its `label_of`."""
    return path if path in named else label_of(path)


# ---- rows in order -------------------------------------------------------------------------------


def read_rows(
    path: str,
    fields: Mapping[str, str],
    other_columns: Iterable[str] | None = (),
    bad: OnBadRow = refuse,
) -> Iterator[tuple[str, JsonObject]]:
    """Yields (where, row) for each row of a file; `where` is "path, line 3".

    Args:
        path: the file.
        fields: the fields that every row must have with a value other than null, each with the
            advice for a missing one.
        other_columns: additional columns of a Parquet file to read if present; None reads all.
            Columns that are not read may hold anything.
        bad: receives the DataError of a row that cannot be used. Errors of the file itself are
            raised.
    """
    empty = True
    for where, raw in raw_rows(path, fields, other_columns):
        try:
            row = row_of(where, raw, fields)
        except DataError as error:
            refuse_half_written(where, raw)
            bad(error)
            row, empty = None, False
        if row is not None:
            yield where, row
            empty = False
    if empty:
        raise _empty(path)


def raw_rows(
    path: str, fields: Mapping[str, str], other_columns: Iterable[str] | None
) -> Iterator[tuple[str, Raw]]:
    """Yields (where, row) before parsing. Raises DataError for errors of the file itself."""
    for number, raw in enumerate(_unparsed(path, fields, other_columns), 1):
        yield _checked(_where(path, number), raw)


def _unparsed(
    path: str, fields: Mapping[str, str], other_columns: Iterable[str] | None
) -> Iterator[Any]:
    number = 0
    try:
        if path.endswith(".parquet"):
            rows: Iterator[Any] = _parquet_rows(path, fields, other_columns)
        else:
            rows = _records(path) if path.endswith(ARRAY_RECORDS) else _lines(path)
        for raw in rows:
            yield raw
            number += 1
    except DataError:
        raise
    except Exception as error:  # of many classes, of pyarrow, grain and Python
        raise _unreadable(path, error, f", after {_word(path)} {number}") from error


def _word(path: str) -> str:
    other = "record" if path.endswith(ARRAY_RECORDS) else "line"
    return "row" if path.endswith(".parquet") else other


def _where(path: str, number: int) -> str:
    return f"{path}, {_word(path)} {number}"


def _checked(where: str, raw: Json) -> tuple[str, Raw]:
    if isinstance(raw, bytes) and len(raw) > MOST_LINE_BYTES:
        most = f"more than {MOST_LINE_BYTES:,} bytes, the most that a line may have"
        return where, DataError(f"{where}: {most}; split it, or leave the row out")
    return where, raw


def _unreadable(path: str, error: Exception, place: str = "") -> DataError:
    if not os.path.exists(path):
        return DataError(f"{path} does not exist")
    remedy = "it is cut off, damaged, or not of the kind that its name says; write it again"
    return DataError(f"{path}{place}: cannot be read ({error}); {remedy}")


def _empty(path: str) -> DataError:
    return DataError(f"{path} is empty: write one JSON object per line, or one row at least")


def _lines(path: str) -> Iterator[bytes]:
    if not path.endswith(CODECS):
        with open(path, "rb") as lines:
            yield from lines
        return
    import pyarrow

    with io.BufferedReader(pyarrow.input_stream(path, "detect"), 2**20) as lines:
        yield from lines


def _records(path: str) -> Iterator[bytes]:
    import grain

    source = grain.sources.ArrayRecordDataSource([path])
    for start in range(0, len(source), AT_ONCE):
        for record in source.__getitems__([*range(len(source))[start : start + AT_ONCE]]):
            # The line feed marks a complete row for `refuse_half_written`.
            yield record + b"\n"


def _parquet_rows(
    path: str, fields: Mapping[str, str], other_columns: Iterable[str] | None
) -> Iterator[JsonObject]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        names = list(_column_names(file.schema_arrow))
        for name, remedy in fields.items():
            if name not in names:
                known = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path}: no field {name!r} (fields: {known}); {remedy}")
        used = {*fields, *(other_columns or ())}
        columns = None if other_columns is None else [name for name in names if name in used]
        for batch in file.iter_batches(columns=columns):
            rows = batch.to_pylist()
            for field in batch.schema:
                for row in rows if _is_nested(field.type) else ():
                    row[field.name] = _json_value(row[field.name], field.type)
            yield from rows


def _column_names(fields: Iterable[Any], prefix: str = "") -> Iterator[str]:
    from pyarrow import types

    for field in fields:
        yield prefix + field.name
        if types.is_struct(field.type):
            yield from _column_names(field.type, f"{prefix}{field.name}.")


def _is_nested(kind: Any) -> bool:
    from pyarrow import types

    return types.is_nested(kind) and not types.is_union(kind)


def _json_value(value: Json, kind: Any) -> Json:
    """Returns an Arrow value as the JSON value that was written.

    A struct type has the union of all rows' fields, so a field that a row lacks is null; it is
    dropped. A map becomes an object with its keys and keeps null values.
    """
    from pyarrow import types

    if value is None or not _is_nested(kind):
        return value
    if types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return {key: _json_value(x, fields[key]) for key, x in value.items() if x is not None}
    if types.is_map(kind):
        return {key: _json_value(x, kind.item_type) for key, x in value}
    return [_json_value(x, kind.value_type) for x in value]


# ---- one row -------------------------------------------------------------------------------------


def refuse_half_written(where: str, raw: Raw) -> None:
    """Raises DataError for an unterminated last line that is not JSON."""
    if isinstance(raw, bytes) and not raw.endswith(b"\n"):
        row_of(where, raw, {})


def row_of(where: str, raw: Raw, fields: Mapping[str, str]) -> JsonObject | None:
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
            names = list(_names(raw))
            absent = f"no field {name!r} (fields: {', '.join(names)[:300]})"
            problem = f"{name!r} is null" if name in names else absent
            raise DataError(f"{where}: {problem}; {remedy}")
    return raw


def json_object(line: bytes, where: str) -> JsonObject:
    """Returns the JSON object of a line. Raises DataError, also for one that is cut off."""
    try:
        row = parse_json(line, where, error=DataError, most_digits=MOST_DIGITS)
    except DataError as error:
        cause = error.__cause__
        if line.endswith(b"\n") or not isinstance(cause, json.JSONDecodeError | UnicodeDecodeError):
            raise
        raise DataError(
            f"{where}: the last line is cut off ({cause}); the file is half-written: write it"
            " again, or delete this line"
        ) from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: a JSON {type(row).__name__}, not an object; write one JSON object per line"
        )
    return row


def field_of(row: JsonMapping, name: str) -> Json:
    """Returns the value of a field, whose name may have dots, or None if it is missing."""
    if name in row:
        return row[name]
    value: Json = row
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def columns_of(path: str) -> tuple[str, list[str]]:
    """Returns (where, names) of the columns of a file's first usable row, or of a Parquet file;
    nested columns have dotted names.
    """
    if not path.endswith(".parquet"):
        errors: list[DataError] = []
        try:
            for where, row in read_rows(path, {}, bad=errors.append):
                return where, list(_names(row))
        except DataError as error:  # an empty file, or a half-written last line
            errors.append(error)
        raise errors[0]
    from pyarrow import parquet

    try:
        return path, list(_column_names(parquet.read_schema(path)))
    except Exception as error:
        raise _unreadable(path, error) from error


def _names(row: JsonMapping, prefix: str = "") -> Iterator[str]:
    for name, value in row.items():
        yield prefix + name
        if isinstance(value, Mapping):
            yield from _names(value, f"{prefix}{name}.")


# ---- rows by index -------------------------------------------------------------------------------


class FileRows:
    """The rows of one file by index, in constant memory.

    A .jsonl file is read in place, with an index of its lines in a cache folder (8 bytes per line).
    A .gz, .zst or .parquet file is unpacked once into the cache folder as JSON lines. An
    ArrayRecord file has its own index. The names of cache files are derived from the file's path,
    size, modification time and samples of its content, so they belong to one version of it.

    `key` is equal for files of the same size and content in any folder.

    Args:
        path: the file.
        fields, other_columns: a Parquet file's columns, as in `read_rows`.
        cache: the cache folder; if empty, compass_jax/data in the user's cache folder.

    Raises DataError for a file that cannot be read, is empty or half-written, and if the cache
    folder has no space.
    """

    def __init__(
        self, path: str, fields: Mapping[str, str], other_columns: Iterable[str], cache: str
    ):
        self._path, self._source = path, None
        try:
            self._stamp, self.key = _stamp(path), _key(path)
            if path.endswith(ARRAY_RECORDS):
                import grain

                self._source = grain.sources.ArrayRecordDataSource([path])
                self._count = len(self._source)
        except Exception as error:
            raise _unreadable(path, error) from error
        if self._source is None:
            base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
            folder = Path(cache or os.path.join(base, "compass_jax", "data"))
            unique = FORMAT, os.path.realpath(path), self._stamp, self.key
            content = json.dumps([*unique, sorted(fields), sorted(other_columns)]).encode()
            name = hashlib.blake2b(content, digest_size=16).hexdigest()
            self._plain = Path(path)
            if path.endswith((*CODECS, ".parquet")):
                unpack = lambda to: _unpack(path, fields, other_columns, to)  # noqa: E731
                self._plain = _cached(folder / f"{name}.jsonl", unpack)
            self._index = _cached(folder / f"{name}.lines", lambda to: _index(self._plain, to))
            self._count = self._index.stat().st_size // OFFSET.itemsize - 1
        if not len(self):
            raise _empty(path)
        refuse_half_written(*self[len(self) - 1])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[str, Raw]:
        """Returns (where, row); the row is a DataError if it is too long. Raises DataError if it
        cannot be read, or the file has changed since it was opened. Opens the files for each row,
        because a folder may have thousands.
        """
        where = _where(self._path, index + 1)
        try:
            if _stamp(self._path) != self._stamp:
                raise DataError(
                    f"{self._path} has changed while it was read: a run needs the same file from"
                    " its start to its end; put the old one back, or start a new run"
                )
            if self._source is not None:
                return _checked(where, self._source[index] + b"\n")
            start, end = np.fromfile(self._index, OFFSET, 2, offset=index * OFFSET.itemsize)
            with open(self._plain, "rb") as lines:
                return _checked(where, os.pread(lines.fileno(), int(end - start), int(start)))
        except DataError:
            raise
        except Exception as error:  # RuntimeError for a damaged record, OSError
            raise _unreadable(self._path, error, where.removeprefix(self._path)) from error


def _stamp(path: str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _key(path: str) -> str:
    """Returns a digest of the size and of evenly spaced samples of the content."""
    size = os.path.getsize(path)
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(path, "rb") as file:
        for start in np.linspace(0, max(size - PART_BYTES, 0), PARTS).astype(int):
            digest.update(os.pread(file.fileno(), PART_BYTES, int(start)))
    return digest.hexdigest()


def _cached(target: Path, make: Callable[[Path], None]) -> Path:
    """Returns a file of the cache folder, which one process makes if it is missing."""
    if target.is_file():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target}.lock"), tempfile.TemporaryDirectory(dir=target.parent) as folder:
            # Another process may have made it while this one waited for the lock.
            if not target.is_file():
                make(Path(folder, "unfinished"))
                os.replace(Path(folder, "unfinished"), target)
    except OSError as error:
        raise DataError(
            f"{target} cannot be written ({error.strerror or error}): make room there, or name"
            " another folder in data.cache"
        ) from error
    return target


def _index(plain: Path, to: Path) -> None:
    """Writes the start offset of each line, and the end of the last one."""
    with open(plain, "rb") as lines, open(to, "wb") as index:
        ends = accumulate(map(len, lines), initial=0)
        while (part := np.fromiter(islice(ends, 2**16), OFFSET)).size:
            part.tofile(index)


def _unpack(path: str, fields: Mapping[str, str], other_columns: Iterable[str], to: Path) -> None:
    """Writes the rows of a compressed or Parquet file as JSON lines."""
    with open(to, "wb") as out:
        for number, raw in enumerate(_unparsed(path, fields, other_columns), 1):
            if isinstance(raw, bytes):
                out.write(raw)
                continue
            try:
                out.write(json.dumps(raw, ensure_ascii=False).encode() + b"\n")
            except TypeError as error:
                raise DataError(
                    f"{_where(path, number)}: {error}; write the value as text, or leave the"
                    " column out"
                ) from error
