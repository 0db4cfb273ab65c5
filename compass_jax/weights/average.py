"""The average of a run's weights in its checkpoints (rl.optim.average)."""

from __future__ import annotations

from pathlib import Path

from compass_jax.weights import checkpoint
from compass_jax.weights.sound import ValidCheckpoint

AVERAGE, POLICY = "average", "params"  # keys of a checkpoint's `state`


def weights_key(source: ValidCheckpoint) -> str:
    """Returns the key in `state` of the weights that all readers but a resumed run take: the
    average if the run kept one, else the policy's.
    """
    has_average = any(name.startswith(f"state/{AVERAGE}/") for name in source.manifest.leaves)
    return AVERAGE if has_average else POLICY


def average_notice(path: str | Path) -> str:
    """Returns a line if the weights that are read from a run directory or a checkpoint are an
    average, else an empty text.
    """
    if weights_key(checkpoint.find(path, tell=None, contents=False)) == POLICY:
        return ""
    return "the weights are the average that the run kept (optim.average), not its last policy"
