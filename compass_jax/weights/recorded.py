"""Validation of recorded routes from a checkpoint before a pass replays them.

Inside the model an invalid route raises no error: ids are clipped into range, a repeated id counts
an expert twice, and a partly unset row is routed live. Recorded routes enter a run only here, with
the rollout that a stop interrupted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from compass_jax.config import ModelConfig
from compass_jax.devices.sharding import fetch
from compass_jax.model.moe import check_routes, routing_dtype, unset_id
from compass_jax.weights.checkpoint import CheckpointError

ENOUGH = 32  # number of one-expert routes whose chance agreement has a probability below 2^-32


def check_recorded_routes(
    lengths: np.ndarray, routes: UInt[Array, "rows t l k"], config: ModelConfig, where: str
) -> None:
    """Raises CheckpointError unless `routes` can be replayed for these samples.

    A row of length 0 is a sample that had not started or is sampled again; its routes are
    overwritten. In other rows each of the first length - 1 tokens is set or unset (live routing),
    and all later ones are unset. The error names the checkpoint, the row and the problem: layers,
    k, type or length that the model does not have, an id out of range, a repeated id, a partly
    unset route, or a route after the last input.

    Routes of zeros repeat an id if k > 1. If k = 1, each of them is valid, and they are refused
    only if all routes, `ENOUGH` or more, are zero.

    Args:
        lengths: number of tokens of each sample, [rows].
        routes: expert ids, on any devices. Every process must call it.
        config: the model.
        where: the checkpoint's directory.
    """
    moe, layers = config.mixture, len(config.moe_layers)
    remedy = f"remove {where} to go on from an earlier checkpoint; its rollout is then sampled anew"

    def refuse(problem: str) -> CheckpointError:
        return CheckpointError(
            f"{where}: the routes of its interrupted rollout cannot be replayed: {problem};"
            f" {remedy}"
        )

    if routes.ndim != 4 or len(routes) != len(lengths):
        raise refuse(
            f"shape {list(routes.shape)}, expected [{len(lengths)} t {layers} {moe.top_k}]"
        )
    if routes.shape[2:] != (layers, moe.top_k) or routes.dtype != routing_dtype(moe.experts):
        wrong, zeros, filled = np.flatnonzero(lengths), 0, 0
    else:
        flags, *counts = fetch(_examine(routes, lengths, moe.experts))
        wrong, (zeros, filled) = np.flatnonzero(flags), (int(x.sum(dtype=np.int64)) for x in counts)
    for row in wrong:
        _check_row(fetch(routes[row]), int(lengths[row]), int(row), config, refuse)
    if moe.top_k == 1 and zeros == filled >= ENOUGH:
        raise refuse(
            f"all {filled} of them name expert 0: zeros that were never written look so, or a"
            " router that has collapsed"
        )


@partial(jax.jit, static_argnums=2)
def _examine(
    routes: UInt[Array, "rows t l k"], lengths: Int[Array, " rows"], experts: int
) -> tuple[Bool[Array, " rows"], Int[Array, " rows"], Int[Array, " rows"]]:
    """Returns for each row whether `_check_row` refuses it, and the numbers of ids of its inputs
    that are 0 and that are set. It runs where the routes are, without a copy on the host.
    """
    is_set, ordered = routes != unset_id(routes.dtype), jnp.sort(routes, axis=-1)
    all_set, any_set = is_set.all(-1), is_set.any(-1)
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]).any(-1) & all_set
    is_wrong = (all_set != any_set) | ((routes >= experts) & is_set).any(-1) | is_repeated
    is_input = (jnp.arange(routes.shape[1])[None] < lengths[:, None] - 1)[..., None]
    refused = jnp.where(is_input, is_wrong, any_set).any((1, 2))
    # a row of length 0 has no input
    zeros, filled = (jnp.sum(x & is_input[..., None], (1, 2, 3)) for x in (routes == 0, is_set))
    is_outside = (lengths < 0) | (lengths > routes.shape[1])
    return (lengths != 0) & (refused | is_outside), zeros, filled


def _check_row(
    routes: np.ndarray,
    tokens: int,
    row: int,
    config: ModelConfig,
    refuse: Callable[[str], CheckpointError],
) -> None:
    """Raises `refuse(problem)` for a row that cannot be replayed."""
    moe, layers = config.mixture, len(config.moe_layers)
    if not 0 < tokens <= len(routes):
        raise refuse(f"row {row} has {tokens} tokens, the routes are of {len(routes)}")
    place = f"row {row} (token, layer)"
    try:
        check_routes(routes[: tokens - 1], moe.experts, moe.top_k, layers, where=place)
    except ValueError as error:
        raise refuse(str(error)) from error
    late = np.flatnonzero((routes[tokens - 1 :] != unset_id(routes.dtype)).any((1, 2)))
    if late.size:
        raise refuse(
            f"row {row} has a route at token {tokens - 1 + late[0]}; of {tokens} tokens only the"
            f" first {tokens - 1} were inputs"
        )
