"""Merges the models of Hugging Face folders into a new folder, one block of a tensor at a time.

Only a few blocks and one tensor of the new folder are in memory. A file is reopened for each block,
so that its pages do not stay in the memory of the process.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from compass_jax.apps.curate.merge import METHODS, Block, Combine, MergeError, Method, check_factor
from compass_jax.apps.curate.parents import Parents, read_parents
from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.weights.carried import carry_files
from compass_jax.weights.convert import export_hf
from compass_jax.weights.digests import of_files
from compass_jax.weights.new_folder import check_new, new_folder
from compass_jax.weights.safetensors_io import (
    Stored,
    finite,
    not_finite,
    open_file,
    shard_files,
    write_json,
    write_shards,
)
from compass_jax.weights.start import is_checkpoint

READ = 2**20  # entries of a tensor per block
_MOST_THREADS = 16
T = TypeVar("T")
RECORD = "merge.json"


class ParentShare(NamedTuple):
    """Statistics of one parent over all merged tensors.

    They are the share of its entries that was kept, the share of these whose sign agrees with the
    merged entry, the L2 norm of its delta, and that norm relative to the base's.
    """

    kept_share: float
    agreeing: float
    norm: float
    relative_norm: float


class MergedFolder(NamedTuple):
    """The new folder, the statistics of each parent, and notices for the user."""

    path: Path
    parents: list[ParentShare]
    notices: list[str]


@dataclass(frozen=True)
class StoredBlocks:
    """The blocks of the tensors `names`, in this order, read and processed by threads."""

    parents: Parents
    names: Sequence[str]
    tell: Callable[[str], None] = lambda line: None

    def map(self, function: Callable[[Block], T]) -> Iterator[T]:
        """Yields the function's value for each block, in order, with a few reads ahead."""
        self.tell(f"reading {len(self.names):,} tensors of {1 + len(self.parents.models)} models")

        def work(name: str, rows: slice) -> T:
            base = read_rows(self.parents.base[name], name, rows)
            models = [read_rows(model[name], name, rows) for model in self.parents.models]
            with np.errstate(all="ignore"):  # `_Merged` reports values that are not finite
                return function(Block(name, base, np.stack(models)))

        threads = min(_MOST_THREADS, os.cpu_count() or 1)
        with ThreadPoolExecutor(threads, "merge") as pool:
            results: deque[Future[T]] = deque()
            for name in self.names:
                for rows in _reads(self.parents.base[name].shape):
                    results.append(pool.submit(work, name, rows))
                    if len(results) > 2 * threads:
                        yield results.popleft().result()
            while results:
                yield results.popleft().result()


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
    """Merges models that were trained from `base` into the new Hugging Face folder `out`.

    The folder appears once it is complete. Its merge.json records the models and the settings.

    Args:
        base: a Hugging Face folder, a run directory or a checkpoint. `out` takes its config.json,
            tokenizer, types and shards.
        models: the parents, folders of the same kinds.
        method: a method of compass_jax/apps/curate/merge.py with settings for these parents.
        scale: lambda, the factor of the merged delta; 0 gives the base.
        routers_from: source of the gates of MoE layers. None merges them like other tensors; 0
            copies the base's; n copies those of the n-th parent.
        shard_bytes: maximum size of a shard; None keeps the base's assignment of tensors to files.
        family: the model family as in `model.family`, for a custom family.
        tell: receives a line when a pass over the models, or a file, begins.

    Raises MergeError for models that cannot be merged, listing every difference; WeightsError for a
    damaged folder, for values that are not finite, and for an `out` that exists or cannot be
    written. Only one process may write the folder at a time (NewFolderLock).
    """
    out = Path(out).absolute()
    check_new(out)
    check_factor("scale", scale)
    if not models:
        raise MergeError("there is no model to merge: give at least one beside the base")
    with _folders([base, *models], out) as (base_folder, *folders):
        parents = read_parents(base_folder, folders, family)
        if routers_from is not None and not parents.routers:
            raise MergeError("routers: the models have none, they are dense")
        if not 0 <= (routers_from or 0) <= len(models):
            raise MergeError(f"routers: {routers_from} of {len(models)} models")
        fixed = parents.routers if routers_from is not None else frozenset()
        names = [name for name in parents.base if name not in fixed]
        combine = method.prepare(StoredBlocks(parents, names, tell))
        merged = _Merged(parents, combine, np.float32(scale), routers_from, fixed)
        files = _layout(parents.base, shard_bytes)
        with new_folder(out, sum(map(_bytes, parents.base.values()))) as temporary:
            write_shards(temporary, files, merged.tensors(files, tell))
            shares = merged.shares()
            notices = parents.notices + _far(models, shares)
            shutil.copyfile(base_folder / "config.json", temporary / "config.json")
            carry_files(base_folder, temporary)
            one, *sources = (
                {"folder": str(Path(path).absolute()), "files": _digests(folder)}
                for path, folder in zip([base, *models], [base_folder, *folders], strict=True)
            )
            sources = [x | share._asdict() for x, share in zip(sources, shares, strict=True)]
            record = _settings(method, scale, routers_from) | {"base": one, "models": sources}
            outcome = {"notices": notices, "files": _digests(temporary)}
            write_json(temporary / RECORD, record | outcome)
    return MergedFolder(out, shares, notices)


