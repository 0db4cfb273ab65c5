"""Conversion of a GGUF file (llama.cpp's format) into a Hugging Face folder, by the package gguf.

Quantised tensors are dequantised. `config.json` comes from the file's metadata, of which every key
that changes what the model computes is read or refused by name; the tokenizer and its chat template
come from `gguf_tokenizer`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from compass_jax.base.aliases import Json, JsonMapping, JsonObject, Tree
from compass_jax.base.extras import how_to_install
from compass_jax.config.model import ModelConfig
from compass_jax.config.ranges import describe_value
from compass_jax.model.families.raw import REQUIRED, Raw, UnsupportedModel, WeightsError
from compass_jax.weights.gguf_tokenizer import tokenizer_files
from compass_jax.weights.hf import tensor_leaves
from compass_jax.weights.hf_config import config_from_dict, write_hf_config
from compass_jax.weights.new_folder import new_folder
from compass_jax.weights.safetensors_io import (
    DTYPES,
    finite,
    shard_files,
    write_json,
    write_shards,
)

# llama.cpp's architecture -> the model type, and its values that the file does not carry
ARCHITECTURES: Mapping[str, tuple[str, JsonMapping]] = {
    "llama": ("llama", {"mlp_bias": False}),
    "mixtral": ("mixtral", {}),  # "llama" with experts
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"attention_bias": False}),
    # llama.cpp always normalises the weights of this architecture's experts
    "qwen3moe": ("qwen3_moe", {"attention_bias": False, "norm_topk_prob": True}),
}
# Key of the metadata, after the architecture -> key of config.json
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_OPTIONAL = {
    "feed_forward_length": "intermediate_size",  # absent where every layer has experts
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# Further keys after the architecture, and the values with which they change nothing. A key that is
# neither read nor here is refused.
_NEUTRAL: Mapping[str, tuple[Json, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),  # softmax
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0, 1),
    "final_logit_softcapping": (0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0, 1),
    "nextn_predict_layers": (0,),
    "residual_scale": (0, 1),
    "rope.scale_linear": (0, 1),
    "rope.scaling.attn_factor": (0, 1),
    "rope.scaling.finetuned": (True, False),
    "rope.scaling.yarn_attn_factor": (1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "tensor_data_layout": ("Meta AI original pth",),  # the layout that `_half_rotation` takes
    "use_parallel_residual": (False,),
}
_SCALING = ("type", "factor", "original_context_length")  # after rope.scaling
_READ = {*_SIZES, *_OPTIONAL, "expert_count", *(f"rope.scaling.{key}" for key in _SCALING)}
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"blk\.(\d+)\.")
_ROPE_FACTORS = "rope_freqs.weight"  # one factor for each frequency
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class GGUFFile:
    """An open GGUF file: its metadata, and its tensors, which are dequantised when read."""

    def __init__(self, path: str | Path):
        """Raises WeightsError for a missing package, and for a file that is not readable as
        GGUF.
        """
        try:
            from compass_jax.weights.gguf_header import read_header
        except ImportError as error:
            raise WeightsError(
                f"reading a GGUF file needs the package gguf: {how_to_install('gguf', 'gguf')}"
            ) from error
        self.path = Path(path)
        if not self.path.is_file():
            raise WeightsError(f"{path} does not exist, or is no file: a GGUF file is expected")
        self.metadata, self.tensors = read_header(self.path)
        self.values = Raw(self.metadata, str(path))
        self.read = lru_cache(maxsize=1)(self._read)  # a layer's experts share one tensor

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def text(self, key: str) -> str:
        """Returns a text of the metadata. Raises WeightsError if it is absent."""
        return self.values.typed(key, (str,), REQUIRED)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor. Raises WeightsError if it is absent."""
        if name not in self:
            raise WeightsError(f"{self.path} lacks the tensor {name}, which the model needs")
        return self.tensors[name].shape

    def _read(self, name: str) -> np.ndarray:
        from gguf import GGML_QUANT_SIZES
        from gguf.quants import dequantize

        tensor = self.tensors[name]
        block, size = GGML_QUANT_SIZES[tensor.kind]
        *rows, width = tensor.shape
        with open(self.path, "rb") as file:
            file.seek(tensor.start)
            data = np.frombuffer(file.read(tensor.size), np.uint8)
        try:
            values = dequantize(data.reshape(*rows, width // block * size), tensor.kind)
        except NotImplementedError as error:
            raise WeightsError(
                f"{self.path}: the tensor {name} is quantised as {tensor.kind.name}, which the"
                " package gguf cannot dequantise; take a file of another quantisation"
            ) from error
        return values.reshape(tensor.shape)


def import_gguf(source: str | Path, out: str | Path, dtype: str = "float32") -> Path:
    """Writes the model of a GGUF file as a Hugging Face folder; returns its path.

    Args:
        source: the GGUF file, of one of `ARCHITECTURES`.
        out: the new folder.
        dtype: type of the stored weights. Float32 holds every quantised value exactly.

    Raises UnsupportedModel for an architecture or tokenizer that is not supported, and WeightsError
    for a file that is damaged or inconsistent, and for an `out` that is not empty.
    """
    if dtype not in DTYPES.values():
        raise WeightsError(f"dtype = {dtype!r}: expected one of {', '.join(DTYPES.values())}")
    file = GGUFFile(source)
    raw = config_json(file)
    config = config_from_dict(raw, str(source))
    _check_keys(file, config)
    shapes = {x: leaf.tensor_shape for leaf in tensor_leaves(config)[0] for x in leaf.names.flat}
    places = {name: _place(file, name, raw) for name in shapes}
    _check_tensors(file, places, shapes)
    folder, size = Path(out).absolute(), jnp.dtype(dtype).itemsize
    sizes = {name: math.prod(shape) * size for name, shape in shapes.items()}
    tokenizer = tokenizer_files(file.metadata, str(source))
    with new_folder(folder, sum(sizes.values())) as temporary:
        write_shards(temporary, shard_files(sizes), _tensors(file, places, raw, dtype))
        ids = {name: raw.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(temporary / "config.json", write_hf_config(config, dtype, ids))
        for name, content in tokenizer.items():
            write_json(temporary / name, content)
    return folder


def config_json(file: GGUFFile) -> JsonObject:
    """Returns the config.json that a file's metadata and tensors describe."""
    arch, values = file.text("general.architecture"), file.values
    name = "mixtral" if arch == "llama" and file.metadata.get("llama.expert_count") else arch
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture = {arch[:80]!r} is not supported (supported:"
            f" {', '.join(ARCHITECTURES)}); convert it to a Hugging Face folder first"
        )
    model_type, constants = ARCHITECTURES[name]
    raw: JsonObject = {"model_type": model_type, "hidden_act": "silu", **constants}
    raw |= {key: _plain(file, f"{arch}.{field}") for field, key in _SIZES.items()}
    raw |= {
        key: _plain(file, f"{arch}.{field}")
        for field, key in _OPTIONAL.items()
        if f"{arch}.{field}" in file.metadata
    }
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("intermediate_size", raw.get("moe_intermediate_size"))
    raw.setdefault("rope_theta", 10_000.0)
    if experts := _experts(file, arch):
        raw["num_local_experts" if model_type == "mixtral" else "num_experts"] = experts
    if model_type == "mixtral":
        raw.pop("moe_intermediate_size", None)
    if model_type == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in file
    _check_layers(file, raw["num_hidden_layers"])
    tokens = values.typed("tokenizer.ggml.tokens", (list,), REQUIRED)
    raw["vocab_size"] = file.shape("token_embd.weight")[0]
    if len(tokens) != raw["vocab_size"]:
        raise WeightsError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, the embedding"
            f" {raw['vocab_size']} rows; the file is inconsistent"
        )
    raw["tie_word_embeddings"] = "output.weight" not in file
    raw |= _rope_scaling(file, arch, raw)
    for key, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = values.integer(f"tokenizer.ggml.{field}_token_id", -1)
        if token != -1:
            raw[f"{key}_token_id"] = token
    return raw


def _plain(file: GGUFFile, key: str) -> int | float:
    """Returns a number of the metadata; a float32 becomes the decimal number it was written from
    (1e-05 instead of 9.999999747378752e-06). A list has a number for each layer: all must be equal.
    """
    value = file.metadata.get(key)
    if isinstance(value, list) and value:
        if any(x != value[0] for x in value):
            raise UnsupportedModel(
                f"{file.path}: {key} has a value for each layer, and they differ; layers of"
                " different sizes are not supported"
            )
        value = value[0]
    one = Raw({} if value is None else {key: value}, str(file.path))
    number = one.typed(key, (int, float), REQUIRED)
    return float(str(np.float32(number))) if isinstance(number, float) else number


def _experts(file: GGUFFile, arch: str) -> int:
    """Returns the number of experts, which the routers have; 0 for a dense model."""
    experts, router = file.values.integer(f"{arch}.expert_count", 0), "blk.0.ffn_gate_inp.weight"
    if experts and experts != file.shape(router)[0]:
        raise WeightsError(
            f"{file.path}: {arch}.expert_count = {experts}, and {router} has"
            f" {file.shape(router)[0]} rows; the file is inconsistent"
        )
    return experts


def _check_layers(file: GGUFFile, layers: int | float) -> None:
    """Raises WeightsError unless the tensors are of that many layers."""
    numbers = {int(x[1]) for name in file.tensors if (x := _LAYER.match(name[:40]))}
    if len(numbers) != layers or max(numbers, default=-1) != layers - 1:
        raise WeightsError(
            f"{file.path}: block_count = {layers}, and its tensors are of {len(numbers)} layers;"
            " the file is inconsistent"
        )


def _check_keys(file: GGUFFile, config: ModelConfig) -> None:
    """Raises UnsupportedModel for keys of the architecture that are not read, and whose values
    change what the model computes.
    """
    arch = file.text("general.architecture")
    implied: Mapping[str, tuple[Json, ...]] = {
        "vocab_size": (config.vocab_size,),
        "rope.dimension_count": (config.head_dim,),
        "attention.value_length": (config.head_dim,),
    }
    unread = []
    for key, value in file.metadata.items():
        name = key.removeprefix(f"{arch}.")
        if name == key or name in _READ or value in {**_NEUTRAL, **implied}.get(name, ()):
            continue
        unread.append(f"{key[:80]} = {describe_value(value)}")
    if unread:
        raise UnsupportedModel(
            f"{file.path}: {', '.join(unread[:20])}: not supported, and may change what the model"
            " computes; convert the model's Hugging Face folder instead"
        )


def _rope_scaling(file: GGUFFile, arch: str, raw: JsonMapping) -> JsonObject:
    """Returns the `rope_scaling` of a file's metadata. Llama 3 has a tensor of factors instead,
    which must be those of its published rule.
    """
    kind, key = file.values.typed(f"{arch}.rope.scaling.type", (str,), "none"), "rope.scaling"
    factor = file.values.number(f"{arch}.{key}.factor", 1.0)
    if _ROPE_FACTORS in file:
        return {"rope_scaling": _llama3_scaling(file, raw)}
    if kind == "none":
        if factor not in (0, 1):
            raise UnsupportedModel(
                f"{file.path}: {arch}.{key}.factor = {factor:g} without {arch}.{key}.type; convert"
                " the model's Hugging Face folder instead"
            )
        return {}
    scaling: JsonObject = {"rope_type": kind, "factor": _plain(file, f"{arch}.{key}.factor")}
    if original := file.values.integer(f"{arch}.{key}.original_context_length", 0):
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def _llama3_scaling(file: GGUFFile, raw: JsonMapping) -> JsonObject:
    factors = file.read(_ROPE_FACTORS).reshape(-1)
    original = 8192
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    wavelength = 2 * math.pi * raw["rope_theta"] ** (np.arange(factors.size) / factors.size)
    # Low frequencies are divided by the whole factor.
    largest = float(factors.max())
    smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / largest + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModel(
            f"{file.path}: {_ROPE_FACTORS} has factors that are not Llama 3's (low and high"
            f" frequency factors {low:g} and {high:g}, original length {original}); convert the"
            " model's Hugging Face folder instead"
        )
    return {
        "rope_type": "llama3",
        "factor": largest,
        **_LLAMA3,
        "original_max_position_embeddings": original,
    }


def _place(file: GGUFFile, name: str, raw: JsonMapping) -> tuple[str, int | None]:
    """Returns the GGUF tensor that holds a Hugging Face tensor, and the expert's index in it."""
    import gguf

    arch = file.text("general.architecture")
    kinds = {value: key for key, value in gguf.MODEL_ARCH_NAMES.items()}
    names = _name_map(kinds[arch], raw["num_hidden_layers"])
    expert = _EXPERT.search(name)
    plain = _EXPERT.sub(".experts.", name)
    tensor_name = names.get_name(plain, try_suffixes=(".weight", ".bias"))
    if tensor_name is None:
        raise UnsupportedModel(f"{file.path}: GGUF has no tensor for {name}")
    return tensor_name, None if expert is None else int(expert[1])


@lru_cache(maxsize=4)
def _name_map(kind: Any, layers: int) -> Tree:
    import gguf

    return gguf.get_tensor_name_map(kind, layers)


def _check_tensors(
    file: GGUFFile,
    places: Mapping[str, tuple[str, int | None]],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Raises WeightsError for tensors that the model needs and the file lacks, or the reverse, and
    for one of another shape.
    """
    needed, stored = {name for name, _ in places.values()}, {*file.tensors}
    if missing := sorted(needed - stored):
        raise WeightsError(
            f"{file.path} lacks {len(missing)} tensors that the model needs, such as {missing[0]}"
        )
    if extra := sorted(stored - needed - {_ROPE_FACTORS}):
        raise UnsupportedModel(
            f"{file.path} has {len(extra)} tensors that a model of this config does not have, such"
            f" as {extra[0][:80]}"
        )
    for name, (place, expert) in places.items():
        shape = file.shape(place)
        if (shape if expert is None else shape[1:]) != shapes[name]:
            raise WeightsError(
                f"{file.path}: the tensor {place} has the shape {shape}, and the metadata ask for"
                f" {shapes[name]}{'' if expert is None else ' for each expert'}; the file is"
                " inconsistent"
            )


def _tensors(
    file: GGUFFile,
    places: Mapping[str, tuple[str, int | None]],
    raw: JsonMapping,
    dtype: str,
) -> Iterator[np.ndarray]:
    """Yields the tensors in Hugging Face's layout, in the order of `places`."""
    rotated = {"attn_q.": "num_attention_heads", "attn_k.": "num_key_value_heads"}
    llama = file.text("general.architecture") == "llama"
    for stored, expert in places.values():
        values = file.read(stored)
        values = values if expert is None else values[expert]
        heads = next((key for part, key in rotated.items() if part in stored), None)
        # Of the supported architectures only llama, which includes Mixtral, has reordered rows.
        if llama and heads is not None:
            values = _half_rotation(values, raw[heads])
        yield finite(values, jnp.dtype(dtype), f"{file.path}: tensor {stored}")


def _half_rotation(values: np.ndarray, heads: int) -> np.ndarray:
    """Returns a query or key projection with rows in Hugging Face's order: llama.cpp rotates pairs
    of neighbouring rows of a head, Hugging Face row i with row i + half.
    """
    pairs = values.reshape(heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
