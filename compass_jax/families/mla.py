"""Multi-head latent attention in a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from compass_jax.aliases import JsonObject
from compass_jax.config import MLAConfig, ModelConfig
from compass_jax.families.raw import Raw

# Field of MLAConfig -> key of config.json.
MLA_KEYS: Mapping[str, str] = {
    "kv_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "q_rank": "q_lora_rank",
    "interleaved": "rope_interleave",
}
NOPE_KEY = "qk_nope_head_dim"  # the number of channels of a head without rotation


def read_mla(raw: Raw, keys: Mapping[str, str]) -> MLAConfig:
    """Returns the latent attention of a config.json; a q_rank of null is 0."""
    return MLAConfig(
        kv_rank=raw.integer(keys["kv_rank"]),
        rope_dim=raw.integer(keys["rope_dim"]),
        value_dim=raw.integer(keys["value_dim"]),
        q_rank=raw.integer(keys["q_rank"], 0),
        interleaved=raw.flag(keys["interleaved"]),
    )


def written_mla(config: ModelConfig, keys: Mapping[str, str], head_dim: str) -> JsonObject:
    """Returns the keys of latent attention in config.json, `head_dim` the key of the head's
    width.
    """
    if config.mla is None:
        return {}
    values = dataclasses.asdict(config.mla)
    values["q_rank"] = config.mla.q_rank or None
    width = config.head_dim - (config.mla.rope_dim if head_dim == NOPE_KEY else 0)
    return {key: values[field] for field, key in keys.items()} | {head_dim: width}
