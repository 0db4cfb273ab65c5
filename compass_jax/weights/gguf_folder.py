"""Conversion of a GGUF file (llama.cpp's format) into a Hugging Face folder, by the package gguf.

Quantised tensors are dequantised. `config.json` comes from the file's metadata, the tokenizer and
its chat template from `gguf_tokenizer`.
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

from compass_jax.aliases import Json, JsonMapping, JsonObject, Tree
from compass_jax.extras import how_to_install
from compass_jax.families.raw import UnsupportedModel, WeightsError
from compass_jax.weights.gguf_tokenizer import tokenizer_files
from compass_jax.weights.hf import parameters_of
from compass_jax.weights.hf_config import config_from_dict, write_hf_config
from compass_jax.weights.new_folder import new_folder
from compass_jax.weights.safetensors_io import (
    DTYPES,
    finite,
    plan_shards,
    shard_names,
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
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ROPE_FACTORS = "rope_freqs.weight"  # one factor for each frequency
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}


class GGUFFile:
    """An open GGUF file: its metadata, and its tensors, which are dequantised when read."""

    def __init__(self, path: str | Path):
        """Raises WeightsError for a missing package, and for a file that is not readable as
        GGUF.
        """
        try:
            from gguf import GGUFReader
        except ImportError as error:
            raise WeightsError(
                f"reading a GGUF file needs the package gguf: {how_to_install('gguf', 'gguf')}"
            ) from error
        self.path = Path(path)
        if not self.path.is_file():
            raise WeightsError(f"{path} does not exist, or is no file: a GGUF file is expected")
        try:
            self._reader = GGUFReader(self.path)
            names = {name: field.contents() for name, field in self._reader.fields.items()}
        except (ValueError, IndexError, OverflowError, MemoryError, OSError, KeyError) as error:
            raise WeightsError(
                f"{path} could not be read as a GGUF file ({str(error)[:200]}): it is truncated or"
                " damaged, or has a quantisation that the installed package gguf does not know;"
                " download it again"
            ) from error
        self.metadata: JsonObject = names
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.read = lru_cache(maxsize=1)(self._read)  # a layer's experts share one tensor

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    @property
    def names(self) -> set[str]:
        """The names of the tensors."""
        return set(self._tensors)

    def value(self, key: str) -> Tree:
        """Returns a value of the metadata. Raises WeightsError if it is absent."""
        if key not in self.metadata:
            raise WeightsError(f"{self.path} has no {key}, which the model's config needs")
        return self.metadata[key]

    def rows(self, name: str) -> int:
        """Returns the number of rows of a matrix. Raises WeightsError if it is absent."""
        if name not in self:
            raise WeightsError(f"{self.path} lacks the tensor {name}, which the model needs")
        return int(self._tensors[name].shape[-1])  # GGUF lists the fastest axis first

    def _read(self, name: str) -> np.ndarray:
        from gguf.quants import dequantize

        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise WeightsError(
                f"{self.path}: the tensor {name} is quantised as {tensor.tensor_type.name}, which"
                " the package gguf cannot dequantise; take a file of another quantisation"
            ) from error
        return values.reshape(tuple(reversed(tensor.shape.tolist())))


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
    names = parameters_of(config)
    places = {name: _place(file, name, raw) for name in names}
    _check_tensors(file, places)
    folder, size = Path(out).absolute(), jnp.dtype(dtype).itemsize
    sizes = {name: file_size * size for name, file_size in _counts(file, places).items()}
    shards = plan_shards(sizes, 4_000_000_000)
    tokenizer = tokenizer_files(file.metadata, str(source))
    with new_folder(folder, sum(sizes.values())) as temporary:
        files = dict(zip(shard_names(len(shards)), shards, strict=True))
        write_shards(temporary, files, _tensors(file, places, raw, dtype))
        ids = {name: raw.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        write_json(temporary / "config.json", write_hf_config(config, dtype, ids))
        for name, content in tokenizer.items():
            write_json(temporary / name, content)
    return folder


def config_json(file: GGUFFile) -> JsonObject:
    """Returns the config.json that a file's metadata and tensors describe."""
    arch = file.value("general.architecture")
    name = "mixtral" if arch == "llama" and file.metadata.get("llama.expert_count") else arch
    if name not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path}: general.architecture = {str(arch)[:80]!r} is not supported (supported:"
            f" {', '.join(ARCHITECTURES)}); convert it to a Hugging Face folder first"
        )
    model_type, constants = ARCHITECTURES[name]
    raw: JsonObject = {"model_type": model_type, "hidden_act": "silu", **constants}
    raw |= {key: _plain(file.value(f"{arch}.{field}")) for field, key in _SIZES.items()}
    raw |= {
        key: _plain(file.metadata[f"{arch}.{field}"])
        for field, key in _OPTIONAL.items()
        if f"{arch}.{field}" in file.metadata
    }
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    raw.setdefault("intermediate_size", raw.get("moe_intermediate_size"))
    raw.setdefault("rope_theta", 10_000.0)
    experts = file.metadata.get(f"{arch}.expert_count")
    if experts:
        raw["num_local_experts" if model_type == "mixtral" else "num_experts"] = int(experts)
    if model_type == "mixtral":
        raw.pop("moe_intermediate_size", None)
    if model_type == "llama":
        raw["attention_bias"] = "blk.0.attn_q.bias" in file
    tokens = file.value("tokenizer.ggml.tokens")
    raw["vocab_size"] = file.rows("token_embd.weight")
    if len(tokens) != raw["vocab_size"]:
        raise WeightsError(
            f"{file.path}: the tokenizer has {len(tokens)} tokens, the embedding"
            f" {raw['vocab_size']} rows; the file is inconsistent"
        )
    raw["tie_word_embeddings"] = "output.weight" not in file
    raw |= _rope_scaling(file, arch, raw)
    for key, field in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        if (token := file.metadata.get(f"tokenizer.ggml.{field}_token_id")) is not None:
            raw[f"{key}_token_id"] = int(token)
    return raw