def read_rows(stored: Stored, name: str, rows: slice) -> np.ndarray:
    """Returns rows of a tensor as flat float32. Raises WeightsError if they are not finite."""
    with open_file(stored.file) as handle:
        piece = handle.get_slice(name)[rows] if stored.shape else handle.get_tensor(name)
    flat = np.ascontiguousarray(piece).reshape(-1)
    return finite(flat, np.dtype(np.float32), f"{stored.file}: tensor {name}")


def _reads(shape: tuple[int, ...]) -> Iterator[slice]:
    """Yields slices of the first axis, each of about READ entries."""
    length, row = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
    step = max(1, READ // max(1, row))
    return (slice(at, min(at + step, length)) for at in range(0, length, step))


def _bytes(stored: Stored) -> int:
    return math.prod(stored.shape) * jnp.dtype(stored.dtype).itemsize


@dataclass
class _Merged:
    """The merged tensors, with counts of the entries that they were merged from.

    `counts` has four rows: for each parent the kept entries, the agreeing entries, and the sums of
    squares of its delta and of the base.
    """

    parents: Parents
    combine: Combine
    scale: np.float32
    routers_from: int | None
    fixed: frozenset[str]  # tensors copied from one model
    entries: int = 0
    counts: Tree = 0.0  # float64 [4 p]

    def tensors(
        self, files: dict[str, list[str]], tell: Callable[[str], None]
    ) -> Iterator[np.ndarray]:
        """Yields the tensors in the order of the files."""
        for file, names in files.items():
            tell(f"writing {file}")
            blocks = StoredBlocks(self.parents, names).map(self._block)
            for name in names:
                parts = []
                shape = self.parents.base[name].shape
                for _ in _reads(shape):
                    values, counts = next(blocks)
                    parts.append(values)
                    self.counts = self.counts + counts
                self.entries += 0 if name in self.fixed else math.prod(shape)
                yield np.concatenate(parts).reshape(shape)

    def _block(self, block: Block) -> tuple[np.ndarray, np.ndarray]:
        """Returns the merged block in the base's type, and its counts."""
        if block.name in self.fixed and self.routers_from is not None:
            source = (block.base, *block.models)[self.routers_from]
            return self._stored(source, block.name), np.zeros((4, len(block.models)))
        trimmed, merged = self.combine(block)
        counts = [
            np.count_nonzero(trimmed, axis=1),
            np.count_nonzero(np.sign(trimmed) * np.sign(merged) > 0, axis=1),
            np.square(block.deltas, dtype=np.float64).sum(1),
            [np.square(block.base, dtype=np.float64).sum()] * len(trimmed),
        ]
        values = self._stored(block.base + self.scale * merged, block.name)
        return values, np.array(counts, np.float64)

    def _stored(self, values: np.ndarray, name: str) -> np.ndarray:
        dtype = jnp.dtype(self.parents.base[name].dtype)
        cast = values.astype(dtype)
        if bad := not_finite(cast):
            raise MergeError(
                f"tensor {name}: of {cast.size:,} merged entries {bad:,} are too large for {dtype};"
                " give a smaller scale, smaller weights or a larger density"
            )
        return cast

    def shares(self) -> list[ParentShare]:
        """Returns the statistics of each parent."""
        return [
            ParentShare(
                trimmed / max(self.entries, 1),
                agreeing / max(trimmed, 1),
                math.sqrt(squares),
                math.sqrt(squares / of_base) if of_base else 0.0,
            )
            for trimmed, agreeing, squares, of_base in self.counts.T
        ]


@contextmanager
def _folders(paths: Sequence[str | Path], out: Path) -> Iterator[list[Path]]:
    """Yields each path as a Hugging Face folder; runs are exported next to `out`."""
    scratch = out.with_name(f".{out.name}.parents")
    shutil.rmtree(scratch, ignore_errors=True)
    folders = []
    try:
        for number, path in enumerate(map(Path, paths)):
            if not path.is_dir():
                raise MergeError(f"{path}: there is no such folder")
            exported = is_checkpoint(path)
            folders.append(export_hf(path, scratch / str(number)) if exported else path)
        yield folders
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _layout(base: dict[str, Stored], shard_bytes: int | None) -> dict[str, list[str]]:
    """Returns file -> its tensors: as in the base, or in shards of at most `shard_bytes`."""
    if shard_bytes is not None:
        return shard_files({name: _bytes(stored) for name, stored in base.items()}, shard_bytes)
    files: dict[str, list[str]] = defaultdict(list)
    for name, stored in base.items():
        files[stored.file.name].append(name)
    return files


def _far(models: Sequence[str | Path], shares: Sequence[ParentShare]) -> list[str]:
    """Returns a notice for each parent that is farther from the base than fine-tuning leads."""
    return [
        f"{model} differs from the base by {share.relative_norm:.2g} times the base's norm: was it"
        " trained from this base?"
        for model, share in zip(models, shares, strict=True)
        if share.relative_norm > 1
    ]


def _settings(method: Method, scale: float, routers_from: int | None) -> JsonObject:
    """Returns the settings that determine the numbers, as merge.json records them."""
    names = (name for name, kind in METHODS.items() if isinstance(method, kind))
    routers = {None: "merge", 0: "base"}.get(routers_from, routers_from)
    fields = dataclasses.asdict(method)  # type: ignore[call-overload]  # every method is one
    return {
        "method": next(names, type(method).__name__),
        **fields,
        "scale": scale,
        "routers": routers,
    }


def _digests(folder: Path) -> dict[str, str]:
    """Returns the digest (XXH3, compass_jax/weights/digests.py) of each weight file."""
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    return {name: digest.value for name, digest in of_files(folder, names).items()}
