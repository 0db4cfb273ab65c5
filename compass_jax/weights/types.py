"""The float types of a folder's tensors, and the notice of an export that changes them."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.io import read_config
from compass_jax.model.families.raw import WeightsError
from compass_jax.weights import checkpoint
from compass_jax.weights.hf import split_experts
from compass_jax.weights.safetensors_io import read_headers
from compass_jax.weights.start import is_checkpoint

IMPORTED_FROM = "imported_from"  # key in a checkpoint's meta


def changed_types(path: str | Path, exported: Path, model: ModelConfig) -> str:
    """Returns a line with the number of tensors of an export that have another type than in the
    Hugging Face folder that the checkpoint `path` began with, and the reason; empty where none has,
    or that folder is gone.
    """
    base, reason = _beginning(path)
    if base is None or not base.is_dir():
        return ""
    try:
        before = split_experts(read_headers(base), model)
    except WeightsError:
        return ""
    after = split_experts(read_headers(exported), model)
    changes = Counter(
        (before[name].dtype, tensor.dtype)
        for name, tensor in after.items()
        if name in before and before[name].dtype != tensor.dtype
    )
    if not changes:
        return ""
    kinds = ", ".join(f"{count} from {old} to {new}" for (old, new), count in changes.items())
    return (
        f"{changes.total()} of {len(after)} tensors have another type than in {base} ({kinds}):"
        f" {reason}"
    )


def _beginning(path: str | Path) -> tuple[Path | None, str]:
    """Returns the Hugging Face folder that a checkpoint began with, or None, and the reason for
    other types.
    """
    imported = "a checkpoint has one type for all layers of a parameter"
    trained = "the run's parameters have the type of compute.param_dtype"
    meta = checkpoint.read_meta(path)
    if IMPORTED_FROM in meta:
        return Path(meta[IMPORTED_FROM]), imported
    with contextlib.suppress(ConfigError):
        config = read_config(checkpoint.locate(path).parent.parent)
        base = Path(config.init_from) if config.init_from else None
        if base is not None and is_checkpoint(base):
            source = checkpoint.read_meta(base).get(IMPORTED_FROM)
            base = None if source is None else Path(source)
        return base, trained
    return None, trained
