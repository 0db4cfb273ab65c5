"""JSON, compared by value."""

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
    """Returns 1 for JSON that conforms to the schema and equals the reference, if they are given.

    Schema and reference are JSON texts or values. With a schema, the component "valid" is 1 if the
    answer conforms to it.
    """
    try:
        value = parse_json(json_text(response, answer_tag), "the answer")
    except UntrustedError:
        return NOTHING
    is_equal = answer is None or _equals_reference(value, answer)
    if schema is None:
        return {"reward": float(is_equal)}
    from jsonschema.validators import validator_for

    schema = _value(schema, "the schema")
    valid = validator_for(schema)(schema).is_valid(value)
    return {"reward": float(is_equal and valid), "valid": float(valid)}


def at_once(
    response: str, answer_tag: str, answer: Any = None, schema: Any = None
) -> Mapping[str, Any] | None:
    """Returns the result of `judge` without a schema, else None, because a pattern in a schema may
    run forever.
    """
    return judge(response, answer_tag, answer) if schema is None else None


def _equals_reference(value: Any, answer: Any) -> bool:
    """Returns whether the answer equals the reference. Null fields count as absent if the reference
    is an object of the row, but not if it is JSON text.
    """
    if isinstance(answer, str):
        return equal(value, parse_json(answer, "the reference"))
    return equal(without_nulls(value), without_nulls(answer))


def _value(value: Any, name: str) -> Any:
    return parse_json(value, name) if isinstance(value, str) else value


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
