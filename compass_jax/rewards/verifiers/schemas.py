"""JSON schemas: their faults, and whether an answer conforms to one.

The user writes a schema, so its faults are errors at the start. The model writes an answer, so an
answer is wrong if its check takes too long.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from compass_jax.base.aliases import Json
from compass_jax.base.untrusted import UntrustedError, parse_json
from compass_jax.rewards.verifiers.limits import OutOfTime, processor_time

_SAMPLES: tuple[Json, ...] = (None, True, 1, "a", [], [1], {}, {"a": 1})  # one of each type


def conforms(value: Json, schema: Json) -> bool:
    """Returns whether a value conforms to a schema; not if that takes too long to find out."""
    try:
        with processor_time():
            return bool(_validator(json.dumps(schema)).is_valid(value))
    except OutOfTime:
        return False


def decoded(schema: Json) -> Json:
    """Returns a schema that may be JSON text. Raises UntrustedError."""
    return parse_json(schema, "the schema") if isinstance(schema, str) else schema


def schema_fault(schema: Json) -> str:
    """Returns the fault of a schema, after a colon; empty for a valid one."""
    try:
        return _fault(json.dumps(decoded(schema)))
    except (UntrustedError, TypeError, ValueError) as error:
        return f": {error!s:.200}"


@lru_cache(maxsize=1024)
def _fault(text: str) -> str:
    from jsonschema.exceptions import SchemaError
    from referencing.exceptions import Unresolvable

    schema = json.loads(text)
    if not isinstance(schema, dict | bool):
        return f": a {type(schema).__name__}; it must be an object, true or false"
    try:
        for pattern in _patterns(schema):
            re.compile(pattern)
        validator = _validator(text)
        validator.check_schema(schema)
        with processor_time():
            for sample in _SAMPLES:
                validator.is_valid(sample)
    except re.error as error:
        return f": the pattern {pattern!r:.80} is none of Python's: {error}"
    except RecursionError:
        return ": it refers to itself without an end"
    except Unresolvable as error:
        return f": {error!s:.120} cannot be found; include the schema that it refers to"
    except OutOfTime as error:
        return f": it takes {error} for a short value"
    except (SchemaError, TypeError, ValueError) as error:
        return f": {str(error).splitlines()[0]:.200}"
    return ""


def _patterns(schema: Json) -> Iterator[str]:
    """Yields the regular expressions in a schema."""
    if isinstance(schema, list):
        for item in schema:
            yield from _patterns(item)
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key == "pattern" and isinstance(value, str):
                yield value
            if key == "patternProperties" and isinstance(value, Mapping):
                yield from value
            yield from _patterns(value)


@lru_cache(maxsize=64)
def _validator(text: str) -> Any:
    from jsonschema.validators import extend, validator_for

    schema = json.loads(text)
    cls = validator_for(schema)
    return extend(cls, {"uniqueItems": _check_unique})(schema)


def _check_unique(validator: Any, unique: Json, value: Json, schema: Json) -> Iterator[Exception]:
    """Checks `uniqueItems` in linear time; jsonschema compares all pairs of objects."""
    from jsonschema.exceptions import ValidationError

    if unique and validator.is_type(value, "array"):
        texts = {json.dumps(_canonical(item), sort_keys=True) for item in value}
        if len(texts) < len(value):
            yield ValidationError("it has equal items")


def _canonical(value: Json) -> Json:
    """Returns a value in which equal numbers are written in one way: 1 for 1.0."""
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _canonical(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
