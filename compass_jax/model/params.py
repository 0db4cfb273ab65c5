"""Every parameter declared once: shape, logical axes, initialiser, weight decay and quantisation.
Modules read parameters and never declare them.

The decoder is a static list of runs of equal layers (`layer_runs`): a run is a period of layer
kinds, repeated. A run has one of four layouts. *stacked*, for storage and for training with one
`lax.scan` per run, has a leading axis of length `repeats`. *unrolled*, for training few layers, is
a tuple over repeats: slices of one array would be copied, and so would their gradients. *decode* is
unrolled with the experts' gate and up concatenated, because one wide product of few rows is faster
than two. *decode_stacked* is its stacked form, for a scan (compute.scan_decode). Abstract trees,
shardings, initialisation and checkpoint conversion derive from `param_specs`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, MLAConfig, ModelConfig
from compass_jax.devices.sharding import SPLIT, STORE, Placement, move
from compass_jax.model.precision import at_least_float32

_LONGEST_PERIOD = 8
Layout = Literal["stacked", "unrolled", "decode", "decode_stacked"]


class Run(NamedTuple):
    """`repeats` copies of `period` (True = MoE layer) that start at decoder layer `start`."""

    start: int
    period: tuple[bool, ...]
    repeats: int

    def layer(self, repeat: int, offset: int) -> int:
        """Returns the decoder layer of position `offset` of the period in copy `repeat`."""
        return self.start + repeat * len(self.period) + offset


class ParamSpec(NamedTuple):
    """One parameter leaf. Families know it by `name` ("attention.q"; in the MLP of an MoE layer
    "moe.gate").
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str = "normal"  # normal, ones, zeros
    decays: bool = True  # takes weight decay
    quantised: bool = False  # in 8 bits in a quantised rollout
    stacked: bool = False  # leading axis is the run's repeats
    per_expert: bool = False  # next axis is the expert
    exact: bool = False  # in at least float32 whatever the type of the other parameters

    def dtype(self, params: str) -> np.dtype:
        """Returns the type of this parameter among parameters of type `params`."""
        return at_least_float32(params) if self.exact else jnp.dtype(params)

    def over_mesh(self, x: Tree) -> PartitionSpec:
        """Returns the partition of `x` (this parameter or its 8-bit scales) inside `shard_map`:
        axes that only storage splits are whole.
        """
        # 8-bit scales have size 1 along the inputs, which cannot be split.
        sizes = zip(x.shape, self.axes, strict=True)
        return PartitionSpec(*(SPLIT.get(axis or "") if size > 1 else None for size, axis in sizes))


def layer_runs(config: ModelConfig) -> tuple[Run, ...]:
    """Splits the layers into runs, at each point taking the period that covers the most layers
    (shortest on a tie). Layers at the same place of a period have the same sliding window.
    """
    moe = tuple(config.is_moe(i) for i in range(config.layers))
    kinds = tuple((is_moe, config.window_of(i)) for i, is_moe in enumerate(moe))
    runs, start = [], 0
    while start < len(kinds):
        best = Run(start, moe[start : start + 1], 1)
        for size in range(1, min(_LONGEST_PERIOD, len(kinds) - start) + 1):
            period, repeats = kinds[start : start + size], 1
            while kinds[start + repeats * size : start + (repeats + 1) * size] == period:
                repeats += 1
            # Any layers at all form a period with one copy, so a longer period must repeat.
            if (size == 1 or repeats > 1) and repeats * size > best.repeats * len(best.period):
                best = Run(start, moe[start : start + size], repeats)
        runs.append(best)
        start += best.repeats * len(best.period)
    return tuple(runs)


def _matrix(name: str, shape: tuple[int, ...], *axes: str | None) -> ParamSpec:
    return ParamSpec(name, shape, axes, quantised=True, per_expert=axes[0] == "expert")


def _scale(name: str, size: int, axis: str | None, init: str = "ones") -> ParamSpec:
    """Declares a norm's scale, a bias or attention sinks, without weight decay."""
    return ParamSpec(name, (size,), (axis,), init, decays=False)


def _latent_specs(c: ModelConfig, mla: MLAConfig) -> dict[str, ParamSpec]:
    """Declares the projections of multi-head latent attention and the norms of latent vectors."""
    q, first = c.heads * c.head_dim, ("q_a" if mla.q_rank else "q")
    expanded = c.heads * (c.head_dim - mla.rope_dim + mla.value_dim)
    kv_a = (c.hidden, mla.kv_rank + mla.rope_dim)
    specs = {
        first: _matrix(f"attention.{first}", (c.hidden, mla.q_rank or q), "embed", "heads"),
        "kv_a": _matrix("attention.kv_a", kv_a, "embed", None),
        "kv_a_norm": _scale("attention.kv_a_norm", mla.kv_rank, None),
        "kv_b": _matrix("attention.kv_b", (mla.kv_rank, expanded), "latent", "heads"),
        "o": _matrix("attention.o", (c.heads * mla.value_dim, c.hidden), "heads", "embed"),
    }
    if mla.q_rank:
        specs["q_a"] = specs["q_a"]._replace(axes=("embed", None))
        specs["q_a_norm"] = _scale("attention.q_a_norm", mla.q_rank, None)
        specs["q_b"] = _matrix("attention.q_b", (mla.q_rank, q), "latent", "heads")
    return specs


