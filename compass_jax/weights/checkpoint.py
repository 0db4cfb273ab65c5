"""Checkpoints: a directory per step that is either whole or ignored.

    <run>/checkpoints/step_00000012/   arrays/ (orbax)   meta.json   manifest.json

A checkpoint is written into `.tmp_...`, every file of it is flushed to the disk, the manifest last,
and the directory is then renamed, so a crash at any moment leaves the previous checkpoints as they
were; the next `save` sweeps what was half-written. The manifest has a digest of every file
(weights/manifest.py), which `restore` compares before it trusts one (weights/sound.py). It lists
every leaf (path, shape, dtype) and the model's configuration, and `restore` compares them itself,
because orbax casts another dtype without a word. Another mesh is welcome: arrays are read straight
into the shardings asked for.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from compass_jax import distributed
from compass_jax.config import ModelConfig
from compass_jax.config.io import differences
from compass_jax.sharding import everywhere, put
from compass_jax.weights import digests, disk, manifest, sound
from compass_jax.weights.digests import Digest
from compass_jax.weights.manifest import ARRAYS, META, CheckpointError, Manifest
from compass_jax.weights.sound import Sound, find, set_aside

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "Manifest",
    "Sound",
    "abstract_like",
    "find",
    "latest",
    "locate",
    "read_manifest",
    "read_meta",
    "restore",
    "save",
    "set_aside",
]

_SHOWN = 5  # differences named in a message


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another model, or holds other arrays than asked for; the message names
    the first differences.
    """

    exit_status = 2


def save(
    run_dir: str | os.PathLike,
    step: int,
    arrays: Any,
    meta: dict,
    *,
    model: ModelConfig,
    keep: int = 2,
) -> Path:
    """The directory of the checkpoint `step`, which is written; it replaces one of the same step.

    Args:
        run_dir: where checkpoints/ is, or will be.
        step: the number of steps that are done.
        arrays: pytree of jax arrays (random keys as uint32 key data).
        meta: JSON-able host-side state, given back equal by `restore`.
        model: the configuration that the manifest names.
        keep: of the sound checkpoints all but the newest so many are removed.

    Every process of a run calls this together. Raises CheckpointError, with what was written
    removed and earlier checkpoints untouched, when the disk is full or refuses; and for a leaf that
    is no jax array.
    """
    flat = _flatten(arrays)
    text = json.dumps(meta).encode()
    leaves = {k: (tuple(x.shape), str(x.dtype)) for k, x in flat.items()}
    root = Path(run_dir).absolute() / "checkpoints"
    final, temporary = root / f"step_{step:08d}", root / f".tmp_step_{step:08d}"
    first = jax.process_index() == 0
    try:
        if first:
            _sweep(root)
            temporary.mkdir(parents=True)
        multihost_utils.sync_global_devices("checkpoint directory")
        with disk.told_once(), _checkpointer() as orbax:
            # orbax refuses arrays without elements
            stored = {k: _of_all(x) for k, x in flat.items() if x.size}
            orbax.save(temporary / ARRAYS, stored)
        with ThreadPoolExecutor(1) as beside:  # digests are made while the files are flushed
            own = beside.submit(_own_digests, temporary)
            if first:
                _write(temporary / META, text)
                _flush_tree(temporary)
            files = _of_all_processes(own.result()) | {META: digests.of_bytes(text)}
        if first:
            described = manifest.to_text(Manifest(step, model, leaves, files))
            _write(temporary / manifest.NAME, described.encode())
            _flush(temporary)
            _publish(temporary, final)
            _forget(root, keep, step)
        multihost_utils.sync_global_devices("checkpoint written")
    except Exception as error:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        size = sum(x.nbytes for x in flat.values())
        free = disk.free_bytes(root)  # without it, as at the next try
        raise CheckpointError(disk.failure(step, final, error, size, free)) from error
    return final


