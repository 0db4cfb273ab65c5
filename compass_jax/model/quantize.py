"""8-bit weights for the rollout: (values, scales) with one scale per output channel and expert; 8-bit keys and values: one per position and head.

Only the matrices of attention and MLP are quantised; router, norms, biases, embedding and LM head stay as they are. 8-bit
weights are emulated on every backend: the hand-over quantises and at once dequantises to the rollout's dtype, so that the sampler computes with
the values that 8 bits can hold, at the speed and in the memory of its dtype (in bfloat16 the product value * scale is rounded once more).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LARGEST = {"e4m3": 448.0, "int8": 127.0}  # of the values' type
_TYPE = {"e4m3": jnp.float8_e4m3fn, "int8": jnp.int8}
_TINY = 1e-30  # lower bound of a channel's absmax: an all-zero channel divides by it, and its 448th part is still a normal float32
_MATRICES = frozenset({"q", "k", "v", "o", "gate", "up", "down", "gate_up"})


_CHIPS = (  # a chip's name as JAX gives it -> the 8-bit type that its matrix units multiply at twice the rate of bfloat16
    (r"tpu ?v?7", "e4m3"),
    (r"tpu v[56]", "int8"),
    (r"\b(gh|gb|h|b)(20|100|200|300|800)\b|\bl(4|20|40s?)\b|\bada\b|\brtx [45]0\d0", "e4m3"),
    (r"\ba100\b", "int8"),
)


def kind_for(device_kind: str) -> str:
    """What `rollout.quantize = "auto"` is on a chip (`jax.Device.device_kind`): "e4m3", "int8", or "off" for a chip that gains nothing or is unknown.

    TPU v7 and NVIDIA's Hopper, Blackwell and Ada multiply float8; TPU v5 and v6 and A100 int8. TPU v4 and CPUs do neither faster. So far the
    arithmetic is emulated everywhere: this chooses whose rounding a run has.
    """
    return next((kind for pattern, kind in _CHIPS if re.search(pattern, device_kind.lower())), "off")


class Quantized(NamedTuple):
    """`values * scales` is the matrix."""

    values: Array  # [... i o], float8_e4m3fn or int8
    scales: Float[Array, "... 1 o"]  # float32; [... i 1] of keys and values


def quantize(w: Float[Array, "... i o"], kind: str, axis: int = -2) -> Quantized:
    """8-bit values of w / scale, scale = max(absmax, tiny) / 448 (127 for int8) over `axis`: the inputs `i` of each output channel.

    `kind`: "e4m3" or "int8"; KeyError for another. The cast to e4m3 gives NaN from 464 on, which the scale keeps away from.
    A finite matrix gives finite values; an entry's error is at most half the distance between the type's values around it, times the scale.
    """
    largest, wide = LARGEST[kind], w.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=axis, keepdims=True), _TINY) / largest
    scaled = wide / scales
    return Quantized((jnp.round(scaled) if kind == "int8" else scaled).astype(_TYPE[kind]), scales)


def dequantize(q: Quantized, dtype: str) -> Float[Array, "... i o"]:
    """values * scales, computed in float32."""
    return (q.values.astype(jnp.float32) * q.scales).astype(dtype)


def kind_of(q: Quantized) -> str:
    """ "e4m3" or "int8"."""
    return next(kind for kind, dtype in _TYPE.items() if q.values.dtype == dtype)


def quantized_zeros(shape: tuple[int, ...], kind: str) -> Quantized:
    """Zeros `[... i o]` with a scale for each row."""
    return Quantized(jnp.zeros(shape, _TYPE[kind]), jnp.zeros((*shape[:-1], 1), jnp.float32))


def emulate(params: Any, kind: str, dtype: str) -> Any:
    """A parameter tree in `dtype` whose attention and MLP matrices hold what 8 bits of `kind` leave of them; "off": all are only cast."""

    def leaf(path, w):
        name = getattr(path[-1], "key", "")
        return dequantize(quantize(w, kind), dtype) if kind != "off" and name in _MATRICES else w.astype(dtype)

    return jax.tree_util.tree_map_with_path(leaf, params)
