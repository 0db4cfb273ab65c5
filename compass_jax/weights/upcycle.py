"""Sparse upcycling: a mixture of experts from a dense model (arXiv 2212.05055)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from compass_jax.config import ConfigError, ModelConfig, MoEConfig
from compass_jax.model.families.find import find
from compass_jax.model.families.raw import UnsupportedModel
from compass_jax.weights.carried import carry_files
from compass_jax.weights.hf import checked_headers, parameters_of
from compass_jax.weights.hf_config import find_token_ids, read_hf_config, write_hf_config
from compass_jax.weights.new_folder import new_folder
from compass_jax.weights.safetensors_io import (
    Stored,
    finite,
    open_file,
    shard_files,
    widest,
    write_json,
    write_shards,
)

# Family of a dense model -> the family whose layers differ from it by their experts alone
SPARSE = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
_ROUTER = "moe.router"
_MLP = {"moe.gate": "mlp.gate", "moe.up": "mlp.up", "moe.down": "mlp.down"}


class _Origin(NamedTuple):
    """The dense model's tensor that a tensor is made from; None: the router, which is random."""

    stored: tuple[str, Stored] | None
    shape: tuple[int, ...]
    noisy: bool = False


def upcycle(
    source: str | Path,
    out: str | Path,
    experts: int,
    top_k: int,
    noise: float = 0.0,
    seed: int = 0,
) -> Path:
    """Writes a mixture of experts whose experts are copies of a dense model's MLPs, with a random
    router; returns the folder's path.

    The weights of a token's experts sum to 1, so that without noise the model computes the same
    as the dense one. One tensor is in memory at a time, and one shard while it is written.

    Args:
        source: the Hugging Face folder of a dense model of a family in `SPARSE`.
        out: the new folder.
        experts: number of experts of a layer.
        top_k: number of experts of a token.
        noise: standard deviation of the noise that is added to each expert's matrices, in standard
            deviations of the matrix.
        seed: seed of the router and the noise.

    Raises UnsupportedModel for a model that has experts already, or whose family has no counterpart
    with experts; ConfigError for numbers out of range; WeightsError for unusable weights.
    """
    source, folder = Path(source), Path(out).absolute()
    if not 0 <= noise <= 10:
        raise ConfigError(f"noise = {noise}: must be in 0..10 standard deviations of the weights")
    dense = read_hf_config(source)
    config = sparse_config(dense, experts, top_k, str(source))
    origins = _origins(source, dense, config)
    dtype = widest({x.stored[1].dtype for x in origins.values() if x.noisy and x.stored})
    types = {
        name: jnp.dtype(x.stored[1].dtype if x.stored else dtype) for name, x in origins.items()
    }
    sizes = {name: math.prod(x.shape) * types[name].itemsize for name, x in origins.items()}
    description = write_hf_config(config, dtype, find_token_ids(source))
    tensors = _tensors(origins, config.init_std, noise, seed, types)
    with new_folder(folder, sum(sizes.values())) as temporary:
        write_shards(temporary, shard_files(sizes), tensors)
        write_json(temporary / "config.json", description)
        carry_files(source, temporary)
    return folder


def sparse_config(dense: ModelConfig, experts: int, top_k: int, where: str) -> ModelConfig:
    """Returns the configuration of the mixture of experts that `dense` becomes."""
    if dense.moe is not None:
        raise UnsupportedModel(
            f"{where}: the model has {dense.moe.experts} experts already; name a dense model"
        )
    if dense.family not in SPARSE:
        pairs = ", ".join(f"{one} (to {other})" for one, other in SPARSE.items())
        raise UnsupportedModel(
            f"{where}: the family {dense.family} has no counterpart with experts in transformers;"
            f" supported: {pairs}"
        )
    moe = MoEConfig(experts=experts, top_k=top_k, ffn=dense.ffn, norm_top_k=True)
    config = replace(dense, family=SPARSE[dense.family], moe=moe)
    config.validate()
    find(config.family).check(config)
    return config


def _origins(source: Path, dense: ModelConfig, config: ModelConfig) -> dict[str, _Origin]:
    """Returns the origin of each tensor of the mixture of experts, in the order of its files."""
    stored, family = checked_headers(source, dense), find(dense.family)
    layers = _layers(config)
    origins = {}
    for name, leaf in parameters_of(config).items():
        if leaf == _ROUTER:
            origins[name] = _Origin(None, (config.mixture.experts, config.hidden))
            continue
        dense_name = family.tensor(_MLP.get(leaf, leaf)).name.format(i=layers.get(name))
        origins[name] = _Origin(
            (dense_name, stored[dense_name]), stored[dense_name].shape, leaf in _MLP
        )
    return origins


def _layers(config: ModelConfig) -> dict[str, int]:
    """Returns tensor -> its decoder layer, for the tensors of layers."""
    family, moe = find(config.family), config.mixture
    return {
        family.tensor(leaf).name.format(i=i, e=e): i
        for leaf in set(parameters_of(config).values())
        if "{i}" in family.tensor(leaf).name
        for i in range(config.layers)
        for e in range(moe.experts)
    }


def _tensors(
    origins: dict[str, _Origin],
    init_std: float,
    noise: float,
    seed: int,
    types: dict[str, np.dtype],
) -> Iterator[np.ndarray]:
    """Yields the tensors in the order of `origins`."""
    rng = np.random.default_rng(seed)
    for name, origin in origins.items():
        dtype = types[name]
        if origin.stored is None:
            yield rng.normal(0, init_std, origin.shape).astype(dtype)
            continue
        dense_name, stored = origin.stored
        with open_file(stored.file) as handle:
            values = stored.read(handle, dense_name, (slice(None),) * len(stored.shape))
        if origin.noisy and noise:
            wide = values.astype(np.float32)
            values = wide + rng.normal(0, noise * wide.std(), wide.shape).astype(np.float32)
        yield finite(values, dtype, f"{stored.file}: tensor {dense_name} for {name}")
