"""The trained part of a model: all of it, or adapters of a frozen base (LoRA, arXiv 2106.09685).

`TrainState.params`, its optimiser, its gradients and its checkpoints have the trained tree alone;
this module alone knows how it becomes the model's parameters.
"""

from __future__ import annotations

import jax

from compass_jax.base.aliases import Tree
from compass_jax.base.records import TrainState
from compass_jax.config.lora import LoRAConfig
from compass_jax.model.lora import combine, init_adapters
from compass_jax.model.params import decays
from compass_jax.model.transformer import Transformer

ADAPTERS = 0x10A  # of the key of their first values, folded into the run's


def split(
    lora: LoRAConfig, model: Transformer, params: Tree, key: jax.Array
) -> tuple[Tree, Tree | None]:
    """Returns (trained tree, frozen base) at the start of a run from `params`, in the model's
    layout: the parameters and None, or new adapters and the parameters.
    """
    if not lora.acts:
        return params, None
    return init_adapters(model.config, lora, key, model.layout), params


def full(lora: LoRAConfig, trained: Tree, frozen: Tree | None) -> Tree:
    """Returns the model's parameters."""
    return trained if frozen is None else combine(frozen, trained, lora.scale)


def full_average(lora: LoRAConfig, state: TrainState, frozen: Tree | None) -> Tree:
    """Returns the model's parameters with the average of the trained ones, in their types."""
    average = jax.tree.map(lambda mean, x: mean.astype(x.dtype), state.average, state.params)
    return full(lora, average, frozen)


def decay_mask(lora: LoRAConfig, model: Transformer, trained: Tree) -> tuple[bool, ...]:
    """Returns which leaves of the trained tree take weight decay, in the tree's order: of adapters
    all, as in PEFT.
    """
    if lora.acts:
        return (True,) * len(jax.tree.leaves(trained))
    return decays(model.config, model.layout)
