"""Models of Hugging Face folders merged into a new one, a block of a tensor at a time: a model need
not fit in memory.

Each pass reads base and parents in blocks of `BLOCK` entries. A file is opened for each block, so
that what was read of it does not stay in the process's memory.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from compass_jax.families.raw import WeightsError
from compass_jax.weights.carried import carry_files
from compass_jax.weights.convert import export_hf
from compass_jax.weights.digests import of_files
from compass_jax.weights.hf_config import read_json
from compass_jax.weights.merge import METHODS, Block, Combine, MergeError, Method
from compass_jax.weights.new_folder import check_new, new_folder
from compass_jax.weights.parents import Parents, read_parents
from compass_jax.weights.safetensors_io import (
    INDEX,
    Stored,
    finite,
    open_file,
    plan_shards,
    shard_names,
    write_blocks,
    write_json,
)
from compass_jax.weights.start import is_checkpoint

BLOCK = 2**20  # entries
RECORD = "merge.json"


class ParentShare(NamedTuple):
    """What became of one parent, over all tensors that were merged: the share of its entries that
    was kept, the share of these that have the merged entry's sign, and the L2 norm of its delta.
    """

    kept: float
    agreeing: float
    norm: float


class MergedFolder(NamedTuple):
    """The new folder; what became of each parent; what a person should know."""

    path: Path
    parents: list[ParentShare]
    notices: list[str]


@dataclass(frozen=True)
class Blocks:
    """The blocks of the tensors `names`, in this order: what a method looks at."""

    parents: Parents
    names: Sequence[str]
    tell: Callable[[str], None]

    def __iter__(self) -> Iterator[Block]:
        self.tell(f"reading {len(self.names):,} tensors of {1 + len(self.parents.models)} models")
        for name in self.names:
            yield from self.of(name)

    def of(self, name: str) -> Iterator[Block]:
        """The blocks of one tensor."""
        start = 0
        for rows in _rows(self.parents.base[name].shape):
            base = read_rows(self.parents.base[name], name, rows)
            models = (read_rows(model[name], name, rows) for model in self.parents.models)
            yield Block(name, start, base, np.stack([model - base for model in models]))
            start += base.size


def merge_folders(
    base: str | Path,
    models: Sequence[str | Path],
    out: str | Path,
    method: Method,
    *,
    scale: float = 1.0,
    routers_from: int | None = None,
    shard_bytes: int | None = None,
    family: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> MergedFolder:
    """Merges models that were trained from `base` into the new Hugging Face folder `out`, which
    appears when it is whole; what was merged and how is in its merge.json.

    Args:
        base: a Hugging Face folder, a run directory or a checkpoint. config.json, tokenizer, types
            and shards of `out` are its.
        models: the parents, folders of the same kinds.
        method: one of those in compass_jax/weights/merge.py, with settings for these parents.
        scale: lambda, which the merged delta is multiplied by; 0 gives the base.
        routers_from: None: the gates of MoE layers are merged like all else; 0: they are the
            base's; n: those of the n-th parent.
        shard_bytes: the most bytes of a shard; None: tensors lie in files as in `base`.
        family: as `model.family` names it, for a family of your own.
        tell: gets a line when a pass over the models begins.

    Raises MergeError for what cannot be merged, every difference named; WeightsError for a folder
    that is damaged, for numbers that are not finite, and for an `out` that exists or cannot be
    written. The folder is to be written by one process at a time (NewFolderLock).
    """
    out = Path(out).absolute()
    check_new(out)
    if not math.isfinite(scale):
        raise MergeError(f"scale: {scale} must be finite")
    for setting, values in vars(method).items():
        if isinstance(values, tuple) and len(values) != len(models):
            raise MergeError(f"{setting}: {len(values)} numbers for {len(models)} models")
    with _folders([base, *models], out) as (base_folder, *folders):
        parents = read_parents(base_folder, folders, family)
        _check_router_choice(routers_from, parents)
        fixed = parents.routers if routers_from is not None else frozenset()
        blocks = Blocks(parents, [name for name in parents.base if name not in fixed], tell)
        combine = method.prepare(blocks)
        writing = _Writing(blocks, combine, np.float32(scale), routers_from, fixed)
        files = _layout(parents.base, shard_bytes)
        with new_folder(out, sum(map(_bytes, parents.base.values()))) as temporary:
            tell(f"writing {len(parents.base):,} tensors into {len(files)} files")
            _write_files(temporary, files, parents.base, writing)
            shutil.copyfile(base_folder / "config.json", temporary / "config.json")
            carry_files(base_folder, temporary)
            shares = writing.shares()
            settings = _settings(method, scale, routers_from)
            record = _record([base, *models], [base_folder, *folders], parents, settings, shares)
            write_json(temporary / RECORD, record | {"files": _digests(temporary)})
    return MergedFolder(out, shares, parents.notices)


def read_rows(stored: Stored, name: str, rows: slice) -> np.ndarray:
    """Rows of a stored tensor as flat float32. Raises WeightsError, naming it, where an entry is
    not finite.
    """
    with open_file(stored.file) as handle:
        piece = handle.get_slice(name)[rows] if stored.shape else handle.get_tensor(name)
    flat = np.ascontiguousarray(piece).reshape(-1)
    return finite(flat, np.dtype(np.float32), f"{stored.file}: tensor {name}")


def _rows(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the first axis that hold about BLOCK entries each."""
    length = shape[0] if shape else 1
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    return (slice(at, min(at + step, length)) for at in range(0, length, step))


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * jnp.dtype(stored.dtype).itemsize


