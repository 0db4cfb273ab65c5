"""Which checkpoints are sound: files that the manifest lists, as they were written, and no others.

Names, sizes, steps and digests are compared before anything of a checkpoint is used. Digests tie
arrays, meta.json and manifest together; the manifest's step is tied to the directory's name. Of
several processes each digests its share of the files, and all come to the same decision.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from compass_jax import distributed
from compass_jax.untrusted import read_bytes
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

SET_ASIDE = "damaged_"  # how the names of damaged checkpoints begin that a resumed run moved aside
_STEP = re.compile(r"(?:\.old_)?step_(\d{1,18})")
_SHOWN = 5  # faults named in a message
_COMMITTED = f"{ARRAYS}/commit_success.txt"  # orbax writes it last; nothing reads it
_MOST_META = 2**36  # bytes: a run's history of every prompt may be long

logger = logging.getLogger(__name__)


class Sound(NamedTuple):
    """A checkpoint that is as it was written. `damaged`: newer ones of its run, which are not."""

    path: Path
    manifest: Manifest
    damaged: tuple[Path, ...] = ()

    def meta(self) -> dict[str, Any]:
        """The host-side state. Raises CheckpointError where it changed since."""
        return read_meta(self.path, self.manifest)


class Examined(NamedTuple):
    """The manifest, where it can be read, and everything that is wrong with the checkpoint."""

    manifest: Manifest | None
    faults: list[str]


def steps(run_dir: Path) -> dict[int, Path]:
    """Step -> directory of every checkpoint of a run, in ascending order, damaged ones included.

    An `.old_` one counts only while its successor is not yet in place.
    """
    root = run_dir / "checkpoints"
    found: dict[int, Path] = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():  # ".old_" sorts before "step_"
        match = _STEP.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items()))


def is_one(path: Path) -> bool:
    """Whether `path` is meant as one checkpoint, and not as a run directory; it may be damaged."""
    if (path / NAME).exists():
        return True
    named = _STEP.fullmatch(path.name) is not None
    return named and path.is_dir() and not (path / "checkpoints").is_dir()


def candidates(path: Path, step: int | None = None) -> list[Path]:
    """The checkpoints that `path` means: itself, or those of a run directory, newest first.

    Raises NoCheckpoint where there are none.
    """
    if is_one(path):
        return [path]
    found = steps(path)
    if not found:
        raise NoCheckpoint(
            f"{path} holds no checkpoint: give a run directory with checkpoints/, "
            "or one of its step_... directories"
        )
    if step is None:
        return list(found.values())[::-1]
    if step not in found:
        raise NoCheckpoint(
            f"{path} has no checkpoint of step {step}; it has {', '.join(map(str, found))}"
        )
    return [found[step]]


def find(
    path: str | os.PathLike,
    step: int | None = None,
    *,
    tell: Callable[[str], None] | None = logger.warning,
    contents: bool = True,
) -> Sound:
    """The newest sound checkpoint of a run directory, or the one that was named.

    Args:
        path: a run directory, or a checkpoint's own directory.
        step: the checkpoint of a run directory that is meant.
        tell: gets a line for each damaged checkpoint that was passed over; None: nobody does.
        contents: compare every byte with the manifest, which several processes do together;
            otherwise names and sizes.

    Raises CheckpointError where the one that was named is damaged, or all are, NoCheckpoint where
    there is none.
    """
    path = Path(path).absolute()
    meant = candidates(path, step)
    damaged: dict[Path, list[str]] = {}
    for where in meant:
        manifest, faults = examine(where, contents=contents)
        if manifest is None or faults:
            damaged[where] = faults
            continue
        for other, why in damaged.items():
            if tell is not None:
                told = f"{other} is damaged and was passed over: {_few(why)}"
                tell(f"{told}; going on from {where.name}")
        return Sound(where, manifest, tuple(damaged))
    told = "\n".join(f"{where} is damaged: {_few(faults)}" for where, faults in damaged.items())
    if len(meant) > 1:
        told += f"\nno sound checkpoint is left in {path}"
    elif step is not None or is_one(path):
        told += "\nname an earlier one, or the run directory, to use the newest sound one"
    else:
        told += "\nit is the only one there; put back a copy of it, or remove it to begin anew"
    raise CheckpointError(told)


def examine(where: Path, *, contents: bool = True) -> Examined:
    """Everything that is wrong with the checkpoint in the directory `where`.

    contents: digest every file, which several processes do together; otherwise the manifest, names
    and sizes are compared, by this process alone.
    """
    manifest, faults = _outside(where)
    if not contents:
        return Examined(manifest, faults)
    if manifest is not None:
        faults += _inside(where, _share(manifest.files))
    return Examined(manifest, _agreed(faults))


def read_meta(where: Path, manifest: Manifest) -> dict[str, Any]:
    """The content of meta.json, as `save` was given it. Raises CheckpointError where it cannot be
    read or was changed."""
    file = where / META
    data = read_bytes(file, error=CheckpointError, most_bytes=_MOST_META)
    if digests.of_bytes(data) != manifest.files[META]:
        raise CheckpointError(f"{file} is damaged: its digest is not the manifest's")
    try:
        meta = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is damaged: it cannot be read ({cause(error)})") from error
    if not isinstance(meta, dict):
        raise CheckpointError(f"{file} is damaged: it holds no JSON object")
    return meta


def set_aside(found: Sound) -> list[Path]:
    """Where the damaged checkpoints that were passed over lie now: renamed, so that the run does
    not write over them.

    One that cannot be renamed stays where it is.
    """
    out = []
    for path in found.damaged:
        name = SET_ASIDE + path.name.removeprefix(".old_")
        names = (name, *(f"{name}_{i}" for i in range(2, 1000)))
        try:
            free = next(n for n in names if not path.with_name(n).exists())
            out.append(path.rename(path.with_name(free)))
        except OSError as error:
            logger.warning("%s is damaged and could not be renamed: %s", path, error)
    return out


def _outside(where: Path) -> Examined:
    """What can be seen without the files' contents."""
    try:
        manifest = manifests.read(where)
    except CheckpointError as error:
        return Examined(None, [str(error)])
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
    there = {str(x.relative_to(where)) for x in (where / ARRAYS).rglob("*") if not x.is_dir()}
    extra = sorted(there - {_COMMITTED, *manifest.files})
    faults += [f"{name} was not written with it" for name in extra]
    return Examined(manifest, faults)


