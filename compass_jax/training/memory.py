"""Estimate of a run's peak memory.

The activations are traced: an abstract forward and backward pass of one micro-batch gives the shape
of every array that the backward pass stores, attention scores included. Tracing takes a second or
two and compiles nothing. The logits of `compute.logprob_chunk` tokens are added.
"""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache
from typing import Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from compass_jax.base.aliases import Tree
from compass_jax.base.programs import struct
from compass_jax.config import (
    ComputeConfig,
    ConfigError,
    MeshConfig,
    ModelConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    SamplingConfig,
    SFTConfig,
)
from compass_jax.config.drafts import BYTES_PER_TOKEN
from compass_jax.config.errors import check
from compass_jax.config.lora import LoRAConfig
from compass_jax.devices.machine import available_bytes, on_cpu, peak_bytes, usable_bytes
from compass_jax.devices.sharding import AXES, Placement
from compass_jax.model.logprobs import head_weights, token_logprobs
from compass_jax.model.lora import combine, init_adapters, trainable
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import (
    Layout,
    abstract_params,
    decode_shardings,
    placed_structs,
    training_layout,
)
from compass_jax.model.precision import at_least_float32
from compass_jax.model.transformer import Transformer
from compass_jax.model.transformer import apply as apply_model
from compass_jax.rollout.kv_cache import new_cache, pages_spec

# Python, JAX, the compiler and its programs, and the tokenizer, on a CPU (benchmarks/HISTORY.md)
PROCESS_BYTES = 2.0 * 2**30
# The forward pass of the next micro-batch overlaps the backward pass of the current one.
MICRO_BATCHES_AT_ONCE = 2
BYTES_PER_KEPT_TOKEN = 16  # four numbers of 32 bits
DRAFT_COPIES = 2  # of the kept drafts, one of them for a checkpoint

Training = RLConfig | SFTConfig


class MemoryEstimate(NamedTuple):
    """Bytes on one device at the peak of training; on a CPU, bytes of the process."""

    process: float
    weights: float  # trained parameters, and those of the reference model
    optimizer: float
    rollout: float  # the rollout's weights, KV cache and routes; 0 on devices that do not sample
    gradients: float  # the accumulated gradient, and that of the micro-batch
    activations: float  # stored for the backward passes of MICRO_BATCHES_AT_ONCE
    logits: float
    # routes of the step's samples; groups that hooks hold, on a CPU their tokens too
    replay: float = 0.0

    @property
    def total(self) -> float:
        """Peak bytes."""
        return sum(self)

    def __str__(self) -> str:
        parts = [
            f"{name} {x / 2**30:.2f}" for name, x in self._asdict().items() if x >= 0.005 * 2**30
        ]
        return f"about {self.total / 2**30:.1f} GiB at the peak ({', '.join(parts)})"


def estimate(policy: PolicyConfig, training: Training) -> MemoryEstimate:
    """Returns the peak memory of a run.

    Args:
        policy: the run's.
        training: its `rl`, or its `sft` for a command that trains without a rollout.
    """
    length = training.longest_row
    size = rows_of(training.micro_batch_tokens, length, policy.mesh), length
    return MemoryEstimate(
        process=process_bytes() + _host_bytes(training),
        **_fixed_bytes(policy, training),
        **_micro_batch_bytes(policy.model, policy.compute, policy.lora, policy.mesh, size),
    )


def memory_line(policy: PolicyConfig, training: Training) -> str:
    """Returns the estimate as text. The text names the available memory if the run needs more."""
    need, free = estimate(policy, training), usable_bytes()
    if on_cpu():  # its simulated devices share one memory
        need = MemoryEstimate(*(x * jax.local_device_count() for x in need))
        free = available_bytes() + peak_bytes()  # this process's memory is counted in the estimate
    line = str(need)
    if need.total > free:
        sizes = "sft.micro_batch_tokens"
        if isinstance(training, RLConfig):
            sizes = "rl.micro_batch_tokens or rollout.slots"
            if training.held_groups:
                sizes = "the groups that rl.hooks hold, " + sizes
        line += f"; {free / 2**30:.1f} GiB are free: lower {sizes}"
    return line


def process_bytes() -> float:
    """Returns a device's share of PROCESS_BYTES. A CPU's simulated devices share one process; an
    accelerator's memory holds none of it, so its share is 0.
    """
    return PROCESS_BYTES / jax.local_device_count() if on_cpu() else 0.0