class _Writing:
    """The merged entries in their order, and counts of what became of the parents."""

    def __init__(
        self,
        blocks: Blocks,
        combine: Combine,
        scale: np.float32,
        routers_from: int | None,
        fixed: frozenset[str],
    ):
        self.blocks, self.combine = blocks, combine
        self.scale, self.routers_from, self.fixed = scale, routers_from, fixed
        self.sums = np.zeros((3, len(blocks.parents.models)))  # kept, agreeing, squares
        self.entries = 0

    def tensor(self, name: str) -> Iterator[np.ndarray]:
        """The blocks of one merged tensor in the base's type."""
        parents = self.blocks.parents
        stored = parents.base[name]
        if name in self.fixed and self.routers_from is not None:
            source = (parents.base, *parents.models)[self.routers_from][name]
            for rows in _rows(stored.shape):
                yield self._stored(read_rows(source, name, rows), name)
            return
        for block in self.blocks.of(name):
            kept, merged = self.combine(block)
            self.entries += block.base.size
            self.sums[0] += np.count_nonzero(kept, axis=1)
            self.sums[1] += np.count_nonzero(np.sign(kept) * np.sign(merged) > 0, axis=1)
            self.sums[2] += [np.vdot(delta, delta) for delta in block.deltas]
            yield self._stored(block.base + self.scale * merged, name)

    def _stored(self, values: np.ndarray, name: str) -> np.ndarray:
        dtype = jnp.dtype(self.blocks.parents.base[name].dtype)
        return finite(values, dtype, f"the merged tensor {name}")

    def shares(self) -> list[ParentShare]:
        """What became of each parent, once every tensor was written."""
        return [
            ParentShare(kept / self.entries, agreeing / max(kept, 1), math.sqrt(squares))
            for kept, agreeing, squares in self.sums.T
        ]


@contextmanager
def _folders(paths: Sequence[str | Path], out: Path) -> Iterator[list[Path]]:
    """Each path as a Hugging Face folder; runs and checkpoints are exported beside `out`, for as
    long as the block lasts.
    """
    scratch = out.with_name(f".{out.name}.parents")
    shutil.rmtree(scratch, ignore_errors=True)
    found = []
    try:
        for number, path in enumerate(map(Path, paths)):
            if not path.is_dir():
                raise MergeError(f"{path}: there is no such folder")
            exported = is_checkpoint(path)
            found.append(export_hf(path, scratch / str(number)) if exported else path)
        yield found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_router_choice(routers_from: int | None, parents: Parents) -> None:
    if routers_from is None:
        return
    if not parents.routers:
        raise MergeError("routers: the models have none, they are dense")
    if not 0 <= routers_from <= len(parents.models):
        raise MergeError(f"routers: {routers_from} of {len(parents.models)} models")


def _layout(base: dict[str, Stored], shard_bytes: int | None) -> dict[str, list[str]]:
    """File -> its tensors: as in the base, or in shards of at most `shard_bytes`."""
    if shard_bytes is not None:
        shards = plan_shards({name: _bytes(stored) for name, stored in base.items()}, shard_bytes)
        return dict(zip(shard_names(len(shards)), shards, strict=True))
    files: dict[str, list[str]] = defaultdict(list)
    for name, stored in base.items():
        files[stored.file.name].append(name)
    return files


def _write_files(
    folder: Path, files: dict[str, list[str]], base: dict[str, Stored], writing: _Writing
) -> None:
    for file, names in files.items():
        layout = {name: (base[name].shape, base[name].dtype) for name in names}
        write_blocks(folder / file, layout, (x for name in names for x in writing.tensor(name)))
    if len(files) > 1:
        index = {name: file for file, names in files.items() for name in names}
        total = sum(map(_bytes, base.values()))
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def _settings(method: Method, scale: float, routers_from: int | None) -> dict[str, Any]:
    """Everything that decides the numbers, as merge.json tells it."""
    name = next(name for name, kind in METHODS.items() if isinstance(method, kind))
    routers = {None: "merge", 0: "base"}.get(routers_from, routers_from)
    fields = dataclasses.asdict(method)  # type: ignore[call-overload]  # every method is one
    return {"method": name, **fields, "scale": scale, "routers": routers}


def _record(
    given: Sequence[str | Path],
    folders: Sequence[Path],
    parents: Parents,
    settings: dict[str, Any],
    shares: Sequence[ParentShare],
) -> dict[str, Any]:
    """What merge.json holds, but for the new files."""
    models = [
        {"folder": str(Path(path).absolute()), "files": _digests(folder)}
        for path, folder in zip(given, folders, strict=True)
    ]
    for model, share in zip(models[1:], shares, strict=True):
        model |= share._asdict()
    return settings | {"base": models[0], "models": models[1:], "notices": parents.notices}


def _digests(folder: Path) -> dict[str, str]:
    """The digest (XXH3, compass_jax/weights/digests.py) of each file with weights."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    found = of_files(folder, names)
    if lost := [name for name in names if isinstance(found[name], OSError)]:
        raise WeightsError(f"{folder / lost[0]} cannot be read: {found[lost[0]]}")
    return {name: digest.value for name, digest in found.items() if not isinstance(digest, OSError)}


def read_record(folder: str | Path) -> dict[str, Any]:
    """The merge.json of a merged folder. WeightsError where it is missing or damaged."""
    return read_json(Path(folder) / RECORD)
