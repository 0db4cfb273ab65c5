"""Checkpoints: one directory per step, which is either complete or ignored.

    <run>/checkpoints/step_00000012/   arrays/ (orbax)   meta.json   manifest.json

weights/writer.py writes them. The manifest has a digest of every file (weights/manifest.py), which
`restore` verifies before it uses a checkpoint (weights/sound.py). It lists every leaf (path, shape,
dtype) and the model's configuration. `restore` compares these itself, because orbax silently casts
to another dtype. The mesh may differ from the one that saved: arrays are read directly into the
requested shardings.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import ModelConfig
from compass_jax.config.io import differences
from compass_jax.devices.sharding import everywhere, put
from compass_jax.weights import disk, sound
from compass_jax.weights.manifest import ARRAYS, CheckpointError, Manifest
from compass_jax.weights.sound import ValidCheckpoint, find
from compass_jax.weights.writer import Checkpoints, flatten

_SHOWN = 5  # differences named in a message


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another model, or holds other arrays than requested. The message lists
    the first differences.
    """

    exit_status = 2


def save(
    run_dir: str | os.PathLike,
    step: int,
    arrays: Tree,
    meta: dict,
    *,
    model: ModelConfig,
    keep: int = 2,
) -> Path:
    """Saves one checkpoint and returns its directory once it is on disk (see
    `Checkpoints.save`).
    """
    with Checkpoints(run_dir, model, keep) as checkpoints:
        return checkpoints.save(step, arrays, meta)


def restore(
    path: str | os.PathLike | ValidCheckpoint,
    abstract_arrays: Tree,
    step: int | None = None,
    *,
    model: ModelConfig | None = None,
    subset: bool = False,
) -> tuple[int, Tree, dict]:
    """Reads a checkpoint; returns (step, arrays shaped and sharded as `abstract_arrays`, meta).

    Args:
        path: a run directory (its newest sound checkpoint, or `step`), a checkpoint directory, or
            the result of `find`, which is not verified again.
        abstract_arrays: pytree of jax.ShapeDtypeStruct. A leaf without sharding goes to the first
            device (with several processes: to all devices), uncommitted like an array of a fresh
            start, so that both use the same programs.
        step: the step to read from a run directory; None for the newest sound one.
        model: the expected model; a checkpoint of another model is refused.
        subset: reads only the requested leaves; otherwise the checkpoint must hold exactly these.

    Raises CheckpointMismatch for other contents; CheckpointError for a missing or damaged
    checkpoint.
    """
    checkpoint = path if isinstance(path, ValidCheckpoint) else find(path, step)
    directory = checkpoint.path
    requested = flatten(abstract_arrays)
    if model is not None:
        _compare_models(directory, checkpoint.manifest.model, model)
    _compare_leaves(directory, checkpoint.manifest.leaves, requested, subset)
    is_single_process = jax.process_count() == 1
    shardings: JsonObject = {
        k: x.sharding or (None if is_single_process else everywhere()) for k, x in requested.items()
    }
    stored = {k: x for k, x in requested.items() if x.size}
    restore_args = {
        k: ocp.RestoreArgs(restore_type=np.ndarray, dtype=x.dtype)
        if shardings[k] is None
        else ocp.ArrayRestoreArgs(sharding=shardings[k], dtype=x.dtype, global_shape=x.shape)
        for k, x in stored.items()
    }
    # Arrays without elements are in no checkpoint (orbax refuses them), so they are made here.
    flat = {k: jnp.zeros(x.shape, x.dtype) for k, x in requested.items() if not x.size}
    flat = {k: x if shardings[k] is None else put(x, shardings[k]) for k, x in flat.items()}
    # one key-value store of all leaves, which needs few files
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False)
    try:
        with disk.told_once(), ocp.Checkpointer(handler) as orbax:
            request = ocp.args.PyTreeRestore(
                item=stored, restore_args=restore_args, partial_restore=subset
            )
            read = orbax.restore(directory / ARRAYS, args=request)
            flat |= {k: x if shardings[k] else jnp.array(x) for k, x in read.items()}
    except Exception as error:
        # another process died
        if not is_single_process and isinstance(error, jax.errors.JaxRuntimeError):
            raise
        why = disk.cause(error)
        raise CheckpointError(
            f"{directory}: its arrays are as they were written, and cannot be read ({why})"
        ) from error
    arrays = jax.tree.unflatten(jax.tree.structure(abstract_arrays), [flat[k] for k in requested])
    return checkpoint.manifest.step, arrays, checkpoint.meta()


def latest(run_dir: str | os.PathLike, until: int | None = None) -> int | None:
    """Returns the step of the newest checkpoint (of step `until` at most), which may be damaged, or
    None.
    """
    steps = sound.steps(Path(run_dir))
    return max((step for step in steps if until is None or step <= until), default=None)


def locate(path: str | os.PathLike, step: int | None = None) -> Path:
    """Returns the checkpoint directory that `path` refers to: itself, or a run's newest (or
    `step`'s).

    It may be damaged. Raises CheckpointError if it does not exist.
    """
    return sound.candidates(Path(path).absolute(), step)[0]


def read_manifest(path: str | os.PathLike, step: int | None = None) -> Manifest:
    """Returns the step, model and leaves of a checkpoint. Only file names and sizes are verified.

    For a run directory it is the newest checkpoint that passes. Raises CheckpointError if there is
    no such checkpoint.
    """
    return find(path, step, tell=None, contents=False).manifest


def read_meta(path: str | os.PathLike) -> dict:
    """Returns the host-side state of the checkpoint that `read_manifest` selects.

    Raises CheckpointError.
    """
    return find(path, tell=None, contents=False).meta()


def _compare_models(where: Path, saved: ModelConfig, expected: ModelConfig) -> None:
    differing = differences(saved, expected)
    if differing:
        lines = [
            f"  model.{k}: {a!r} in the checkpoint, {b!r} asked for"
            for k, (a, b) in differing.items()
        ]
        raise CheckpointMismatch(f"{where} is a checkpoint of another model:\n" + _few(lines))


def _compare_leaves(where: Path, saved: dict, requested: dict, subset: bool) -> None:
    lines = []
    for key, leaf in requested.items():
        have, want = saved.get(key), (tuple(leaf.shape), str(leaf.dtype))
        if have != want:
            lines.append(
                f"  {key}: {_describe(have)} in the checkpoint, {_describe(want)} asked for"
            )
    if not subset:
        lines += [
            f"  {key}: {_describe(saved[key])} in the checkpoint, not asked for"
            for key in saved
            if key not in requested
        ]
    if lines:
        raise CheckpointMismatch(f"{where} does not hold the arrays asked for:\n" + _few(lines))


def _describe(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def _few(lines: list[str]) -> str:
    more = len(lines) - _SHOWN
    return "\n".join(lines[:_SHOWN] + ([f"  and {more} more"] if more > 0 else []))
