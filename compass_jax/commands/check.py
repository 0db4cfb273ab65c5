"""`compass check DIR`: reports the faults of a run directory, a checkpoint or a Hugging Face
folder.

Prints a line for each checked part and a line for every fault, not just the first. Changes no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compass_jax.base.errors import UserError
from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.foreign import hub_hint
from compass_jax.config.io import read_config
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights import sound
from compass_jax.weights.dequantize import dequantized
from compass_jax.weights.hf import import_notices, tensor_problems
from compass_jax.weights.hf_config import read_hf_config, refuse_adapter
from compass_jax.weights.safetensors_io import DTYPES, Stored, look, not_finite, open_file

_ROWS = 4096  # rows of a tensor that are checked at once


class CheckError(UserError):
    """The path has nothing that can be checked."""


class Checked(NamedTuple):
    """One checked part: its name, its description and its faults."""

    what: str
    words: str
    faults: list[str]


def run_check(path: str | os.PathLike, family: str | None = None) -> bool:
    """Prints each checked part with its faults, and returns whether `path` is free of faults.

    family: the family that reads a Hugging Face folder; None: this package's for its model type.
    Raises CheckError for a path that is not a directory, or a directory of another kind.
    """
    faulty = 0
    for checked in check(path, family):
        print(f"{'damaged' if checked.faults else 'sound':<8} {checked.what}: {checked.words}")
        for fault in checked.faults:
            print(f"         {fault}")
        faulty += bool(checked.faults)
    print(f"{path}: {f'{faulty} damaged' if faulty else 'sound'}", flush=True)
    return not faulty


def check(path: str | os.PathLike, family: str | None = None) -> Iterator[Checked]:
    """Yields the checked parts of `path`. Raises CheckError as `run_check` does."""
    hint = hub_hint(str(path))
    path = Path(path).absolute()
    if not path.is_dir():
        raise CheckError(f"{path}: there is no such directory; {hint}".rstrip("; "))
    if sound.is_one(path):
        yield _checkpoint(path, path.name)[0]
    elif (path / "checkpoints").is_dir():
        yield from _run(path)
    elif (path / "config.json").exists() or any(path.glob("*.safetensors*")):
        yield from _hugging_face(path, family)
    else:
        refuse_adapter(path)
        kinds = "neither a run directory, nor a checkpoint, nor a Hugging Face folder"
        raise CheckError(f"{path} is {kinds}: it has no checkpoints/, manifest.json or config.json")


def _run(path: Path) -> Iterator[Checked]:
    model = None
    if (path / "config.json").exists():
        try:
            model = read_config(path).model
            yield Checked("config.json", "the configuration of the run", [])
        except (ConfigError, OSError, ValueError) as error:
            yield Checked("config.json", "the configuration of the run", [str(error)])
    checkpoints = sound.steps(path)
    for where in checkpoints.values():
        checked, checkpoint_model = _checkpoint(where, f"checkpoints/{where.name}")
        model = model or checkpoint_model
        yield checked
    for aside in sorted((path / "checkpoints").glob(f"{sound.SET_ASIDE}*")):
        words = "was set aside as damaged by a resumed run, and is used by nobody"
        yield Checked(f"checkpoints/{aside.name}", words, [])
    if not checkpoints:
        yield Checked("checkpoints", "of the run", ["there is none"])
    if (path / "tokenizer").is_dir():
        yield _tokenizer(path / "tokenizer", "tokenizer", model)


def _checkpoint(where: Path, name: str) -> tuple[Checked, ModelConfig | None]:
    manifest, faults = sound.examine(where)
    if manifest is None:
        return Checked(name, "a checkpoint", faults), None
    kind = f"{len(manifest.leaves)} leaves of a {manifest.model.family} model"
    size = sum(digest.size for digest in manifest.files.values())
    files = f"{len(manifest.files)} files, {size:,} bytes"
    return Checked(name, f"step {manifest.step}, {files}, {kind}", faults), manifest.model


def _hugging_face(folder: Path, family: str | None) -> Iterator[Checked]:
    model = None
    try:
        model = read_hf_config(folder, family)
        yield Checked("config.json", f"a {model.family} model of {model.layers} layers", [])
    except WeightsError as error:
        yield Checked("config.json", "the model", [str(error)])
    try:
        stored, faults = look(folder)
    except WeightsError as error:
        yield Checked("weights", "files and index", [str(error)])
        stored = None
    if stored is not None:
        files = len({tensor.file for tensor in stored.values()})
        words = f"headers of {len(stored)} tensors in {files} files, and their index"
        yield Checked("weights", words, faults)
        if model is not None:
            words = "names, shapes and types against config.json"
            words = "; ".join([words, *import_notices(stored, model)])
            yield Checked("tensors", words, tensor_problems(folder, model, stored))
        yield Checked(
            "values", f"every number of {len(stored)} tensors", _not_finite(dequantized(stored))
        )
    if (folder / "tokenizer.json").exists() or (folder / "tokenizer_config.json").exists():
        yield _tokenizer(folder, "tokenizer", model)
    else:
        yield Checked("tokenizer", "there is none in this folder", [])


def _not_finite(stored: dict[str, Stored]) -> list[str]:
    """Returns a line for each tensor with NaN or infinity. Reads each file once."""
    faults = []
    by_file: dict[Path, list[str]] = {}
    for name, tensor in stored.items():
        if tensor.dtype in DTYPES.values():
            by_file.setdefault(tensor.file, []).append(name)
    for file, names in by_file.items():
        with open_file(file) as handle:
            for name in names:
                parts = _parts(handle, name, stored[name])
                bad = sum(not_finite(np.ascontiguousarray(part)) for part in parts)
                if bad:
                    faults.append(f"{file.name}: tensor {name}: {bad:,} numbers are not finite")
    return faults


def _parts(handle: Any, name: str, stored: Stored) -> Iterator[np.ndarray]:
    """Yields rows of a tensor, or the matrices of a stack."""
    if not stored.shape:
        yield np.asarray(handle.get_tensor(name))
        return
    piece, rows = stored.open(handle, name), _ROWS if len(stored.shape) < 3 else 1
    for start in range(0, stored.shape[0], rows):
        yield piece[start : min(start + rows, stored.shape[0])]


def _tokenizer(folder: Path, name: str, model: ModelConfig | None) -> Checked:
    words = "tokenizer.json and tokenizer_config.json, against the model's rows"
    try:
        tokenizer = Tokenizer.load(folder)
    except TokenizerError as error:
        return Checked(name, words, [str(error)])
    faults = []
    if model is not None and tokenizer.vocab_size > model.vocab_size:
        ids = f"it has ids up to {tokenizer.vocab_size - 1}"
        faults.append(f"{ids}, and the model has rows for {model.vocab_size} alone")
    without = "" if tokenizer.has_template else ", no chat template: data and train need one"
    return Checked(name, f"{tokenizer.vocab_size} ids{without}", faults)
