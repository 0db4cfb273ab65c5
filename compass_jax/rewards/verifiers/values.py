"""Equality of JSON values."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from compass_jax.base.aliases import Json


def without_nulls(value: Json) -> Json:
    """Returns a JSON value with the null fields of its objects removed at any depth. Nulls in lists
    remain.

    Arrow stores a missing field of a row as null, so null and missing fields are the same data in a
    Parquet file.
    """
    if isinstance(value, Mapping):
        return {key: without_nulls(x) for key, x in value.items() if x is not None}
    if isinstance(value, list | tuple):
        return type(value)(map(without_nulls, value))
    return value


def equal(a: Json, b: Json, text: Callable[[str], str] = str) -> bool:
    """Returns whether two values are the same JSON: true is not 1, 1 equals 1.0, and a tuple equals
    a list. Strings are compared after applying `text`.
    """
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(equal(x, y, text) for x, y in zip(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[key], b[key], text) for key in a)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    if isinstance(a, str) and isinstance(b, str):
        return text(a) == text(b)
    return type(a) is type(b) and a == b
