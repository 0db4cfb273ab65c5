"""Models and Hugging Face folders that several test files write, read and compare."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.model.params import abstract_params
from compass_jax.weights.hf_config import write_hf_config

MOE = ModelConfig(
    family="qwen3_moe",
    vocab_size=40,
    hidden=16,
    layers=5,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=20,
    max_positions=64,
    moe=MoEConfig(experts=3, top_k=2, ffn=10, sparse_step=2, dense_layers=(3,)),
)
TIED = dataclasses.replace(
    MOE, family="qwen3", moe=None, layers=2, tie_embeddings=True, qkv_bias=True, o_bias=True
)
QWEN2 = dataclasses.replace(
    MOE, family="qwen2", moe=None, layers=2, head_dim=4, qk_norm=False, qkv_bias=True
)


def random_params(config, dtype="float32", seed=0):
    """Returns parameters in which every leaf is random, so that no two tensors are equal."""
    leaves, structure = jax.tree.flatten(abstract_params(config, dtype))
    rng = np.random.default_rng(seed)
    return structure.unflatten([jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in leaves])


def tensors_of(folder):
    """Returns the arrays of a folder by tensor name, read by safetensors' reader."""
    tensors = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="np") as handle:
            assert handle.metadata() == {"format": "pt"}
            tensors |= {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    return tensors


def assert_same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def write_folder(folder, config, tensors, shards=1):
    """Writes a model's folder with safetensors' own writer, with an index if it is sharded."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(write_hf_config(config)))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    files = {
        name: f"model-{i % shards + 1:05d}-of-{shards:05d}.safetensors"
        for i, name in enumerate(names)
    }
    for file in set(files.values()):
        save_file(
            {name: tensors[name] for name in names if files[name] == file},
            folder / file,
            {"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": files})
    )
    return folder