def _plain(value: Json) -> int | float:
    """Returns a number of the metadata; a float32 becomes the decimal number it was written from
    (1e-05 instead of 9.999999747378752e-06).
    """
    return float(str(np.float32(value))) if isinstance(value, float) else int(value)


def _rope_scaling(file: GGUFFile, arch: str, raw: JsonMapping) -> JsonObject:
    """Returns the `rope_scaling` of a file's metadata. Llama 3 has a tensor of factors instead,
    which must be those of its published rule.
    """
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if _ROPE_FACTORS in file:
        return {"rope_scaling": _llama3_scaling(file, raw)}
    if kind == "none":
        return {}
    scaling: JsonObject = {
        "rope_type": kind,
        "factor": _plain(file.value(f"{arch}.rope.scaling.factor")),
    }
    original = file.metadata.get(f"{arch}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = int(original)
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

    arch = file.value("general.architecture")
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


def _check_tensors(file: GGUFFile, places: Mapping[str, tuple[str, int | None]]) -> None:
    """Raises WeightsError for tensors that the model needs and the file lacks, or the reverse."""
    needed = {name for name, _ in places.values()}
    if missing := sorted(needed - file.names):
        raise WeightsError(
            f"{file.path} lacks {len(missing)} tensors that the model needs, such as {missing[0]}"
        )
    if extra := sorted(file.names - needed - {_ROPE_FACTORS}):
        raise UnsupportedModel(
            f"{file.path} has {len(extra)} tensors that a model of this config does not have, such"
            f" as {extra[0]}"
        )


def _counts(file: GGUFFile, places: Mapping[str, tuple[str, int | None]]) -> dict[str, int]:
    counts = {}
    for name, (stored, expert) in places.items():
        shape = file._tensors[stored].shape
        # The fastest axis is first, so the expert is the last.
        counts[name] = math.prod(map(int, shape[:-1] if expert is not None else shape))
    return counts


def _tensors(
    file: GGUFFile,
    places: Mapping[str, tuple[str, int | None]],
    raw: JsonMapping,
    dtype: str,
) -> Iterator[np.ndarray]:
    """Yields the tensors in Hugging Face's layout, in the order of `places`."""
    rotated = {"attn_q.": "num_attention_heads", "attn_k.": "num_key_value_heads"}
    llama = file.value("general.architecture") == "llama"
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
