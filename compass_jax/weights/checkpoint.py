"""Checkpoints: a directory per step that is either whole or ignored.

    <run>/checkpoints/step_00000012/   arrays/ (orbax)   meta.json   manifest.json

A checkpoint is written into `.tmp_...`, every file of it is flushed to the disk, the manifest last, and the directory is then
renamed, so a crash at any moment leaves the previous checkpoints as they were; the next `save` sweeps what was half-written.
The manifest lists every leaf (path, shape, dtype) and the model's configuration. `restore` compares them itself before it
reads an array, because orbax casts another dtype without a word. Another mesh is welcome: arrays are read straight into the shardings asked for.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from compass_jax.config import ModelConfig
from compass_jax.config_io import differences, from_plain, to_plain
from compass_jax.sharding import everywhere, put

FORMAT = 1
_STEP = re.compile(r"(?:\.old_)?step_(\d+)")
_SHOWN = 5  # differences named in a message


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, found or read; the message names the path and what to do."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint is of another model, or holds other arrays than asked for; the message names the first differences."""


class Manifest(NamedTuple):
    """What a checkpoint holds: `leaves` maps each leaf's path to (shape, dtype name)."""

    step: int
    model: ModelConfig
    leaves: dict[str, tuple[tuple[int, ...], str]]


def save(run_dir: str | os.PathLike, step: int, arrays: Any, meta: dict, *, model: ModelConfig, keep: int = 2) -> Path:
    """Writes checkpoint `step` (replacing one of the same step) and removes all but the newest `keep`; returns its directory.

    arrays: pytree of jax arrays (random keys as uint32 key data). meta: JSON-able host-side state, given back equal by `restore`.
    Every process of a run calls this together. Raises CheckpointError, with what was written removed and earlier
    checkpoints untouched, when the disk is full or refuses; and for a leaf that is no jax array.
    """
    flat = _flatten(arrays)
    text = json.dumps(meta)
    manifest = {"format": FORMAT, "step": step, "model": to_plain(model), "leaves": {k: [list(x.shape), str(x.dtype)] for k, x in flat.items()}}
    root = Path(run_dir).absolute() / "checkpoints"
    final, temporary = root / f"step_{step:08d}", root / f".tmp_step_{step:08d}"
    first = jax.process_index() == 0
    try:
        if first:
            _sweep(root)
            temporary.mkdir(parents=True)
        multihost_utils.sync_global_devices("checkpoint directory")
        with _checkpointer() as orbax:
            orbax.save(temporary / "arrays", {k: _of_all(x) for k, x in flat.items() if x.size})  # orbax refuses arrays without elements
        if first:
            _write(temporary / "meta.json", text)
            _flush_tree(temporary)
            _write(temporary / "manifest.json", json.dumps(manifest))
            _flush(temporary)
            _publish(temporary, final)
            _forget(root, keep, step)
        multihost_utils.sync_global_devices("checkpoint written")
    except Exception as error:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
        free = shutil.disk_usage(_existing(root)).free
        raise CheckpointError(f"checkpoint of step {step} could not be written to {final} ({free:,} bytes free there): {_cause(error)}") from error
    return final


def restore(
    path: str | os.PathLike, abstract_arrays: Any, step: int | None = None, *, model: ModelConfig | None = None, subset: bool = False
) -> tuple[int, Any, dict]:
    """Reads a checkpoint: (step, arrays shaped and sharded as `abstract_arrays`, meta).

    path: a run directory (newest checkpoint, or `step`), or a checkpoint's own directory. abstract_arrays: pytree of
    jax.ShapeDtypeStruct; a leaf without sharding goes to the first device (of several processes: to all devices). model: refuse another one's.
    subset: read only the leaves asked for; otherwise the checkpoint must hold these and no others.
    Raises CheckpointMismatch, or CheckpointError where there is none or it is damaged.
    """
    where = locate(path, step)
    manifest = read_manifest(where)
    wanted = _flatten(abstract_arrays)
    if model is not None:
        _compare_models(where, manifest.model, model)
    _compare_leaves(where, manifest.leaves, wanted, subset)
    one = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if jax.process_count() == 1 else everywhere()
    stored = {k: x for k, x in wanted.items() if x.size}
    how = {k: ocp.ArrayRestoreArgs(sharding=x.sharding or one, dtype=x.dtype, global_shape=x.shape) for k, x in stored.items()}
    flat = {k: put(jnp.zeros(x.shape, x.dtype), x.sharding or one) for k, x in wanted.items() if not x.size}
    try:
        with _checkpointer() as orbax:
            flat |= orbax.restore(where / "arrays", args=ocp.args.PyTreeRestore(item=stored, restore_args=how, partial_restore=subset))
    except Exception as error:
        if jax.process_count() > 1 and isinstance(error, jax.errors.JaxRuntimeError):  # another process is lost; the checkpoint is none the worse
            raise
        raise CheckpointError(f"{where} is damaged: its arrays cannot be read ({_cause(error)}); remove it to use an earlier one") from error
    return manifest.step, jax.tree.unflatten(jax.tree.structure(abstract_arrays), [flat[k] for k in wanted]), read_meta(where)