def draft_bytes(training: Training) -> float:
    """Returns the bytes of the host's memory that the kept drafts of `rl.drafts` take at most."""
    if not isinstance(training, RLConfig) or training.drafts is None:
        return 0.0
    return float(DRAFT_COPIES * BYTES_PER_TOKEN * training.drafts.kept_tokens)


def check_drafts(training: Training) -> None:
    """Raises ConfigError if the drafts that may be kept exceed the host's available memory."""
    need, free = draft_bytes(training), available_bytes()
    if need > free:
        raise ConfigError(
            f"rl.drafts.kept_tokens: these drafts take {need / 2**30:.1f} GiB of the host's memory"
            f" at the most and {free / 2**30:.1f} GiB are free; lower it"
        )


def _host_bytes(training: Training) -> float:
    """Returns a device's share of the bytes in the host's memory besides the process: on a CPU the
    devices share it, an accelerator holds none of it.
    """
    return draft_bytes(training) / jax.local_device_count() if on_cpu() else 0.0


def rows_of(tokens: int, length: int, mesh: MeshConfig) -> int:
    """Returns the number of rows per device in a full micro-batch."""
    return max(1, tokens // length // _shards_of_rows(mesh))


def _shards_of_rows(mesh: MeshConfig) -> int:
    return max(mesh.devices // mesh.tensor // mesh.context, 1)


def fitting_rows(policy: PolicyConfig, training: Training, most: int) -> int:
    """Returns the number of rows of the longest bucket that fit into a micro-batch on one device:
    `most`, or a power of two, so that small changes of the free memory do not change the result.
    `training` is as in `estimate`.
    """
    room = usable_bytes() - process_bytes() - _host_bytes(training)
    room -= sum(_fixed_bytes(policy, training).values())

    def needed(rows: int) -> float:
        size = rows, training.longest_row
        parts = _micro_batch_bytes(policy.model, policy.compute, policy.lora, policy.mesh, size)
        return sum(parts.values())

    if needed(most) <= room:  # usual for small models; the run's estimate has the same trace
        return most
    # The bytes are taken as linear in the rows: two traces give the constant and the slope.
    one, two = needed(1), needed(2)
    fitting = max(1, 1 + int((room - one) // max(two - one, 1)))
    return most if fitting >= most else 2 ** int(math.log2(fitting))


def _fixed_bytes(policy: PolicyConfig, training: Training) -> dict[str, float]:
    """Returns the bytes per device that do not depend on the micro-batch, by name."""
    model, compute = policy.model, policy.compute
    narrow = jnp.dtype(compute.param_dtype).itemsize < 4
    master, averages = narrow and training.optim.float32_master, bool(training.optim.average)
    placed = model, training_layout(compute), policy.mesh
    weights = _weight_bytes(*placed, compute.param_dtype)
    wide = _weight_bytes(*placed, str(at_least_float32(compute.param_dtype)))
    adapters = 0
    if policy.lora.acts:
        adapters = tree_bytes(_abstract_adapters(model, compute, policy.lora))
    rollout = replay = 0.0
    if isinstance(training, RLConfig):
        replay = _step_route_bytes(model, policy.rollout, training, policy.mesh)
        mesh, decoding = policy.sampling_mesh, policy.rollout_compute
        if not policy.rollout_apart and not policy.samplers.acts:
            rollout = float(_decode_weight_bytes(model, decoding.dtype, mesh))
            rollout += cache_bytes(model, policy.rollout, decoding, mesh)
            rollout += route_bytes(model, policy.rollout, training, mesh)
            replay += held_route_bytes(model, policy.rollout, training, mesh)
        elif policy.samplers.acts:
            split = _samplers_split(policy.mesh, mesh)
            rollout = float(_decode_weight_bytes(model, decoding.dtype, split))
        if on_cpu():
            replay += held_token_bytes(policy.rollout, training) / jax.local_device_count()
    copies = 2 if isinstance(training, RLConfig) and training.uses_reference else 1
    if policy.lora.acts:  # in float32, the same on every device; the base is the reference
        return {
            "weights": float(weights + adapters),
            "optimizer": float((2 + averages) * adapters),
            "rollout": rollout,
            "gradients": float(2 * adapters),
            "replay": replay,
        }
    return {
        "weights": weights * copies,
        # two moments, a master copy, and the average of the weights
        "optimizer": (3 * wide if master else 2 * weights) + averages * wide,
        "rollout": rollout,
        "gradients": wide + weights,
        "replay": replay,
    }


def _samplers_split(training: MeshConfig, sampler: MeshConfig) -> MeshConfig:
    """Returns the mesh that splits the copy of the weights that the training keeps for samplers."""
    if training.devices % (sampler.expert * sampler.tensor):
        return MeshConfig()
    return MeshConfig(expert=sampler.expert, tensor=sampler.tensor)


def _weight_bytes(model: ModelConfig, layout: Layout, mesh: MeshConfig, dtype: str) -> int:
    """Returns the bytes of one device's shards of the parameters in storage."""
    weights = abstract_params(model, dtype, layout)
    return bytes_per_device(placed_structs(weights, model, _abstract_placement(mesh)))


def _decode_weight_bytes(model: ModelConfig, dtype: str, mesh: MeshConfig) -> int:
    """Returns the bytes of one device's shards of the rollout's weights, which FSDP does not split,
    before they are quantised.
    """
    weights = abstract_params(model, dtype, "decode")
    shardings = decode_shardings(weights, model, _abstract_placement(mesh))
    return bytes_per_device(
        jax.tree.map(lambda x, sharding: struct(x.shape, x.dtype, sharding), weights, shardings)
    )


def _abstract_placement(mesh: MeshConfig, use: Literal["train", "decode"] = "train") -> Placement:
    """Returns a placement on a mesh without devices, for shardings whose shapes alone are read."""
    return Placement(cast(Mesh, AbstractMesh(dataclasses.astuple(mesh), AXES)), use)


def cache_bytes(
    model: ModelConfig, rollout: RolloutConfig, compute: ComputeConfig, mesh: MeshConfig
) -> float:
    """Returns the bytes of the rollout's KV cache on one device. A device holds all slots if the
    mesh does not divide their number.
    """
    placement = _abstract_placement(mesh, "decode")
    groups = _shards(rollout.slots, mesh)
    cache = jax.eval_shape(lambda: new_cache(model, rollout, compute, groups)[0])
    specs = pages_spec(placement, rollout.slots, cache)[1]
    return bytes_per_device(
        jax.tree.map(
            lambda x, spec: struct(x.shape, x.dtype, placement.sharding(*spec)), cache, specs
        )
    )


def route_bytes(
    model: ModelConfig, rollout: RolloutConfig, sampling: SamplingConfig, mesh: MeshConfig
) -> float:
    """Returns the bytes of recorded routes on one device: those of the slots, and those of the
    groups in flight.
    """
    if not model.moe_layers:
        return 0.0
    share = _share_of_routes(sampling, mesh) * sampling.groups_in_flight * sampling.capacity
    share += rollout.slots / _shards(rollout.slots, mesh)
    return share * _sample_route_bytes(model, rollout)


def _step_route_bytes(
    model: ModelConfig, rollout: RolloutConfig, sampling: SamplingConfig, mesh: MeshConfig
) -> float:
    """Returns the bytes on one device of the routes of a step's samples, which training has a copy
    of, so that the next rollout may overwrite the engine's.
    """
    if not model.moe_layers:
        return 0.0
    shards = _shards_of_rows(mesh) * mesh.context
    samples = sampling.prompts_per_step * sampling.capacity
    return samples * _sample_route_bytes(model, rollout) / shards


def held_route_bytes(
    model: ModelConfig, rollout: RolloutConfig, sampling: SamplingConfig, mesh: MeshConfig
) -> float:
    """Returns the bytes on one device of the routes of groups that hooks hold."""
    samples = sampling.held_groups * sampling.holds_routes * sampling.capacity
    if not model.moe_layers or not samples:
        return 0.0
    return samples * _sample_route_bytes(model, rollout) * _share_of_routes(sampling, mesh)


def _share_of_routes(sampling: SamplingConfig, mesh: MeshConfig) -> float:
    """Returns the part of the route buffer's rows that one device holds."""
    return 1 / _shards(sampling.routed_groups * sampling.capacity, mesh)


def _shards(rows: int, mesh: MeshConfig) -> int:
    """Returns the number of parts into which decoding on the mesh splits an array's rows."""
    placement = _abstract_placement(mesh, "decode")
    return placement.size(*placement.batch_axes(rows))


def held_token_bytes(rollout: RolloutConfig, sampling: SamplingConfig) -> float:
    """Returns the bytes of the host's memory that the longest samples of the groups that hooks
    hold need: tokens, log-probs, entropies and versions.
    """
    samples = sampling.held_groups * sampling.capacity
    return float(samples * rollout.max_length * BYTES_PER_KEPT_TOKEN)


def check_held_groups(
    model: ModelConfig, rollout: RolloutConfig, sampling: SamplingConfig, mesh: MeshConfig
) -> None:
    """Raises ConfigError if the groups that hooks hold alone need more memory than there is: their
    tokens the host's, their routes a device's. mesh: the rollout's.
    """
    groups = sampling.held_groups
    for what, need, free, remedy in (
        ("tokens", held_token_bytes(rollout, sampling), available_bytes(), ""),
        (
            "routes",
            held_route_bytes(model, rollout, sampling, mesh),
            usable_bytes(),
            ", or hold no routes",
        ),
    ):
        check(
            need <= free,
            f"rl.hooks hold {groups} groups: the {what} of so many groups need"
            f" {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; lower it{remedy}",
        )


def _sample_route_bytes(model: ModelConfig, rollout: RolloutConfig) -> int:
    return tree_bytes(jax.eval_shape(lambda: empty_routes(model, 1, rollout.max_length)))


def _micro_batch_bytes(
    model: ModelConfig,
    compute: ComputeConfig,
    lora: LoRAConfig,
    mesh: MeshConfig,
    size: tuple[int, int],
) -> dict[str, float]:
    """Returns the bytes of activations and logits of one micro-batch on one device. size: its rows
    and their tokens.
    """
    rows, length = size
    # Devices of `context` hold all of a row's tokens if they do not divide them.
    shards = mesh.context if length % mesh.context == 0 else 1
    chunk = min(compute.logprob_chunk, rows * length // shards)
    residuals = _residual_bytes(model, compute, lora, rows, length)
    return {
        "activations": MICRO_BATCHES_AT_ONCE * residuals / shards,
        # the logits and their log-softmax
        "logits": 2.0 * chunk * model.vocab_size * 4,
    }


@lru_cache(maxsize=8)
def _residual_bytes(
    model: ModelConfig, compute: ComputeConfig, lora: LoRAConfig, rows: int, length: int
) -> int:
    """Returns the bytes stored for the backward pass of a micro-batch's log-probs, without the
    parameters. The computation matches training/step.py.
    """
    network = Transformer(model, compute, training_layout(compute))

    def residuals(params: Tree, tokens: Tree, routes: Tree) -> list[Tree]:
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], tokens.shape)

        trained, in_params = trainable(params)

        def run(trained: Tree) -> Tree:
            params, mask = in_params(trained), positions >= 0
            out = apply_model(network, params, tokens, positions, mask=mask, routes=routes)
            head, chunk = head_weights(params), compute.logprob_chunk
            logp, entropy = token_logprobs(out.hidden, head, tokens, 1.0, chunk, predicted=mask)
            return (logp, None if out.aux is None else out.aux.probs), (entropy, out.routes)

        # The pullback is a pytree whose leaves are the arrays that the backward pass reads. The
        # parameters among them are counted as weights.
        _, pullback, _ = jax.vjp(run, trained, has_aux=True)
        param_ids = {id(x) for x in jax.tree.leaves(params)}
        return [x for x in jax.tree.leaves(pullback) if id(x) not in param_ids]

    params = abstract_params(model, compute.param_dtype, training_layout(compute))
    if lora.acts:
        params = combine(params, _abstract_adapters(model, compute, lora), lora.scale)
    shapes = (
        params,
        jax.ShapeDtypeStruct((rows, length), jnp.int32),
        jax.eval_shape(lambda: empty_routes(model, rows, length)) if model.moe_layers else None,
    )
    return tree_bytes(jax.eval_shape(jax.jit(residuals), *shapes))


def _abstract_adapters(model: ModelConfig, compute: ComputeConfig, lora: LoRAConfig) -> Tree:
    key, layout = jax.random.key(0), training_layout(compute)
    return jax.eval_shape(lambda: init_adapters(model, lora, key, layout))


def tree_bytes(tree: Tree) -> int:
    """Returns the bytes of a tree of arrays or shapes."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def bytes_per_device(tree: Tree) -> int:
    """Returns the bytes per device of structs with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x.dtype)
        for x in jax.tree.leaves(tree)
    )


def _itemsize(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize
