"""The parameters that a run starts from: drawn, a Hugging Face folder's or a checkpoint's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from compass_jax.config import ModelConfig, RunConfig
from compass_jax.config.io import differences
from compass_jax.families import find as families
from compass_jax.families.raw import WeightsError
from compass_jax.model.params import abstract_params, in_layout, place, shardings_like
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.weights import checkpoint
from compass_jax.weights.hf import checked_headers, load_params
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.sound import is_one


def tokenizer_beside(path: str | Path) -> Path | None:
    """The tokenizer's folder of a run directory, of one of its checkpoints, or of a Hugging Face
    folder; None where there is none.
    """
    path = Path(path)
    if (path / "tokenizer.json").is_file():
        return path
    beside = [path / "tokenizer"] + (
        [] if not is_checkpoint(path) else [checkpoint.locate(path).parent.parent / "tokenizer"]
    )
    return next((folder for folder in beside if folder.is_dir()), None)


def is_checkpoint(path: str | Path) -> bool:
    """Whether a folder is a run directory or one checkpoint, and not a Hugging Face folder."""
    return (Path(path) / "checkpoints").is_dir() or is_one(Path(path).absolute())


def model_of(path: str | Path) -> ModelConfig:
    """The model of a checkpoint or of a Hugging Face folder. CheckpointError, or what
    `read_hf_config` raises, where it is neither.
    """
    return checkpoint.read_manifest(path).model if is_checkpoint(path) else read_hf_config(path)


def restore_params(path: str | Path, shardings: Any = None) -> tuple[Any, ModelConfig]:
    """The parameters of a checkpoint, in the type that it stores, without its optimiser state."""
    found = checkpoint.find(path)
    manifest = found.manifest
    parents = [
        keys
        for keys in (("params",), ("state", "params"))
        if "/".join((*keys, "embed")) in manifest.leaves
    ]
    if not parents:
        raise WeightsError(
            f"{path} is a checkpoint without parameters (neither params nor state/params)"
        )
    prefix = parents[0]
    wanted = abstract_params(manifest.model, manifest.leaves["/".join((*prefix, "embed"))][1])
    if shardings is not None:
        wanted = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), wanted, shardings
        )
    for key in reversed(prefix):
        wanted = {key: wanted}
    _, arrays, _ = checkpoint.restore(found, wanted, subset=True)
    for key in prefix:
        arrays = arrays[key]
    return arrays, manifest.model


def init_or_load(config: RunConfig, key: jax.Array, shardings: Any = None) -> Any:
    """The parameters that a run starts from, stacked, in `compute.param_dtype`: random, or those of
    `init_from`.

    `init_from` is a Hugging Face folder or a checkpoint (a run directory, or one checkpoint of it).
    Raises WeightsError, or CheckpointError, where it is neither or its model is not `config.model`,
    the fields that differ named; and for a model that its family cannot express.
    """
    path = _folder(config)
    dtype = config.compute.param_dtype
    if path is None:
        draw = (
            init_params
            if shardings is None
            else jax.jit(init_params, static_argnums=(0, 1), out_shardings=shardings)
        )
        return draw(config.model, config.compute, key)
    if is_checkpoint(path):
        params, _ = restore_params(path, shardings)
        return _cast(params, dtype)
    return load_params(path, config.model, dtype, shardings)


def check_weights(config: RunConfig) -> None:
    """Raises what `init_or_load` raises before it reads a number of the weights."""
    path = _folder(config)
    if path is not None and not is_checkpoint(path):
        checked_headers(path, config.model)


def _folder(config: RunConfig) -> Path | None:
    """The folder of `init_from`, which holds the run's model; None where weights are drawn."""
    families.check(config.model)
    if not config.init_from:
        return None
    path = Path(config.init_from)
    if not path.is_dir():
        raise WeightsError(f"init_from = {config.init_from!r}: there is no such folder")
    found = model_of(path) if is_checkpoint(path) else read_hf_config(path, config.model.family)
    _check_same_model(config, found)
    return path


def first_parameters(config: RunConfig, model: Transformer) -> Any:
    """`init_or_load` in the model's layout, made or read straight into its mesh."""
    placement = model.placement
    shardings = (
        None
        if placement is None
        else shardings_like(abstract_params(config.model, "float32"), config.model, placement)
    )
    params = in_layout(init_or_load(config, jax.random.key(config.seed), shardings), model.layout)
    return place(params, config.model, placement)


def _cast(params: Any, dtype: str) -> Any:
    """`params` in another type, a leaf at a time, each old leaf released as its copy is made."""
    leaves, structure = jax.tree.flatten(params)
    params.clear()
    for i, leaf in enumerate(leaves):
        leaves[i] = leaf if leaf.dtype == jnp.dtype(dtype) else leaf.astype(dtype)
        del leaf
    return jax.tree.unflatten(structure, leaves)


def _check_same_model(config: RunConfig, found: ModelConfig) -> None:
    """`init_std` says nothing about weights that exist, and a run may use fewer positions than the
    model has.
    """
    differing = differences(found, config.model)
    differing.pop("init_std", None)
    if config.model.max_positions <= found.max_positions:
        differing.pop("max_positions", None)
    if differing:
        lines = [
            f"  model.{name}: {theirs!r} there, {ours!r} in the run's config"
            for name, (theirs, ours) in differing.items()
        ]
        raise WeightsError(
            f"init_from = {config.init_from!r} is another model:\n" + "\n".join(lines)
        )
