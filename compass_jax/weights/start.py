"""The initial parameters of a run: random, from a Hugging Face folder, or from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.config import ComputeConfig, ModelConfig
from compass_jax.config.io import differences
from compass_jax.devices.distributed import require_single_process
from compass_jax.model.families import find as families
from compass_jax.model.families.raw import WeightsError
from compass_jax.model.lora import combine, merged
from compass_jax.model.params import abstract_params, in_layout, place, shardings_like
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.weights import checkpoint
from compass_jax.weights.adapters import LORA, abstract_adapters, check_base, settings_of
from compass_jax.weights.average import POLICY, average_notice, weights_key
from compass_jax.weights.hf import checked_headers, import_notices, load_params
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.manifest import Manifest
from compass_jax.weights.safetensors_io import read_headers
from compass_jax.weights.sound import is_one
from compass_jax.weights.stored import open_array


def tokenizer_beside(path: str | Path) -> Path | None:
    """Returns the tokenizer folder of a run directory, of a checkpoint, or of a Hugging Face
    folder, or None.
    """
    path = Path(path)
    if (path / "tokenizer.json").is_file():
        return path
    folders = [path / "tokenizer"] + (
        [] if not is_checkpoint(path) else [checkpoint.locate(path).parent.parent / "tokenizer"]
    )
    return next((folder for folder in folders if folder.is_dir()), None)


def is_checkpoint(path: str | Path) -> bool:
    """Returns whether a folder is a run directory or a checkpoint, and not a Hugging Face
    folder.
    """
    return (Path(path) / "checkpoints").is_dir() or is_one(Path(path).absolute())


def model_of(path: str | Path) -> ModelConfig:
    """Returns the model of a checkpoint or of a Hugging Face folder. Raises CheckpointError or the
    errors of `read_hf_config`.
    """
    return checkpoint.read_manifest(path).model if is_checkpoint(path) else read_hf_config(path)


def restore_params(path: str | Path, shardings: Tree = None) -> tuple[Tree, ModelConfig]:
    """Returns the parameters of a checkpoint in the policy's stored type, without the optimiser
    state, and the model; the average of the weights if the run kept one.
    """
    source = checkpoint.find(path)
    manifest, prefix = source.manifest, _parents_of_params(source)
    if not prefix:
        return _restore_adapted(source, shardings)
    requested = jax.tree.map(
        lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype),
        abstract_params(manifest.model, "float32"),
        _saved_types(manifest, prefix),
    )
    if shardings is not None:
        requested = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), requested, shardings
        )
    # The request must be nested as the checkpoint's arrays are.
    for key in reversed(prefix):
        requested = {key: requested}
    _, arrays, _ = checkpoint.restore(source, requested, subset=True)
    for key in prefix:
        arrays = arrays[key]
    return _cast(arrays, jax.tree.leaves(_policy_types(manifest, prefix))), manifest.model


def open_params(path: str | Path) -> tuple[Tree, ModelConfig]:
    """Returns the parameters of a checkpoint, as `restore_params` does, as arrays on disk
    (`StoredArray`), and the model. Adapters are merged into their base in memory, by one process.

    Raises WeightsError for a checkpoint without parameters, CheckpointError for one that is missing
    or damaged or lacks an array of the model, ConfigError for adapters in several processes.
    """
    source = checkpoint.find(path)
    prefix = _parents_of_params(source)
    if not prefix:
        require_single_process("merging adapters into their base")
        return _restore_adapted(source, None)
    model = source.manifest.model
    params = jax.tree_util.tree_map_with_path(
        lambda path, dtype: open_array(source, _leaf_name(prefix, path), dtype),
        _policy_types(source.manifest, prefix),
    )
    return params, model


def _parents_of_params(source: checkpoint.ValidCheckpoint) -> tuple[str, ...]:
    """Returns the keys under which a checkpoint has its parameters; none for adapters. Raises
    WeightsError for a checkpoint that has neither.
    """
    for keys in (("params",), ("state", weights_key(source))):
        if "/".join((*keys, "embed")) in source.manifest.leaves:
            return keys
    if LORA in source.meta():
        return ()
    raise WeightsError(
        f"{source.path} is a checkpoint without parameters (neither params nor state/params)"
    )


def _leaf_name(prefix: tuple[str, ...], path: tuple[object, ...]) -> str:
    return "/".join((*prefix, jax.tree_util.keystr(path, simple=True, separator="/")))


def _saved_types(manifest: Manifest, prefix: tuple[str, ...]) -> Tree:
    """Returns the types of a checkpoint's parameters; float32 for one that it lacks."""

    def saved_type(path: tuple[object, ...], leaf: jax.ShapeDtypeStruct) -> np.dtype:
        _, dtype = manifest.leaves.get(_leaf_name(prefix, path), ((), leaf.dtype))
        return jnp.dtype(dtype)

    return jax.tree_util.tree_map_with_path(saved_type, abstract_params(manifest.model, "float32"))


