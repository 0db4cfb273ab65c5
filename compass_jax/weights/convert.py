"""Conversion of a Hugging Face folder to a checkpoint and back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from compass_jax.devices.distributed import in_main_process
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights import checkpoint
from compass_jax.weights.average import average_notice
from compass_jax.weights.carried import carried_files, carry_files
from compass_jax.weights.hf import import_notices, lazy_params, save_params
from compass_jax.weights.hf_config import read_hf_config
from compass_jax.weights.safetensors_io import read_headers
from compass_jax.weights.start import (
    VOCAB_ROWS,
    in_vocabulary,
    open_params,
    tokenizer_beside,
)
from compass_jax.weights.types import IMPORTED_FROM, changed_types


def import_hf(
    source: str | Path,
    out: str | Path,
    dtype: str | None = None,
    family: str | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    """Converts a Hugging Face folder into a checkpoint of step 0 under `out`; returns its path.

    The tokenizer is copied to `out/tokenizer`. The parameters are read and written in chunks, none
    of which a device holds. Several processes, which all make this call, share the chunks.

    Args:
        source: the Hugging Face folder.
        out: the run directory of the checkpoint.
        dtype: type of the stored parameters; None keeps the files' types, so that an export gives
            identical tensors bit for bit, unless the layers of a parameter have several.
        family: the model family as in `model.family`, such as a custom `path/file.py:FAMILY`; None
            selects the built-in family of the folder's model type.
        tell: receives notices of layers that the import leaves out, and of tensors that it
            dequantises.

    Raises WeightsError for a folder that cannot be used and for an `out` that already holds a
    checkpoint.
    """
    source, out = Path(source), Path(out)
    if checkpoint.latest(out) is not None:
        raise WeightsError(f"{out} already holds a checkpoint: choose another folder, or remove it")
    # Called for its error, before anything is written.
    carried_files(source)
    config = read_hf_config(source, family)
    for notice in import_notices(read_headers(source), config):
        tell(notice)
    params = lazy_params(source, config, dtype)
    in_main_process(partial(_copy_tokenizer, source, out / "tokenizer"))
    return checkpoint.save(
        out, 0, {"params": params}, {IMPORTED_FROM: str(source.absolute())}, model=config
    )


def _copy_tokenizer(source: Path, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WeightsError(f"{folder} could not be made: {error.strerror or error}") from error
    carry_files(source, folder)


def export_hf(
    path: str | Path,
    out: str | Path,
    dtype: str | None = None,
    tokenizer: str | Path | None = None,
    replace: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> Path:
    """Writes the parameters of a checkpoint as a Hugging Face folder; returns its path.

    The parameters are read and written in parts, without a device: a process holds one of the
    folder's files, and one layer of one parameter. Adapters are first merged into their base, which
    takes the whole model's memory. Several processes, which all make this call,
    share the files among them. For a randomly initialised model, rows beyond the tokenizer's ids
    are dropped (`start.vocab_rows`).

    Args:
        path: a run directory (newest checkpoint) or one checkpoint.
        out: the new folder.
        dtype: type of the weights; None keeps the type of each of the checkpoint's parameters.
        tokenizer: the folder to copy the tokenizer from; None uses `tokenizer` of the run
            directory, if present.
        replace: whether `out` may replace an existing folder.
        tell: receives a line where the weights are the average that the run kept, and one where
            tensors have another type than in the Hugging Face folder that the checkpoint began
            with.

    Raises the errors of `open_params` and `save_params`.
    """
    params, config = open_params(path)
    if line := average_notice(path):
        tell(line)
    rows = checkpoint.read_meta(path).get(VOCAB_ROWS, config.vocab_size)
    params, config = in_vocabulary(params, config, rows)
    tokenizer = tokenizer_beside(path) if tokenizer is None else tokenizer
    folder = save_params(params, config, out, dtype, tokenizer_from=tokenizer, replace=replace)
    if dtype is None and (line := changed_types(path, folder, config)):
        tell(line)
    return folder
