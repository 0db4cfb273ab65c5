"""Every parameter declared once: shape, logical axes, initialiser, Hugging Face name. Modules read,
they never declare.

The decoder is a static list of runs of equal layers (`layer_runs`): a run is a period of layer
kinds repeated. Three layouts of a run: *stacked* for storage and for training with one `lax.scan`
per run, a leading axis of length `repeats`; *unrolled* for training few layers, a tuple over
repeats, because layers that are slices of one array are copied out of it, and their gradients into
it; *decode*, unrolled with the experts' gate and up side by side in one array, because one wide
product of few rows is faster than two; *decode_stacked*, the same stacked, for a scan
(compute.scan_decode). Abstract tree, shardings, initialisation and checkpoint conversion are all
derived from `param_specs`.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.sharding import SPLIT, STORE, Placement, move

_LONGEST_PERIOD = 8


class Run(NamedTuple):
    """`repeats` copies of `period` (True = MoE layer) starting at decoder layer `start`."""

    start: int
    period: tuple[bool, ...]
    repeats: int

    def layer(self, repeat: int, offset: int) -> int:
        """Decoder layer index of position `offset` of the period in copy `repeat`."""
        return self.start + repeat * len(self.period) + offset


class ParamSpec(NamedTuple):
    """One parameter leaf. `hf` has `{i}` for the layer and `{e}` for the expert where the leaf
    stacks them.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str  # normal, ones, zeros
    hf: str
    transpose: bool = False  # torch keeps Linear weights as [out, in]; ours are [in, out]
    stacked: bool = False  # leading axis is the run's repeats
    per_expert: bool = False  # next axis is the expert, one key per expert on disk


def layer_runs(config: ModelConfig) -> tuple[Run, ...]:
    """Splits the layers into runs, at each point taking the period that covers the most layers
    (shortest on a tie).
    """
    kinds = tuple(config.is_moe(i) for i in range(config.layers))
    runs, start = [], 0
    while start < len(kinds):
        best = Run(start, kinds[start : start + 1], 1)
        for size in range(1, min(_LONGEST_PERIOD, len(kinds) - start) + 1):
            period, repeats = kinds[start : start + size], 1
            while kinds[start + repeats * size : start + (repeats + 1) * size] == period:
                repeats += 1
            if (size == 1 or repeats > 1) and repeats * size > best.repeats * len(best.period):
                best = Run(start, period, repeats)
        runs.append(best)
        start += best.repeats * len(best.period)
    return tuple(runs)


def _attention_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    at = "model.layers.{i}.self_attn."
    specs = {
        "q": ParamSpec((c.hidden, q), ("embed", "heads"), "normal", at + "q_proj.weight", True),
        "k": ParamSpec((c.hidden, kv), ("embed", "kv_heads"), "normal", at + "k_proj.weight", True),
        "v": ParamSpec((c.hidden, kv), ("embed", "kv_heads"), "normal", at + "v_proj.weight", True),
        "o": ParamSpec((q, c.hidden), ("heads", "embed"), "normal", at + "o_proj.weight", True),
    }
    if c.qkv_bias:
        for name, size, axis in (("q", q, "heads"), ("k", kv, "kv_heads"), ("v", kv, "kv_heads")):
            specs[f"{name}_bias"] = ParamSpec((size,), (axis,), "zeros", f"{at}{name}_proj.bias")
    if c.o_bias:
        specs["o_bias"] = ParamSpec((c.hidden,), ("embed",), "zeros", at + "o_proj.bias")
    if c.qk_norm:
        specs["q_norm"] = ParamSpec((c.head_dim,), (None,), "ones", at + "q_norm.weight")
        specs["k_norm"] = ParamSpec((c.head_dim,), (None,), "ones", at + "k_norm.weight")
    return specs


def _dense_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    at = "model.layers.{i}.mlp."
    return {
        "gate": ParamSpec(
            (c.hidden, c.ffn), ("embed", "ffn"), "normal", at + "gate_proj.weight", True
        ),
        "up": ParamSpec((c.hidden, c.ffn), ("embed", "ffn"), "normal", at + "up_proj.weight", True),
        "down": ParamSpec(
            (c.ffn, c.hidden), ("ffn", "embed"), "normal", at + "down_proj.weight", True
        ),
    }


