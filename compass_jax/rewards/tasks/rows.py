"""JSON encoding of a prompt's row, in the form that is sent to reward workers. Decoding restores
the row.

A tuple is encoded as {"!tuple": [...]}, a set as {"!set": [...]}, and a mapping whose keys are not
all strings as {"!dict": [[key, value], ...]}.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from compass_jax.base.aliases import Json, JsonMapping, JsonObject

# columns with a prompt's labels; the name of its source is another label
LABELS = ("domain", "language", "difficulty")


def encode_row(row: JsonMapping) -> str:
    """Returns `row` as JSON. Raises TypeError, naming the column, if it cannot be encoded."""
    try:
        return json.dumps(_add_tags(row), ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        for name, value in row.items():
            try:
                json.dumps(_add_tags(value))
            except (TypeError, ValueError, RecursionError) as error:
                raise TypeError(f"column {name!r} cannot be written as JSON: {error}") from error
        raise


def decode_row(text: str) -> JsonObject:
    """Returns the row that `encode_row` encoded."""
    return json.loads(text, object_hook=_remove_tags)


def _add_tags(value: Json) -> Json:
    if isinstance(value, tuple):
        return {"!tuple": [_add_tags(item) for item in value]}
    if isinstance(value, (set, frozenset)):
        return {"!set": [_add_tags(item) for item in sorted(value, key=repr)]}
    if isinstance(value, list):
        return [_add_tags(item) for item in value]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("!") for key in value):
            return {key: _add_tags(item) for key, item in value.items()}
        return {"!dict": [[_add_tags(key), _add_tags(item)] for key, item in value.items()]}
    return value


def _remove_tags(value: JsonObject) -> Json:
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "!tuple":
            return tuple(content)
        if tag == "!set":
            return set(content)
        if tag == "!dict":
            return {key: item for key, item in content}
    return value
