"""Parameters from and to a Hugging Face folder: safetensors, single or sharded, without torch; and
the start of a run.

`params.param_specs` is the only table of names: each leaf of the stacked layout is filled from one
tensor per layer and expert, a leaf at a time, so that beside the parameters themselves the host
holds one leaf, or with `shardings` one device's part of it.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.config import ModelConfig, RunConfig
from compass_jax.config_io import differences
from compass_jax.model.params import (
    ParamSpec,
    abstract_params,
    in_layout,
    is_spec,
    layer_runs,
    param_specs,
    place,
    shardings_like,
)
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.weights import checkpoint
from compass_jax.weights.carried import CARRIED, carried_files, carry_files
from compass_jax.weights.hf_config import (
    UnsupportedModel,
    WeightsError,
    find_token_ids,
    read_hf_config,
    write_hf_config,
)
from compass_jax.weights.safetensors_io import (
    DTYPES,
    INDEX,
    Stored,
    finite,
    open_file,
    plan_shards,
    read_headers,
    same_tensor,
    shard_names,
    write_file,
    write_json,
)
from compass_jax.weights.sound import is_one

__all__ = [
    "CARRIED",
    "UnsupportedModel",
    "WeightsError",
    "carry_files",
    "export_hf",
    "import_hf",
    "init_or_load",
    "load_params",
    "read_hf_config",
    "save_params",
    "stored_dtype",
    "write_hf_config",
]

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHOWN = 3  # tensors named in a message


class _Leaf(NamedTuple):
    """One leaf of the stacked layout and the tensors that it consists of."""

    path: tuple[str, ...]
    spec: ParamSpec
    names: np.ndarray  # of str: [], [layers], or [layers, experts]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each tensor on disk."""
        shape = self.spec.shape[self.names.ndim :]
        return shape[::-1] if self.spec.transpose else shape


def _leaves(config: ModelConfig) -> tuple[list[_Leaf], Any]:
    """The leaves in tree order, and the tree's structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(param_specs(config), is_leaf=is_spec)
    leaves = []
    for path, spec in flat:
        keys = tuple(key.key for key in path)
        names = np.empty(spec.shape[: spec.stacked + spec.per_expert], object)
        for at in np.ndindex(names.shape):
            layer = _decoder_layer(config, keys, at[0]) if spec.stacked else None
            names[at] = spec.hf.format(i=layer, e=at[-1] if at else None)
        leaves.append(_Leaf(keys, spec, names))
    return leaves, structure


def _decoder_layer(config: ModelConfig, keys: tuple[str, ...], repeat: int) -> int:
    run, offset = (int(key.rpartition("_")[2]) for key in keys[:2])
    return layer_runs(config)[run].layer(repeat, offset)


def load_params(
    folder: str | Path, config: ModelConfig, param_dtype: str, shardings: Any = None
) -> Any:
    """Parameters of a Hugging Face folder in the stacked layout, cast to `param_dtype`.

    shardings: a tree of jax.sharding.Sharding like the parameters; each device then reads its own
    part. Raises WeightsError, before any data is read, for a missing, truncated or inconsistent
    shard, a missing or unexpected tensor, a wrong shape, weights that are no floats, and a tied
    model whose `lm_head.weight` is not its embedding; and, while they are read, for weights that
    are not finite in `param_dtype`.
    """
    stored = read_headers(folder)
    if problems := tensor_problems(Path(folder), config, stored):
        raise WeightsError(problems[0])
    leaves, structure = _leaves(config)
    targets = [None] * len(leaves) if shardings is None else structure.flatten_up_to(shardings)
    dtype = jnp.dtype(param_dtype)
    params = []
    for leaf, sharding in zip(leaves, targets, strict=True):

        def read(index: tuple[slice, ...], leaf: _Leaf = leaf) -> np.ndarray:
            return _read_block(leaf, stored, index, dtype)

        if sharding is None:
            params.append(jnp.asarray(read((slice(None),) * len(leaf.spec.shape))))
        else:
            params.append(jax.make_array_from_callback(leaf.spec.shape, sharding, read))
    return structure.unflatten(params)


def _read_block(
    leaf: _Leaf, stored: dict[str, Stored], index: tuple[slice, ...], dtype: np.dtype
) -> np.ndarray:
    """The part `index` of a leaf, from the tensors that it touches, with one file open at a
    time.
    """
    lead = leaf.names.ndim
    names, inner = leaf.names[index[:lead]] if lead else leaf.names, index[lead:]
    on_disk = inner[::-1] if leaf.spec.transpose else inner
    sizes = (
        len(range(*part.indices(size)))
        for part, size in zip(inner, leaf.spec.shape[lead:], strict=True)
    )
    block = np.empty((*names.shape, *sizes), dtype)
    by_file: dict[Path, list[tuple[int, ...]]] = {}
    for at in np.ndindex(names.shape):
        by_file.setdefault(stored[names[at]].file, []).append(at)
    for file, positions in by_file.items():
        with open_file(file) as handle:
            for at in positions:
                tensor = finite(
                    handle.get_slice(names[at])[on_disk], dtype, f"{file}: tensor {names[at]}"
                )
                block[at] = tensor.T if leaf.spec.transpose else tensor
    return block


def tensor_problems(folder: Path, config: ModelConfig, stored: dict[str, Stored]) -> list[str]:
    """What keeps these tensors from being the weights of a model: names, shapes, types, a tied head
    that is not.
    """
    problems = []
    specs = jax.tree.leaves(param_specs(config), is_leaf=is_spec)
    described = sum(math.prod(spec.shape[: spec.stacked + spec.per_expert]) for spec in specs)
    if described > 2 * len(stored) + 1000:  # their names alone might fill the memory
        return [
            f"{folder}: config.json describes {described:,} tensors, the files hold {len(stored):,}"
        ]
    expected = {name: leaf.shape for leaf in _leaves(config)[0] for name in leaf.names.flat}
    missing = [name for name in expected if name not in stored]
    if missing:
        hint = (
            "; config.json says that the head is not tied to the embedding"
            if _HEAD in missing
            else ""
        )
        problems.append(f"{folder} lacks {_some(missing)}, which the model needs{hint}")
    extra = [name for name in stored if name not in expected]
    if config.tie_embeddings and _HEAD in extra and _EMBEDDING in stored:
        if not same_tensor((_HEAD, stored[_HEAD]), (_EMBEDDING, stored[_EMBEDDING])):
            problems.append(
                f"{folder}: tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}"
            )
        extra.remove(_HEAD)
    if extra:
        problems.append(
            f"{folder} holds {_some(extra)}, which a {config.family} model of this config does not"
            " have"
        )
    for name in (name for name in expected if name in stored):
        found = stored[name]
        if found.shape != expected[name]:
            problems.append(
                f"{found.file}: tensor {name} has shape {found.shape}, the model expects"
                f" {expected[name]}"
            )
        if found.dtype not in DTYPES.values():
            problems.append(
                f"{found.file}: tensor {name} is stored as {found.dtype}; supported:"
                f" {', '.join(DTYPES.values())}"
            )
    return problems


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_SHOWN])}{more}"


def stored_dtype(folder: str | Path) -> str:
    """The float type that holds every tensor of a folder exactly."""
    kinds = {stored.dtype for stored in read_headers(folder).values()}
    unknown = kinds - set(DTYPES.values())
    if unknown:
        raise WeightsError(
            f"{folder} holds weights of type {', '.join(sorted(unknown))}; supported:"
            f" {', '.join(DTYPES.values())}"
        )
    if len(kinds) == 1:
        return kinds.pop()
    return "float64" if "float64" in kinds else "float32"


def save_params(
    params: Any,
    config: ModelConfig,
    folder: str | Path,
    dtype: str,
    shard_bytes: int = 4_000_000_000,
    tokenizer_from: str | Path | None = None,
    replace: bool = False,
) -> Path:
    """Writes stacked parameters as a Hugging Face folder that `AutoModelForCausalLM` loads, and
    returns its path.

    Shards of at most `shard_bytes` with an index, or one file where one suffices; tokenizer files
    and `generation_config.json` are carried over from `tokenizer_from`. The folder appears under
    its name when it is whole. An existing, non-empty folder is refused unless `replace`. Raises
    WeightsError; a full disk leaves nothing behind.
    """
    folder = Path(folder).absolute()
    if dtype not in DTYPES.values():
        raise WeightsError(
            f"weights cannot be stored as {dtype!r}; supported: {', '.join(DTYPES.values())}"
        )
    leaves, structure = _leaves(config)
    flat = structure.flatten_up_to(params)
    for leaf, value in zip(leaves, flat, strict=True):
        if tuple(value.shape) != leaf.spec.shape:
            raise WeightsError(
                f"parameter {'/'.join(leaf.path)} has shape {tuple(value.shape)}, the model has"
                f" {leaf.spec.shape}"
            )
    carried_files(tokenizer_from)
    ids = find_token_ids(tokenizer_from) if tokenizer_from is not None else {}
    description = write_hf_config(config, dtype, ids)
    if not replace and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise WeightsError(f"{folder} already exists: choose another name, or remove it")
    temporary = folder.with_name(f".{folder.name}.partial")
    total = sum(math.prod(leaf.spec.shape) for leaf in leaves) * jnp.dtype(dtype).itemsize
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_shards(temporary, leaves, flat, dtype, shard_bytes, total)
        write_json(temporary / "config.json", description)
        carry_files(tokenizer_from, temporary)
        _publish(temporary, folder)
    except OSError as error:
        free = shutil.disk_usage(next(p for p in folder.parents if p.exists())).free
        what = f"{error.strerror or error} ({total:,} bytes of weights, {free:,} bytes free)"
        raise WeightsError(
            f"{folder} could not be written: {what}; nothing was left behind"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_shards(
    folder: Path, leaves: list[_Leaf], values: list[Any], dtype: str, shard_bytes: int, total: int
) -> None:
    shapes = {name: leaf.shape for leaf in leaves for name in leaf.names.flat}
    size = jnp.dtype(dtype).itemsize
    shards = plan_shards(
        {name: math.prod(shape) * size for name, shape in shapes.items()}, shard_bytes
    )
    names = shard_names(len(shards))
    tensors = _tensors(leaves, values)
    for file, shard in zip(names, shards, strict=True):
        write_file(
            folder / file,
            {name: shapes[name] for name in shard},
            dtype,
            (next(tensors) for _ in shard),
        )
    if len(shards) > 1:
        index = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _tensors(leaves: list[_Leaf], values: list[Any]) -> Iterator[np.ndarray]:
    """Every tensor as it is on disk, in order; one layer of one leaf at a time is on the host."""
    for leaf, value in zip(leaves, values, strict=True):
        for layer in value if leaf.spec.stacked else (value,):
            host = np.asarray(layer)
            for tensor in host if leaf.spec.per_expert else (host,):
                yield tensor.T if leaf.spec.transpose else tensor


def _publish(temporary: Path, folder: Path) -> None:
    """Gives the whole folder its name; one that it replaces is moved aside first."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old, ignore_errors=True)