def _moe_specs(c: ModelConfig) -> dict[str, ParamSpec]:
    moe, at = c.moe, "model.layers.{i}.mlp."
    wide, narrow = (moe.experts, c.hidden, moe.ffn), (moe.experts, moe.ffn, c.hidden)
    one = at + "experts.{e}."
    return {
        "router": ParamSpec(
            (c.hidden, moe.experts), ("embed", None), "normal", at + "gate.weight", True
        ),
        "gate": ParamSpec(
            wide,
            ("expert", "embed", "expert_ffn"),
            "normal",
            one + "gate_proj.weight",
            True,
            per_expert=True,
        ),
        "up": ParamSpec(
            wide,
            ("expert", "embed", "expert_ffn"),
            "normal",
            one + "up_proj.weight",
            True,
            per_expert=True,
        ),
        "down": ParamSpec(
            narrow,
            ("expert", "expert_ffn", "embed"),
            "normal",
            one + "down_proj.weight",
            True,
            per_expert=True,
        ),
    }


def _layer_specs(c: ModelConfig, is_moe: bool) -> dict[str, Any]:
    norm = ParamSpec((c.hidden,), ("embed",), "ones", "model.layers.{i}.input_layernorm.weight")
    return {
        "attention_norm": norm,
        "attention": _attention_specs(c),
        "mlp_norm": norm._replace(hf="model.layers.{i}.post_attention_layernorm.weight"),
        "mlp": _moe_specs(c) if is_moe else _dense_specs(c),
    }


def is_spec(x: Any) -> bool:
    """Leaf test for `jax.tree.map` over a tree of ParamSpec (which is itself a tuple)."""
    return isinstance(x, ParamSpec)


Layout = Literal["stacked", "unrolled", "decode", "decode_stacked"]


def training_layout(compute: ComputeConfig) -> Layout:
    """In which layout a run trains; checkpoints are stacked whichever it is."""
    return "stacked" if compute.scan_layers else "unrolled"


def decode_layout(compute: ComputeConfig) -> Layout:
    """In which layout a run samples."""
    return "decode_stacked" if compute.scan_decode else "decode"


def is_stacked(layout: Layout) -> bool:
    """Whether a run's layers are one array."""
    return layout in ("stacked", "decode_stacked")


def param_specs(config: ModelConfig, layout: Layout = "stacked") -> dict[str, Any]:
    """Nested dict of ParamSpec with the structure of the parameter tree in a layout."""
    tree: dict[str, Any] = {
        "embed": ParamSpec(
            (config.vocab_size, config.hidden),
            ("vocab", "embed"),
            "normal",
            "model.embed_tokens.weight",
        ),
        "final_norm": ParamSpec((config.hidden,), ("embed",), "ones", "model.norm.weight"),
    }
    if not config.tie_embeddings:
        tree["head"] = ParamSpec(
            (config.hidden, config.vocab_size), ("embed", "vocab"), "normal", "lm_head.weight", True
        )
    for n, run in enumerate(layer_runs(config)):
        period = {f"layer_{j}": _layer_specs(config, kind) for j, kind in enumerate(run.period)}
        if layout.startswith("decode"):
            period = jax.tree.map(
                _fuse_specs, period, is_leaf=lambda x: _is_moe_mlp(x) or is_spec(x)
            )
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
def unstack_run(run: Any) -> tuple[Any, ...]:
    """One run's stacked parameters as a tuple of per-repeat trees.

    Its gradient writes each layer's into its place of one array: that of indexing would be a padded
    array of the whole stack for every layer.
    """
    repeats = jax.tree.leaves(run)[0].shape[0]
    return tuple(jax.tree.map(lambda x, r=r: x[r], run) for r in range(repeats))


def _stack_gradients(_, layers: tuple[Any, ...]) -> tuple[Any]:
    def stack(*parts):
        whole = jnp.zeros((len(parts), *parts[0].shape), parts[0].dtype)
        for r, part in enumerate(parts):
            whole = jax.lax.dynamic_update_slice_in_dim(whole, part[None], r, 0)
        return whole

    return (jax.tree.map(stack, *layers),)


unstack_run.defvjp(lambda run: (unstack_run(run), None), _stack_gradients)


def unroll(tree: Any) -> Any:
    """Stacked -> unrolled layout, for every parameter tree in `tree` (an optimiser's state has
    several); one that is unrolled stays as it is.
    """
    return _each_run(lambda run: run if isinstance(run, tuple) else unstack_run(run), tree)


def stack(tree: Any) -> Any:
    """Unrolled -> stacked layout, for every parameter tree in `tree`; one that is stacked stays as
    it is.
    """
    return _each_run(
        lambda run: (
            jax.tree.map(lambda *layers: jnp.stack(layers), *run) if isinstance(run, tuple) else run
        ),
        tree,
    )


def in_layout(tree: Any, layout: Layout) -> Any:
    """`tree`, stacked, in a training layout."""
    return tree if layout == "stacked" else unroll(tree)


def _each_run(change, tree: Any) -> Any:
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


def _has_runs(tree: Any) -> bool:
    return isinstance(tree, dict) and any(str(name).startswith("run_") for name in tree)


