"""8-bit weights for the rollout, (values, scales) with one scale per output channel and expert; and
8-bit keys and values, with one scale per position and head.

Only the matrices of attention and MLP are quantised (ParamSpec.quantised); router, norms, biases,
embedding and LM head keep their dtype. On TPU and GPU the sampler holds 8-bit weights, half the
bytes of bfloat16: `matmul` casts the values to the activations' dtype before the product and scales
the result. Whether the compiler fuses that cast into the product, so that a decode step also reads
half the bytes, has not been measured. On CPU, where that would only be slower, 8 bits are emulated:
weights are quantised and dequantised to the rollout's dtype, so that the sampler computes with the
values that 8 bits can hold (in bfloat16 value * scale is rounded once more).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.model.lora import LowRank, is_low_rank
from compass_jax.model.params import is_spec
from compass_jax.model.precision import at_least_float32
from compass_jax.model.stacks import InStack

LARGEST = {"e4m3": 448.0, "int8": 127.0}  # of the values' type
_TYPE = {"e4m3": jnp.float8_e4m3fn, "int8": jnp.int8}
# Lower bound of a channel's absmax. An all-zero channel divides by it, and its 448th part is still
# a normal float32.
_TINY = 1e-30


# JAX's name of a chip -> the 8-bit type that its matrix units multiply at twice the rate of
# bfloat16
_CHIPS: tuple[tuple[str, Literal["e4m3", "int8"]], ...] = (
    (r"tpu ?v?7", "e4m3"),
    (r"tpu v[56]", "int8"),
    (r"\b(gh|gb|h|b)(20|100|200|300|800)\b|\bl(4|20|40s?)\b|\bada\b|\brtx [45]0\d0", "e4m3"),
    (r"\ba100\b", "int8"),
)


def kind_for(device_kind: str) -> Literal["e4m3", "int8", "off"]:
    """Returns the value of `rollout.quantize = "auto"` on a chip (`jax.Device.device_kind`):
    "e4m3", "int8", or "off" for a chip that gains nothing or is unknown.

    TPU v7 and NVIDIA's Hopper, Blackwell and Ada multiply float8; TPU v5 and v6 and A100 multiply
    int8. TPU v4 and CPUs do neither faster.
    """
    return next(
        (kind for pattern, kind in _CHIPS if re.search(pattern, device_kind.lower())), "off"
    )


class Quantized(NamedTuple):
    """A matrix, equal to `values * scales`."""

    values: Array  # [... i o], float8_e4m3fn or int8
    scales: Float[Array, "... 1 o"]  # float32; [... i 1] of keys and values

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return self.values.shape


def quantize(w: Float[Array, "... i o"], kind: str, axis: int = -2) -> Quantized:
    """Quantises w / scale to 8 bits, with scale = max(absmax, tiny) / 448 (127 for int8) over
    `axis`: the inputs `i` of each output channel.

    `kind` is "e4m3" or "int8" (KeyError otherwise). The cast to e4m3 gives NaN from 464 on, which
    the scale avoids: a finite matrix gives finite values. An entry's error is at most half the
    distance between neighbouring values of the type, times the scale.
    """
    largest, wide = LARGEST[kind], w.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=axis, keepdims=True), _TINY) / largest
    scaled = wide / scales
    # A cast to int8 truncates, one to e4m3 rounds.
    return Quantized((jnp.round(scaled) if kind == "int8" else scaled).astype(_TYPE[kind]), scales)


def dequantize(q: Quantized, dtype: str) -> Float[Array, "... i o"]:
    """Computes values * scales in float32 and casts to `dtype`."""
    return (q.values.astype(jnp.float32) * q.scales).astype(dtype)


def kind_of(q: Quantized) -> str:
    """Returns "e4m3" or "int8"."""
    return next(kind for kind, dtype in _TYPE.items() if q.values.dtype == dtype)


def quantized_zeros(shape: tuple[int, ...], kind: str) -> Quantized:
    """Returns zeros `[... i o]` with a scale for each row."""
    return Quantized(jnp.zeros(shape, _TYPE[kind]), jnp.zeros((*shape[:-1], 1), jnp.float32))


def eight_bit(params: Tree, specs: Tree, kind: str, dtype: str) -> Tree:
    """Casts a parameter tree to `dtype`, and the leaves that `specs` (params.param_specs) declare
    quantised to 8 bits of `kind`. With "off" it only casts. Leaves declared exact keep their type.
    """

    def leaf(spec, w):
        if spec.exact:
            return w
        return quantize(w, kind) if kind != "off" and spec.quantised else w.astype(dtype)

    return jax.tree.map(leaf, specs, params, is_leaf=is_spec)


def emulate(params: Tree, specs: Tree, kind: str, dtype: str) -> Tree:
    """Applies `eight_bit` and dequantises to `dtype`: plain arrays with the values that 8 bits can
    hold.
    """
    low = eight_bit(params, specs, kind, dtype)
    return jax.tree.map(
        lambda w: dequantize(w, dtype) if is_quantized(w) else w, low, is_leaf=is_quantized
    )


def is_quantized(w: Tree) -> TypeGuard[Quantized]:
    """Returns whether a matrix is in 8 bits."""
    return isinstance(w, Quantized)


def any_quantized(tree: Tree) -> bool:
    """Returns whether a parameter tree has 8-bit matrices."""
    return any(map(is_quantized, jax.tree.leaves(tree, is_leaf=is_quantized)))


def in_dtype(w: Array | Quantized | InStack, dtype) -> Array | Quantized | InStack:
    """Casts a matrix to `dtype`; returns an 8-bit one, and one in a stack, unchanged."""
    return w if isinstance(w, Quantized | InStack) else w.astype(dtype)


def matmul(
    x: Float[Array, "... m i"], w: Float[Array, "... i o"] | Quantized | LowRank
) -> Float[Array, "... m o"]:
    """Computes x @ w in the dtype of x. 8-bit values are exact in bfloat16; their scales multiply
    the product before it is rounded. A matrix with an adapter computes x @ base and (x @ a) @ b, so
    that its gradient never has the size of the matrix.

    A batch of matrices takes a batch of x; one matrix takes x of any rank.
    """
    if is_low_rank(w):
        low = matmul(matmul(x, w.a), w.b)
        return matmul(x, w.base) + jnp.asarray(w.scale, low.dtype) * low
    assert not isinstance(w, LowRank)
    if not isinstance(w, Quantized):
        return x @ w.astype(x.dtype)
    out = jnp.matmul(x, w.values.astype(x.dtype), preferred_element_type=at_least_float32(x.dtype))
    scales = w.scales.reshape((1,) * (out.ndim - w.scales.ndim) + w.scales.shape)
    return (out * scales.astype(out.dtype)).astype(x.dtype)


def ragged_matmul(
    x: Float[Array, "m i"],
    w: Float[Array, "e i o"] | Quantized | InStack,
    sizes: Int[Array, "e"],
    dot: Callable[..., Float[Array, "m o"]] = jax.lax.ragged_dot,
    dtype: jnp.dtype | None = None,
) -> Float[Array, "m o"]:
    """Computes `dot`, by default `jax.lax.ragged_dot`: the first sizes[0] rows by w[0], and so on.
    Rows after the last group are undefined. The result has x's type, or `dtype`. `dot` takes
    matrices in a stack, 8-bit ones too, if there are any.
    """
    if not isinstance(w, Quantized):
        return dot(x, w, sizes, preferred_element_type=dtype)
    wide = at_least_float32(x.dtype)
    out = dot(x, w.values.astype(x.dtype), sizes, preferred_element_type=wide)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    expert = jnp.sum(
        jnp.arange(x.shape[0], dtype=jnp.int32)[:, None] >= ends[None, :], axis=1, dtype=jnp.int32
    )
    return (out * jnp.take(w.scales[:, 0].astype(out.dtype), expert, axis=0, mode="clip")).astype(
        dtype or x.dtype
    )


def of_expert(w: Float[Array, "e i o"] | Quantized, expert) -> Float[Array, "i o"] | Quantized:
    """Returns one expert's matrix."""
    return jax.tree.map(lambda x: x[expert], w)