def _share(files: dict[str, Digest]) -> dict[str, Digest]:
    """The files whose digests this process compares.

    Where there are as many processes as wrote the checkpoint, these are the files that a process of
    this number wrote: it will read its arrays from them, out of memory then. Otherwise the files
    are dealt out by size.
    """
    number, count = jax.process_index(), jax.process_count()
    writers = {name: manifests.writer_of(name) for name in files}
    if {writer for writer in writers.values() if writer is not None} == set(range(count)):
        return {name: files[name] for name, writer in writers.items() if (writer or 0) == number}
    ordered = sorted(files, key=lambda name: (-files[name].size, name))
    return {name: files[name] for name in ordered[number::count]}


def _inside(where: Path, files: dict[str, Digest]) -> list[str]:
    """Which of these files have another content; those without the right size are told already."""
    whole = [name for name in files if (where / name).is_file()]  # reading a pipe would wait
    try:
        found = digests.of_files(where, whole)
    except OSError as error:
        return [f"a file cannot be read: {error}"]
    return [
        f"{name} was changed after it was written: its digest does not fit"
        for name, digest in found.items()
        if digest.size == files[name].size and digest != files[name]
    ]


def _agreed(faults: list[str]) -> list[str]:
    """The faults that any process found."""
    told = (json.loads(part) for part in distributed.all_gather_bytes(json.dumps(faults).encode()))
    return list(dict.fromkeys(fault for part in told for fault in part))


def _few(faults: list[str]) -> str:
    more = len(faults) - _SHOWN
    return "; ".join(faults[:_SHOWN] + ([f"and {more} more"] if more > 0 else []))