def _policy_types(manifest: Manifest, prefix: tuple[str, ...]) -> Tree:
    """Returns the types of the policy's parameters; an average under `prefix` has wider ones."""
    return _saved_types(manifest, (*prefix[:-1], POLICY))


def _restore_adapted(
    source: checkpoint.ValidCheckpoint, shardings: Tree
) -> tuple[Tree, ModelConfig]:
    """Returns the parameters of a checkpoint of adapters, merged into their base, and the model.
    Raises WeightsError if the base no longer exists, CheckpointMismatch if its weights changed.
    """
    model, saved = source.manifest.model, source.meta()[LORA]
    base, lora = Path(saved["base"]), settings_of(saved)
    if not base.is_dir():
        raise WeightsError(
            f"{source.path} has adapters alone, and their base {base} does not exist: put the base"
            " there again"
        )
    if is_checkpoint(base):
        params, _ = restore_params(base, shardings)
    else:
        rows = read_hf_config(base, model.family).vocab_size
        params = load_params(base, model, None, shardings, rows)
    check_base(source.path, source.meta(), params)
    key = weights_key(source)
    requested = {"state": {key: abstract_adapters(model, lora)}}
    _, arrays, _ = checkpoint.restore(source, requested, subset=True)
    adapters = arrays["state"][key]
    return jax.jit(merged)(combine(params, adapters, lora.scale)), model


VOCAB_ROWS = "vocab_rows"  # key in a checkpoint's meta


def vocab_rows(init_from: str, family: str, known: int) -> int:
    """Returns the number of ids for which an export of the run has rows.

    A randomly initialised model has rows for the tokenizer's `known` ids: the others are never
    trained, and transformers would sample them. A model that the run starts from keeps its rows.
    """
    if not init_from:
        return known
    path = Path(init_from)
    if is_checkpoint(path):
        return max(checkpoint.read_meta(path).get(VOCAB_ROWS, model_of(path).vocab_size), known)
    return read_hf_config(path, family).vocab_size


def in_vocabulary(params: Tree, model: ModelConfig, rows: int) -> tuple[Tree, ModelConfig]:
    """Returns stacked parameters and their model with rows for the first `rows` ids only."""
    if rows == model.vocab_size:
        return params, model
    tables = {"embed": params["embed"][:rows]}
    if "head" in params:
        tables["head"] = params["head"][:, :rows]
    return {**params, **tables}, replace(model, vocab_size=rows)


