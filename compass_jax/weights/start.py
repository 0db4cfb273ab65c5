"""The parameters that a run starts from: drawn, a Hugging Face folder's or a checkpoint's."""

from __future__ import annotations

from dataclasses import replace
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


VOCAB_ROWS = "vocab_rows"  # in a checkpoint's meta


def vocab_rows(config: RunConfig, known: int) -> int:
    """Returns for how many ids an export of the run has rows. A drawn model has them for the
    tokenizer's `known` ids: nothing ever trains the others, and transformers would sample them. A
    model that the run starts from keeps its own.
    """
    if not config.init_from:
        return known
    path = Path(config.init_from)
    if is_checkpoint(path):
        return max(checkpoint.read_meta(path).get(VOCAB_ROWS, model_of(path).vocab_size), known)
    return read_hf_config(path, config.model.family).vocab_size


def in_vocabulary(params: Any, model: ModelConfig, rows: int) -> tuple[Any, ModelConfig]:
    """Returns stacked parameters and their model with rows for the first `rows` ids alone."""
    if rows == model.vocab_size:
        return params, model
    cut = {"embed": params["embed"][:rows]}
    if "head" in params:
        cut["head"] = params["head"][:, :rows]
    return {**params, **cut}, replace(model, vocab_size=rows)


def init_or_load(
    config: RunConfig, key: jax.Array, shardings: Any = None, known: int | None = None
) -> Any:
    """The parameters that a run starts from, stacked, in `compute.param_dtype`: random, or those of
    `init_from`, which must have rows for the tokenizer's `known` ids.

    `init_from` is a Hugging Face folder or a checkpoint (a run directory, or one checkpoint of it).
    Raises WeightsError, or CheckpointError, where it is neither or its model is not `config.model`,
    the fields that differ named; and for a model that its family cannot express.
    """
    path, rows = _folder(config)
    dtype = config.compute.param_dtype
    if known is not None and rows < known:
        raise WeightsError(
            f"init_from = {config.init_from!r} has rows for {rows} ids, and the tokenizer"
            f" {config.data.tokenizer!r} has ids up to {known - 1}: name the model's tokenizer"
        )
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
    return load_params(path, config.model, dtype, shardings, rows)


def check_weights(config: RunConfig) -> None:
    """Raises what `init_or_load` raises before it reads a number of the weights."""
    path, rows = _folder(config)
    if path is not None and not is_checkpoint(path):
        checked_headers(path, config.model, rows)


def _folder(config: RunConfig) -> tuple[Path | None, int]:
    """Returns the folder of `init_from`, which holds the run's model (None where weights are
    drawn), and for how many ids it has rows.
    """
    families.check(config.model)
    if not config.init_from:
        return None, config.model.vocab_size
    path = Path(config.init_from)
    if not path.is_dir():
        raise WeightsError(f"init_from = {config.init_from!r}: there is no such folder")
    found = model_of(path) if is_checkpoint(path) else read_hf_config(path, config.model.family)
    _check_same_model(config, found, whole=is_checkpoint(path))
    return path, found.vocab_size


def first_parameters(config: RunConfig, model: Transformer) -> Any:
    """`init_or_load` in the model's layout, made or read straight into its mesh."""
    placement = model.placement
    shardings = (
        None
        if placement is None
        else shardings_like(abstract_params(config.model, "float32"), config.model, placement)
    )
    drawn = init_or_load(config, jax.random.key(config.seed), shardings, model.known)
    params = in_layout(drawn, model.layout)
    return place(params, config.model, placement)


def _cast(params: Any, dtype: str) -> Any:
    """`params` in another type, a leaf at a time, each old leaf released as its copy is made."""
    leaves, structure = jax.tree.flatten(params)
    params.clear()
    for i, leaf in enumerate(leaves):
        leaves[i] = leaf if leaf.dtype == jnp.dtype(dtype) else leaf.astype(dtype)
        del leaf
    return jax.tree.unflatten(structure, leaves)


def _check_same_model(config: RunConfig, found: ModelConfig, whole: bool) -> None:
    """Raises WeightsError where `found` is another model than the run's.

    `init_std` says nothing about weights that exist, and a run may use fewer positions than the
    model has. Unless `whole`, the run may have rows beyond the vocabulary, so that a mesh can split
    them.
    """
    differing = differences(found, config.model)
    differing.pop("init_std", None)
    if config.model.max_positions <= found.max_positions:
        differing.pop("max_positions", None)
    if not whole and found.vocab_size < config.model.vocab_size:
        differing.pop("vocab_size", None)
    if differing:
        lines = [
            f"  model.{name}: {theirs!r} there, {ours!r} in the run's config"
            for name, (theirs, ours) in differing.items()
        ]
        raise WeightsError(
            f"init_from = {config.init_from!r} is another model:\n" + "\n".join(lines)
        )
