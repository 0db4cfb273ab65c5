"""Verification of checkpoints: a sound one has exactly the files of its manifest, unchanged.

Names, sizes, steps and digests are compared before a checkpoint is used. Digests tie arrays,
meta.json and manifest together, and the manifest's step is tied to the directory's name. With
several processes each digests a share of the files, and all come to the same decision.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.base.untrusted import read_bytes
from compass_jax.devices import distributed
from compass_jax.weights import digests
from compass_jax.weights import manifest as manifests
from compass_jax.weights.digests import Digest
from compass_jax.weights.disk import cause
from compass_jax.weights.manifest import (
    ARRAYS,
    META,
    NAME,
    CheckpointError,
    Manifest,
    NoCheckpoint,
)

SET_ASIDE = "damaged_"  # name prefix of damaged checkpoints that a resumed run moved aside
_STEP = re.compile(r"(?:\.old_)?step_(\d{1,18})")
_SHOWN = 5  # faults named in a message
_COMMITTED = f"{ARRAYS}/commit_success.txt"  # orbax writes it last; it is never read

logger = logging.getLogger(__name__)


class ValidCheckpoint(NamedTuple):
    """A verified checkpoint. `damaged` lists newer checkpoints of its run that failed
    verification.
    """

    path: Path
    manifest: Manifest
    damaged: tuple[Path, ...] = ()

    def meta(self) -> JsonObject:
        """Returns the host-side state. Raises CheckpointError if it has changed since
        verification.
        """
        return read_meta(self.path, self.manifest)


class CheckpointReport(NamedTuple):
    """The manifest, if it can be read, and all faults of the checkpoint."""

    manifest: Manifest | None
    faults: list[str]


def steps(run_dir: Path) -> dict[int, Path]:
    """Returns step -> directory of every checkpoint of a run in ascending order, including damaged
    ones.

    An `.old_` directory counts only while its successor is not in place.
    """
    root = run_dir / "checkpoints"
    directories: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():  # ".old_" sorts before "step_"
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            directories[int(match[1])] = path
    return dict(sorted(directories.items()))


def is_one(path: Path) -> bool:
    """Returns whether `path` is a checkpoint directory, possibly damaged, and not a run
    directory.
    """
    if (path / NAME).exists():
        return True
    named = _STEP.fullmatch(path.name) is not None
    return named and path.is_dir() and not (path / "checkpoints").is_dir()


def candidates(path: Path, step: int | None = None) -> list[Path]:
    """Returns the checkpoints that `path` refers to: itself, or those of a run directory, newest
    first.

    Raises NoCheckpoint if no checkpoint exists.
    """
    if is_one(path):
        return [path]
    directories = steps(path)
    if not directories:
        raise NoCheckpoint(
            f"{path} holds no checkpoint: give a run directory with checkpoints/, "
            "or one of its step_... directories"
        )
    if step is None:
        return list(directories.values())[::-1]
    if step not in directories:
        raise NoCheckpoint(
            f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, directories))}"
        )
    return [directories[step]]


def find(
    path: str | os.PathLike,
    step: int | None = None,
    *,
    tell: Callable[[str], None] | None = logger.warning,
    contents: bool = True,
) -> ValidCheckpoint:
    """Returns the newest sound checkpoint of a run directory, or the named one.

    Args:
        path: a run directory or a checkpoint directory.
        step: the step to select in a run directory; None for the newest sound one.
        tell: receives a line for each damaged checkpoint that was skipped; None for silence.
        contents: compares every byte with the manifest, shared among processes; otherwise only
            names and sizes.

    Raises CheckpointError if the named checkpoint or all of them are damaged; NoCheckpoint if there
    is no checkpoint.
    """
    path = Path(path).absolute()
    choices = candidates(path, step)
    damaged: dict[Path, list[str]] = {}
    for where in choices:
        manifest, faults = examine(where, contents=contents)
        if manifest is None or faults:
            damaged[where] = faults
            continue
        for other, why in damaged.items():
            if tell is not None:
                message = f"{other} is damaged and was passed over: {_few(why)}"
                tell(f"{message}; going on from {where.name}")
        return ValidCheckpoint(where, manifest, tuple(damaged))
    message = "\n".join(f"{where} is damaged: {_few(faults)}" for where, faults in damaged.items())
    if len(choices) > 1:
        message += f"\nno sound checkpoint is left in {path}"
    elif step is not None or is_one(path):
        message += "\nname an earlier one, or the run directory, to use the newest sound one"
    else:
        message += "\nit is the only one there; put back a copy of it, or remove it to begin anew"
    raise CheckpointError(message)


def examine(where: Path, *, contents: bool = True) -> CheckpointReport:
    """Verifies the checkpoint in the directory `where`; returns its manifest and all faults.

    Args:
        where: the checkpoint's directory.
        contents: compares the digest of every file, shared among processes; otherwise this process
            compares the manifest, names and sizes.
    """
    manifest, faults = _outside(where)
    if not contents:
        return CheckpointReport(manifest, faults)
    if manifest is not None:
        faults += _inside(where, _share(manifest.files))
    return CheckpointReport(manifest, _agreed(faults))


def read_meta(where: Path, manifest: Manifest) -> JsonObject:
    """Returns the content of meta.json as passed to `save`. Raises CheckpointError if it cannot be
    read or was changed.
    """
    file = where / META
    data = read_bytes(file, error=CheckpointError)
    if digests.of_bytes(data) != manifest.files[META]:
        raise CheckpointError(f"{file} is damaged: its digest is not the manifest's")
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it cannot be read ({cause(error)})") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{file} is damaged: it holds no JSON object")
    return meta


def set_aside(checkpoint: ValidCheckpoint) -> list[Path]:
    """Renames the damaged checkpoints that were skipped, so that the run does not overwrite them;
    returns their new paths.

    One that cannot be renamed stays in place and is not returned.
    """
    renamed = []
    for path in checkpoint.damaged:
        name = SET_ASIDE + path.name.removeprefix(".old_")
        names = (name, *(f"{name}_{i}" for i in range(2, 1000)))
        try:
            free = next(n for n in names if not path.with_name(n).exists())
            renamed.append(path.rename(path.with_name(free)))
        except OSError as error:
            logger.warning("%s is damaged and could not be renamed: %s", path, error)
    return renamed


def _outside(where: Path) -> CheckpointReport:
    """Verifies everything but the files' contents."""
    try:
        manifest = manifests.read(where)
    except CheckpointError as error:
        return CheckpointReport(None, [str(error)])
    faults = []
    named = _STEP.fullmatch(where.name)
    if named and int(named[1]) != manifest.step:
        faults.append(
            f"its manifest is of step {manifest.step}, the directory's name of step {int(named[1])}"
        )
    for name, digest in manifest.files.items():
        file = where / name
        if not file.exists():
            faults.append(f"{name} is missing")
        elif not file.is_file():
            faults.append(f"{name} is no file: a folder, a pipe or a device lies there")
        elif (size := file.stat().st_size) != digest.size:
            faults.append(f"{name} has {size:,} bytes, {digest.size:,} were written")
    present = {str(x.relative_to(where)) for x in (where / ARRAYS).rglob("*") if not x.is_dir()}
    extra = sorted(present - {_COMMITTED, *manifest.files})
    faults += [f"{name} was not written with it" for name in extra]
    return CheckpointReport(manifest, faults)