def restore(
    path: str | os.PathLike | Sound,
    abstract_arrays: Any,
    step: int | None = None,
    *,
    model: ModelConfig | None = None,
    subset: bool = False,
) -> tuple[int, Any, dict]:
    """Reads a checkpoint: (step, arrays shaped and sharded as `abstract_arrays`, meta).

    Args:
        path: a run directory (its newest sound checkpoint, or `step`), a checkpoint's own
            directory, or what `find` found, which is not verified again.
        abstract_arrays: pytree of jax.ShapeDtypeStruct; a leaf without sharding goes to the first
            device, uncommitted like an array of a fresh start, so that the same programs serve both
            (of several processes: to all devices).
        model: refuse another one's.
        subset: read only the leaves asked for; otherwise the checkpoint must hold these and no
            others.

    Raises CheckpointMismatch, or CheckpointError where there is none or it is damaged.
    """
    found = path if isinstance(path, Sound) else find(path, step)
    where = found.path
    wanted = _flatten(abstract_arrays)
    if model is not None:
        _compare_models(where, found.manifest.model, model)
    _compare_leaves(where, found.manifest.leaves, wanted, subset)
    alone = jax.process_count() == 1
    shardings: dict[str, Any] = {
        k: x.sharding or (None if alone else everywhere()) for k, x in wanted.items()
    }
    stored = {k: x for k, x in wanted.items() if x.size}
    how = {
        k: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
        if shardings[k] is None
        else ocp.ArrayRestoreArgs(sharding=shardings[k], dtype=x.dtype, global_shape=x.shape)
        for k, x in stored.items()
    }
    flat = {k: jnp.zeros(x.shape, x.dtype) for k, x in wanted.items() if not x.size}
    flat = {k: x if shardings[k] is None else put(x, shardings[k]) for k, x in flat.items()}
    try:
        with disk.told_once(), _checkpointer() as orbax:
            asked = ocp.args.PyTreeRestore(item=stored, restore_args=how, partial_restore=subset)
            read = orbax.restore(where / ARRAYS, args=asked)
            flat |= {k: x if shardings[k] else jnp.array(x) for k, x in read.items()}
    except Exception as error:
        if not alone and isinstance(error, jax.errors.JaxRuntimeError):  # another process is lost
            raise
        why = disk.cause(error)
        if found.manifest.files is not None:
            raise CheckpointError(
                f"{where}: its arrays are as they were written, and cannot be read ({why})"
            ) from error
        raise CheckpointError(
            f"{where} is damaged: its arrays cannot be read ({why}); "
            "remove it to use an earlier one"
        ) from error
    arrays = jax.tree.unflatten(jax.tree.structure(abstract_arrays), [flat[k] for k in wanted])
    return found.manifest.step, arrays, found.meta()


def latest(run_dir: str | os.PathLike) -> int | None:
    """The newest checkpoint's step, by the directories' names, or None; it may be damaged."""
    return max(sound.steps(Path(run_dir)), default=None)


def locate(path: str | os.PathLike, step: int | None = None) -> Path:
    """The directory that `path` means: a checkpoint's own, or a run's newest (or that of `step`).

    It may be damaged. Raises CheckpointError where there is none.
    """
    return sound.candidates(Path(path).absolute(), step)[0]


def read_manifest(path: str | os.PathLike, step: int | None = None) -> Manifest:
    """Step, model and leaves of a checkpoint, of which names and sizes were compared alone.

    Of a run's, it is the newest where these fit. Raises CheckpointError where there is none.
    """
    return find(path, step, tell=_nobody, contents=False).manifest


def read_meta(path: str | os.PathLike, step: int | None = None) -> dict:
    """The host-side state of the checkpoint whose manifest `read_manifest` gives.

    Raises CheckpointError.
    """
    return find(path, step, tell=_nobody, contents=False).meta()


def abstract_like(arrays: Any) -> Any:
    """The ShapeDtypeStructs, shardings included, with which `restore` gives back arrays
    like these.
    """
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def _checkpointer() -> ocp.Checkpointer:
    """All leaves in one key-value store: few files, however many leaves."""
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False))


