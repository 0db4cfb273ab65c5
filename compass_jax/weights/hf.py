"""Parameters from and to a Hugging Face folder: safetensors, single or sharded, without torch.

The model's family names the tensors. Each leaf of the stacked layout is filled from one tensor per
layer and expert. Leaves are processed one at a time, so the host holds one leaf in addition to the
parameters, or one device's part of it with `shardings`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.config import ModelConfig
from compass_jax.devices.distributed import (
    in_every_process,
    in_main_process,
    process_index_and_count,
)
from compass_jax.model.families.base import TENSORS, Family, Tensor
from compass_jax.model.families.find import find
from compass_jax.model.families.raw import WeightsError
from compass_jax.model.params import ParamSpec, is_spec, layer_runs, param_specs
from compass_jax.weights.carried import carried_files, carry_files
from compass_jax.weights.dequantize import dequantized, dequantized_notices
from compass_jax.weights.hf_config import find_token_ids, write_hf_config
from compass_jax.weights.lazy import LazyArray
from compass_jax.weights.new_folder import new_folder
from compass_jax.weights.safetensors_io import (
    DTYPES,
    MOST_BYTES,
    Stored,
    finite,
    open_file,
    read_headers,
    same_tensor,
    shard_files,
    widest,
    write_files,
    write_index,
    write_json,
)
from compass_jax.weights.stored import StoredArray
from compass_jax.weights.whole import loaded

_SHOWN = 3  # tensors named in a message
FUSED = "experts.gate_up_proj"


class TensorLeaf(NamedTuple):
    """One leaf of the stacked layout and its tensors."""

    path: tuple[str, ...]
    spec: ParamSpec
    tensor: Tensor
    names: np.ndarray  # str array: [], [layers], or [layers, experts]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of each tensor on disk, or of an expert's part of a fused tensor."""
        shape = self.spec.shape[self.names.ndim :]
        return shape[::-1] if self.tensor.transposed else shape

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        """The shape of each tensor on disk."""
        if not self.tensor.fused:
            return self.shape
        *axes, last = self.shape
        return (self.names.shape[-1], *axes, last * self.tensor.columns[1])

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes of the leaf in the order of its tensors on disk."""
        outer, inner = range(self.names.ndim), range(self.names.ndim, len(self.spec.shape))
        return (*outer, *(reversed(inner) if self.tensor.transposed else inner))

    def stored_at(self, at: tuple[int, ...], stored: Mapping[str, Stored]) -> Stored:
        """Returns where the tensor of an index of `names`, or an expert's part of it, lies."""
        tensor = stored[self.names[at]]
        if not self.tensor.fused:
            return tensor
        first, step = self.tensor.columns
        shape = (*tensor.shape[1:-1], tensor.shape[-1] // step)
        return tensor._replace(
            shape=shape, tensor=self.names[at], entry=at[-1], columns=(first, step)
        )


def tensor_leaves(config: ModelConfig) -> tuple[list[TensorLeaf], Tree]:
    """Returns the leaves in tree order, and the tree's structure."""
    flat, structure = jax.tree_util.tree_flatten_with_path(param_specs(config), is_leaf=is_spec)
    family, leaves = find(config.family), []
    for path, spec in flat:
        keys = tuple(key.key for key in path)
        tensor = family.tensor(spec.name)
        names = np.empty(spec.shape[: spec.stacked + spec.per_expert], object)
        for at in np.ndindex(names.shape):
            layer = _decoder_layer(config, keys, at[0]) if spec.stacked else None
            names[at] = tensor.name.format(i=layer, e=at[-1] if at else None)
        leaves.append(TensorLeaf(keys, spec, tensor, names))
    return leaves, structure


def _decoder_layer(config: ModelConfig, keys: tuple[str, ...], repeat: int) -> int:
    run, offset = (int(key.rpartition("_")[2]) for key in keys[:2])
    return layer_runs(config)[run].layer(repeat, offset)


def load_params(
    folder: str | Path,
    config: ModelConfig,
    param_dtype: str | None,
    shardings: Tree = None,
    vocab_rows: int | None = None,
) -> Tree:
    """Returns the parameters of a Hugging Face folder in the stacked layout.

    `shardings` is a tree of jax.sharding.Sharding like the parameters; each process then reads only
    a part. The other arguments, and the errors, are those of `lazy_params`; WeightsError also
    for weights that are not finite in `param_dtype`.
    """
    params = lazy_params(folder, config, param_dtype, vocab_rows)
    if shardings is None:
        return jax.tree.map(lambda x: jax.device_put(x.read((slice(None),) * len(x.shape))), params)
    return jax.tree.map(loaded, params, shardings)


def lazy_params(
    folder: str | Path,
    config: ModelConfig,
    param_dtype: str | None,
    vocab_rows: int | None = None,
) -> Tree:
    """Returns the parameters of a Hugging Face folder in the stacked layout, as LazyArrays that
    read from its files.

    Args:
        folder: the Hugging Face folder.
        config: the model.
        param_dtype: type of the parameters; None: the type that holds the tensors of each exactly.
            A router's selection bias has at least float32.
        vocab_rows: number of ids for which the folder has rows; the remaining rows are zero. None
            for all of the model's.

    Raises WeightsError for a missing, truncated or inconsistent shard, a missing or unexpected
    tensor, a wrong shape, weights that are not floats, and a tied model whose `lm_head.weight`
    differs from its embedding. Reading a part raises it for weights that are not finite in
    `param_dtype`.
    """
    stored = checked_headers(folder, config, vocab_rows)
    leaves, structure = tensor_leaves(config)
    dtypes = [
        leaf.spec.dtype(param_dtype or widest({stored[name].dtype for name in leaf.names.flat}))
        for leaf in leaves
    ]
    return structure.unflatten(
        LazyArray(leaf.spec.shape, dtype, partial(_read_block, leaf, stored, dtype), leaf.axes)
        for leaf, dtype in zip(leaves, dtypes, strict=True)
    )


def checked_headers(
    folder: str | Path, config: ModelConfig, vocab_rows: int | None = None
) -> dict[str, Stored]:
    """Returns the tensors of a Hugging Face folder from their headers. Raises WeightsError, as
    `load_params` does before reading data, if they do not fit the model.
    """
    config = replace(config, vocab_size=vocab_rows or config.vocab_size)
    stored = split_experts(read_headers(folder), config)
    if problems := tensor_problems(Path(folder), config, stored):
        raise WeightsError(problems[0])
    return stored


def split_experts(stored: dict[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Returns the tensors under the family's names, dequantised, with experts as separate tensors.

    transformers 5 can fuse a layer's experts (`save_original_format=False`): gate over up in
    experts.gate_up_proj [e 2f d], and experts.down_proj [e d f], under the names of its classes,
    which are those of `TENSORS`.
    """
    stored = dequantized(without_extra_layers(stored, config))
    if config.moe is None or not any(name.endswith(FUSED) for name in stored):
        return stored
    # The family's own tensors are fused: `TensorLeaf.stored_at` finds the experts in them.
    if find(config.family).tensor("moe.gate").fused:
        return stored
    family, tensors = find(config.family), dict(stored)
    router = family.tensor("moe.router").name
    prefix_of_family = family.tensor("moe.gate").name.partition(".{e}")[0]
    for i in config.moe_layers:
        for names in (prefix_of_family, TENSORS["moe.gate"].name.partition(".{e}")[0]):
            prefix = names.format(i=i)
            _split(tensors, config.moe.experts, prefix, family, i)
        renamed = TENSORS["moe.router"].name.format(i=i)
        if router.format(i=i) not in tensors and renamed in tensors:
            tensors[router.format(i=i)] = tensors.pop(renamed)._replace(tensor=renamed)
    return tensors


def extra_layers(stored: Iterable[str], config: ModelConfig) -> tuple[int, ...]:
    """Returns the numbers of the layers after the decoder's last that predict further tokens (arXiv
    2412.19437, section 2.2): each has a projection `eh_proj`.
    """
    if not find(config.family).extra_layers:
        return ()
    tensors = (re.fullmatch(r"model\.layers\.(\d+)\.eh_proj\.weight", name) for name in stored)
    layers = {int(match[1]) for match in tensors if match}
    return tuple(sorted(i for i in layers if i >= config.layers))


def import_notices(stored: dict[str, Stored], config: ModelConfig) -> list[str]:
    """Returns notices of the layers that are ignored, and of tensors that are dequantised."""
    layers = ", ".join(map(str, extra_layers(stored, config)))
    extra = f"layer {layers} ignored: it predicts further tokens, which no export has"
    tensors = dequantized(without_extra_layers(stored, config))
    return [extra] * bool(layers) + dequantized_notices(tensors.values())


def without_extra_layers(stored: dict[str, Stored], config: ModelConfig) -> dict[str, Stored]:
    """Returns the tensors without those of `extra_layers`, so that no layer's number shifts."""
    prefixes = tuple(f"model.layers.{i}." for i in extra_layers(stored, config))
    return {name: x for name, x in stored.items() if not (prefixes and name.startswith(prefixes))}


def _split(
    tensors: dict[str, Stored], experts: int, prefix: str, family: Family, layer: int
) -> None:
    """Replaces the two fused tensors of a layer's experts by their parts. A tensor of another shape
    stays and is later reported as unexpected.
    """
    for tensor, parts in ((FUSED, ("moe.gate", "moe.up")), ("experts.down_proj", ("moe.down",))):
        name = prefix.removesuffix("experts") + tensor
        fused = tensors.get(name)
        if fused is None or len(fused.shape) != 3 or 0 in fused.shape:
            continue
        if fused.shape[0] != experts or fused.shape[1] % len(parts):
            continue
        del tensors[name]
        rows = fused.shape[1] // len(parts)
        for number, leaf in enumerate(parts):
            for e in range(experts):
                tensors[family.tensor(leaf).name.format(i=layer, e=e)] = fused._replace(
                    shape=(rows, fused.shape[2]), tensor=name, entry=e, row=number * rows
                )


def _read_block(
    leaf: TensorLeaf, stored: dict[str, Stored], dtype: np.dtype, index: tuple[slice, ...]
) -> np.ndarray:
    """Returns the part `index` of a leaf, read from its tensors with one file open at a time."""
    lead = leaf.names.ndim
    inner = index[lead:]
    # the indices of `leaf.names` in the block
    first = [range(*part.indices(size)) for part, size in zip(index, leaf.names.shape)]
    on_disk = inner[::-1] if leaf.tensor.transposed else inner
    sizes = (
        len(range(*part.indices(size)))
        for part, size in zip(inner, leaf.spec.shape[lead:], strict=True)
    )
    block = np.zeros((*map(len, first), *sizes), dtype)
    by_file: dict[Path, list[tuple[tuple[int, ...], str, Stored]]] = {}
    for at in np.ndindex(*map(len, first)):
        position = tuple(places[i] for places, i in zip(first, at, strict=True))
        place = leaf.stored_at(position, stored)
        by_file.setdefault(place.file, []).append((at, leaf.names[position], place))
    for file, positions in by_file.items():
        with open_file(file) as handle:
            for at, name, place in positions:
                part = _within(on_disk, leaf.shape, place.shape)
                if any(x.start == x.stop for x in part):  # rows that the folder lacks
                    continue
                tensor = place.read(handle, name, part)
                tensor = finite(tensor, dtype, f"{file}: tensor {name}")
                tensor = tensor.T if leaf.tensor.transposed else tensor
                # Rows beyond those of the folder stay zero.
                block[at][tuple(map(slice, tensor.shape))] = tensor
    return block


def _within(
    index: tuple[slice, ...], expected: tuple[int, ...], stored: tuple[int, ...]
) -> tuple[slice, ...]:
    """Returns `index` into a tensor of shape `expected`, clipped to the stored shape."""
    bounds = (part.indices(size) for part, size in zip(index, expected, strict=True))
    return tuple(
        slice(min(first, size), min(last, size))
        for (first, last, _), size in zip(bounds, stored, strict=True)
    )


def tensor_problems(folder: Path, config: ModelConfig, stored: dict[str, Stored]) -> list[str]:
    """Returns the reasons why these tensors do not fit the model: names, shapes, types, or a head
    that should be tied and differs.
    """
    problems, stored = [], split_experts(stored, config)
    family = find(config.family)
    specs = jax.tree.leaves(param_specs(config), is_leaf=is_spec)
    described = sum(
        math.prod(
            spec.shape[: spec.stacked + (spec.per_expert and not family.tensor(spec.name).fused)]
        )
        for spec in specs
    )
    if described > 2 * len(stored) + 1000:  # their names could exhaust the memory
        return [
            f"{folder}: config.json describes {described:,} tensors, the files hold {len(stored):,}"
        ]
    embedding, head = (family.tensor(leaf).name for leaf in ("embed", "head"))
    expected = {
        name: leaf.tensor_shape for leaf in tensor_leaves(config)[0] for name in leaf.names.flat
    }
    missing = [name for name in expected if name not in stored]
    if missing:
        hint = (
            "; config.json says that the head is not tied to the embedding"
            if head in missing
            else ""
        )
        problems.append(f"{folder} lacks {_some(missing)}, which the model needs{hint}")
    extra = [name for name in stored if name not in expected]
    # A folder of a tied model may have the head too, as a copy of the embedding.
    if config.tie_embeddings and head in extra and embedding in stored:
        if not same_tensor((head, stored[head]), (embedding, stored[embedding])):
            problems.append(
                f"{folder}: tie_word_embeddings is true, but {head} differs from {embedding}"
            )
        extra.remove(head)
    if extra:
        problems.append(
            f"{folder} holds {_some(extra)}, which a {config.family} model of this config does not"
            " have"
        )
    for name in (name for name in expected if name in stored):
        tensor = stored[name]
        if tensor.shape != expected[name]:
            problems.append(
                f"{tensor.file}: tensor {name} has shape {tensor.shape}, the model expects"
                f" {expected[name]}"
            )
        if tensor.dtype not in DTYPES.values():
            problems.append(
                f"{tensor.file}: tensor {name} is stored as {tensor.dtype}; supported:"
                f" {', '.join(DTYPES.values())}, and F8_E4M3 with one scale in {name}_scale_inv for"
                " each block of 128 x 128"
            )
    return problems


def parameters_of(config: ModelConfig) -> dict[str, str]:
    """Returns every tensor of a model's folder, in layout order -> its parameter in the families'
    naming ("moe.router").
    """
    return {name: leaf.spec.name for leaf in tensor_leaves(config)[0] for name in leaf.names.flat}


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_SHOWN])}{more}"