def _attention_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    specs = _projection_specs(c) if c.mla is None else _latent_specs(c, c.mla)
    if c.o_bias:
        specs["o_bias"] = _scale("attention.o_bias", c.hidden, "embed", "zeros")
    if c.attention_sinks:
        specs["sinks"] = _scale("attention.sinks", c.heads, "heads", "normal")
    return specs


def _projection_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    """Declares the projections to queries, keys and values, their biases and norms."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    specs = {
        "q": _matrix("attention.q", (c.hidden, q), "embed", "heads"),
        "k": _matrix("attention.k", (c.hidden, kv), "embed", "kv_heads"),
        "v": _matrix("attention.v", (c.hidden, kv), "embed", "kv_heads"),
        "o": _matrix("attention.o", (q, c.hidden), "heads", "embed"),
    }
    if c.qkv_bias:
        for name, size, axis in (("q", q, "heads"), ("k", kv, "kv_heads"), ("v", kv, "kv_heads")):
            specs[f"{name}_bias"] = _scale(f"attention.{name}_bias", size, axis, "zeros")
    if c.qk_norm:
        by_head = c.qk_norm_scope == "head"
        for name, size, axis in (("q", q, "heads"), ("k", kv, "kv_heads")):
            specs[f"{name}_norm"] = (
                _scale(f"attention.{name}_norm", c.head_dim, None)
                if by_head
                else _scale(f"attention.{name}_norm", size, axis)
            )
    return specs


def _dense_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    return {
        "gate": _matrix("mlp.gate", (c.hidden, c.ffn), "embed", "ffn"),
        "up": _matrix("mlp.up", (c.hidden, c.ffn), "embed", "ffn"),
        "down": _matrix("mlp.down", (c.ffn, c.hidden), "ffn", "embed"),
    }


def moe_specs(c: ModelConfig, layout: Layout = "stacked") -> dict[str, ParamSpec]:
    """Declares the router and the experts of one MoE layer, without a stack's leading axis."""
    moe, axes = c.mixture, ("expert", "embed", "expert_ffn")
    specs = {
        "router": ParamSpec("moe.router", (c.hidden, moe.experts), ("embed", None)),
        "down": _matrix("moe.down", (moe.experts, moe.ffn, c.hidden), axes[0], axes[2], axes[1]),
    }
    fused = layout.startswith("decode")
    names, ffn = (("gate_up",), 2 * moe.ffn) if fused else (("gate", "up"), moe.ffn)
    for name in names:
        specs[name] = _matrix(f"moe.{name}", (moe.experts, c.hidden, ffn), *axes)
    if moe.router.selection_bias:
        # Scores near each other decide the choice: bfloat16 would choose other experts.
        bias = _scale("moe.router_selection", moe.experts, None, "zeros")
        specs["router_selection"] = bias._replace(exact=True)
    if moe.router_bias:
        specs["router_bias"] = _scale("moe.router_bias", moe.experts, None, "zeros")
    if moe.expert_bias:
        for name, size, axis in (
            *((name, ffn, axes[2]) for name in names),
            ("down", c.hidden, axes[1]),
        ):
            specs[f"{name}_bias"] = ParamSpec(
                f"moe.{name}_bias",
                (moe.experts, size),
                (axes[0], axis),
                "zeros",
                decays=False,
                per_expert=True,
            )
    return specs


def _shared_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    """Declares the expert of an MoE layer that every token takes."""
    ffn = c.mixture.shared_ffn
    specs = {
        "gate": _matrix("shared.gate", (c.hidden, ffn), "embed", "ffn"),
        "up": _matrix("shared.up", (c.hidden, ffn), "embed", "ffn"),
        "down": _matrix("shared.down", (ffn, c.hidden), "ffn", "embed"),
    }
    if c.mixture.shared_gate:
        specs["sigmoid"] = ParamSpec("shared.sigmoid", (c.hidden, 1), ("embed", None))
    return specs