def init_or_load(
    init_from: str,
    model: ModelConfig,
    compute: ComputeConfig,
    key: jax.Array,
    shardings: Tree = None,
    known: int | None = None,
) -> Tree:
    """Returns the initial parameters of a run, stacked, in `compute.param_dtype`.

    They are random, or those of `init_from`, a Hugging Face folder, a run directory or a
    checkpoint, which must have rows for the tokenizer's `known` ids.

    Raises WeightsError or CheckpointError if `init_from` is none of these, if its model is not
    `model` (the message lists the fields that differ), and for a model that its family
    cannot express.
    """
    path, rows = _folder(init_from, model)
    dtype = compute.param_dtype
    if known is not None and rows < known:
        raise WeightsError(
            f"init_from = {init_from!r} has rows for {rows} ids, and data.tokenizer has ids up to"
            f" {known - 1}: name the model's tokenizer"
        )
    if path is None:
        draw = (
            init_params
            if shardings is None
            else jax.jit(init_params, static_argnums=(0, 1), out_shardings=shardings)
        )
        return draw(model, compute, key)
    if is_checkpoint(path):
        params, _ = restore_params(path, shardings)
        return _cast(params, [x.dtype for x in jax.tree.leaves(abstract_params(model, dtype))])
    return load_params(path, model, dtype, shardings, rows)


def check_weights(
    init_from: str, model: ModelConfig, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Raises the errors that `init_or_load` raises before it reads the values of the weights; tells
    the notices of an import, and of an average.
    """
    path, rows = _folder(init_from, model)
    if path is None:
        return
    if is_checkpoint(path):
        lines = [average_notice(path)]
    else:
        checked_headers(path, model, rows)
        lines = import_notices(read_headers(path), model)
    for line in filter(None, lines):
        tell(line)


def _folder(init_from: str, model: ModelConfig) -> tuple[Path | None, int]:
    """Returns the folder of `init_from` (None for random weights), whose model is checked, and the
    number of ids for which it has rows.
    """
    families.check(model)
    if not init_from:
        return None, model.vocab_size
    path = Path(init_from)
    if not path.is_dir():
        raise WeightsError(f"init_from = {init_from!r}: there is no such folder")
    source = model_of(path) if is_checkpoint(path) else read_hf_config(path, model.family)
    _check_same_model(init_from, model, source, exact_rows=is_checkpoint(path))
    return path, source.vocab_size


def first_parameters(
    init_from: str, seed: int, model: Transformer, tell: Callable[[str], None] = lambda line: None
) -> Tree:
    """Returns the parameters of `init_or_load` in the model's layout, created or read directly on
    its mesh; tells the notices of `check_weights`.
    """
    config, placement = model.config, model.placement
    check_weights(init_from, config, tell)
    shardings = (
        None
        if placement is None
        else shardings_like(abstract_params(config, "float32"), config, placement)
    )
    key = jax.random.key(seed)
    stacked = init_or_load(init_from, config, model.compute, key, shardings, model.known)
    return place(in_layout(stacked, model.layout), config, placement)


def _cast(params: dict, types: Sequence[np.dtype]) -> Tree:
    """Casts `params` to the types of their leaves, one leaf at a time, and releases each old leaf
    once it is copied.
    """
    leaves, structure = jax.tree.flatten(params)
    # The caller's dictionary would keep the old leaves alive.
    params.clear()
    for i, (leaf, kind) in enumerate(zip(leaves, types, strict=True)):
        leaves[i] = leaf if leaf.dtype == kind else leaf.astype(kind)
        del leaf
    return jax.tree.unflatten(structure, leaves)


def _check_same_model(
    init_from: str, model: ModelConfig, source_model: ModelConfig, exact_rows: bool
) -> None:
    """Raises WeightsError if `source_model` is another model than the run's.

    `init_std` does not affect existing weights, and a run may use fewer positions than the model
    has. Unless `exact_rows`, the run may have rows beyond the vocabulary, so that a mesh can divide
    them.
    """
    differing = differences(source_model, model)
    differing.pop("init_std", None)
    if model.max_positions <= source_model.max_positions:
        differing.pop("max_positions", None)
    if not exact_rows and source_model.vocab_size < model.vocab_size:
        differing.pop("vocab_size", None)
    if differing:
        lines = [
            f"  model.{name}: {source_value!r} there, {run_value!r} in the run's config"
            for name, (source_value, run_value) in differing.items()
        ]
        raise WeightsError(f"init_from = {init_from!r} is another model:\n" + "\n".join(lines))