def latest(run_dir: str | os.PathLike) -> int | None:
    """The newest complete checkpoint's step, or None."""
    return max(_complete(Path(run_dir) / "checkpoints"), default=None)


def locate(path: str | os.PathLike, step: int | None = None) -> Path:
    """The checkpoint directory meant by `path`: itself, or the newest (or that of `step`) of a run directory. Raises CheckpointError."""
    path = Path(path).absolute()
    if (path / "manifest.json").exists():
        return path
    found = _complete(path / "checkpoints")
    if not found:
        raise CheckpointError(f"{path} holds no checkpoint: give a run directory with checkpoints/, or one of its step_... directories")
    if step is None:
        return found[max(found)]
    if step not in found:
        raise CheckpointError(f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, sorted(found)))}")
    return found[step]


def read_manifest(path: str | os.PathLike, step: int | None = None) -> Manifest:
    """Steps, model and leaves of a checkpoint, without its arrays. Raises CheckpointError where it is damaged or of another format."""
    where = locate(path, step)
    data = _read_json(where / "manifest.json")
    if data.get("format") != FORMAT:
        raise CheckpointError(f"{where}: written in format {data.get('format')}, this version reads format {FORMAT}")
    return Manifest(data["step"], from_plain(ModelConfig, data["model"]), {k: (tuple(s), d) for k, (s, d) in data["leaves"].items()})


def read_meta(path: str | os.PathLike, step: int | None = None) -> dict:
    """The host-side state of a checkpoint, without its arrays."""
    return _read_json(locate(path, step) / "meta.json")


def abstract_like(arrays: Any) -> Any:
    """The ShapeDtypeStructs, shardings included, with which `restore` gives back arrays like these."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def _checkpointer() -> ocp.Checkpointer:
    """All leaves in one key-value store: few files, however many leaves."""
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False))


def _of_all(x: jax.Array) -> jax.Array:
    """What every process has whole, as one array of them all: orbax saves no other."""
    return x if jax.process_count() == 1 or not x.is_fully_addressable else put(x, everywhere())


def _flatten(tree: Any) -> dict[str, Any]:
    """Leaf path -> leaf, in tree order: the container types of a tree are no business of the file's."""
    flat = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        key = jax.tree_util.keystr(path, simple=True, separator="/")
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) or jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            what = f"{type(leaf).__name__} {getattr(leaf, 'dtype', '')}".strip()
            raise CheckpointError(f"leaf {key} is {what}: a checkpoint holds plain jax arrays; host values go to meta, random keys in as key data")
        if key in flat:
            raise CheckpointError(f"two leaves have the same path {key}")
        flat[key] = leaf
    return flat


def _compare_models(where: Path, saved: ModelConfig, wanted: ModelConfig) -> None:
    found = differences(saved, wanted)
    if found:
        lines = [f"  model.{k}: {a!r} in the checkpoint, {b!r} asked for" for k, (a, b) in found.items()]
        raise CheckpointMismatch(f"{where} is a checkpoint of another model:\n" + _few(lines))


def _compare_leaves(where: Path, saved: dict, wanted: dict, subset: bool) -> None:
    lines = []
    for key, leaf in wanted.items():
        have, want = saved.get(key), (tuple(leaf.shape), str(leaf.dtype))
        if have != want:
            lines.append(f"  {key}: {_describe(have)} in the checkpoint, {_describe(want)} asked for")
    if not subset:
        lines += [f"  {key}: {_describe(saved[key])} in the checkpoint, not asked for" for key in saved if key not in wanted]
    if lines:
        raise CheckpointMismatch(f"{where} does not hold the arrays asked for:\n" + _few(lines))


def _describe(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def _few(lines: list[str]) -> str:
    more = len(lines) - _SHOWN
    return "\n".join(lines[:_SHOWN] + ([f"  and {more} more"] if more > 0 else []))


def _complete(root: Path) -> dict[int, Path]:
    """Step -> directory of every whole checkpoint. An `.old_` one counts only while its successor is not yet in place."""
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():  # ".old_" sorts before "step_", so the successor wins
        match = _STEP.fullmatch(path.name)
        if match and (path / "manifest.json").exists():
            found[int(match[1])] = path
    return found


def _sweep(root: Path) -> None:
    """Removes what a crash left behind; puts a checkpoint back that was moved aside for a successor that never came."""
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
    """Removes all but the newest `keep` and the one just written.

    Each is renamed first, so that a crash leaves no half-removed checkpoint under its name.
    """
    found = _complete(root)
    for step in sorted(set(found) - {current})[: -keep + 1 or None]:
        doomed = root / f".tmp_remove_{step:08d}"
        os.rename(found[step], doomed)
        shutil.rmtree(doomed)


def _write(file: Path, text: str) -> None:
    with open(file, "w") as out:
        out.write(text)
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


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 300 else text[:300] + " ..."


def _read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({_cause(error)}): damaged; remove {file.parent} to use an earlier one") from error