def to_decode(params: dict[str, Any], tensor: int = 1, layout: Layout = "decode") -> dict[str, Any]:
    """Stacked or unrolled layout -> a decode layout, for experts that are split over `tensor`
    devices.
    """
    params = stack(params) if is_stacked(layout) else unroll(params)
    return jax.tree.map(partial(_fuse, tensor=tensor), params, is_leaf=_is_moe_mlp)


def _is_moe_mlp(tree: Any) -> bool:
    return isinstance(tree, dict) and "router" in tree


def _fuse(tree: Any, tensor: int) -> Any:
    """An MoE layer's gate and up `[... e d f]` as gate_up `[... e d 2f]`, in each of `tensor` parts
    gate before up; anything else as it is.
    """
    if not _is_moe_mlp(tree):
        return tree
    kept = {name: w for name, w in tree.items() if name not in ("gate", "up")}
    *first, f = tree["gate"].shape
    parts = [tree[name].reshape(*first, tensor, f // tensor) for name in ("gate", "up")]
    return {**kept, "gate_up": jnp.concatenate(parts, axis=-1).reshape(*first, 2 * f)}


def _fuse_specs(tree: Any) -> Any:
    if not _is_moe_mlp(tree):
        return tree
    kept = {name: spec for name, spec in tree.items() if name not in ("gate", "up")}
    e, d, f = tree["gate"].shape
    return {**kept, "gate_up": tree["gate"]._replace(shape=(e, d, 2 * f), hf="")}


def abstract_params(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """The parameter tree as ShapeDtypeStructs."""
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s.shape, jnp.dtype(dtype)),
        param_specs(config),
        is_leaf=is_spec,
    )


def logical_axes(config: ModelConfig) -> dict[str, Any]:
    """The parameter tree with each leaf's tuple of logical axis names."""
    return jax.tree.map(lambda s: s.axes, param_specs(config), is_leaf=is_spec)


def shardings_like(
    tree: Any, config: ModelConfig, placement: Placement, table: dict[str, Any] = STORE
) -> Any:
    """A sharding for each leaf: those of parameter trees (an optimiser's state has several, in
    either training layout) by `table`, others whole.
    """

    def of(part):
        if not _has_runs(part):
            return placement.sharding()
        layout = "unrolled" if any(isinstance(run, tuple) for run in part.values()) else "stacked"
        return jax.tree.map(
            lambda s: placement.param_sharding(s.axes, table),
            param_specs(config, layout),
            is_leaf=is_spec,
        )

    return jax.tree.map(of, tree, is_leaf=_has_runs)


def place(tree: Any, config: ModelConfig, placement: Placement | None) -> Any:
    """`tree` on the mesh as it is stored; as it is without one."""
    return tree if placement is None else move(tree, shardings_like(tree, config, placement))


def placed_structs(abstract: Any, config: ModelConfig, placement: Placement | None) -> Any:
    """ShapeDtypeStructs with the shardings of storage, so that a checkpoint is read straight into
    them.
    """
    if placement is None:
        return abstract
    shardings = shardings_like(abstract, config, placement)
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings
    )


def decode_shardings(
    tree: Any, config: ModelConfig, placement: Placement, layout: Layout = "decode"
) -> Any:
    """A sharding for each leaf of a decoding copy in `layout`, 8-bit matrices and their scales (of
    one input) too.
    """

    def of(spec: ParamSpec, part: Any):
        def leaf(x):
            axes = [
                axis if size > 1 else None for size, axis in zip(x.shape, spec.axes, strict=True)
            ]
            return placement.param_sharding(tuple(axes), SPLIT)

        return jax.tree.map(leaf, part)

    return jax.tree.map(of, param_specs(config, layout), tree, is_leaf=is_spec)


def param_count(config: ModelConfig) -> int:
    """Number of parameters."""
    return sum(math.prod(s.shape) for s in jax.tree.leaves(param_specs(config), is_leaf=is_spec))


def init_leaf(key: jax.Array, spec: ParamSpec, std: float, dtype: str) -> jax.Array:
    """Initial value of one parameter, drawn in float32."""
    if spec.init == "normal":
        return (std * jax.random.normal(key, spec.shape, jnp.float32)).astype(dtype)
    return jnp.ones(spec.shape, dtype) if spec.init == "ones" else jnp.zeros(spec.shape, dtype)


def init_tree(key: jax.Array, specs: Any, std: float, dtype: str) -> Any:
    """Initial values of a (sub)tree of specs; leaf n of the flattened tree uses key fold_in(key,
    n).
    """
    leaves, treedef = jax.tree.flatten(specs, is_leaf=is_spec)
    return treedef.unflatten(
        [init_leaf(jax.random.fold_in(key, n), s, std, dtype) for n, s in enumerate(leaves)]
    )
