"""State that is JSON with arrays in it: a checkpoint has the arrays apart, and their shapes in the
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import Json

MARK = "array of this checkpoint"  # the key of a place in the JSON from which an array was taken


def split(state: object) -> tuple[Json, dict[str, jax.Array]]:
    """Returns a state without its arrays, and the arrays by their places in it, such as
    "hooks.mean.weights".

    Raises ValueError for a key that marks the places of arrays, and for an array whose type JAX
    would change, such as float64.
    """
    arrays: dict[str, jax.Array] = {}

    def without(value: object, place: str) -> object:
        if isinstance(value, np.ndarray | jax.Array):
            arrays[place] = value if isinstance(value, jax.Array) else jnp.asarray(value)
            if arrays[place].dtype != value.dtype:
                raise ValueError(
                    f"{place}: a checkpoint would keep this {value.dtype} array as"
                    f" {arrays[place].dtype}; convert it, or keep it as a list"
                )
            return {MARK: place, "shape": [*value.shape], "dtype": str(arrays[place].dtype)}
        if isinstance(value, dict):
            if MARK in value:
                raise ValueError(f"{place}: a state must not have the key {MARK!r}")
            return {key: without(x, f"{place}.{key}" if place else key) for key, x in value.items()}
        if isinstance(value, list | tuple):
            return [without(x, f"{place}.{i}") for i, x in enumerate(value)]
        return value

    return without(state, ""), arrays


def shapes(state: object) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of the arrays that were split from a state."""
    places = {}
    if isinstance(state, dict) and MARK in state:
        places[state[MARK]] = jax.ShapeDtypeStruct(state["shape"], jnp.dtype(state["dtype"]))
    elif isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            places |= shapes(value)
    return places


def joined(state: object, arrays: Mapping[str, jax.Array]) -> Json:
    """Returns a state with its arrays in their places."""
    if isinstance(state, dict):
        if MARK in state:
            return arrays[state[MARK]]
        return {key: joined(value, arrays) for key, value in state.items()}
    return [joined(value, arrays) for value in state] if isinstance(state, list) else state
