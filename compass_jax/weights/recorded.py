"""Recorded routes that come back from a checkpoint: checked on the host, before a pass replays what
nobody chose.

Inside the model a wrong route raises nothing: ids are clipped into range, a repeated id counts an
expert twice, a partly unset row routes live. Routes enter a run from outside by this door alone,
with the rollout that a stop interrupted.
"""

from __future__ import annotations

import numpy as np

from compass_jax.config import ModelConfig
from compass_jax.model.moe import check_routes, unset_id
from compass_jax.weights.checkpoint import CheckpointError

ENOUGH = 32  # routes of one expert each that agree by chance at most once in 2^32


def check_recorded_routes(
    lengths: np.ndarray, routes: np.ndarray, config: ModelConfig, where: str
) -> None:
    """Whether `routes` `[rows t l k]` can be replayed for samples of `lengths` `[rows]` tokens;
    `where` is the checkpoint's directory.

    A row of length 0 is a sample that had not begun, or is sampled anew: what its routes hold is
    overwritten. Of any other one each of the first length - 1 tokens is set or unset (live
    routing), and everything behind is unset. CheckpointError names the checkpoint, the row and what
    is wrong: layers, k, type or length that the model does not have, an id out of range, a repeated
    id, a partly unset route, a route behind the last input. Zeros that some stage captured repeat
    an id where k > 1; with k = 1 each of them is a valid route, and only all of them together,
    `ENOUGH` or more, are refused.
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
        tokens, own = int(lengths[row]), routes[row]
        if not 0 < tokens <= len(own):
            raise refuse(f"row {row} has {tokens} tokens, the routes are of {len(own)}")
        try:
            check_routes(
                own[: tokens - 1],
                moe.experts,
                moe.top_k,
                layers,
                where=f"row {row} (token, layer)",
            )
        except ValueError as error:
            raise refuse(str(error)) from error
        behind = np.flatnonzero((own[tokens - 1 :] != unset).any((1, 2)))
        if behind.size:
            raise refuse(
                f"row {row} has a route at token {tokens - 1 + behind[0]}; of {tokens} tokens only"
                f" the first {tokens - 1} were inputs"
            )
        zeros, filled = (
            zeros + int((own[: tokens - 1] == 0).sum()),
            filled + int((own[: tokens - 1] != unset).sum()),
        )
    if moe.top_k == 1 and zeros == filled >= ENOUGH:
        raise refuse(
            f"all {filled} of them name expert 0: zeros that were never written look so, or a"
            " router that has collapsed"
        )
