"""The settings of the learner and the engine of a server."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax

from compass_jax.apps.tinker.errors import RequestError, refuse
from compass_jax.apps.tinker.model import NO_CLIPPING
from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import (
    ComputeConfig,
    LearnerConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    UpdatesConfig,
)
from compass_jax.config.lora import LoRAConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.devices.sharding import placements
from compass_jax.model.params import training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.rollout.engine import Engine
from compass_jax.training.hand_over import WithinProcess
from compass_jax.weights.start import first_parameters

SHORTEST_ROW = 64  # tokens of the shortest bucket of training rows
TARGETS = {
    "train_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "train_mlp": ("gate_proj", "up_proj", "down_proj"),
}


class Base(NamedTuple):
    """What is loaded once: the base model, its engine and its tokenizer."""

    name: str
    model: Transformer
    params: Tree  # in the layout of training
    engine: Engine
    tokenizer: Tokenizer
    learner: LearnerConfig  # of a model with full parameters

    def decoding(self, params: Tree) -> Tree:
        """Returns a copy of training parameters in the layout that samples."""
        decode, _ = WithinProcess(self.engine).send(params, 0)
        # An update donates the training parameters, so the copy must share no buffer with them.
        return jax.tree.map(lambda x: x.copy(), decode)


def load_base(
    weights: str,
    name: str,
    tokenizer: Tokenizer,
    model: ModelConfig,
    compute: ComputeConfig,
    rollout: RolloutConfig,
    mesh: MeshConfig,
    micro_batch_tokens: int,
) -> Base:
    """Returns the base model of a folder of weights. Raises ConfigError for unusable settings."""
    train, sampling = placements(mesh, None, False)
    columns = tokenizer.vocab_size
    transformer = Transformer(model, compute, training_layout(compute), train, columns)
    engine = Engine(
        model,
        dataclasses.replace(compute, dtype=rollout.dtype or compute.dtype),
        rollout,
        tokenizer.end_ids,
        sampling,
        columns,
    )
    config = learner_config(rollout, micro_batch_tokens)
    params = first_parameters(weights, 0, transformer)
    return Base(name, transformer, params, engine, tokenizer, config)


def learner_config(rollout: RolloutConfig, micro_batch_tokens: int) -> LearnerConfig:
    """Returns the learner's settings. The client sends the optimiser's with each update; the rate
    is a factor of 1.
    """
    longest = rollout.max_length
    buckets = [SHORTEST_ROW * 2**i for i in range(20) if SHORTEST_ROW * 2**i < longest]
    optimizer = OptimConfig(learning_rate=1.0, clip_grad_norm=NO_CLIPPING)
    updates = UpdatesConfig(
        steps=1,
        buckets=(*buckets, longest),
        micro_batch_tokens=micro_batch_tokens,
        optim=optimizer,
    )
    config = LearnerConfig(updates=updates, rollout=rollout)
    config.validate()
    return config


def lora_of(options: JsonObject, model: ModelConfig) -> LoRAConfig:
    """Returns the adapters of a model from the client's lora_config; rank 0 trains all weights.

    Raises RequestError for matrices that take no adapter.
    """
    rank = options["rank"]
    if rank == 0:
        return LoRAConfig()
    if options["train_unembed"]:
        raise refuse("train_unembed = True with a rank", "set train_unembed = False, or rank = 0")
    targets = [name for key, names in TARGETS.items() if options[key] for name in names]
    if options["train_mlp"] and model.moe is not None:
        targets.append("experts")
    if not targets or not 0 < rank <= 4096:
        raise RequestError(f"rank = {rank} and {len(targets)} kinds of matrices: nothing to train")
    return LoRAConfig(rank=rank, targets=tuple(targets))  # type: ignore[arg-type]
