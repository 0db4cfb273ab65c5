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