def import_hf(source: str | Path, out: str | Path, dtype: str | None = None) -> Path:
    """Converts a Hugging Face folder into a checkpoint of step 0 under `out`, with the tokenizer in
    `out/tokenizer`; returns its path.

    dtype: type to keep the parameters in; None: the files' own, so that an export gives the same
    tensors bit for bit. Raises WeightsError for a folder that cannot be used and for an `out` that
    holds a checkpoint already.
    """
    source, out = Path(source), Path(out)
    if checkpoint.latest(out) is not None:
        raise WeightsError(f"{out} already holds a checkpoint: choose another folder, or remove it")
    carried_files(source)
    config = read_hf_config(source)
    params = load_params(source, config, dtype or stored_dtype(source))
    tokenizer = out / "tokenizer"
    try:
        tokenizer.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{tokenizer} could not be made: {error.strerror or error}") from error
    carry_files(source, tokenizer)
    return checkpoint.save(
        out, 0, {"params": params}, {"imported_from": str(source.absolute())}, model=config
    )


def export_hf(
    path: str | Path,
    out: str | Path,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    replace: bool = False,
) -> Path:
    """Writes the parameters of a checkpoint, imported or of a training run, as a Hugging Face
    folder; returns its path.

    path: a run directory (newest checkpoint) or one checkpoint. dtype: None keeps the checkpoint's
    own. tokenizer: a folder to carry the tokenizer from; None: `tokenizer` of the run directory,
    where there is one.
    """
    params, config = _restore_params(path)
    tokenizer = tokenizer_beside(path) if tokenizer is None else tokenizer
    return save_params(
        params,
        config,
        out,
        dtype or str(params["embed"].dtype),
        tokenizer_from=tokenizer,
        replace=replace,
    )


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


def _restore_params(path: str | Path, shardings: Any = None) -> tuple[Any, ModelConfig]:
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
    Raises WeightsError, or CheckpointError, where it is neither or its model is not `config.model`;
    the fields that differ are named.
    """
    dtype = config.compute.param_dtype
    if not config.init_from:
        draw = (
            init_params
            if shardings is None
            else jax.jit(init_params, static_argnums=(0, 1), out_shardings=shardings)
        )
        return draw(config.model, config.compute, key)
    path = Path(config.init_from)
    if not path.is_dir():
        raise WeightsError(f"init_from = {config.init_from!r}: there is no such folder")
    if is_checkpoint(path):
        _check_same_model(config, model_of(path))
        params, _ = _restore_params(path, shardings)
        return _cast(params, dtype)
    _check_same_model(config, read_hf_config(path))
    return load_params(path, config.model, dtype, shardings)


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
    return structure.unflatten(leaves)


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
