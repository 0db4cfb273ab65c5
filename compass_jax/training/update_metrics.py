"""Metrics of the updates of a rollout: means over the updates, and how fast they were."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from compass_jax.devices.chips import chip_of
from compass_jax.devices.sharding import fetch
from compass_jax.model.flops import forward_flops
from compass_jax.model.transformer import Transformer
from compass_jax.rl.diagnostics import Diagnostics, finalize_diagnostics, merge_diagnostics

COUNTS = ("zero_gradient_updates",)  # of the optimiser's metrics


def update_metrics(
    parts: Sequence[Diagnostics], applied: Sequence[dict], accounts: Sequence[Diagnostics]
) -> dict[str, float]:
    """Returns metrics averaged over the updates, but for COUNTS, which are summed: `parts` and the
    optimiser's metrics `applied` have one entry per update, `accounts` belong to all.
    """
    total = fetch(finalize_diagnostics(merge_diagnostics([*parts, *accounts])))
    metrics = {name: float(value) for name, value in total.items()}
    metrics["loss"] /= len(parts)  # a sum; the other diagnostics are ratios of sums
    for name in applied[0]:
        values = [float(update[name]) for update in applied]
        metrics[name] = float(np.sum(values) if name in COUNTS else np.mean(values))
    return metrics


def mfu(model: Transformer, lengths: np.ndarray, epochs: int, seconds: float) -> dict[str, float]:
    """Returns train/mfu: the operations of forward and backward of these rows, which have a
    gradient, over the devices' peak; passes for old log-probs count as overhead.

    Empty on a chip whose peak is unknown (compass_jax/devices/chips.py).
    """
    chip = chip_of(jax.devices()[0].device_kind)
    if chip is None:
        return {}
    devices = 1 if model.placement is None else model.placement.mesh.size
    # A backward pass has twice the operations of a forward pass.
    flops = 3 * epochs * forward_flops(model.config, lengths)
    return {"train/mfu": flops / (seconds * devices * chip.device_flops)}
