"""Hugging Face `config.json` to `ModelConfig` and back, for the families qwen3_moe, qwen3 and
qwen2.

What a file says and we cannot compute is refused by name: a model that loads and answers wrongly is
the worst outcome. Both spellings are read, the hub's (`num_experts`, `rope_theta`, `rope_scaling`)
and that of transformers 5 (`num_local_experts`, `rope_parameters`); the hub's is written, which
transformers 4 and 5 and the serving engines read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args, get_type_hints

from compass_jax import untrusted
from compass_jax.config import ConfigError, ModelConfig, MoEConfig
from compass_jax.config.ranges import shown
from compass_jax.weights.hf_keys import HARMLESS, NEUTRAL, READ, READ_OF_MOE

FAMILIES: tuple[str, ...] = get_args(get_type_hints(ModelConfig)["family"])
_ARCHITECTURE = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_REQUIRED = object()


class WeightsError(ValueError):
    """A model folder that cannot be read or written; the message names the file or tensor and what
    is wrong with it.
    """


class UnsupportedModel(WeightsError):
    """A model that this package would compute wrongly; the message names the field, its value and
    what is supported.
    """


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; raises WeightsError if it is missing, or what
    `untrusted.parse_json` refuses.
    """
    # tokenizer_config.json says 10**30 where a length is not limited.
    raw = untrusted.read_json(path, error=WeightsError, most_bytes=2**28, most_digits=40)
    if not isinstance(raw, dict):
        raise WeightsError(f"{path} holds a {type(raw).__name__}, a JSON object is expected")
    return raw


