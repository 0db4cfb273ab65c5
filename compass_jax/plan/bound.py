"""The least time of each program and of a step at the chip's peaks, and that of kernels alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from compass_jax.chips import Chip
from compass_jax.config import (
    ComputeConfig,
    MeshConfig,
    ModelConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
)
from compass_jax.model.flops import attention_flops, flops_per_token, forward_flops
from compass_jax.plan.memory import Memory, keeps_attention
from compass_jax.plan.programs import ROLLOUT
from compass_jax.rl.bucketing import row_counts

# Products of attention in a backward pass for each two of the forward pass: the kernels for the
# gradients of queries and of keys and values compute scores and their gradients each.
_BACKWARD, _REMATERIALISED = 7 / 2, 9 / 2
# Products of experts in a backward pass for each three of the forward pass: two gradients of each,
# and gate and up again.
_EXPERTS_BACKWARD = 8 / 3


class Bound(NamedTuple):
    """Seconds of one run of a program by resource; memory: each argument and result once, of the
    cache what a token sees in the mean.
    """

    flops_s: float
    hbm_s: float
    ici_s: float

    @property
    def seconds(self) -> float:
        """The bound: all three resources may work at the same time."""
        return max(self)

    @property
    def by(self) -> str:
        """The limiting resource."""
        return ("FLOPs", "HBM", "ICI")[self.index(self.seconds)]


def program_flops(
    model: ModelConfig, rollout: RolloutConfig, compute: ComputeConfig, name: str, tokens: int
) -> float:
    """Counts the operations of one run over all devices; for decode of one token of every slot, in
    the mean over an answer of the largest length.
    """
    kind, _, length = name.partition(" ")
    if kind == "decode":
        heads, seen = model.heads * (model.head_dim + model.value_dim), _positions(rollout)
        keys = sum(
            float(np.mean(np.minimum(seen, model.window_of(i) or np.inf)))
            for i in range(model.layers)
        )
        return tokens * (flops_per_token(model) + 2.0 * heads * keys)
    if kind in ("prefill", "resume"):
        bucket = rollout.prompt_buckets[-1] if kind == "prefill" else rollout.max_length
        return forward_flops(model, [bucket] * (tokens // bucket))
    if kind in ("forward", "backward"):
        lengths = [int(length)] * (tokens // int(length))
        forward = forward_flops(model, lengths)
        if kind == "forward":
            return forward
        spared = attention_flops(model, lengths) if keeps_attention(compute, model) else 0.0
        return 2 * forward + (forward - spared if compute.remat else 0)
    return 0.0


def _positions(rollout: RolloutConfig) -> np.ndarray:
    """Returns the context of each token of an answer of the largest length, in tokens."""
    return rollout.prompt_buckets[-1] + 1 + np.arange(rollout.max_new_tokens)


def read_share(rollout: RolloutConfig) -> float:
    """Returns the share of a slot's cache that a decoded token sees in the mean."""
    return float(np.mean(_positions(rollout))) / rollout.max_length


def bound_of(
    config: PolicyConfig,
    chip: Chip,
    name: str,
    tokens: int,
    memory: Memory,
    sent_bytes: float,
    cache: float = 0.0,
) -> Bound:
    """Returns the bound on one run of program `name` (decode: one token of every slot), where a
    device's slots hold `cache` bytes of keys and values.
    """
    share, decodes = chip.devices, name == "decode"
    flops = program_flops(config.model, config.rollout, config.compute, name, tokens)
    unread = cache * (1 - read_share(config.rollout)) if decodes else 0.0
    return Bound(
        flops / _mesh_of(config, name).devices / chip.device_flops,
        (memory.arguments + memory.results - unread) / (chip.hbm_gb_s * 1e9 / share),
        sent_bytes / (chip.ici_gb_s * 1e9 / share),
    )


def _mesh_of(config: PolicyConfig, name: str) -> MeshConfig:
    samples = name.split()[0] in ROLLOUT
    return (config.rollout_mesh or config.mesh) if samples else config.mesh


def kernel_seconds(config: PolicyConfig, chip: Chip, name: str, tokens: int, cache: float) -> float:
    """Returns the seconds at the chip's peaks of one run's kernels, attention and the experts'
    products, for which the compiler has no estimate. In decode they read memory: the `cache` of a
    device as far as a token sees it, and its experts.
    """
    model, mesh, share = config.model, _mesh_of(config, name), chip.devices
    kind, _, length = name.partition(" ")
    moe = model.moe
    weights = 0.0 if moe is None else 3.0 * len(model.moe_layers) * model.hidden * moe.ffn
    if kind == "decode":
        size = 2 if config.rollout.quantize == "off" else 1
        experts = weights * (moe.experts if moe else 0) * size / (mesh.expert * mesh.tensor)
        read = cache * read_share(config.rollout) + experts
        return read / (chip.hbm_gb_s * 1e9 / share)
    if kind not in ("prefill", "forward", "backward"):
        return 0.0
    row = config.rollout.prompt_buckets[-1] if kind == "prefill" else int(length)
    attention = attention_flops(model, [row] * (tokens // row))
    experts = 2.0 * tokens * weights * (moe.top_k if moe else 0)
    if kind == "backward":
        has_output = keeps_attention(config.compute, model) or not config.compute.remat
        attention *= _BACKWARD if has_output else _REMATERIALISED
        experts *= _EXPERTS_BACKWARD
    return (attention + experts) / mesh.devices / chip.device_flops


def runs_per_step(
    rl: RLConfig, rollout: RolloutConfig, rows_multiple: int, samplers: int = 1
) -> dict[str, float]:
    """Returns how often each program runs in a step whose answers have the largest length, on one
    of `samplers`.
    """
    samples, length = rl.prompts_per_step * rl.group_size, rl.longest_row
    zero = rl.zero_variance
    # Dynamic sampling has at least one round.
    rounds = zero.dynamic_batch if zero.dynamic_sampling else 1
    fills = samples * rounds / rollout.slots / samplers
    rows = samples / (length // rl.buckets[-1])
    micro = rows / row_counts(length, rl.micro_batch_tokens, rows_multiple)[0]
    # The first update's pass gives its old log-probs, except with R2.
    scored = 1 - (rl.replay != "R2") / rl.updates_per_rollout
    return {
        "hand-over": 1,
        "prefill": fills,
        "insert": fills,
        "decode": max(1.0, fills) * rollout.max_new_tokens,
        # Old log-probs, the reference's, and the updates' forward passes.
        f"forward {length}": micro * (scored + rl.uses_reference + rl.epochs),
        f"backward {length}": micro * rl.epochs,
        "add": micro * rl.epochs,
        "apply": rl.updates_per_rollout * rl.epochs,
    }
