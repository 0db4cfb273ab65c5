"""The least time of each program and of a step at the chip's peaks, and that of kernels alone."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from compass_jax.apps.plan.memory import Memory, keeps_attention
from compass_jax.apps.plan.programs import ROLLOUT
from compass_jax.config import (
    ComputeConfig,
    MeshConfig,
    ModelConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
)
from compass_jax.devices.chips import Chip
from compass_jax.model.flops import attention_flops, flops_per_token, forward_flops
from compass_jax.rl.bucketing import plan, row_counts
from compass_jax.rollout.sizes import prefill_rows

# Products of attention in a backward pass for each two of the forward pass: the kernels for the
# gradients of queries and of keys and values compute scores and their gradients each.
_BACKWARD, _REMATERIALISED = 7 / 2, 9 / 2
# Products of experts in a backward pass for each three of the forward pass: two gradients of each,
# and gate and up again.
_EXPERTS_BACKWARD = 8 / 3
SIGMA = 0.8  # of the logarithm of an answer's length, where only its mean is known


class Bound(NamedTuple):
    """Seconds of one run of a program by resource. Memory: each argument and result once, but only
    the part of the cache that a token sees in the mean.
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
    the mean over an answer of the largest length; an extension's tokens see the longest sequence.
    """
    kind, _, length = name.partition(" ")
    if kind in ("decode", "extend"):
        heads = model.heads * (model.head_dim + model.value_dim)
        seen = _positions(rollout) if kind == "decode" else np.full(1, rollout.max_length)
        keys = sum(
            float(np.mean(np.minimum(seen, model.window_of(i) or np.inf)))
            for i in range(model.layers)
        )
        return tokens * (flops_per_token(model) + 2.0 * heads * keys)
    if kind in ("prefill", "resume", "drafts"):
        bucket = rollout.prompt_buckets[-1] if kind == "prefill" else rollout.max_length
        return forward_flops(model, [bucket] * (tokens // bucket))
    if kind in ("forward", "backward"):
        lengths = [int(length)] * (tokens // int(length))
        forward = forward_flops(model, lengths)
        if kind == "forward":
            return forward
        spared = attention_flops(model, lengths) if keeps_attention(compute, model) else 0.0
        # Each product of the forward pass has two gradients. Remat repeats the forward pass, except
        # for attention whose output is kept.
        return 2 * forward + (forward - spared if compute.remat else 0)
    return 0.0


def _positions(rollout: RolloutConfig) -> np.ndarray:
    """Returns the context of each token of an answer of the largest length, in tokens."""
    return rollout.prompt_buckets[-1] + 1 + np.arange(rollout.max_new_tokens)


def read_share(rollout: RolloutConfig, answers: Int[np.ndarray, "n"] | None = None) -> float:
    """Returns the share of a slot's cache that a decoded token of such answers sees in the mean;
    None: all have the largest length.
    """
    if answers is None:
        return float(np.mean(_positions(rollout))) / rollout.max_length
    # The tokens of an answer of n tokens see (1 + n) / 2 of it on average. An answer counts once
    # for each of its tokens.
    seen = rollout.prompt_buckets[-1] + (1 + answers) / 2
    return float(np.average(seen, weights=answers)) / rollout.max_length


def bound_of(
    policy: PolicyConfig,
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
    flops = program_flops(policy.model, policy.rollout, policy.compute, name, tokens)
    # The arguments hold the whole cache, of which a token reads only the positions before it.
    unread = cache * (1 - read_share(policy.rollout)) if decodes else 0.0
    return Bound(
        flops / _mesh_of(policy, name).devices / chip.device_flops,
        (memory.arguments + memory.results - unread) / (chip.hbm_gb_s * 1e9 / share),
        sent_bytes / (chip.ici_gb_s * 1e9 / share),
    )


def _mesh_of(policy: PolicyConfig, name: str) -> MeshConfig:
    samples = name.split()[0] in ROLLOUT
    return policy.sampling_mesh if samples else policy.mesh


def kernel_seconds(policy: PolicyConfig, chip: Chip, name: str, tokens: int, cache: float) -> float:
    """Returns the seconds at the chip's peaks of one run's kernels, attention and the experts'
    products, for which the compiler has no estimate. In decode they read memory: the `cache` of a
    device as far as a token sees it, and its experts.
    """
    model, mesh, share = policy.model, _mesh_of(policy, name), chip.devices
    kind, _, length = name.partition(" ")
    moe = model.moe
    weights = 0.0 if moe is None else 3.0 * len(model.moe_layers) * model.hidden * moe.ffn
    if kind == "decode":
        size = 2 if policy.rollout.quantize == "off" else 1
        experts = weights * (moe.experts if moe else 0) * size / (mesh.expert * mesh.tensor)
        read = cache * read_share(policy.rollout) + experts
        return read / (chip.hbm_gb_s * 1e9 / share)
    if kind not in ("prefill", "forward", "backward"):
        return 0.0
    row = policy.rollout.prompt_buckets[-1] if kind == "prefill" else int(length)
    attention = attention_flops(model, [row] * (tokens // row))
    experts = 2.0 * tokens * weights * (moe.top_k if moe else 0)
    if kind == "backward":
        has_output = keeps_attention(policy.compute, model) or not policy.compute.remat
        attention *= _BACKWARD if has_output else _REMATERIALISED
        experts *= _EXPERTS_BACKWARD
    return (attention + experts) / mesh.devices / chip.device_flops


def answer_lengths(rl: RLConfig, rollout: RolloutConfig, mean: int) -> Int[np.ndarray, "n"]:
    """Returns the tokens of a step's answers: log-normal, up to the largest length, `mean` on
    average.
    """
    samples = rl.prompts_per_step * rl.group_size
    shape = np.exp(SIGMA * np.random.default_rng(0).standard_normal(samples))

    def cut(scale: float) -> np.ndarray:
        return np.minimum(scale * shape, rollout.max_new_tokens)

    # Bisects the scale at which the cut lengths have this mean. At `high` all answers are cut.
    low, high = 0.0, rollout.max_new_tokens / shape.min()
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut(middle).mean() < mean else (low, middle)
    return np.maximum(np.rint(cut(high)), 1).astype(np.int64)


def runs_per_step(
    rl: RLConfig,
    rollout: RolloutConfig,
    rows_multiple: int,
    samplers: int = 1,
    answers: Int[np.ndarray, "n"] | None = None,
) -> dict[str, float]:
    """Returns how often each program runs in a step, on one of `samplers`.

    Args:
        answers: tokens of each answer; None: all have the largest length.
    """
    samples, zero = rl.prompts_per_step * rl.group_size, rl.zero_variance
    if answers is None:
        answers = np.full(samples, rollout.max_new_tokens)
    # Dynamic sampling has at least one round.
    rounds = zero.dynamic_batch if zero.dynamic_sampling else 1
    fills = samples * rounds / rollout.slots / samplers
    rows = prefill_rows(rollout, rl.group_size, rollout.prompt_buckets[-1])[-1]
    # One prefill of long prompts can be too few rows to fill all slots.
    prefills = max(fills, rl.prompts_per_step * rounds / rows / samplers)
    runs = {
        "hand-over": 1,
        "prefill": prefills,
        "insert": prefills,
        # A run decodes one token in every slot, so the longest answer needs a run per token.
        "decode": max(float(answers.max()), fills * float(answers.mean())),
        "apply": rl.updates_per_rollout * rl.epochs,
    }
    # The first update's pass gives its old log-probs, except with R2.
    scored = 1 - (rl.replay != "R2") / rl.updates_per_rollout
    for length, micro in _micro_batches(rl, rollout, rows_multiple, answers).items():
        # Old log-probs, the reference's, and the updates' forward passes.
        runs[f"forward {length}"] = micro * (scored + rl.uses_reference + rl.epochs)
        runs[f"backward {length}"] = micro * rl.epochs
        runs["add"] = runs.get("add", 0.0) + micro * rl.epochs
    return runs


def _micro_batches(
    rl: RLConfig, rollout: RolloutConfig, rows_multiple: int, answers: np.ndarray
) -> dict[int, float]:
    """Returns the number of full micro-batches of each length in a step's updates. One of half the
    rows is half a full one.
    """
    numbers: dict[int, float] = {}
    for rows in np.array_split(rollout.prompt_buckets[-1] + answers, rl.updates_per_rollout):
        for batch in plan(
            rows,
            rl.buckets,
            rl.micro_batch_tokens,
            rows_multiple=rows_multiple,
            packed_row_tokens=rl.packed_row_tokens,
        ):
            length = batch.length if batch.packing is None else batch.packing.length
            full = row_counts(length, rl.micro_batch_tokens, rows_multiple)[0]
            numbers[length] = numbers.get(length, 0.0) + batch.tokens / (full * length)
    return numbers
