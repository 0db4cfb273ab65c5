"""Fields of ModelConfig as keys of config.json, in one table that is read and written.

A field has a path (`heads`, `moe.top_k`, `moe.router.scale`, `mla.q_rank`) and in each family a
key. A key holds the field's value, whose type says how it is read, unless the field has a `Form`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import NamedTuple

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config import ModelConfig
from compass_jax.config.ranges import describe_value, field_hints, type_name
from compass_jax.model.families.raw import Raw, WeightsError, agreed

# Field of ModelConfig -> key of config.json. `activation` is no field: MLPs have SiLU.
KEYS: dict[str, str] = {
    "vocab_size": "vocab_size",
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "max_positions": "max_position_embeddings",
    "init_std": "initializer_range",
    "rope_theta": "rope_theta",
    "activation": "hidden_act",
}
# Field of MoEConfig -> key of config.json.
MOE_KEYS: dict[str, str] = {
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "norm_top_k": "norm_topk_prob",
    "sparse_step": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
}
# Field of MLAConfig -> key of config.json.
MLA_KEYS: dict[str, str] = {
    "kv_rank": "kv_lora_rank",
    "rope_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "q_rank": "q_lora_rank",
    "interleaved": "rope_interleave",
}
FIRST_DENSE = "first_k_dense_replace"  # as a key of dense_layers: the number of first dense layers
SHARED_COUNT = "n_shared_experts"  # as a key of shared_ffn: its width in widths of an expert
NOPE_KEY = "qk_nope_head_dim"  # as a key of head_dim: its channels without rotation
EXPERTS_TOO = "num_local_experts"  # transformers 5's spelling
_READERS = {"int": Raw.integer, "float": Raw.number, "bool": Raw.flag}


class Form(NamedTuple):
    """A field whose value differs from that of its key.

    Args:
        read: (config.json, keys by path) -> the field's value.
        write: model -> the key's value; None: the field's.
        rule: what the key can hold, where that is less than the field.
    """

    read: Callable[[Raw, Mapping[str, str]], Json]
    write: Callable[[ModelConfig], object] | None = None
    rule: str = ""


def _head_dim(raw: Raw, keys: Mapping[str, str]) -> int:
    """Returns the width of a head, hidden / heads by default. `validate` reports 0 heads."""
    hidden, heads = raw.integer(keys["hidden"]), raw.integer(keys["heads"])
    return raw.integer(keys["head_dim"], hidden // max(heads, 1))


def _experts(raw: Raw, keys: Mapping[str, str]) -> int:
    names = [x for x in (keys["moe.experts"], EXPERTS_TOO) if raw.get(x) is not None]
    message = " and ".join(f"{name} = {raw.get(name)}" for name in names)
    return agreed(map(raw.integer, names), 0, f"{raw.where}: {message} disagree")


def _dense_layers(raw: Raw, keys: Mapping[str, str]) -> tuple[int, ...]:
    name = keys["moe.dense_layers"]
    layers = [] if raw.get(name) is None else raw.get(name)
    if not isinstance(layers, list) or not all(type(i) is int for i in layers):
        value = describe_value(layers)
        raise WeightsError(f"{raw.where}: {name} = {value}, a list of layer numbers is expected")
    return tuple(sorted(set(layers)))


def _first_layers(raw: Raw, keys: Mapping[str, str]) -> tuple[int, ...]:
    # `validate` refuses more than 1000 layers.
    return tuple(range(min(raw.integer(FIRST_DENSE), raw.integer(keys["layers"]), 1000)))


# Path of a field -> its form; (path, key) -> its form in families where it has this key.
_FORMS: Mapping[str | tuple[str, str], Form] = {
    "head_dim": Form(_head_dim),
    "init_std": Form(lambda raw, keys: raw.number(keys["init_std"], 0.02)),
    "rope_theta": Form(lambda raw, keys: raw.get(keys["rope_theta"])),  # read by rope.read_rope
    "activation": Form(lambda raw, keys: "silu", lambda model: "silu"),
    "moe.experts": Form(_experts),
    "moe.dense_layers": Form(_dense_layers, lambda model: list(model.mixture.dense_layers)),
    "mla.q_rank": Form(
        lambda raw, keys: raw.integer(keys["mla.q_rank"], 0),
        lambda model: (model.mla and model.mla.q_rank) or None,
    ),
    ("moe.dense_layers", FIRST_DENSE): Form(
        _first_layers,
        lambda model: len(model.mixture.dense_layers),
        "dense layers are the first ones",
    ),
    ("moe.shared_ffn", SHARED_COUNT): Form(
        lambda raw, keys: raw.integer(SHARED_COUNT) * raw.integer(keys["moe.ffn"]),
        lambda model: model.mixture.shared_ffn // model.mixture.ffn,
        "it is a multiple of model.moe.ffn = {0.moe.ffn}",
    ),
    ("head_dim", NOPE_KEY): Form(
        lambda raw, keys: raw.integer(NOPE_KEY) + raw.integer(keys["mla.rope_dim"]),
        lambda model: model.head_dim - (model.mla.rope_dim if model.mla else 0),
    ),
}


def _form(path: str, key: str) -> Form | None:
    return _FORMS.get((path, key)) or _FORMS.get(path)


def read_fields(raw: Raw, keys: Mapping[str, str], cls: type, prefix: str = "") -> JsonObject:
    """Returns the fields of `cls` whose paths, `prefix` and their names, have a key."""
    values = {}
    for name, hint in field_hints(cls).items():
        if key := keys.get(prefix + name):
            form, read = _form(prefix + name, key), _READERS.get(type_name(hint), Raw.number)
            values[name] = form.read(raw, keys) if form else read(raw, key)
    return values


def written_fields(model: ModelConfig, keys: Mapping[str, str]) -> JsonObject:
    """Returns the value of each key of config.json."""
    values = {}
    for path, key in keys.items():
        form = _form(path, key)
        values[key] = form.write(model) if form and form.write else attrgetter(path)(model)
    return values


def unwritable_fields(model: ModelConfig, keys: Mapping[str, str]) -> list[str]:
    """Returns a message for each field that its key cannot hold: it is read with another value."""
    raw, reasons = Raw(written_fields(model, keys), ""), []
    for path, key in keys.items():
        form = _form(path, key)
        if form and form.rule and form.read(raw, keys) != (value := attrgetter(path)(model)):
            reasons.append(f"model.{path} = {value}: {form.rule.format(model)}")
    return reasons
