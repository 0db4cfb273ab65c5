"""Attention kernels of accelerators, called by model/attention.py: Pallas' on TPUs, cuDNN's on
NVIDIA GPUs. They compute the same as its portable code.

Pallas is imported where a kernel is used: on other chips its import would only cost time.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.devices.sharding import Placement

_LANES = 128  # the kernels' granularity in tokens and head size
_BLOCKS = (512, 256, _LANES)  # tokens of a block, the best first
SAVED = "attention"  # names the output and log-sum-exp of `splash_causal` for `jax.checkpoint`
# Set by tests without an accelerator: Pallas interprets its kernels, XLA replaces cuDNN.
# It is not read from the backend, because programs for a TPU are also compiled on other machines.
INTERPRET = False


def whole_lanes(x: Float[Array, "*n d"]) -> Float[Array, "*n e"]:
    """Pads heads of queries or keys with zeros, which add nothing to their products, to a multiple
    of 128 channels.
    """
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -x.shape[-1] % _LANES),))


def splash_fits(tokens: int, head_dim: int, placement: Placement | None) -> bool:
    """Returns whether `splash_causal` takes rows of `tokens` tokens: each device's part of them,
    and a head of values, must be multiples of 128.
    """
    axis = None if placement is None else placement.token_axis(tokens)
    local_tokens = tokens // (placement.size(axis) if placement is not None and axis else 1)
    return local_tokens % _LANES == 0 and whole_heads(head_dim)


def whole_heads(head_dim: int) -> bool:
    """Returns whether `splash_causal` accepts values of `head_dim` channels a head."""
    return head_dim % _LANES == 0


def decode_fits(positions: int, head_dim: int, paged: bool) -> bool:
    """Returns whether `decode_kernel.decode_attention` takes rows, or pages, of `positions`
    positions: heads of whole lanes, blocks of whole tiles.
    """
    return head_dim % _LANES == 0 and (positions % 16 == 0 if paged else positions % _LANES == 0)


def cudnn_fits(tokens: int, head_dim: int, dtype, placement: Placement | None) -> bool:
    """Returns whether `cudnn_causal` takes such heads: 16 bits, a multiple of 8 channels and at
    most 128, rows whole on a device.
    """
    is_split = placement is not None and placement.token_axis(tokens) is not None
    is_half = dtype in (jnp.bfloat16, jnp.float16) or INTERPRET
    return is_half and head_dim % 8 == 0 and head_dim <= 128 and not is_split


def cudnn_causal(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b kv t d"],
    v: Float[Array, "b kv t d"],
    placement: Placement | None,
    window: int = 0,
) -> Float[Array, "b h t d"]:
    """Computes causal softmax(q k^T) v with cuDNN's flash attention, within the last `window`
    positions (0: all). q is scaled by the caller.

    Over a mesh each device has its rows and its heads.
    """
    run = partial(_cudnn, window=window)
    if placement is None:
        return run(q, k, v)
    heads = P(placement.batch_axes(q.shape[0]) or None, "tensor")
    return jax.shard_map(
        run, mesh=placement.mesh, in_specs=(heads,) * 3, out_specs=heads, check_vma=False
    )(q, k, v)


def _cudnn(q, k, v, window: int):
    out = jax.nn.dot_product_attention(
        *(x.transpose(0, 2, 1, 3) for x in (q, k, v)),
        scale=1.0,
        is_causal=True,
        # (positions before the query's, after it): `window` includes the query's own.
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla" if INTERPRET else "cudnn",
    )
    return out.transpose(0, 2, 1, 3)


def splash_causal(
    q: Float[Array, "b h t d"],
    k: Float[Array, "b kv t d"],
    v: Float[Array, "b kv t v"],
    placement: Placement | None,
    segments: Int[Array, "b t"] | None = None,
    window: int = 0,
    sinks: Float[Array, "h"] | None = None,
) -> Float[Array, "b h t v"]:
    """Computes causal softmax(q k^T) v, within the segments of each row if they are given, and
    within the last `window` positions (0: all); `sinks` are one more score per head in the
    softmax's denominator. q is scaled by the caller. Scores exist a block at a time, in the
    backward pass too (FlashAttention-2, arXiv 2307.08691).

    Over a mesh each device has its rows, its heads, its part of the queries, and all keys of its
    rows.
    """
    b, h, t, _ = q.shape
    sinks = None if sinks is None else sinks.astype(q.dtype)
    if placement is None:
        return _by_rows(_kernel(h, t, 1, window), q, k, v, segments, segments, sinks)
    axis, rows = placement.token_axis(t), placement.batch_axes(b) or None
    shards = placement.size(axis) if axis else 1
    kernel = _kernel(h // placement.size("tensor"), t, shards, window)
    queries, keys = P(rows, "tensor", axis, None), P(rows, "tensor", None, None)

    specs = kernel.manual_sharding_spec(placement.sharding(None, axis))
    run = jax.shard_map(
        _by_rows,
        mesh=placement.mesh,
        in_specs=(specs, queries, keys, keys, P(rows, axis), P(rows, None), P("tensor")),
        out_specs=queries,
        check_vma=False,
    )
    return run(kernel, q, k, v, segments, segments, sinks)


def _by_rows(kernel: Any, q, k, v, of_queries, of_keys, sinks):
    """Runs the kernel on each row of a device, with the segments of its queries and of its keys, or
    None, and the sinks of its heads, or None.
    """

    def one(q, k, v, segments=None):
        return kernel(q, k, v, segments, sinks)

    if of_queries is None:
        return jax.vmap(one)(q, k, v)
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    return jax.vmap(one)(q, k, v, SegmentIds(of_queries, of_keys))


def _kernel(heads: int, tokens: int, shards: int, window: int) -> Tree:
    """Builds the kernel of `heads` heads with queries in `shards` parts."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    block_q, block_kv = _block(tokens // shards), _block(tokens)
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_kv,
        block_kv_compute=block_kv,
        block_q_dkv=block_q,
        block_kv_dkv=block_kv,
        block_kv_dkv_compute=block_kv,
        block_q_dq=block_q,
        block_kv_dq=block_kv,
    )
    shape = tokens, tokens
    one = (
        masks.LocalMask(shape, (window - 1, 0), 0, shard_count=shards)
        if window
        else masks.CausalMask(shape, shard_count=shards)
    )
    mask = masks.MultiHeadMask([one] * heads)
    # Evaluated at once, even while a model is traced: `np.asarray` needs the values of the mask's
    # arrays, which become constants of the program.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask,
            block_sizes=sizes,
            # All heads have the same mask, so that of one device's heads serves every device.
            head_shards=1,
            q_seq_shards=shards,
            residual_checkpoint_name=SAVED,
            interpret=INTERPRET,
        )
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), kernel)


def _block(tokens: int) -> int:
    """Returns the largest block size that divides `tokens`."""
    return next(size for size in _BLOCKS if tokens % size == 0)