def _layer_specs(c: ModelConfig, is_moe: bool, layout: Layout) -> dict[str, Tree]:
    specs: dict[str, Tree] = {
        "attention_norm": _scale("attention_norm", c.hidden, "embed"),
        "attention": _attention_specs(c),
        "mlp_norm": _scale("mlp_norm", c.hidden, "embed"),
        "mlp": moe_specs(c, layout) if is_moe else _dense_specs(c),
    }
    if is_moe and c.mixture.shared_ffn:
        specs["shared"] = _shared_specs(c)
    return specs


def is_spec(x: Tree) -> bool:
    """Tests for a leaf in `jax.tree.map` over a tree of ParamSpec (which is itself a tuple)."""
    return isinstance(x, ParamSpec)


def training_layout(compute: ComputeConfig) -> Layout:
    """Returns the layout in which a run trains. Checkpoints are always stacked."""
    return "stacked" if compute.scan_layers else "unrolled"


def decode_layout(compute: ComputeConfig) -> Layout:
    """Returns the layout in which a run samples."""
    return "decode_stacked" if compute.scan_decode else "decode"


def is_stacked(layout: Layout) -> bool:
    """Returns whether a run's layers are one array."""
    return layout in ("stacked", "decode_stacked")


def param_specs(config: ModelConfig, layout: Layout = "stacked") -> dict[str, Tree]:
    """Returns the nested dict of ParamSpec with the structure of the parameter tree in a layout."""
    table = config.vocab_size, config.hidden
    tree: dict[str, Tree] = {
        "embed": ParamSpec("embed", table, ("vocab", "embed")),
        "final_norm": _scale("final_norm", config.hidden, "embed"),
    }
    if not config.tie_embeddings:
        tree["head"] = ParamSpec("head", table[::-1], ("embed", "vocab"))
    for n, run in enumerate(layer_runs(config)):
        period = {
            f"layer_{j}": _layer_specs(config, kind, layout) for j, kind in enumerate(run.period)
        }
        if not is_stacked(layout):
            tree[f"run_{n}"] = (period,) * run.repeats
            continue
        tree[f"run_{n}"] = jax.tree.map(
            lambda s, r=run.repeats: s._replace(
                shape=(r, *s.shape), axes=("layers", *s.axes), stacked=True
            ),
            period,
            is_leaf=is_spec,
        )
    return tree


@jax.custom_vjp
def unstack_run(run: Tree) -> tuple[Tree, ...]:
    """Returns one run's stacked parameters as a tuple of per-repeat trees.

    Its gradient writes each layer's gradient into one array. The gradient of indexing would be a
    padded array of the whole stack for every layer.
    """
    repeats = jax.tree.leaves(run)[0].shape[0]
    return tuple(jax.tree.map(lambda x, r=r: x[r], run) for r in range(repeats))


def _stack_gradients(_, layers: tuple[Tree, ...]) -> tuple[Tree]:
    def stack(*parts):
        stacked = jnp.zeros((len(parts), *parts[0].shape), parts[0].dtype)
        for r, part in enumerate(parts):
            stacked = jax.lax.dynamic_update_slice_in_dim(stacked, part[None], r, 0)
        return stacked

    return (jax.tree.map(stack, *layers),)


unstack_run.defvjp(lambda run: (unstack_run(run), None), _stack_gradients)
_unstacked = jax.jit(unstack_run)  # one program, not two for each shape


@jax.jit
def _stacked(run: tuple[Tree, ...]) -> Tree:
    return jax.tree.map(lambda *layers: jnp.stack(layers), *run)


def unroll(tree: Tree) -> Tree:
    """Converts every stacked parameter tree in `tree` (an optimiser's state has several) to the
    unrolled layout; unrolled ones are unchanged.
    """
    return _each_run(lambda run: run if isinstance(run, tuple) else _unstacked(run), tree)


def stack(tree: Tree) -> Tree:
    """Converts every unrolled parameter tree in `tree` to the stacked layout; stacked ones are
    unchanged.
    """
    return _each_run(lambda run: _stacked(run) if isinstance(run, tuple) else run, tree)


def in_layout(tree: Tree, layout: Layout) -> Tree:
    """Converts a stacked `tree` to a training layout."""
    return tree if layout == "stacked" else unroll(tree)


def _each_run(change, tree: Tree) -> Tree:
    def of(params):
        return (
            {
                name: change(part) if name.startswith("run_") else part
                for name, part in params.items()
            }
            if _has_runs(params)
            else params
        )

    return jax.tree.map(of, tree, is_leaf=_has_runs)


def _has_runs(tree: Tree) -> bool:
    return isinstance(tree, dict) and any(str(name).startswith("run_") for name in tree)


def to_decode(
    params: dict[str, Tree], tensor: int = 1, layout: Layout = "decode"
) -> dict[str, Tree]:
    """Converts the stacked or unrolled layout to a decode layout, for experts split over `tensor`
    devices.
    """
    params = stack(params) if is_stacked(layout) else unroll(params)
    return jax.tree.map(partial(_fuse, tensor=tensor), params, is_leaf=_is_moe_mlp)


