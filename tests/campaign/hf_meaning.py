"""What a Hugging Face folder means, key by key of config.json and by the letter of the
safetensors format.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from .strict import DEEP, depth, strict_json
from .world import HF_CONFIG, read_safetensors, tensor_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


# What may stand in config.json beside the sound values, with other maths or numbers that the
# weights fit to.
LEGAL = {
    "rms_norm_eps": [1e-5, 1e-8],
    "rope_theta": [500000.0, 10000],
    "max_position_embeddings": [512, 300],
    "initializer_range": [0.02, 0.5],
    "norm_topk_prob": [False],
    "num_experts_per_tok": [1, 3, 4],
    "eos_token_id": [1, 337],
    "bos_token_id": [0],
    "pad_token_id": [2],
}


# Keys that say nothing about what is computed, at any value of their type.
HARMLESS_KEYS = {
    "transformers_version": "4.51.0",
    "_name_or_path": "x/y",
    "use_cache": False,
    "torch_dtype": "bfloat16",
    "dtype": "float32",
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
    "architectures": ["Other"],
    "max_window_layers": 28,
    "sliding_window": None,
}


# Keys that describe other maths.
OTHER_MATHS = {
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "shared_expert_intermediate_size": 16,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "logit_softcapping": 30.0,
    "clip_qkv": 8.0,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "use_sliding_window": True,
    "partial_rotary_factor": 0.5,
    "hidden_act": "gelu",
    "scoring_func": "sigmoid",
    "n_shared_experts": 1,
    "quantization_config": {"bits": 4},
    "num_nextn_predict_layers": 1,
    "layer_types": ["sliding_attention"] * 2,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.2,
    "embedding_multiplier": 12.0,
    "logits_scaling": 8.0,
    "query_pre_attn_scalar": 144,
    "mlp_bias": True,
    "frobnicate": 1,
    "moe_layer_freq": 2,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0},
    "is_causal": False,
    "model_type": "llama",
    "alibi": True,
}


# Keys whose odd values may mean what is computed anyway, or nothing at all: what comes out must
# be what comes out undisturbed.
_NO_EFFECT = {
    "use_cache",
    "torch_dtype",
    "architectures",
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "rope_scaling",
}


_NO_EFFECT |= {
    "use_sliding_window",
    "mlp_only_layers",
    "decoder_sparse_step",
    "attention_bias",
    "initializer_range",
    "max_position_embeddings",
}


SIZES = (
    "num_hidden_layers",
    "num_experts",
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "intermediate_size",
    "moe_intermediate_size",
    "head_dim",
)


def with_parts(sound: dict, config: dict | None = None, tensors: dict | None = None) -> dict:
    return {
        **sound,
        "config": sound["config"] | (config or {}),
        "tensors": tensors or sound["tensors"],
    }


def config_meaning(text: str, key: str, sound: dict) -> list[Any]:
    """What an odd value of a key may be accepted with: its own number where that is legal, or
    nothing else than before where it has no effect.
    """
    try:
        raw = strict_json(text)
    except ValueError:
        return []
    value, before = raw.get(key), HF_CONFIG[key]
    if not isinstance(raw, dict) or key in ("model_type", "hidden_act"):
        return [sound] if raw.get(key) == before else []
    if key == "attention_dropout":  # nothing is dropped here, whatever the file says of it
        return [with_parts(sound, {key: raw.get(key, 0.0)}), sound]
    same = value == before and isinstance(value, bool) == isinstance(before, bool)
    if same or (
        key in _NO_EFFECT
        and (
            key in ("use_cache", "torch_dtype", "architectures") or value is None or key not in raw
        )
    ):
        # a default may be another number: then it must be told in what comes out
        return [sound, *_defaults(key, sound)]
    if (
        key in ("rms_norm_eps", "rope_theta", "initializer_range", "attention_dropout")
        and isinstance(value, (int, float))
        and not isinstance(value, bool)
    ):
        fine = value > 0 if key in ("rms_norm_eps", "rope_theta") else value >= 0
        return (
            [
                with_parts(sound, {key: float(value)}),
                with_parts(sound, {key: value}),
                *([sound] if key == "attention_dropout" else []),
            ]
            if fine
            else []
        )
    if key in _NO_EFFECT and isinstance(value, int) and not isinstance(value, bool):
        ids = key.endswith("token_id") and 0 <= value < 338
        return (
            [with_parts(sound, {key: value}), sound]
            if ids or (key == "max_position_embeddings" and 1 <= value < 2**31)
            else []
        )
    if (
        key.endswith("token_id")
        and isinstance(value, list)
        and value
        and all(type(x) is int and 0 <= x < 338 for x in value)
    ):
        return [with_parts(sound, {key: value}), sound]
    return _defaults(key, sound) if value is None else []


def _defaults(key: str, sound: dict) -> list[Any]:
    """What a key is where it is absent or null, as transformers has it; none for those that a
    model cannot do without.
    """
    known = {
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "initializer_range": 0.02,
        "norm_topk_prob": False,
        "tie_word_embeddings": None,
        "decoder_sparse_step": 1,
        "head_dim": 8,
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_only_layers": [],
        "hidden_act": "silu",
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
        "attention_dropout": 0.0,
    }
    return (
        [with_parts(sound, {key: known[key]}), sound]
        if known.get(key) is not None or key.endswith("token_id")
        else []
    )


def folder_meaning(folder: Path, sound: dict) -> list[Any]:
    """[what the folder's tensors are], or [] where they are not all there, once, finite, of the
    model's shapes.
    """
    try:
        index = strict_json((folder / INDEX).read_bytes())
        where = index["weight_map"]
        if not isinstance(where, dict) or depth(index) > DEEP:
            return []
        for name in set(where.values()):
            if Path(name).name != name or not (folder / name).is_file():
                return []
        found: dict[str, str] = {}
        for name in set(where.values()):
            for tensor in read_strictly((folder / name).read_bytes()):
                if tensor in found or where.get(tensor) != name:
                    return []
                found[tensor] = name
        if set(found) != set(tensor_shapes()):
            return []
        return [with_parts(sound, tensors=read_safetensors(folder))]
    except (ValueError, OSError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return []


def read_strictly(data: bytes) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file of ours. ValueError where it is not by the format's
    letter, or a tensor is not F32, finite, of its shape.
    """
    size = struct.unpack("<Q", data[:8])[0]
    if size > len(data) - 8 or data[8:9] != b"{":
        raise ValueError("no header")
    header, body = strict_json(data[8 : 8 + size]), data[8 + size :]
    shapes, out, spans = tensor_shapes(), {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            if not isinstance(entry, dict) or not all(isinstance(x, str) for x in entry.values()):
                raise ValueError("metadata")
            continue
        if (
            set(entry) != {"dtype", "shape", "data_offsets"}
            or entry["dtype"] != "F32"
            or tuple(entry["shape"]) != shapes.get(name)
        ):
            raise ValueError(name)
        begin, end = entry["data_offsets"]
        if (
            any(type(x) is not int for x in (begin, end, *entry["shape"]))
            or end - begin != 4 * math.prod(entry["shape"])
            or begin < 0
        ):
            raise ValueError(name)
        spans.append((begin, end))
        out[name] = np.frombuffer(body[begin:end], "<f4")
        if not np.isfinite(out[name]).all():
            raise ValueError(f"{name} is not finite")
    spans.sort()
    if [b for b, _ in spans] != [0, *(e for _, e in spans[:-1])] or spans[-1][1] != len(body):
        raise ValueError("holes")
    return out
