"""What automatic partitioning does badly, by hand: the MoE layer with its experts on several
devices, log-probs over a split vocabulary.

Expert parallelism: each device gets the tokens of the devices that hold the other experts, all of
them (gather) or those that its experts are chosen for (all_to_all, model/exchange.py), computes
what its own experts have to do with them, and the sums go back. Nothing is dropped, and in float32
each token's routes are those of a single device.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt

from compass_jax.config import MoEConfig
from compass_jax.model.exchange import through_experts
from compass_jax.model.moe import RouterStats, moe_ffn, moe_layer
from compass_jax.model.quantize import Quantized
from compass_jax.sharding import Placement


class _Share(NamedTuple):
    """How one device takes part in the experts' work."""

    how: Literal["gather", "all_to_all", "here"]  # here: each device has the same tokens
    expert: int
    tensor: int
    native: bool = False  # a TPU's own all-to-all

    def __call__(self, x, ids, gates, mask, weights, implementation: str) -> Float[Array, "n d"]:
        """`moe_ffn` of this device's tokens, with the experts of all devices along the
        expert axis.
        """
        held = weights["down"].shape[0]
        work = partial(moe_ffn, weights=weights, implementation=implementation, parts=self.expert)
        if self.how == "all_to_all":
            out = through_experts(work, x, ids, gates, mask, held, self.native)
        else:
            if self.how == "gather":
                x, ids, gates, mask = (
                    jax.lax.all_gather(y, "expert", tiled=True) for y in (x, ids, gates, mask)
                )
            first = jax.lax.axis_index("expert") * held
            # `held` is no expert: not dispatched
            own = jnp.where((ids >= first) & (ids < first + held), ids - first, held)
            out = work(x, own, gates, mask)
        if self.how == "gather":
            out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        elif self.how == "here" and self.expert > 1:
            out = jax.lax.psum(out, "expert")
        # Last: over this device's own tokens, not over all that came.
        return jax.lax.psum(out, "tensor") if self.tensor > 1 else out


def sharded_moe_layer(
    placement: Placement,
    y: Float[Array, "b t d"],
    gate_input: Float[Array, "b t d"],
    params: dict[str, Any],
    given: UInt[Array, "b t k"] | None,
    mask: Bool[Array, "b t"],
    config: MoEConfig,
    implementation: str,
    chunk: int = 0,
    exchange: Literal["gather", "all_to_all"] = "gather",
) -> tuple[Float[Array, "b t d"], UInt[Array, "b t k"], RouterStats]:
    """`moe_layer` over the mesh, `chunk` tokens of each device at once, by `exchange`
    (ComputeConfig.exchange); the statistics are of all tokens.
    """
    rows, tokens = placement.batch_axes(y.shape[0]), placement.token_axis(y.shape[1])
    split = (*rows, *([tokens] if tokens else ()))
    native = placement.mesh.devices.flat[0].platform == "tpu"
    share = _Share(
        exchange if "expert" in rows else "here",
        placement.size("expert"),
        placement.size("tensor"),
        native,
    )
    here = P(rows or None, tokens)

    def local(y, gate_input, params, given, mask):
        out, ids, stats = moe_layer(
            y, gate_input, params, given, mask, config, implementation, share, chunk
        )
        return out, ids, jax.tree.map(lambda x: jax.lax.psum(x, split), stats) if split else stats

    specs = {name: _weight_spec(name, w) for name, w in params.items()}
    run = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(here, here, specs, None if given is None else here, here),
        out_specs=(here, here, P()),
        check_vma=False,
    )
    return run(y, gate_input, params, given, mask)


def _weight_spec(name: str, w: Array | Quantized) -> Any:
    """The hidden axis is whole: storage's split of it is gathered on the way in."""
    if name == "router":
        return P(None, None)
    matrix = P("expert", "tensor", None) if name == "down" else P("expert", None, "tensor")
    scales = P("expert", None, None if name == "down" else "tensor")
    return Quantized(matrix, scales) if isinstance(w, Quantized) else matrix


def sharded_over_tokens(
    placement: Placement,
    chunked: Any,
    hidden: Float[Array, "b t d"],
    head: Float[Array, "d v"],
    targets: Int[Array, "b t"],
) -> tuple[Float[Array, "b t"], Float[Array, "b t"]]:
    """(logp, entropy) of `targets` by `chunked(hidden, head, targets, axis)`, each device its own
    tokens and its part of the vocabulary.
    """
    here = P(placement.batch_axes(hidden.shape[0]) or None, placement.token_axis(hidden.shape[1]))
    axis = "tensor" if placement.size("tensor") > 1 else None
    local = partial(chunked, axis=axis)
    return jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(here, P(None, axis), here),
        out_specs=(here, here),
        check_vma=False,
    )(hidden, head, targets)
