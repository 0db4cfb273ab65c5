"""The manifest of a checkpoint: its step, model, leaves, and a digest of every file and of itself.

    {"format": 2, "step": 12, "model": {...}, "leaves": {path: [shape, dtype]},
     "files": {name: [bytes, digest]}, "digest": "..."}

`digest` is that of the text before it, closed by a brace. It is written last, so that a manifest
that was cut off has none.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.io import from_plain, to_plain
from compass_jax.errors import CompassError
from compass_jax.untrusted import parse_json, read_text
from compass_jax.weights import digests
from compass_jax.weights.digests import Digest

FORMAT = 2
NAME, META, ARRAYS = "manifest.json", "meta.json", "arrays"
_OWN_DIGEST = re.compile(r', "digest": "([0-9a-f]{32})"\}\Z')
_OWN_FOLDER = re.compile(rf"{ARRAYS}/ocdbt\.process_(\d{{1,9}})/")


class CheckpointError(CompassError, RuntimeError):
    """A checkpoint could not be written, found or read; the message names the path and what to
    do."""


class NoCheckpoint(CheckpointError):
    """The folder that a person named has no checkpoint, or not the one that was asked for."""

    exit_status = 2


class Manifest(NamedTuple):
    """The content of a checkpoint: `leaves` maps each leaf's path to (shape, dtype name), `files`
    each file's name to its digest.
    """

    step: int
    model: ModelConfig
    leaves: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, Digest]


def to_text(manifest: Manifest) -> str:
    """Returns the text of a manifest, from which `read` makes an equal one."""
    content = {
        "format": FORMAT,
        "step": manifest.step,
        "model": to_plain(manifest.model),
        "leaves": {name: [list(shape), dtype] for name, (shape, dtype) in manifest.leaves.items()},
        "files": {name: list(digest) for name, digest in manifest.files.items()},
    }
    text = json.dumps(content)
    return f'{text[:-1]}, "digest": "{_digest(text)}"}}'


def read(where: Path) -> Manifest:
    """Returns the manifest of the checkpoint in the directory `where`.

    Raises CheckpointError, naming the file, where it is missing, was changed, or is of another
    form.
    """
    file = where / NAME
    text = read_text(file, error=CheckpointError)
    own = _OWN_DIGEST.search(text)
    if own is not None and _digest(text[: own.start()] + "}") != own[1]:
        raise CheckpointError(f"{file} was changed after it was written: its digest does not fit")
    data = parse_json(text, str(file), error=CheckpointError)
    form = data.get("format") if isinstance(data, dict) else None
    if form != FORMAT:
        raise CheckpointError(f"{file}: written in format {form}; this version reads {FORMAT}")
    if own is None:
        raise CheckpointError(f"{file}: its digest is not its last key, or of another form")
    try:
        model = from_plain(ModelConfig, data["model"])
        model.validate()
        leaves = {name: (tuple(shape), dtype) for name, (shape, dtype) in data["leaves"].items()}
        files = {name: Digest(*digest) for name, digest in data["files"].items()}
        return Manifest(int(data["step"]), model, leaves, files)
    except ConfigError as error:
        raise CheckpointError(f"{file}: model: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"{file}: no manifest of format {FORMAT} ({why})") from error


def writer_of(name: str) -> int | None:
    """Returns the process that wrote a file of the arrays; None for a file of them all."""
    match = _OWN_FOLDER.match(name)
    return int(match[1]) if match else None


def _digest(text: str) -> str:
    return digests.of_bytes(text.encode()).value
