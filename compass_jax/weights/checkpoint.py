"""Checkpoints: a directory per step that is either whole or ignored.

    <run>/checkpoints/step_00000012/   arrays/ (orbax)   meta.json   manifest.json

weights/writer.py writes them. The manifest has a digest of every file (weights/manifest.py), which
`restore` compares before it trusts one (weights/sound.py). It lists every leaf (path, shape, dtype)
and the model's configuration, and `restore` compares them itself, because orbax casts another dtype
without a word. Another mesh is welcome: arrays are read straight into the shardings asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from compass_jax.config import ModelConfig
from compass_jax.config.io import differences
from compass_jax.sharding import everywhere, put
from compass_jax.weights import disk, sound
from compass_jax.weights.manifest import ARRAYS, CheckpointError, Manifest
from compass_jax.weights.sound import Sound, find, set_aside
from compass_jax.weights.writer import Checkpoints, flatten

__all__ = [
    "CheckpointError",
    "CheckpointMismatch",
    "Checkpoints",
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
    """Returns the directory of one checkpoint, when it is on the disk (see `Checkpoints.save`)."""
    with Checkpoints(run_dir, model, keep) as checkpoints:
        return checkpoints.save(step, arrays, meta)


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
    wanted = flatten(abstract_arrays)
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
        raise CheckpointError(
            f"{where}: its arrays are as they were written, and cannot be read ({why})"
        ) from error
    arrays = jax.tree.unflatten(jax.tree.structure(abstract_arrays), [flat[k] for k in wanted])
    return found.manifest.step, arrays, found.meta()


def latest(run_dir: str | os.PathLike) -> int | None:
    """Returns the step of the newest checkpoint, which may be damaged, or None."""
    return max(sound.steps(Path(run_dir)), default=None)


def locate(path: str | os.PathLike, step: int | None = None) -> Path:
    """Returns the directory that `path` means: a checkpoint's own, or a run's newest (or `step`'s).

    It may be damaged. Raises CheckpointError where there is none.
    """
    return sound.candidates(Path(path).absolute(), step)[0]


def read_manifest(path: str | os.PathLike, step: int | None = None) -> Manifest:
    """Returns step, model and leaves of a checkpoint, of which names and sizes alone are compared.

    Of a run's, it is the newest where these fit. Raises CheckpointError where there is none.
    """
    return find(path, step, tell=None, contents=False).manifest


def read_meta(path: str | os.PathLike, step: int | None = None) -> dict:
    """Returns the host-side state of the checkpoint whose manifest `read_manifest` gives.

    Raises CheckpointError.
    """
    return find(path, step, tell=None, contents=False).meta()


def abstract_like(arrays: Any) -> Any:
    """Returns the ShapeDtypeStructs, shardings included, with which `restore` gives back arrays
    like these.
    """
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays
    )


def _checkpointer() -> ocp.Checkpointer:
    """All leaves in one key-value store: few files, however many leaves."""
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False))


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
