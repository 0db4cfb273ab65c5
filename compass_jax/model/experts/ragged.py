"""Grouped SwiGLU for TPUs and GPUs: one `ragged_dot` over the rows of all experts."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.aliases import Tree
from compass_jax.config import ConfigError
from compass_jax.extras import how_to_install
from compass_jax.model.experts.activation import swiglu
from compass_jax.model.experts.dispatch import Dispatch, permute, repeat_tokens
from compass_jax.model.quantize import Quantized, ragged_matmul


def tokamax_dot() -> Callable[..., Float[Array, "m o"]]:
    """Returns tokamax's `ragged_dot`, whose kernels read an expert's rows alone; XLA's takes the
    place of those that this chip or type has no kernel for. XLA's own on GPUs computes every expert
    on every row (docs/measurements.md). ConfigError if tokamax is not installed.
    """
    try:
        import tokamax
    except ImportError as error:
        raise ConfigError(
            f"compute.experts = 'tokamax': {error}; it needs Python 3.12:"
            f" {how_to_install('cuda', 'tokamax')}"
        ) from error

    def dot(x, w, sizes, **options):
        # The sizes may be a part of a larger array, whose address the GPU's kernel refuses; XLA
        # cannot tell that this changes nothing, and gives the result a buffer of its own.
        sizes = jnp.maximum(sizes, jnp.int32(0))
        return tokamax.ragged_dot(x, w, sizes, implementation=("mosaic", "xla"), **options)

    return dot


def ragged_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    weights: dict[str, Float[Array, "e ..."] | Quantized],
    dispatch: Dispatch,
    limit: float = 0.0,
    dot: Callable[..., Float[Array, "m o"]] = jax.lax.ragged_dot,
) -> Float[Array, "n d"]:
    """Computes sum_k gates_k * SwiGLU of a token's k-th expert with `dot`, which has the signature
    of `jax.lax.ragged_dot`; masked tokens give 0.

    `weights` are gate and up `[e d f]`, or their concatenation gate_up `[e d 2f]`, and down `[e f
    d]`; each may be 8-bit, and have a bias (`gate_bias`). `limit` is that of `activation.swiglu`.
    """
    order, row, sizes = dispatch
    dispatched = (jnp.arange(order.shape[0], dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[
        :, None
    ]
    zero = jnp.zeros((), x.dtype)
    rows = repeat_tokens(x, order, row)
    rows = jnp.where(dispatched, rows, zero)

    def product(rows, name):
        out = ragged_matmul(rows, weights[name], sizes, dot)
        bias: Tree = weights.get(f"{name}_bias")
        return out if bias is None else out + jnp.take(bias, dispatch.expert_of_row(), axis=0)

    if "gate_up" in weights:
        a, u = jnp.split(product(rows, "gate_up"), 2, axis=-1)
    else:
        a, u = (product(rows, name) for name in ("gate", "up"))
    # Rows after the last group are undefined.
    out = jnp.where(dispatched, product(swiglu(a, u, limit), "down"), zero)
    return jnp.einsum("nkd,nk->nd", permute(out, row, order).reshape(*gates.shape, -1), gates)