def save_params(
    params: Tree,
    config: ModelConfig,
    folder: str | Path,
    dtype: str | None,
    shard_bytes: int | None = None,
    tokenizer_from: str | Path | None = None,
    replace: bool = False,
) -> Path:
    """Writes stacked parameters as a Hugging Face folder for `AutoModelForCausalLM`; returns its
    path.

    The tensors have the type `dtype`; None: the type of their parameter. It writes one file, or
    shards of at most `shard_bytes` with an index (None: a sixteenth of the model, but at least 256
    MiB and at most 4 GB). With several processes, each writes a part of the
    files; `params` then holds arrays that each of them can read as a whole, as `open_params`
    returns them.

    Tokenizer files and `generation_config.json` are copied from `tokenizer_from`. The folder
    appears once it is complete. An existing, non-empty folder is refused unless `replace`. Raises
    WeightsError; a full disk leaves no files behind.
    """
    folder = Path(folder).absolute()
    leaves, structure = tensor_leaves(config)
    flat = structure.flatten_up_to(params)
    types = [dtype or str(value.dtype) for value in flat]
    if wrong := sorted({*types} - {*DTYPES.values()}):
        raise WeightsError(
            f"weights cannot be stored as {wrong[0]!r}; supported: {', '.join(DTYPES.values())}"
        )
    kinds = [leaf.spec.dtype(kind) for leaf, kind in zip(leaves, types, strict=True)]
    for leaf, value in zip(leaves, flat, strict=True):
        if tuple(value.shape) != leaf.spec.shape:
            raise WeightsError(
                f"parameter {'/'.join(leaf.path)} has shape {tuple(value.shape)}, the model has"
                f" {leaf.spec.shape}"
            )
    # Called for its error, before anything is written.
    carried_files(tokenizer_from)
    ids = {} if tokenizer_from is None else find_token_ids(tokenizer_from)
    if isinstance(ends := ids.get("eos_token_id"), list):  # only ids that the model can emit
        ids["eos_token_id"] = [i for i in ends if i < config.vocab_size] or None
    description = write_hf_config(config, dtype or str(params["embed"].dtype), ids)
    sizes = {
        name: math.prod(leaf.tensor_shape) * kind.itemsize
        for leaf, kind in zip(leaves, kinds, strict=True)
        for name in leaf.names.flat
    }
    total = sum(sizes.values())
    files = shard_files(sizes, shard_bytes or min(max(total // 16, 2**28), MOST_BYTES))
    number, count = process_index_and_count()
    own_files = dict(list(files.items())[number::count])
    # In the order of `own_files`, as `write_files` needs them.
    tensors = _tensors(leaves, flat, kinds, {x for names in own_files.values() for x in names})
    with new_folder(folder, total, replace) as temporary:
        in_every_process(lambda: write_files(temporary, own_files, tensors))

        def write_the_rest() -> None:
            write_index(temporary, files, total)
            write_json(temporary / "config.json", description)
            carry_files(tokenizer_from, temporary)

        in_main_process(write_the_rest)
    return folder


def _tensors(
    leaves: list[TensorLeaf], values: list[Tree], kinds: list[np.dtype], selected: Container[str]
) -> Iterator[np.ndarray]:
    """Yields the selected tensors in their on-disk form, in order; one layer of the leaves of a
    tensor is on the host at a time.
    """
    # first tensor -> the leaves in its tensors
    groups: dict[str, list[tuple[TensorLeaf, Tree, np.dtype]]] = {}
    for leaf, value, kind in zip(leaves, values, kinds, strict=True):
        # Leaves that are columns of one fused tensor share its name.
        groups.setdefault(leaf.names.flat[0], []).append((leaf, value, kind))
    for group in groups.values():
        leaf, _, kind = group[0]
        layers = leaf.names.reshape(len(leaf.names) if leaf.spec.stacked else 1, -1)
        is_selected = [any(name in selected for name in names) for names in layers]
        parts = [_layers(value, leaf.spec.stacked, is_selected) for leaf, value, _ in group]
        for names, hosts in zip(layers[is_selected], zip(*parts, strict=True), strict=True):
            tensors = _tensors_of_layer([leaf for leaf, _, _ in group], hosts, kind)
            # experts of one tensor share its name
            yield from (x for name, x in zip(names, tensors) if name in selected)


def _layers(value: Tree, stacked: bool, is_selected: Sequence[bool]) -> Iterator[np.ndarray]:
    """Yields the selected layers of a leaf on the host. Layers that a file has in one chunk are
    read together.
    """
    if not stacked or not isinstance(value, StoredArray):
        layers = value if stacked else (value,)
        yield from (np.asarray(x) for x, use in zip(layers, is_selected, strict=True) if use)
        return
    count = value.entries_read
    for first in range(0, len(is_selected), count):
        last = min(first + count, len(is_selected))
        if any(is_selected[first:last]):
            block = np.asarray(value[first:last])
            yield from (block[i - first] for i in range(first, last) if is_selected[i])


def _tensors_of_layer(
    leaves: Sequence[TensorLeaf], values: Sequence[np.ndarray], dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Yields the tensors of a layer: the tensor whose columns the leaves share, or those of the
    only leaf.
    """
    leaf, value = leaves[0], values[0]
    if not leaf.tensor.fused:
        for tensor in value if leaf.spec.per_expert else (value,):
            yield (tensor.T if leaf.tensor.transposed else tensor).astype(dtype)
        return
    fused = np.empty(leaf.tensor_shape, dtype)
    for leaf, value in zip(leaves, values, strict=True):
        first, step = leaf.tensor.columns
        part = value.swapaxes(1, 2) if leaf.tensor.transposed else value
        fused[..., first::step] = part.astype(dtype)
    yield fused
