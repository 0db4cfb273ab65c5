"""Validation of recorded routes from a checkpoint, on the host, before a pass replays them.

Inside the model an invalid route raises no error: ids are clipped into range, a repeated id counts
an expert twice, and a partly unset row is routed live. Recorded routes enter a run only here, with
the rollout that a stop interrupted.
"""

from __future__ import annotations

import numpy as np

from compass_jax.config import ModelConfig
from compass_jax.model.moe import check_routes, unset_id
from compass_jax.weights.checkpoint import CheckpointError

ENOUGH = 32  # number of one-expert routes whose chance agreement has a probability below 2^-32


def check_recorded_routes(
    lengths: np.ndarray, routes: np.ndarray, config: ModelConfig, where: str
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
        routes: expert ids, [rows t l k].
        config: the model.
        where: the checkpoint's directory.
    """
    moe, layers, unset = config.mixture, len(config.moe_layers), unset_id(routes.dtype)
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
    zeros = filled = 0
    for row in np.flatnonzero(lengths):
        tokens, row_routes = int(lengths[row]), routes[row]
        if not 0 < tokens <= len(row_routes):
            raise refuse(f"row {row} has {tokens} tokens, the routes are of {len(row_routes)}")
        try:
            check_routes(
                row_routes[: tokens - 1],
                moe.experts,
                moe.top_k,
                layers,
                where=f"row {row} (token, layer)",
            )
        except ValueError as error:
            raise refuse(str(error)) from error
        late = np.flatnonzero((row_routes[tokens - 1 :] != unset).any((1, 2)))
        if late.size:
            raise refuse(
                f"row {row} has a route at token {tokens - 1 + late[0]}; of {tokens} tokens only"
                f" the first {tokens - 1} were inputs"
            )
        zeros, filled = (
            zeros + int((row_routes[: tokens - 1] == 0).sum()),
            filled + int((row_routes[: tokens - 1] != unset).sum()),
        )
    if moe.top_k == 1 and zeros == filled >= ENOUGH:
        raise refuse(
            f"all {filled} of them name expert 0: zeros that were never written look so, or a"
            " router that has collapsed"
        )
