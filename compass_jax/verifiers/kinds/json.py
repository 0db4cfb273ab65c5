"""JSON, by value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compass_jax.untrusted import UntrustedError, parse_json
from compass_jax.verifiers.base import NOTHING, Example, Kind, complaints
from compass_jax.verifiers.extract import json_text
from compass_jax.verifiers.values import equal, without_nulls


def judge(
    response: str, answer_tag: str, answer: Any = None, schema: Any = None
) -> Mapping[str, Any]:
    """Returns 1 for JSON that fits the schema and equals the reference, where they are given.

    Each is JSON as text, or a value. With a schema, "valid" is 1 where it fits.
    """
    try:
        value = parse_json(json_text(response, answer_tag), "the answer")
    except UntrustedError:
        return NOTHING
    same = answer is None or _same(value, answer)
    if schema is None:
        return {"reward": float(same)}
    from jsonschema.validators import validator_for

    schema = _value(schema, "the schema")
    valid = validator_for(schema)(schema).is_valid(value)
    return {"reward": float(same and valid), "valid": float(valid)}


def at_once(
    response: str, answer_tag: str, answer: Any = None, schema: Any = None
) -> Mapping[str, Any] | None:
    """Returns the result of `judge` without a schema: a pattern in a schema can take for ever."""
    return judge(response, answer_tag, answer) if schema is None else None


def _same(value: Any, answer: Any) -> bool:
    """Returns whether the answer equals the reference. Null fields count as absent where the
    reference is an object of the row, and as written where it is JSON text.
    """
    if isinstance(answer, str):
        return equal(value, parse_json(answer, "the reference"))
    return equal(without_nulls(value), without_nulls(answer))


def _value(given: Any, name: str) -> Any:
    return parse_json(given, name) if isinstance(given, str) else given


def _schema_fault(schema: Any) -> str:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        schema = _value(schema, "it")
        validator_for(schema).check_schema(schema)
    except (UntrustedError, SchemaError, TypeError, ValueError) as error:
        return f": {str(error).splitlines()[0]:.200}"
    return ""


KIND = Kind(
    judge,
    "the answer is JSON that fits `schema` and equals the reference, where they are given",
    Example({"answer": '{"a": [1, true]}'}, '{"a": [1.0, true]}', '{"a": [1, 1]}'),
    answer=False,
    takes=("schema",),
    looks_for="JSON: {last}, else in a block between ``` marks, else all of it",
    may_hang=True,
    at_once=at_once,
    complaint=complaints(schema=_schema_fault),
)
