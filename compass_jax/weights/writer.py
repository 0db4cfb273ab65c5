"""Writes a run's checkpoints in the background with orbax's CheckpointManager.

    <run>/checkpoints/step_00000012/   arrays/ (orbax)   meta.json   manifest.json

`Checkpoints.save` returns when the arrays are on the host. orbax's threads write them into a
temporary directory. The handler below then adds meta.json and a manifest with the digest of every
file, and orbax renames the directory. A crash at any time leaves earlier checkpoints unchanged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import ModelConfig
from compass_jax.devices.distributed import DistributedError, in_main_process
from compass_jax.devices.sharding import everywhere, put
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights import digests, disk, lazy, sound
from compass_jax.weights import manifest as manifests
from compass_jax.weights.digests import Digest
from compass_jax.weights.manifest import ARRAYS, META, CheckpointError, Manifest

_TIMEOUT_S = 6 * 3600  # orbax's timeout of one background save
_LARGE_BYTES = 2**28  # of an array that is stored in chunks; its save takes 1.5 times as long
_CHUNK_BYTES = 2**26  # of a part of an array that is stored, and read, as a whole
_TEMPORARY = "*.orbax-checkpoint-tmp*"  # uncommitted directories of orbax
_PROBE = ".new"  # begins the name of a folder that is made to see whether one can be

logger = logging.getLogger(__name__)


class Checkpoints:
    """Writes the checkpoints of one run. Every process of the run makes the same calls.

    Args:
        run_dir: the run directory; the first save creates checkpoints/ in it.
        model: the configuration recorded in the manifests.
        keep: number of sound checkpoints to keep; older ones are removed.
        needed_step: a function of the saved step that returns an earlier one, or the same: the
            newest sound checkpoint at or before it is kept as well, and all since it.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike,
        model: ModelConfig,
        keep: int = 2,
        needed_step: Callable[[int], int] = lambda step: step,
    ):
        self.root = Path(run_dir).absolute() / "checkpoints"
        self.model, self.keep, self.needed_step = model, keep, needed_step
        self._manager: ocp.CheckpointManager | None = None
        self._lazy = lazy.LazyHandler()
        self._step = self._bytes = 0  # step and bytes of the last save

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            logger.warning("%s", error)  # the block's error is raised

    def save(self, step: int, arrays: Tree, meta: dict, *, wait: bool = False) -> Path:
        """Saves checkpoint `step`, replacing an earlier one of that step; returns its directory.

        Args:
            step: number of completed steps.
            arrays: pytree of jax arrays (random keys as uint32 key data), or of LazyArrays, which
                are read while they are written.
            meta: JSON-serialisable host-side state, which `restore` returns.
            wait: returns once the checkpoint is on disk; otherwise it is written in the background
                from copies on the host.

        Raises CheckpointError for another leaf and, for this save or the previous one, the errors
        of `wait`.
        """
        flat = flatten(arrays)
        text = json.dumps(meta).encode()
        leaves = {name: (tuple(x.shape), str(x.dtype)) for name, x in flat.items()}
        self.wait()
        self._step, self._bytes = step, sum(x.nbytes for x in flat.values())
        with self._errors_named():
            # orbax's threads would wait for a folder that cannot be made until their timeout
            in_main_process(self._make_room)
            manager = self._open()
            self._move_aside(manager, step)
            # orbax refuses arrays without elements
            stored = {name: _of_all(x) for name, x in flat.items() if x.size}
            manifest = Manifest(step, self.model, leaves, {META: digests.of_bytes(text)})
            save_args = {name: _save_args(x) for name, x in stored.items()}
            args = _Save(stored, save_args=save_args, meta=text, manifest=manifest)
            # Lazy arrays start their collectives after orbax's call (LazyHandler), also if that
            # fails.
            self._lazy.saved.clear()
            try:
                manager.save(step, args=ocp.args.Composite(**{ARRAYS: args}), force=True)
            finally:
                self._lazy.saved.set()
        if wait:
            self.wait()
        return self._path(step)

    def wait(self) -> None:
        """Waits until the last save is on disk.

        Raises CheckpointError if it failed, and WeightsError if a LazyArray cannot be read. Its
        partial files are removed, and earlier checkpoints are unchanged.
        """
        if self._manager is not None:
            with self._errors_named():
                self._manager.wait_until_finished()
                if jax.process_index() == 0:
                    _tidy(self.root)

    def close(self) -> None:
        """Waits as `wait` does, and stops orbax's threads."""
        self.wait()
        if self._manager is not None:
            self._manager.close()
            self._manager = None

    def _path(self, step: int) -> Path:
        return self.root / f"step_{step:08d}"

    def _make_room(self) -> None:
        """Makes the directory at the first save, and a folder in it at each."""
        if self._manager is None:
            self.root.mkdir(parents=True, exist_ok=True)
            _tidy(self.root)
        os.rmdir(tempfile.mkdtemp(prefix=_PROBE, dir=self.root))

    def _open(self) -> ocp.CheckpointManager:
        if self._manager is None:
            registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
            # floats compress little, and the processors are busy with the next step
            types = lazy.registry(self._lazy)
            handler = _Handler(use_compression=False, type_handler_registry=types)
            registry.add(ARRAYS, _Save, handler)
            options = ocp.CheckpointManagerOptions(
                step_prefix="step",
                step_format_fixed_length=8,
                preservation_policy=_NewestSound(self.root, self.keep, self.needed_step),
                async_options=ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S),
                save_root_metadata=False,
                lightweight_initialize=True,
            )
            self._manager = ocp.CheckpointManager(
                self.root, options=options, handler_registry=registry
            )
        return self._manager

    def _move_aside(self, manager: ocp.CheckpointManager, step: int) -> None:
        """Renames a checkpoint of the same step. Under its new name it counts until its successor
        is in place (`sound.steps`), and is then removed.
        """
        path = self._path(step)
        exists = path.exists()
        # Every process must have looked before the first one renames the folder.
        multihost_utils.sync_global_devices("checkpoint of the same step")
        if exists:
            if jax.process_index() == 0:
                os.rename(path, path.with_name(f".old_{path.name}"))
            multihost_utils.sync_global_devices("checkpoint moved aside")
            manager.reload()

    @contextlib.contextmanager
    def _errors_named(self) -> Iterator[None]:
        """Converts an error in the block to CheckpointError, and removes partial files."""
        try:
            with disk.told_once():
                yield
        except Exception as error:
            # The next save opens a new manager instead of one whose save failed.
            self._manager = None
            if jax.process_index() == 0:
                with contextlib.suppress(OSError):
                    _tidy(self.root)
            if isinstance(error, WeightsError | DistributedError):  # of what a LazyArray reads
                raise
            free = disk.free_bytes(self.root)  # free at the next attempt
            where = self._path(self._step)
            message = disk.failure(self._step, where, error, self._bytes, free)
            raise CheckpointError(message) from error


