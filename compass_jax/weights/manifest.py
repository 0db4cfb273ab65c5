"""The manifest of a checkpoint: step, model, leaves, and digests of every file and of itself.

    {"format": 2, "step": 12, "model": {...}, "leaves": {path: [shape, dtype]},
     "files": {name: [bytes, digest]}, "digest": "..."}

`digest` is that of the text before it, closed by a brace. It is written last, so a truncated
manifest lacks it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from compass_jax.base.errors import CompassError
from compass_jax.base.untrusted import parse_json, read_text
from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.io import from_plain, to_plain
from compass_jax.weights import digests
from compass_jax.weights.digests import Digest

FORMAT = 2
NAME, META, ARRAYS = "manifest.json", "meta.json", "arrays"
_OWN_DIGEST = re.compile(r', "digest": "([0-9a-f]{32})"\}\Z')
_OWN_FOLDER = re.compile(rf"{ARRAYS}/ocdbt\.process_(\d{{1,9}})/")


class CheckpointError(CompassError, RuntimeError):
    """A checkpoint could not be written, found or read. The message names the path and a remedy."""


class NoCheckpoint(CheckpointError):
    """The named folder has no checkpoint, or not the requested one."""

    exit_status = 2


class Manifest(NamedTuple):
    """The content of a checkpoint. `leaves` maps each leaf's path to (shape, dtype name), and
    `files` maps each file's name to its digest.
    """

    step: int
    model: ModelConfig
    leaves: dict[str, tuple[tuple[int, ...], str]]
    files: dict[str, Digest]


def to_text(manifest: Manifest) -> str:
    """Returns the text of a manifest, which `read` parses."""
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

    Raises CheckpointError, which names the file, if it is missing, was changed, or has another
    format.
    """
    file = where / NAME
    text = read_text(file, error=CheckpointError)
    match = _OWN_DIGEST.search(text)
    if match is not None and _digest(text[: match.start()] + "}") != match[1]:
        raise CheckpointError(f"{file} was changed after it was written: its digest does not fit")
    data = parse_json(text, str(file), error=CheckpointError)
    form = data.get("format") if isinstance(data, dict) else None
    if form != FORMAT:
        raise CheckpointError(f"{file}: written in format {form}; this version reads {FORMAT}")
    if match is None:
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
    """Returns the process that wrote a file of the arrays, or None for a file that all processes
    share.
    """
    match = _OWN_FOLDER.match(name)
    return int(match[1]) if match else None


def _digest(text: str) -> str:
    return digests.of_bytes(text.encode()).value
