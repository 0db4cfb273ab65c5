"""The least time of each program and of a step at the chip's peaks: no prediction."""

from __future__ import annotations

from typing import NamedTuple

from compass_jax.chips import Chip
from compass_jax.config import ComputeConfig, ModelConfig, PolicyConfig, RLConfig, RolloutConfig
from compass_jax.model.flops import attention_flops, flops_per_token, forward_flops
from compass_jax.plan.memory import Memory, keeps_attention
from compass_jax.plan.programs import ROLLOUT
from compass_jax.rl.bucketing import row_counts


class Bound(NamedTuple):
    """Seconds of one run of a program by resource; memory: each argument and result once."""

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
    """Counts the operations of one run over all devices; for decode of one token step with every
    slot at the longest length (the worst case).
    """
    kind, _, length = name.partition(" ")
    if kind == "decode":
        longest = rollout.max_length
        heads = model.heads * (model.head_dim + model.value_dim)
        keys = sum(min(longest, model.window_of(i) or longest) for i in range(model.layers))
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


def bound_of(
    config: PolicyConfig, chip: Chip, name: str, tokens: int, memory: Memory, sent_bytes: float
) -> Bound:
    """Returns the bound on one run of program `name` (decode: one token step)."""
    share, sampling = chip.devices, name.split()[0] in ROLLOUT
    devices = (config.rollout_mesh or config.mesh).devices if sampling else config.mesh.devices
    flops = program_flops(config.model, config.rollout, config.compute, name, tokens)
    return Bound(
        flops / devices / chip.device_flops,
        (memory.arguments + memory.results) / (chip.hbm_gb_s * 1e9 / share),
        sent_bytes / (chip.ici_gb_s * 1e9 / share),
    )


def runs_per_step(rl: RLConfig, rollout: RolloutConfig, rows_multiple: int) -> dict[str, float]:
    """Returns how often each program runs in a step whose answers have the largest length."""
    samples, length = rl.prompts_per_step * rl.group_size, rl.longest_row
    zero = rl.zero_variance
    # Dynamic sampling has at least one round.
    fills = samples * (zero.dynamic_batch if zero.dynamic_sampling else 1) / rollout.slots
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
