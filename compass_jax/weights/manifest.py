"""The manifest of a checkpoint: its step, model, leaves, and a digest of every file and of itself.

    {"format": 2, "step": 12, "model": {...}, "leaves": {path: [shape, dtype]},
     "files": {name: [bytes, digest]}, "digest": "..."}

`digest` is that of the text before it, closed by a brace. It is written last, so that a manifest
that was cut off has none.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax.numpy as jnp

from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.io import from_plain, to_plain
from compass_jax.errors import CompassError
from compass_jax.untrusted import parse_json, read_text
from compass_jax.weights import digests
from compass_jax.weights.digests import Digest

FORMAT = 2
UNVERIFIED = 1  # the format before, without digests
NAME, META, ARRAYS = "manifest.json", "meta.json", "arrays"
_KEYS: dict[int, tuple[str, ...]] = {UNVERIFIED: ("format", "step", "model", "leaves")}
_KEYS[FORMAT] = (*_KEYS[UNVERIFIED], "files", "digest")
_OWN_DIGEST = re.compile(r', "digest": "([0-9a-f]{32})"\}\Z')
_OWN_FOLDER = re.compile(rf"{ARRAYS}/ocdbt\.process_(\d{{1,9}})/")
_DTYPE = re.compile(r"bool|(u?int|b?float|complex)\d+\w*")
_MOST_AXES = 32
_MOST_BYTES = 2**60  # of one leaf


class CheckpointError(CompassError, RuntimeError):
    """A checkpoint could not be written, found or read; the message names the path and what to
    do."""


class NoCheckpoint(CheckpointError):
    """The folder that a person named has no checkpoint, or not the one that was asked for."""

    exit_status = 2


class Manifest(NamedTuple):
    """What a checkpoint holds: `leaves` maps each leaf's path to (shape, dtype name), `files` each
    file's name to its digest.

    `files` is None in a checkpoint of format 1, which had no digests.
    """

    step: int
    model: ModelConfig
    leaves: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, Digest] | None


def to_text(manifest: Manifest) -> str:
    """The manifest as it is written; `read` gives an equal one back."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "model": to_plain(manifest.model),
        "leaves": {name: [list(shape), dtype] for name, (shape, dtype) in manifest.leaves.items()},
        "files": {name: list(digest) for name, digest in (manifest.files or {}).items()},
    }
    text = json.dumps(content)
    return f'{text[:-1]}, "digest": "{_digest(text)}"}}'


def read(where: Path) -> Manifest:
    """The manifest of the checkpoint in the directory `where`.

    Raises CheckpointError, naming the file and the key, where it is missing, was changed, or is of
    another form.
    """
    file = where / NAME
    text = read_text(file, error=CheckpointError)
    own = _OWN_DIGEST.search(text)
    if own is not None and _digest(text[: own.start()] + "}") != own[1]:
        raise CheckpointError(f"{file} was changed after it was written: its digest does not fit")
    data = parse_json(text, str(file), error=CheckpointError)
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} holds {_shown(data)}, a JSON object is expected")
    form = data.get("format")
    if type(form) is not int or form not in _KEYS:
        known = f"this version reads formats {UNVERIFIED} and {FORMAT}"
        raise CheckpointError(f"{file}: written in format {_shown(form)}; {known}")
    for name in _KEYS[form]:
        if name not in data:
            raise CheckpointError(f"{file}: the key {name!r} is missing")
    if unknown := sorted(set(data) - set(_KEYS[form])):
        raise CheckpointError(
            f"{file}: the key {_shown(unknown[0])} belongs to no manifest of format {form}"
        )
    if form == FORMAT and own is None:
        raise CheckpointError(f"{file}: its digest is not its last key, or of another form")
    step = data["step"]
    if type(step) is not int or step < 0:
        raise CheckpointError(f"{file}: step = {_shown(step)}, a number of steps is expected")
    files = None if form == UNVERIFIED else _files(data["files"], file)
    return Manifest(step, _model(data["model"], file), _leaves(data["leaves"], file), files)


def writer_of(name: str) -> int | None:
    """The process that wrote a file of the arrays; None for what belongs to all of them."""
    match = _OWN_FOLDER.match(name)
    return int(match[1]) if match else None


def _digest(text: str) -> str:
    return digests.of_bytes(text.encode()).value


def _model(data: Any, file: Path) -> ModelConfig:
    try:
        model = from_plain(ModelConfig, data)
        model.validate()
    except ConfigError as error:
        raise CheckpointError(f"{file}: model: {error}") from error
    if not isinstance(model, ModelConfig):
        raise CheckpointError(f"{file}: model = {_shown(data)}, a JSON object is expected")
    return model


def _leaves(data: Any, file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    found = {}
    for name, entry in _entries(data, "leaves", file):
        shape, dtype = _pair(entry, f"{file}: leaves: {name[:200]}", "a shape and a dtype")
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise CheckpointError(f"{file}: leaves: {name[:200]}: {_shown(shape)} is no shape")
        size = _bytes_of(dtype)
        if size is None:
            raise CheckpointError(f"{file}: leaves: {name[:200]}: {_shown(dtype)} is no dtype")
        if len(shape) > _MOST_AXES or math.prod(shape) * size > _MOST_BYTES:
            raise CheckpointError(
                f"{file}: leaves: {name[:200]}: no array has shape {_shown(shape)}"
            )
        found[name] = (tuple(shape), dtype)
    return found


def _files(data: Any, file: Path) -> dict[str, Digest]:
    found = {}
    for name, entry in _entries(data, "files", file):
        size, value = _pair(entry, f"{file}: files: {name[:200]}", "a size and a digest")
        path = PurePosixPath(name)
        inside = path.parts[:1] == (ARRAYS,) and ".." not in path.parts and str(path) == name
        if name != META and not inside:
            raise CheckpointError(f"{file}: files: {_shown(name)} is no file of a checkpoint")
        if type(size) is not int or not isinstance(value, str) or not 0 <= size <= _MOST_BYTES:
            raise CheckpointError(
                f"{file}: files: {name[:200]}: {_shown(entry)} is no size and digest"
            )
        found[name] = Digest(size, value)
    if META not in found:
        raise CheckpointError(f"{file}: files: {META} is missing")
    return found


def _entries(data: Any, key: str, file: Path) -> Any:
    if not isinstance(data, dict):
        raise CheckpointError(f"{file}: {key} = {_shown(data)}, a JSON object is expected")
    return data.items()


def _pair(entry: Any, where: str, what: str) -> tuple[Any, Any]:
    if not isinstance(entry, list) or len(entry) != 2:
        raise CheckpointError(f"{where}: {_shown(entry)}, {what} are expected")
    return entry[0], entry[1]


def _bytes_of(dtype: Any) -> int | None:
    """Bytes of an element; None for what is no dtype of numbers."""
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        return None
    try:
        return jnp.dtype(dtype).itemsize
    except TypeError:
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