def _share(files: dict[str, Digest]) -> dict[str, Digest]:
    """Returns the files whose digests this process compares.

    If the checkpoint was written by the same number of processes, they are the files written by the
    process of this number: it reads its arrays from them, which are then in memory. Otherwise the
    files are distributed by size.
    """
    number, count = distributed.process_index_and_count()
    writers = {name: manifests.writer_of(name) for name in files}
    if {writer for writer in writers.values() if writer is not None} == set(range(count)):
        return {name: files[name] for name, writer in writers.items() if (writer or 0) == number}
    ordered = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in ordered[number::count]}


def _inside(where: Path, files: dict[str, Digest]) -> list[str]:
    """Returns a fault for each of these files whose content changed. Files of the wrong size are
    reported elsewhere.
    """
    regular = [name for name in files if (where / name).is_file()]  # reading a pipe would block
    try:
        actual = digests.of_files(where, regular)
    except OSError as error:
        return [f"a file cannot be read: {error}"]
    return [
        f"{name} was changed after it was written: its digest does not fit"
        for name, digest in actual.items()
        if digest.size == files[name].size and digest != files[name]
    ]


def _agreed(faults: list[str]) -> list[str]:
    """Returns the union of the faults that the processes found."""
    gathered = (
        json.loads(part) for part in distributed.all_gather_bytes(json.dumps(faults).encode())
    )
    return list(dict.fromkeys(fault for part in gathered for fault in part))


def _few(faults: list[str]) -> str:
    more = len(faults) - _SHOWN
    return "; ".join(faults[:_SHOWN] + ([f"and {more} more"] if more > 0 else []))