def _is_moe_mlp(tree: Tree) -> bool:
    return isinstance(tree, dict) and "router" in tree


def _fuse(tree: Tree, tensor: int) -> Tree:
    """Concatenates an MoE layer's gate and up `[... e d f]` into gate_up `[... e d 2f]`, gate
    before up in each of `tensor` parts; and their biases. Returns any other tree unchanged.
    """
    if not _is_moe_mlp(tree):
        return tree
    result = dict(tree)
    for end in ("", "_bias"):
        pair = [result.pop(f"{name}{end}") for name in ("gate", "up") if f"{name}{end}" in result]
        if pair:
            *first, f = pair[0].shape
            # A device halves its part of the product into gate and up, so that part must have both
            # for the same hidden units.
            parts = [w.reshape(*first, tensor, f // tensor) for w in pair]
            result[f"gate_up{end}"] = jnp.concatenate(parts, axis=-1).reshape(*first, 2 * f)
    return result


def abstract_params(config: ModelConfig, dtype: str, layout: Layout = "stacked") -> dict[str, Tree]:
    """Returns the parameter tree as ShapeDtypeStructs."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype(dtype)),
        param_specs(config, layout),
        is_leaf=is_spec,
    )


def decays(config: ModelConfig, layout: Layout) -> tuple[bool, ...]:
    """Returns which leaves of the parameter tree take weight decay, in the tree's order."""
    return tuple(s.decays for s in jax.tree.leaves(param_specs(config, layout), is_leaf=is_spec))


def shardings_like(tree: Tree, config: ModelConfig, placement: Placement) -> Tree:
    """Returns a sharding for each leaf: that of storage for parameter trees (an optimiser's state
    has several, in either training layout), replicated for others.
    """

    def of(part):
        if not _has_runs(part):
            return placement.sharding()
        runs = [run for name, run in part.items() if str(name).startswith("run_")]
        unrolled = any(isinstance(run, tuple) for run in runs)

        def sharding(spec: ParamSpec, leaf: Tree):
            if getattr(leaf, "shape", None) == tuple(spec.shape):
                return placement.param_sharding(spec.axes, STORE)
            # An optimiser's leaf may have another shape (Adafactor's rows and columns) or be
            # absent (a masked leaf).
            return jax.tree.map(lambda _: placement.sharding(), leaf)

        specs = param_specs(config, "unrolled" if unrolled else "stacked")
        return jax.tree.map(sharding, specs, part, is_leaf=is_spec)

    return jax.tree.map(of, tree, is_leaf=_has_runs)


def place(tree: Tree, config: ModelConfig, placement: Placement | None) -> Tree:
    """Moves `tree` to its storage layout on the mesh; returns it unchanged without a mesh."""
    return tree if placement is None else move(tree, shardings_like(tree, config, placement))


def placed_structs(abstract: Tree, config: ModelConfig, placement: Placement | None) -> Tree:
    """Returns ShapeDtypeStructs with the shardings of storage, into which a checkpoint is read
    directly.
    """
    if placement is None:
        return abstract
    shardings = shardings_like(abstract, config, placement)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )


def decode_shardings(
    tree: Tree, config: ModelConfig, placement: Placement, layout: Layout = "decode"
) -> Tree:
    """Returns a sharding for each leaf of decode weights in `layout`, including 8-bit matrices and
    their scales.
    """

    def of(spec: ParamSpec, part: Tree):
        return jax.tree.map(lambda x: placement.sharding(*spec.over_mesh(x)), part)

    return jax.tree.map(of, param_specs(config, layout), tree, is_leaf=is_spec)


def param_count(config: ModelConfig) -> int:
    """Returns the number of parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(param_specs(config), is_leaf=is_spec))


def init_leaf(key: jax.Array, spec: ParamSpec, std: float, dtype: str) -> jax.Array:
    """Draws the initial value of one parameter in float32."""
    kind = spec.dtype(dtype)
    if spec.init == "normal":
        return (std * jax.random.normal(key, spec.shape, jnp.float32)).astype(kind)
    return jnp.ones(spec.shape, kind) if spec.init == "ones" else jnp.zeros(spec.shape, kind)


def init_tree(key: jax.Array, specs: Tree, std: float, dtype: str) -> Tree:
    """Draws the initial values of a (sub)tree of specs; leaf n of the flattened tree has the key
    fold_in(key, n).
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    return jax.tree.unflatten(
        treedef,
        [init_leaf(jax.random.fold_in(key, n), s, std, dtype) for n, s in enumerate(leaves)],
    )