def read_hf_config(folder: str | Path) -> ModelConfig:
    """The `ModelConfig` of a Hugging Face folder.

    Raises UnsupportedModel for a model type or a field that changes the maths and is not supported,
    WeightsError for a missing or malformed `config.json`. Fields that are absent take the defaults
    of the family's transformers class.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise WeightsError(f"{path} does not exist: a Hugging Face model folder is expected")
    return config_from_dict(read_json(path), str(path))


def config_from_dict(raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """`read_hf_config` on the parsed file; `where` begins every error message."""
    family = raw.get("model_type")
    if family not in FAMILIES:
        raise _unsupported(where, "model_type", family, " | ".join(FAMILIES))
    _refuse_other_maths(raw, where)
    hidden, heads = _integer(raw, where, "hidden_size"), _integer(raw, where, "num_attention_heads")
    biased = _flag(raw, where, "attention_bias", family == "qwen2")
    if family == "qwen2" and not biased:
        raise _unsupported(
            where, "attention_bias", False, "true in qwen2, whose class knows no other"
        )
    try:
        config = ModelConfig(
            family=family,
            vocab_size=_integer(raw, where, "vocab_size"),
            hidden=hidden,
            layers=_integer(raw, where, "num_hidden_layers"),
            heads=heads,
            kv_heads=_integer(raw, where, "num_key_value_heads"),
            # Only Qwen3Config has a default of its own; the other two classes divide.
            head_dim=_integer(
                raw, where, "head_dim", 128 if family == "qwen3" else hidden // max(heads, 1)
            ),
            ffn=_integer(raw, where, "intermediate_size"),
            moe=_moe_config(raw, where) if family == "qwen3_moe" else None,
            rope_theta=_rope_theta(raw, where),
            norm_eps=_number(raw, where, "rms_norm_eps", 1e-6),
            tie_embeddings=_flag(raw, where, "tie_word_embeddings", False),
            qk_norm=family != "qwen2",
            qkv_bias=biased,
            o_bias=biased and family != "qwen2",
            max_positions=_integer(raw, where, "max_position_embeddings", 32_768),
            init_std=_number(raw, where, "initializer_range", 0.02),
        )
        config.validate()
    except ConfigError as error:
        raise WeightsError(f"{where} describes an impossible model: {error}") from error
    _check_layer_types(raw, where, config.layers)
    for field, ours in (("qkv_bias", config.qkv_bias), ("use_qk_norm", config.qk_norm)):
        if raw.get(field) not in (None, ours):
            raise _unsupported(where, field, raw[field], f"{ours} in this {family} model")
    _token_ids(raw, where, config.vocab_size)
    return config


def write_hf_config(
    config: ModelConfig, dtype: str = "float32", token_ids: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The `config.json` of a model whose weights are stored as `dtype`; `token_ids` as
    `bos_token_id`, `eos_token_id`, `pad_token_id`.

    Raises UnsupportedModel where the family's transformers class cannot express the model (biases,
    QK norm).
    """
    _check_expressible(config)
    raw: dict[str, Any] = {
        "architectures": [_ARCHITECTURE[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "initializer_range": config.init_std,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "use_cache": True,
        "torch_dtype": dtype,
    }
    if config.family != "qwen2":
        raw["attention_bias"] = config.qkv_bias
    if config.moe is not None:
        raw |= {
            "num_experts": config.moe.experts,
            "num_experts_per_tok": config.moe.top_k,
            "moe_intermediate_size": config.moe.ffn,
            "norm_topk_prob": config.moe.norm_top_k,
            "decoder_sparse_step": config.moe.sparse_step,
            "mlp_only_layers": list(config.moe.dense_layers),
        }
    return raw | {name: (token_ids or {}).get(name) for name in _TOKEN_IDS}


def find_token_ids(folder: str | Path) -> dict[str, Any]:
    """`bos_token_id`, `eos_token_id`, `pad_token_id` of a folder: from `config.json`, else from the
    tokenizer's special tokens.
    """
    folder = Path(folder)
    if (folder / "config.json").is_file():
        return _token_ids(read_json(folder / "config.json"), str(folder / "config.json"))
    if not ((folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return {}
    special, tokenizer = (
        read_json(folder / "tokenizer_config.json"),
        read_json(folder / "tokenizer.json"),
    )
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise WeightsError(f"{folder / 'tokenizer.json'}: added_tokens must be a list of objects")
    ids = {
        token["content"]: token.get("id")
        for token in added
        if isinstance(token.get("content"), str)
    }
    found = {}
    for name in _TOKEN_IDS:
        token = special.get(name.removesuffix("_id"))
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str) and content in ids:
            found[name] = ids[content]
    return _token_ids(found, str(folder / "tokenizer.json"))


def _token_ids(raw: dict[str, Any], where: str, vocab: int = 2**31) -> dict[str, Any]:
    """Those of `_TOKEN_IDS` that are given, each an id below `vocab`, the end tokens perhaps
    several.
    """
    found = {name: raw[name] for name in _TOKEN_IDS if raw.get(name) is not None}
    for name, value in found.items():
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        if not all(type(i) is int and 0 <= i < vocab for i in ids):
            raise WeightsError(
                f"{where}: {name} = {shown(value)}, a token id from 0 to {vocab - 1} is expected"
            )
    return found


def _unsupported(where: str, field: str, value: Any, supported: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{where}: {field} = {shown(value)} is not supported (supported: {supported})"
    )


def _refuse_other_maths(raw: dict[str, Any], where: str) -> None:
    known = HARMLESS.union(READ, READ_OF_MOE if raw["model_type"] == "qwen3_moe" else ())
    for field, value in raw.items():
        if value is None or field in known:
            continue
        if field not in NEUTRAL:
            hint = (
                f"the keys of a {raw['model_type']} model; remove this one if it changes nothing"
                " that the model computes"
            )
            raise _unsupported(where, field[:100], value, hint)
        allowed, supported = NEUTRAL[field]
        if value not in allowed:
            raise _unsupported(where, field, value, supported)
    ours = _ARCHITECTURE[raw["model_type"]]
    if raw.get("architectures") not in (None, [], [ours]):
        raise _unsupported(where, "architectures", raw["architectures"], ours)


def _check_layer_types(raw: dict[str, Any], where: str, layers: int) -> None:
    kinds = raw.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise _unsupported(where, "layer_types", kinds, "'full_attention' in every layer")
    if len(kinds) != layers:
        raise WeightsError(
            f"{where}: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
        )


def _rope_theta(raw: dict[str, Any], where: str) -> float:
    """theta of plain rotary embeddings; any scaling is refused, and so is a key that we do not
    know: it would change the angles.
    """
    found = {"rope_theta": raw} if raw.get("rope_theta") is not None else {}
    for field in ("rope_scaling", "rope_parameters"):
        rope = raw.get(field)
        if rope is None:
            continue
        known = isinstance(rope, dict) and set(rope) <= {
            "rope_type",
            "type",
            "rope_theta",
            "partial_rotary_factor",
        }
        if (
            not known
            or any(rope.get(key, "default") != "default" for key in ("rope_type", "type"))
            or rope.get("partial_rotary_factor", 1.0) != 1.0
        ):
            raise _unsupported(
                where, field, rope, "rope_type 'default' with rope_theta, over the whole head"
            )
        if rope.get("rope_theta") is not None:
            found[field] = rope
    thetas = {
        field: _number(given, f"{where}: {field}", "rope_theta", 0.0)
        for field, given in found.items()
    }
    if len(set(thetas.values())) > 1:
        raise WeightsError(
            f"{where}: "
            + " and ".join(f"{field} gives rope_theta = {value}" for field, value in thetas.items())
            + "; they disagree"
        )
    return next(iter(thetas.values()), 10_000.0)


def _moe_config(raw: dict[str, Any], where: str) -> MoEConfig:
    spelled = [name for name in ("num_experts", "num_local_experts") if raw.get(name) is not None]
    experts = {_integer(raw, where, name) for name in spelled or ["num_experts"]}
    if len(experts) > 1:
        raise WeightsError(
            f"{where}: num_experts = {raw['num_experts']} and num_local_experts ="
            f" {raw['num_local_experts']} disagree"
        )
    dense = [] if raw.get("mlp_only_layers") is None else raw["mlp_only_layers"]
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise WeightsError(
            f"{where}: mlp_only_layers = {shown(dense)}, a list of layer numbers is expected"
        )
    return MoEConfig(
        experts=experts.pop(),
        top_k=_integer(raw, where, "num_experts_per_tok", 8),
        ffn=_integer(raw, where, "moe_intermediate_size", 768),
        norm_top_k=_flag(raw, where, "norm_topk_prob", False),
        sparse_step=_integer(raw, where, "decoder_sparse_step", 1),
        dense_layers=tuple(sorted(set(dense))),
    )


def _value(
    raw: dict[str, Any], where: str, field: str, kinds: tuple[type, ...], default: Any
) -> Any:
    value = raw.get(field)
    if value is None:
        if default is _REQUIRED:
            raise WeightsError(f"{where} has no {field}")
        return default
    if type(value) not in kinds:
        raise WeightsError(
            f"{where}: {field} = {shown(value)}, expected"
            f" {' or '.join(kind.__name__ for kind in kinds)}"
        )
    return value


def _integer(raw: dict[str, Any], where: str, field: str, default: Any = _REQUIRED) -> int:
    return _value(raw, where, field, (int,), default)


def _number(raw: dict[str, Any], where: str, field: str, default: float) -> float:
    value = _value(raw, where, field, (float, int), default)
    return float(value) if abs(value) < 1e300 else float("inf")


def _flag(raw: dict[str, Any], where: str, field: str, default: bool) -> bool:
    return _value(raw, where, field, (bool,), default)


def _check_expressible(config: ModelConfig) -> None:
    actual = (config.qk_norm, config.qkv_bias, config.o_bias)
    allowed = (
        [(False, True, False)]
        if config.family == "qwen2"
        else [(True, False, False), (True, True, True)]
    )
    if actual not in allowed:
        raise UnsupportedModel(
            f"model.qk_norm, qkv_bias, o_bias = {actual}: a Hugging Face {config.family} model has"
            f" {' or '.join(map(str, allowed))}, so this model cannot be exported"
        )