def flatten(tree: Tree) -> JsonObject:
    """Returns leaf path -> leaf, in tree order, without the container types.

    Raises CheckpointError for a leaf that is not a plain array.
    """
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        plain = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | lazy.LazyArray)
        if not plain or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            kind = f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}".strip()
            raise CheckpointError(
                f"leaf {key} is {kind}: a checkpoint holds plain jax arrays; host values go to"
                " meta, random keys in as key data"
            )
        if key in flat:
            raise CheckpointError(f"two leaves have the same path {key}")
        flat[key] = leaf
    return flat


@dataclass
class _Save(ocp.args.PyTreeSave):
    """The arrays, the text of meta.json, and the manifest without the arrays' digests."""

    meta: bytes = b""
    manifest: Manifest | None = None


class _Handler(ocp.PyTreeCheckpointHandler):
    """Writes meta.json and the manifest in addition to the arrays, before orbax commits the
    checkpoint.
    """

    async def async_save(self, directory: Any, *positional: Any, args: Any = None) -> Tree:
        """Starts the writes. After them, each process computes the digests of its files."""
        self._args = args
        futures = await super().async_save(directory, *positional, args=args)
        digest = partial(_digest_own_files, Path(directory))
        return [ocp.future.ChainedFuture(futures or [], digest)]

    def finalize(self, directory: Any) -> None:
        """Merges the processes' files in the first process, and writes the two files."""
        super().finalize(directory)
        folder = Path(directory)
        step_folder, manifest = folder.parent, self._args.manifest
        files = {f"{ARRAYS}/{name}": digest for name, digest in _all_digests(folder).items()}
        # The arrays must be on disk before the manifest that vouches for them.
        for path in [*folder.rglob("*"), folder]:
            _flush(path)
        _write(step_folder / META, self._args.meta)
        text = manifests.to_text(manifest._replace(files=files | manifest.files))
        _write(step_folder / manifests.NAME, text.encode())
        _flush(step_folder)


