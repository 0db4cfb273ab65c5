"""Low-rank adapters (LoRA, arXiv 2106.09685): y = x W + (alpha / r) (x A) B, with W frozen.

A model's parameters have a `LowRank` instead of each matrix with an adapter; the model's products
read it (`quantize.matmul`). The adapters alone form the tree that is trained: the structure of the
parameters, with an `Adapter` for each of these matrices and None for the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.base.aliases import Tree
from compass_jax.config import ModelConfig
from compass_jax.config.errors import ConfigError
from compass_jax.config.lora import LoRAConfig
from compass_jax.model.params import Layout, ParamSpec, in_layout, is_spec, param_specs
from compass_jax.model.precision import at_least_float32

# Parameter -> the names in `lora.targets` that give it an adapter. Keys and values have their
# matrices in common in latent attention.
TARGETS_OF: Mapping[str, tuple[str, ...]] = {
    **{f"attention.{name}": (f"{name}_proj",) for name in ("q", "k", "v", "o")},
    **{f"attention.q_{part}": ("q_proj",) for part in "ab"},
    **{f"attention.kv_{part}": ("k_proj", "v_proj") for part in "ab"},
    **{f"{mlp}.{x}": (f"{x}_proj",) for mlp in ("mlp", "shared") for x in ("gate", "up", "down")},
}


class Adapter(NamedTuple):
    """The trained factors of one matrix, or of the same matrix of all layers or experts."""

    a: Tree  # [... i r]
    b: Tree  # [... r o]


@partial(jax.tree_util.register_dataclass, data_fields=["base", "a", "b"], meta_fields=["scale"])
@dataclass(frozen=True)
class LowRank:
    """The matrix base + scale * a @ b."""

    base: Tree  # [... i o]
    a: Tree  # [... i r]
    b: Tree  # [... r o]
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        """The matrix's shape."""
        return self.base.shape


def is_low_rank(w: Tree) -> TypeGuard[LowRank]:
    """Returns whether a matrix has an adapter."""
    return isinstance(w, LowRank)


def any_low_rank(tree: Tree) -> bool:
    """Returns whether a parameter tree has adapters."""
    return any(map(is_low_rank, jax.tree.leaves(tree, is_leaf=is_low_rank)))


def adapter_specs(config: ModelConfig, lora: LoRAConfig) -> Tree:
    """Returns the tree of adapters as pairs of ParamSpec. Raises ConfigError for a target that the
    model does not have.
    """
    if "experts" in lora.targets and config.moe is None:
        raise ConfigError("lora.targets names experts: the model is dense and has none")

    def of(spec: ParamSpec) -> Adapter | None:
        names = ("experts",) if spec.per_expert else TARGETS_OF.get(spec.name, ())
        # `quantised` marks the matrices of attention and MLP, the only ones that take an adapter.
        if not spec.quantised or not set(names) & set(lora.targets):
            return None
        *lead, rows, columns = spec.shape
        *axes, row_axis, column_axis = spec.axes
        return Adapter(
            spec._replace(shape=(*lead, rows, lora.rank), axes=(*axes, row_axis, None)),
            spec._replace(shape=(*lead, lora.rank, columns), axes=(*axes, None, column_axis)),
        )

    tree = jax.tree.map(of, param_specs(config), is_leaf=is_spec)
    if not jax.tree.leaves(tree, is_leaf=is_spec):
        raise ConfigError(f"lora.targets = {lora.targets}: the model has none of these matrices")
    return tree


def init_adapters(
    config: ModelConfig, lora: LoRAConfig, key: jax.Array, layout: Layout = "stacked"
) -> Tree:
    """Draws the initial adapters in float32: a uniform in +-1 / sqrt(inputs) (PEFT's Kaiming
    initialisation), b zero, so that the model starts as its base.
    """
    specs = adapter_specs(config, lora)
    pairs, structure = jax.tree.flatten(specs, is_leaf=lambda x: isinstance(x, Adapter))

    def draw(number: int, pair: Adapter) -> Adapter:
        bound = pair.a.shape[-2] ** -0.5
        a = jax.random.uniform(
            jax.random.fold_in(key, number), pair.a.shape, jnp.float32, -bound, bound
        )
        return Adapter(a, jnp.zeros(pair.b.shape, jnp.float32))

    drawn = [draw(number, pair) for number, pair in enumerate(pairs)]
    return in_layout(jax.tree.unflatten(structure, drawn), layout)


def combine(base: Tree, adapters: Tree, scale: float) -> Tree:
    """Returns the parameters with a LowRank for each matrix that has an adapter."""
    return jax.tree.map(
        lambda w, adapter: w if adapter is None else LowRank(w, adapter.a, adapter.b, scale),
        base,
        adapters,
    )


def trainable(params: Tree) -> tuple[Tree, Callable[[Tree], Tree]]:
    """Returns the trained part of `params` (all, or only the adapters if it has them), and a
    function that puts another value of that part in its place.
    """
    if not any_low_rank(params):
        return params, lambda trained: trained

    def put(w: Tree, adapter: Adapter | None) -> Tree:
        return w if adapter is None else LowRank(w.base, adapter.a, adapter.b, w.scale)

    adapters = jax.tree.map(
        lambda w: Adapter(w.a, w.b) if is_low_rank(w) else None, params, is_leaf=is_low_rank
    )
    return adapters, lambda trained: jax.tree.map(put, params, trained, is_leaf=is_low_rank)


def merged(params: Tree) -> Tree:
    """Computes the matrices base + scale * a @ b in at least float32, in the base's dtype; other
    parameters are unchanged.
    """
    return jax.tree.map(
        lambda w: merge(w).astype(w.base.dtype) if is_low_rank(w) else w,
        params,
        is_leaf=is_low_rank,
    )


def merge(w: LowRank) -> Float[Array, "... i o"]:
    """Computes base + scale * a @ b in at least float32."""
    wide = at_least_float32(w.base.dtype)
    product = jnp.matmul(w.a.astype(wide), w.b.astype(wide), precision=jax.lax.Precision.HIGHEST)
    return w.base.astype(wide) + jnp.asarray(w.scale, wide) * product
