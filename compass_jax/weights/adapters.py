"""LoRA adapters in checkpoints and in PEFT's folders (arXiv 2106.09685)."""

from __future__ import annotations

import hashlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import ModelConfig
from compass_jax.config.io import from_plain, to_plain
from compass_jax.config.lora import LoRAConfig
from compass_jax.devices.sharding import fetch
from compass_jax.model.lora import init_adapters
from compass_jax.weights.checkpoint import CheckpointMismatch

LORA = "lora"  # key in a checkpoint's meta


def adapter_meta(lora: LoRAConfig, init_from: str, frozen: Tree | None) -> JsonObject:
    """Returns the entry of a checkpoint's meta about its adapters: their settings, and the base's
    path and fingerprint; empty for a run that trains all weights.
    """
    if frozen is None:
        return {}
    base = str(Path(init_from).absolute())
    return {LORA: {**to_plain(lora), "base": base, "fingerprint": fingerprint(frozen)}}


def check_base(path: Path, meta: JsonObject, frozen: Tree) -> None:
    """Raises CheckpointMismatch for adapters that were trained beside other weights than
    `frozen`.
    """
    saved = meta[LORA]
    if fingerprint(frozen) != saved["fingerprint"]:
        raise CheckpointMismatch(
            f"{path} has adapters of {saved['base']}, whose weights were others than those of the"
            " base that is there now: name the base that the adapters were trained on"
        )


def settings_of(saved: JsonObject) -> LoRAConfig:
    """Returns the adapters' settings from a checkpoint's meta."""
    fields = {name: saved[name] for name in ("rank", "alpha", "targets")}
    return from_plain(LoRAConfig, fields)


def fingerprint(params: Tree) -> str:
    """Returns a digest of a corner of every parameter, the same in either layout, on any mesh and
    in float32 and bfloat16.
    """

    def corner(x: jax.Array, lead: int) -> jax.Array:
        wide = x.ndim - lead > 1
        return (x[..., :4, :4] if wide else x[..., :8]).astype(jnp.bfloat16)

    digest = hashlib.sha256()
    for name, part in sorted(params.items()):
        layers = part if isinstance(part, tuple) else None
        lead = int(name.startswith("run_") and layers is None)  # stacked: an axis of layers
        corners = jax.tree.map(lambda x, n=lead: np.asarray(fetch(corner(x, n))), part)
        if layers is not None:
            corners = jax.tree.map(lambda *x: np.stack(x), *corners)
        for leaf in jax.tree.leaves(corners):
            digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()[:32]


def abstract_adapters(config: ModelConfig, lora: LoRAConfig) -> Tree:
    """Returns the structs of a checkpoint's adapters."""
    return jax.eval_shape(lambda: init_adapters(config, lora, jax.random.key(0)))