class _NewestSound(NamedTuple):
    """A preservation policy that keeps the newest `keep` sound checkpoints, including the one just
    written, and those since the newest one at or before the needed step. Older ones are removed;
    damaged ones are not counted.
    """

    root: Path
    keep: int
    needed_step: Callable[[int], int]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether to keep each checkpoint; the last one was just written."""
        steps = [info.step for info in checkpoints]
        older = sorted(steps[:-1], reverse=True)
        needed = self.needed_step(steps[-1])
        sound_count, reaches = 1, steps[-1] <= needed
        for step in older:
            if sound_count >= self.keep and reaches:
                return [x == steps[-1] or x > step for x in steps]
            if not sound.examine(self.root / f"step_{step:08d}", contents=False).faults:
                sound_count += 1
                reaches = reaches or step <= needed
        return [True] * len(steps)


def _tidy(root: Path) -> None:
    """Removes the leftovers of a crash or a failed save, and replaced checkpoints. A replaced
    checkpoint without a successor gets its name back.
    """
    for path in (*root.glob(_TEMPORARY), *root.glob(f"{_PROBE}*")):
        shutil.rmtree(path)
    for path in root.glob(".old_*"):
        final = root / path.name.removeprefix(".old_")
        if final.exists():
            shutil.rmtree(path)
        else:
            os.rename(path, final)


def _of_all(x: jax.Array | lazy.LazyArray) -> jax.Array | lazy.LazyArray:
    """Returns an array that every process holds in full as one global array, the only kind of jax
    array that orbax saves.
    """
    if isinstance(x, lazy.LazyArray):
        return x
    return x if jax.process_count() == 1 or not x.is_fully_addressable else put(x, everywhere())


def _save_args(x: jax.Array | lazy.LazyArray) -> ocp.SaveArgs:
    """Returns how an array is stored: a large stack of matrices with each layer in chunks of its
    own, however small a device's part, so that a reader of one layer holds no others. Lazy arrays
    choose their own.
    """
    if isinstance(x, lazy.LazyArray) or x.ndim < 3 or x.nbytes <= _LARGE_BYTES:
        return ocp.SaveArgs()
    return ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES, shard_axes=(0,))


def _digest_own_files(folder: Path) -> None:
    """Writes the digests of the files that this process wrote, while they are in the page cache."""
    number = jax.process_index()
    own_digests = digests.of_files(folder, _files(folder, f"ocdbt.process_{number}/**/*"))
    _write(folder / f"digests.{number}.json", json.dumps(own_digests).encode())


def _all_digests(folder: Path) -> dict[str, Digest]:
    """Returns file name -> digest of all files of the arrays, and removes the processes' lists."""
    collected: dict[str, Digest] = {}
    for part in sorted(folder.glob("digests.*.json")):
        collected |= {
            name: Digest(*digest) for name, digest in json.loads(part.read_bytes()).items()
        }
        part.unlink()
    remaining = (name for name in _files(folder, "**/*") if name not in collected)
    return dict(sorted((collected | digests.of_files(folder, remaining)).items()))


def _files(folder: Path, pattern: str) -> list[str]:
    return sorted(str(x.relative_to(folder)) for x in folder.glob(pattern) if x.is_file())


def _write(file: Path, data: bytes) -> None:
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _flush(path: Path) -> None:
    """Forces a file, or a directory's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
