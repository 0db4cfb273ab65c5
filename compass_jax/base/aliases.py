"""Names of types that many modules share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Json: TypeAlias = Any
"""A value of JSON, as `json.loads` returns it."""
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object."""
JsonMapping: TypeAlias = Mapping[str, Any]
"""A JSON object that is only read."""
Tree: TypeAlias = Any
"""A pytree of arrays, or of what stands for them (structs, shardings, specs)."""
Inputs: TypeAlias = Any
"""The inputs of a user's class, a NamedTuple of the room that calls it."""
Hint: TypeAlias = Any
"""A type annotation."""
Settings: TypeAlias = Any
"""A dataclass of settings, or its class."""
Value: TypeAlias = Any
"""A value of mathematics: a number, quantity, interval, set, matrix, relation or text."""