def _of_all(x: jax.Array) -> jax.Array:
    """What every process has whole, as one array of them all: orbax saves no other."""
    return x if jax.process_count() == 1 or not x.is_fully_addressable else put(x, everywhere())


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaf path -> leaf, in tree order: the container types of a tree are no business of the
    file's.
    """
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or jax.dtypes.issubdtype(
            leaf.dtype, jax.dtypes.prng_key
        ):
            what = f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}".strip()
            raise CheckpointError(
                f"leaf {key} is {what}: a checkpoint holds plain jax arrays; host values go to"
                " meta, random keys in as key data"
            )
        if key in flat:
            raise CheckpointError(f"two leaves have the same path {key}")
        flat[key] = leaf
    return flat


def _compare_models(where: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    found = differences(saved, wanted)
    if found:
        lines = [
            f"  model.{k}: {a!r} in the checkpoint, {b!r} asked for" for k, (a, b) in found.items()
        ]
        raise CheckpointMismatch(f"{where} is a checkpoint of another model:\n" + _few(lines))


def _compare_leaves(where: Path, saved: dict, wanted: dict, subset: bool) -> None:
    lines = []
    for key, leaf in wanted.items():
        have, want = saved.get(key), (tuple(leaf.shape), str(leaf.dtype))
        if have != want:
            lines.append(
                f"  {key}: {_describe(have)} in the checkpoint, {_describe(want)} asked for"
            )
    if not subset:
        lines += [
            f"  {key}: {_describe(saved[key])} in the checkpoint, not asked for"
            for key in saved
            if key not in wanted
        ]
    if lines:
        raise CheckpointMismatch(f"{where} does not hold the arrays asked for:\n" + _few(lines))


def _describe(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def _few(lines: list[str]) -> str:
    more = len(lines) - _SHOWN
    return "\n".join(lines[:_SHOWN] + ([f"  and {more} more"] if more > 0 else []))


def _sweep(root: Path) -> None:
    """Removes what a crash left behind; puts a checkpoint back that was moved aside for a successor
    that never came.
    """
    root.mkdir(parents=True, exist_ok=True)
    for path in root.glob(".old_*"):
        final = root / path.name.removeprefix(".old_")
        if not final.exists():
            os.rename(path, final)
    for path in [*root.glob(".old_*"), *root.glob(".tmp_*")]:
        shutil.rmtree(path)


def _publish(temporary: Path, final: Path) -> None:
    old = final.with_name(f".old_{final.name}")
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    _flush(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _forget(root: Path, keep: int, current: int) -> None:
    """Removes all but the newest `keep` and the one just written. Damaged ones are neither counted
    nor removed.

    Each is renamed first, so that a crash leaves no half-removed checkpoint under its name.
    """
    whole = {
        step: path
        for step, path in sound.steps(root.parent).items()
        if step != current and not sound.examine(path, contents=False).faults
    }
    for step in sorted(whole)[: -keep + 1 or None]:
        doomed = root / f".tmp_remove_{step:08d}"
        os.rename(whole[step], doomed)
        shutil.rmtree(doomed)


def _own_digests(temporary: Path) -> dict[str, Digest]:
    """The digests of what this process wrote, which the operating system still has in its memory.

    The first process also digests what belongs to no process.
    """
    number, count, names = jax.process_index(), jax.process_count(), []
    for folder, _, files in os.walk(temporary / ARRAYS):
        names += [str((Path(folder) / name).relative_to(temporary)) for name in files]
    writers = {name: manifest.writer_of(name) or 0 for name in names}
    own = [name for name, writer in writers.items() if (writer if writer < count else 0) == number]
    made: dict[str, Digest] = {}
    for name, digest in digests.of_files(temporary, sorted(own)).items():
        if isinstance(digest, OSError):
            raise digest
        made[name] = digest
    return made


def _of_all_processes(own: dict[str, Digest]) -> dict[str, Digest]:
    """Name -> digest of the arrays' files, whichever process digested them."""
    parts = [json.loads(part) for part in distributed.exchange(json.dumps(own).encode())]
    return {name: Digest(*digest) for part in parts for name, digest in sorted(part.items())}


def _nobody(text: str) -> None:
    """Hears what a look at names and sizes has to say: whoever reads the arrays will be told."""


def _write(file: Path, data: bytes) -> None:
    with open(file, "wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())


def _flush_tree(root: Path) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            _flush(Path(folder) / name)
        _flush(Path(folder))


def _flush(path: Path) -> None:
    """Forces a file, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
