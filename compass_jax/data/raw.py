"""Sequential reading of raw rows: bytes of JSON lines (plain, gzip, zstd) and ArrayRecord files,
rows of Parquet files. data/files.py parses and checks them.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

from compass_jax.config.files import ARRAY_RECORDS
from compass_jax.errors import UserError
from compass_jax.untrusted import MOST_LINE_BYTES, open_regular


class DataError(UserError):
    """Data that cannot be used. The message names the file and line (or the source) and a
    remedy.
    """


# A row before parsing: its JSON bytes, a Parquet row, or the error of reading it
Raw = bytes | dict[str, Any] | DataError
CODECS = {".gz": "gzip", ".zst": "zstd"}
AT_ONCE = 256  # records of an ArrayRecord file per read: single reads cost milliseconds each


def raw_rows(
    path: str, fields: Mapping[str, str], others: Iterable[str] | None
) -> Iterator[tuple[str, Raw]]:
    """Returns an iterator of (where, row) over a file, blank lines included. The arguments are
    those of `files.read_rows`. Raises DataError for errors of the file itself.
    """
    if path.endswith(".parquet"):
        return parquet_rows(path, fields, others)
    return _array_records(path) if path.endswith(ARRAY_RECORDS) else _json_lines(path)


@contextlib.contextmanager
def open_lines(path: str) -> Iterator[IO[bytes]]:
    """Opens a file of lines, decompressed if its name ends in .gz or .zst. Raises DataError for
    something other than a regular file. Reading a truncated or damaged file raises OSError.
    """
    codec = CODECS.get(os.path.splitext(path)[1])
    with open_regular(path, error=DataError) as file:
        if codec is None:
            yield file
            return
        import pyarrow

        packed = pyarrow.PythonFile(file, mode="r")
        with io.BufferedReader(pyarrow.CompressedInputStream(packed, codec), 2**20) as unpacked:
            yield unpacked


def unreadable(path: str, after: str, error: Exception) -> DataError:
    """Returns the error for a file that cannot be read `after` a place in it."""
    packed = "it is cut off or damaged, or not packed as its name says; write it again"
    remedy = packed if path.endswith(tuple(CODECS)) else "write it again, or check the disk"
    return DataError(f"{path}, {after}: cannot be read ({error}); {remedy}")


def too_long(where: str) -> DataError:
    """Returns the error for a line or record that is too long."""
    return DataError(
        f"{where}: more than {MOST_LINE_BYTES:,} bytes, the most that a line may have; split it, or"
        " leave the row out"
    )


def _json_lines(path: str) -> Iterator[tuple[str, Raw]]:
    with open_lines(path) as file:
        for number in itertools.count(1):
            where = f"{path}, line {number}"
            try:
                line = file.readline(MOST_LINE_BYTES + 1)
                raw: Raw = line
                if len(line) > MOST_LINE_BYTES:
                    raw = too_long(where)
                    while line and not line.endswith(b"\n"):
                        line = file.readline(2**20)
            except OSError as error:
                raise unreadable(path, f"after line {number - 1}", error) from error
            if raw == b"":
                return
            yield where, raw


def array_records(path: str) -> Any:
    """Returns grain's data source for an ArrayRecord file. Raises DataError for other files."""
    import grain

    with open_regular(path, error=DataError):
        try:  # a name that ends in "[3:5]" would select a part of the file; none does here
            return grain.sources.ArrayRecordDataSource([path])
        except Exception as error:  # RuntimeError for a damaged file, or others
            raise DataError(
                f"{path}: not a complete ArrayRecord file ({error}); write it again"
            ) from error


def records_at(path: str, source: Any, indices: list[int]) -> list[tuple[str, Raw]]:
    """Returns (where, raw row) of records of `array_records`; a DataError replaces a
    damaged row.
    """
    try:
        records = source.__getitems__(indices) if indices else []
    except Exception as error:  # one record is damaged
        if len(indices) > 1:
            return [one for i in indices for one in records_at(path, source, [i])]
        where = f"{path}, record {indices[0] + 1}"
        return [(where, DataError(f"{where}: cannot be read ({error}); write the file again"))]
    rows: list[tuple[str, Raw]] = []
    for i, record in zip(indices, records, strict=True):
        where = f"{path}, record {i + 1}"
        rows.append((where, too_long(where) if len(record) > MOST_LINE_BYTES else record + b"\n"))
    return rows


def _array_records(path: str) -> Iterator[tuple[str, Raw]]:
    source = array_records(path)
    for start in range(0, len(source), AT_ONCE):
        yield from records_at(path, source, [*range(start, min(start + AT_ONCE, len(source)))])


def _parquet_names(prefix: str, fields: Iterable[Any]) -> Iterator[str]:
    from pyarrow import types

    for field in fields:
        yield prefix + field.name
        if types.is_struct(field.type):
            yield from _parquet_names(f"{prefix}{field.name}.", field.type)


@contextlib.contextmanager
def open_parquet(path: str) -> Iterator[tuple[Any, list[str]]]:
    """Opens a Parquet file and yields it with the names of its columns, nested ones included.
    Raises DataError for other files.
    """
    from pyarrow import parquet

    with open_regular(path, error=DataError) as opened:
        try:
            file = parquet.ParquetFile(opened)
            names = list(_parquet_names("", file.schema_arrow))
        except Exception as error:  # of many classes, of pyarrow and Python
            raise DataError(
                f"{path}: not a complete Parquet file ({error}); write it again"
            ) from error
        yield file, names


def _rows_of(batch: Any) -> list[dict[str, Any]]:
    """Returns the rows of a record batch, without the null fields that a struct type adds."""
    rows = batch.to_pylist()
    for field in batch.schema:
        if _is_nested(field.type):
            for row in rows:
                row[field.name] = _json_value(row[field.name], field.type)
    return rows


def _is_nested(kind: Any) -> bool:
    from pyarrow import types

    return types.is_nested(kind) and not types.is_union(kind)


def _json_value(value: Any, kind: Any) -> Any:
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
        pairs = {key: _json_value(x, kind.item_type) for key, x in value}
        if len(pairs) < len(value):
            raise ValueError("a map has a key twice")
        return pairs
    return [_json_value(x, kind.value_type) for x in value]


def parquet_rows(
    path: str, fields: Mapping[str, str], others: Iterable[str] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, row) of a Parquet file; the arguments are those of `read_rows`. Raises
    DataError for a missing column, and for a damaged page, with the last row before it.
    """
    number = 0
    with open_parquet(path) as (file, all_names):
        names = file.schema_arrow.names
        for name, remedy in fields.items():
            if all_names.count(name) != 1:
                problem = (
                    f"{all_names.count(name)} columns {name!r}"
                    if name in all_names
                    else f"no field {name!r}"
                )
                raise DataError(f"{path}: {problem} (fields: {', '.join(names)}); {remedy}")
        read = names if others is None else [n for n in all_names if n in {*fields, *others}]
        batches = file.iter_batches(columns=read)
        while True:
            try:
                batch = next(batches, None)
                rows = None if batch is None else _rows_of(batch)
            except Exception as error:  # a damaged page, invalid UTF-8, a date out of range
                raise DataError(
                    f"{path}, after row {number}: cannot be read ({error}); write it again"
                ) from error
            if rows is None:
                return
            for row in rows:
                number += 1
                yield f"{path}, row {number}", row
