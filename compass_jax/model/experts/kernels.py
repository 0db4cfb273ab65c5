"""Grouped products by tokamax's kernels, with the signature of `jax.lax.ragged_dot`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compass_jax.base.extras import how_to_install
from compass_jax.config import ConfigError
from compass_jax.model.quantize import is_quantized, ragged_matmul
from compass_jax.model.stacks import InStack

_LANES = 128  # the least width of a kernel's matrix


def tokamax_dot() -> Callable[..., Float[Array, "m o"]]:
    """Returns tokamax's `ragged_dot`, whose kernels read an expert's rows alone; XLA's takes the
    place of those that this chip or type has no kernel for. XLA's own on GPUs computes every expert
    on every row (benchmarks/HISTORY.md). ConfigError if tokamax is not installed.
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
        # cannot tell that this changes nothing, and gives the result a separate buffer.
        sizes = jnp.maximum(sizes, jnp.int32(0))
        return tokamax.ragged_dot(x, w, sizes, implementation=("mosaic", "xla"), **options)

    return dot


def stacked_dot(
    x: Float[Array, "m i"],
    w: Array | InStack,
    sizes: Int[Array, "e"],
    preferred_element_type: jnp.dtype | None = None,
) -> Float[Array, "m o"]:
    """Computes `jax.lax.ragged_dot` with the matrices `[e i o]` of one layer, which tokamax's TPU
    kernel `gmm_v2` reads from the stack `[l e i o]`, 8-bit ones without conversion.
    XLA would copy the layer's part, and convert it, before its own kernel.

    A `w` that is in no stack, and one that is narrower than the kernel's tiles, takes `ragged_dot`.
    """
    if not isinstance(w, InStack):
        return jax.lax.ragged_dot(x, w, sizes, preferred_element_type=preferred_element_type)
    experts, i, o = w.shape
    if min(i, o) < _LANES:
        return ragged_matmul(x, w.part(), sizes, dtype=preferred_element_type)
    # tokamax.ragged_dot would round x to 8 bits, too; the package's version is pinned.
    from tokamax._src.ops.gmm_v2.gmm_v2 import gmm_v2

    flat = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), w.stack)
    values, scales = (flat.values, flat.scales[:, None]) if is_quantized(flat) else (flat, None)
    # Only this layer's experts have rows.
    all_sizes = jnp.zeros(values.shape[0], jnp.int32)
    return gmm_v2(
        x,
        values,
        jax.lax.dynamic_update_slice(all_sizes, sizes, (w.layer * experts,)),
        scales,
        preferred_element_type=preferred_element_type or x.dtype,
        maybe_quantize_lhs=False,
        zero_initialize=False,
    )
