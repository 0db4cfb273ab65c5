"""A Hugging Face model family: its `config.json` in and out, the names of its tensors, the models
that its class can express, and the fields that are refused.

A family is one file with one `FAMILY`. This package's families are in this folder; a user's own is
named `family="path/file.py:FAMILY"`:

    from compass_jax.families.base import KEYS, MOE_KEYS, TENSORS, Family, renamed

    FAMILY = Family(
        model_type="acorn_moe",
        architecture="AcornForCausalLM",
        keys=KEYS | {"hidden": "n_embd"},
        moe_keys=MOE_KEYS,
        tensors=renamed(TENSORS, {"model.layers.": "transformer.h."}),
    )

A field that changes the maths and is not supported is an error with its name: a model that loads
and answers wrongly is the worst outcome. Both spellings are read, the hub's (`num_experts`,
`rope_theta`, `rope_scaling`) and that of transformers 5 (`num_local_experts`, `rope_parameters`).
The hub's is written, which transformers 4 and 5 and the serving engines read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from compass_jax.aliases import Json, JsonMapping, JsonObject
from compass_jax.config import ConfigError, ModelConfig, MoEConfig, Router, seam_class
from compass_jax.config.ranges import describe_value
from compass_jax.families.keys import ALWAYS_READ, NEUTRAL, says_no_maths
from compass_jax.families.mla import MLA_KEYS, NOPE_KEY, read_mla, written_mla
from compass_jax.families.quantized import quantization_problems
from compass_jax.families.raw import TOKEN_IDS, Raw, UnsupportedModel, WeightsError, unsupported
from compass_jax.families.rope import (
    PARTIAL,
    rope_problems,
    rope_scaling,
    rope_theta,
    rotary_fraction,
    thetas_of,
    written_scaling,
)
from compass_jax.families.windows import Windows


class Tensor(NamedTuple):
    """One parameter's tensor: its name, with `{i}` for the decoder layer and `{e}` for the expert.

    Args:
        name: the name.
        transposed: in torch's layout of a Linear, [out, in].
        fused: one tensor has all experts of a layer, as its first axis.
        columns: (first, step): the parameter is these columns of a fused tensor.
    """

    name: str
    transposed: bool = False
    fused: bool = False
    columns: tuple[int, int] = (0, 1)


def _linear(name: str) -> Tensor:
    return Tensor(name, transposed=True)


_LAYER = "model.layers.{i}."
# Parameter (model/params.py) -> its tensor. Each expert has its own tensor.
TENSORS: Mapping[str, Tensor] = {
    "embed": Tensor("model.embed_tokens.weight"),
    "final_norm": Tensor("model.norm.weight"),
    "head": _linear("lm_head.weight"),
    "attention_norm": Tensor(_LAYER + "input_layernorm.weight"),
    "attention.q": _linear(_LAYER + "self_attn.q_proj.weight"),
    "attention.k": _linear(_LAYER + "self_attn.k_proj.weight"),
    "attention.v": _linear(_LAYER + "self_attn.v_proj.weight"),
    "attention.o": _linear(_LAYER + "self_attn.o_proj.weight"),
    "attention.q_bias": Tensor(_LAYER + "self_attn.q_proj.bias"),
    "attention.k_bias": Tensor(_LAYER + "self_attn.k_proj.bias"),
    "attention.v_bias": Tensor(_LAYER + "self_attn.v_proj.bias"),
    "attention.o_bias": Tensor(_LAYER + "self_attn.o_proj.bias"),
    "attention.sinks": Tensor(_LAYER + "self_attn.sinks"),
    "attention.q_a": _linear(_LAYER + "self_attn.q_a_proj.weight"),
    "attention.q_a_norm": Tensor(_LAYER + "self_attn.q_a_layernorm.weight"),
    "attention.q_b": _linear(_LAYER + "self_attn.q_b_proj.weight"),
    "attention.kv_a": _linear(_LAYER + "self_attn.kv_a_proj_with_mqa.weight"),
    "attention.kv_a_norm": Tensor(_LAYER + "self_attn.kv_a_layernorm.weight"),
    "attention.kv_b": _linear(_LAYER + "self_attn.kv_b_proj.weight"),
    "attention.q_norm": Tensor(_LAYER + "self_attn.q_norm.weight"),
    "attention.k_norm": Tensor(_LAYER + "self_attn.k_norm.weight"),
    "mlp_norm": Tensor(_LAYER + "post_attention_layernorm.weight"),
    "mlp.gate": _linear(_LAYER + "mlp.gate_proj.weight"),
    "mlp.up": _linear(_LAYER + "mlp.up_proj.weight"),
    "mlp.down": _linear(_LAYER + "mlp.down_proj.weight"),
    "moe.router": _linear(_LAYER + "mlp.gate.weight"),
    "moe.router_bias": Tensor(_LAYER + "mlp.gate.bias"),
    "moe.router_selection": Tensor(_LAYER + "mlp.gate.e_score_correction_bias"),
    "moe.gate": _linear(_LAYER + "mlp.experts.{e}.gate_proj.weight"),
    "moe.up": _linear(_LAYER + "mlp.experts.{e}.up_proj.weight"),
    "moe.down": _linear(_LAYER + "mlp.experts.{e}.down_proj.weight"),
    "moe.gate_bias": Tensor(_LAYER + "mlp.experts.{e}.gate_proj.bias"),
    "moe.up_bias": Tensor(_LAYER + "mlp.experts.{e}.up_proj.bias"),
    "moe.down_bias": Tensor(_LAYER + "mlp.experts.{e}.down_proj.bias"),
    "shared.gate": _linear(_LAYER + "mlp.shared_expert.gate_proj.weight"),
    "shared.up": _linear(_LAYER + "mlp.shared_expert.up_proj.weight"),
    "shared.down": _linear(_LAYER + "mlp.shared_expert.down_proj.weight"),
    "shared.sigmoid": _linear(_LAYER + "mlp.shared_expert_gate.weight"),
}


def renamed(tensors: Mapping[str, Tensor], changes: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns `tensors` with each key of `changes` in their names replaced by its value."""
    result = dict(tensors)
    for old, new in changes.items():
        result = {
            leaf: tensor._replace(name=tensor.name.replace(old, new))
            for leaf, tensor in result.items()
        }
    return result


# Field of ModelConfig -> key of config.json.
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
# Fields of MoEConfig that only some families have, with their readers; `moe_keys` may have a key.
_OPTIONAL: Mapping[str, Callable[[Raw, str], Json]] = {
    "shared_ffn": Raw.integer,
    "shared_gate": Raw.flag,
    "router_bias": Raw.flag,
    "expert_bias": Raw.flag,
    "swiglu_limit": Raw.number,
}
FIRST_DENSE = "first_k_dense_replace"  # as a key of dense_layers: the number of first dense layers
SHARED_COUNT = "n_shared_experts"  # as a key of shared_ffn: its width in widths of an expert
_EXTRA_LAYERS = "num_nextn_predict_layers"
_EXPERTS_TOO = "num_local_experts"  # transformers 5's spelling
_SIZES = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn")  # no class has a default
_FLAGS = {"hidden_act"}  # besides the keys that are read
# Defaults of the Qwen classes for keys that config.json lacks.
QWEN: JsonMapping = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "use_sliding_window": False,
}


class Attention(NamedTuple):
    """The variants of a family's attention: fields of ModelConfig."""

    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    qk_norm_scope: Literal["head", "projection"] = "head"
    attention_sinks: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """A Hugging Face model family. `model_type` and `architecture` are those of its config.json.

    A value that config.json lacks is never guessed: it comes from `defaults` or `fixed`, or reading
    is an error.

    Args:
        keys, moe_keys: field of ModelConfig and of MoEConfig -> key of config.json; moe_keys None:
            a family without experts.
        tensors: parameter -> its tensor in the files.
        attention: the variants that the family's class can express; the first is its default.
        bias_key: the key of config.json that selects one of several variants.
        defaults: key of config.json -> the class's value where the key is absent.
        fixed: key -> the class's constant value; an export leaves these keys out.
        mla_keys: field of MLAConfig -> key of config.json; None: a family without multi-head latent
            attention.
        served: keys that the class does not read and serving engines do, with the only value that
            is supported; an export writes them.
        unread: keys in its config.json that the class does not read.
        rotary: the class's default fraction of a head that rotary embeddings turn; None:
            config.json has no such key, and they turn whole heads.
        own_kv_heads: whether the class has as many heads of keys and values as of queries where
            config.json has no number of them.
        extra_layers: whether its files may have layers after the last that predict further tokens,
            which are ignored.
        rope: the types of scaled rotary embeddings that its config.json may have (rope.SCALED).
        windows: the sliding windows that the class has.
        router: the class's router, as in `model.moe.router`.
        router_keys: field of the router -> key of config.json.
    """

    model_type: str
    architecture: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: KEYS)
    moe_keys: Mapping[str, str] | None = None
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=lambda: TENSORS)
    attention: tuple[Attention, ...] = (
        Attention(qk_norm=True, qkv_bias=False, o_bias=False),
        Attention(qk_norm=True, qkv_bias=True, o_bias=True),
    )
    bias_key: str = "attention_bias"
    defaults: JsonMapping = dataclasses.field(default_factory=dict)
    fixed: JsonMapping = dataclasses.field(default_factory=dict)
    mla_keys: Mapping[str, str] | None = None
    served: JsonMapping = dataclasses.field(default_factory=dict)
    unread: tuple[str, ...] = ()
    rope: tuple[str, ...] = ()
    rotary: float | None = None
    own_kv_heads: bool = False
    extra_layers: bool = False
    windows: Windows = dataclasses.field(default_factory=Windows)
    router: str = "softmax"
    router_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, mapping, fields, optional in (
            ("keys", self.keys, KEYS, set[str]()),
            ("moe_keys", self.moe_keys or MOE_KEYS, MOE_KEYS, set(_OPTIONAL)),
            ("mla_keys", self.mla_keys or MLA_KEYS, MLA_KEYS, set[str]()),
        ):
            if wrong := sorted((mapping.keys() - optional) ^ fields.keys()):
                raise ConfigError(
                    f"the family {self.model_type}: {name} must have a key of config.json for each"
                    f" of {', '.join(fields)}; look at {', '.join(wrong)}"
                )
        for name, values in (("defaults", self.defaults), ("fixed", self.fixed)):
            if wrong := sorted(values.keys() - self.read_keys - _FLAGS):
                raise ConfigError(
                    f"the family {self.model_type}: {name} has {', '.join(wrong)}, which is read"
                    " from no config.json: use the names that `keys` and `moe_keys` give"
                )

    def tensor(self, leaf: str) -> Tensor:
        """Returns the tensor of a parameter. Raises UnsupportedModel where the family names
        none.
        """
        if leaf not in self.tensors:
            raise UnsupportedModel(
                f"the family {self.model_type} names no tensor for the parameter {leaf}:"
                " add it to the family's `tensors`"
            )
        return self.tensors[leaf]

    def read(self, raw: JsonObject, where: str, name: str) -> ModelConfig:
        """Returns the ModelConfig of a parsed config.json; `name` is the family's name in
        configurations.

        Raises:
            UnsupportedModel: a field changes the maths and is not supported; names all of them.
            WeightsError: a field is missing or malformed.
        """
        declared = {key: value for key, value in raw.items() if value is not None}
        raw_config, key = Raw(self._with_defaults(raw, declared), where), self.keys
        if problems := self.problems(raw, where):
            raise UnsupportedModel(in_one(where, problems))
        hidden, heads = raw_config.integer(key["hidden"]), raw_config.integer(key["heads"])
        layers, positions = (raw_config.integer(key[x]) for x in ("layers", "max_positions"))
        # `validate` reports a number of heads that is 0.
        head_dim = raw_config.integer(key["head_dim"], hidden // max(heads, 1))
        try:
            mla = None if self.mla_keys is None else read_mla(raw_config, self.mla_keys)
            config = ModelConfig(
                family=name,
                vocab_size=raw_config.integer(key["vocab_size"]),
                hidden=hidden,
                layers=layers,
                heads=heads,
                kv_heads=raw_config.integer(key["kv_heads"]),
                # qk_nope_head_dim lacks the rotary channels, which ModelConfig.head_dim includes.
                head_dim=head_dim + (mla.rope_dim if mla and key["head_dim"] == NOPE_KEY else 0),
                ffn=raw_config.integer(key["ffn"]),
                moe=self._moe(raw_config),
                mla=mla,
                # Read without defaults: the default rope_theta could disagree with rope_parameters.
                rope_theta=rope_theta(Raw(declared, where), raw_config.get("rope_theta")),
                rope_scaling=rope_scaling(Raw(declared, where), positions, self.defaults),
                rotary_fraction=rotary_fraction(Raw(declared, where), self.rotary or 1.0),
                norm_eps=raw_config.number(key["norm_eps"]),
                tie_embeddings=raw_config.flag(key["tie_embeddings"]),
                max_positions=positions,
                init_std=raw_config.number(key["init_std"], 0.02),
                **self._attention(raw_config)._asdict(),
                **self.windows.read(raw_config, layers, key["layers"]),
            )
            config.validate()
        except ConfigError as error:
            raise WeightsError(f"{where} describes an impossible model: {error}") from error
        # Called for its error: a config.json with ids outside the vocabulary.
        raw_config.token_ids(config.vocab_size)
        return config

    def problems(self, raw: JsonObject, where: str) -> list[str]:
        """Returns a line for each thing in a config.json that changes the maths and is not
        supported, and one with the keys that are missing.
        """
        declared = {key: value for key, value in raw.items() if value is not None}
        raw_config = Raw(self._with_defaults(raw, declared), where)
        return [*self._unsupported(declared, raw_config), *self._absent(declared, raw_config)]

    def _with_defaults(self, raw: JsonObject, declared: JsonObject) -> JsonObject:
        """Returns the values of config.json, the class's defaults where a key is absent or null,
        and its constants. A null sliding_window is no window, and a null rank of queries no latent
        vector, whatever the default.
        """
        defaults = dict(self.defaults)
        if self.own_kv_heads and self.keys["heads"] in declared:
            defaults[self.keys["kv_heads"]] = declared[self.keys["heads"]]
        for key in ("sliding_window", (self.mla_keys or MLA_KEYS)["q_rank"]):
            if key in raw:
                defaults.pop(key, None)
        return {**defaults, **declared, **self.fixed}

    def write(self, config: ModelConfig, dtype: str, token_ids: JsonObject) -> JsonObject:
        """Returns the config.json of a model whose weights are stored as `dtype`; `token_ids` has
        the keys of `TOKEN_IDS`. Raises UnsupportedModel where the family's class cannot express the
        model.
        """
        self.check(config)
        raw: JsonObject = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "rope_theta": config.rope_theta,
            "rope_scaling": written_scaling(config.rope_scaling, self.defaults),
            "attention_dropout": 0.0,
            **self.windows.to_config(config),
            "use_cache": True,
            "torch_dtype": dtype,
        }
        raw |= {**self.served, **self._values(config)}
        if len(self._variants("qkv_bias")) > 1:
            raw[self.bias_key] = config.qkv_bias
        if len(self._variants("qk_norm")) > 1:
            raw["use_qk_norm"] = config.qk_norm
        if self.rotary is not None:
            raw[PARTIAL] = config.rotary_fraction
        if self.extra_layers:
            raw[_EXTRA_LAYERS] = 0
        raw |= {name: token_ids.get(name) for name in TOKEN_IDS}
        return {key: value for key, value in raw.items() if key not in self.fixed}

    def _values(self, config: ModelConfig) -> JsonObject:
        """Returns the values of the keys that `keys` and `moe_keys` name."""
        values = {key: getattr(config, field) for field, key in self.keys.items()}
        if config.moe is not None and self.moe_keys is not None:
            moe = {field: getattr(config.moe, field) for field in self.moe_keys}
            moe["dense_layers"] = (
                len(moe["dense_layers"])
                if self.moe_keys["dense_layers"] == FIRST_DENSE
                else list(moe["dense_layers"])
            )
            if self.moe_keys.get("shared_ffn") == SHARED_COUNT:
                moe["shared_ffn"] //= config.moe.ffn
            values |= {key: moe[field] for field, key in self.moe_keys.items()}
            router = config.moe.router
            values |= {key: getattr(router, field) for field, key in self.router_keys.items()}
        if self.mla_keys is not None:
            values |= written_mla(config, self.mla_keys, self.keys["head_dim"])
        return values

    def _router(self, raw: Raw) -> Router:
        cls = seam_class(Router, self.router)
        numbers = {
            field.name: raw.integer if type(field.default) is int else raw.number
            for field in dataclasses.fields(cls)
        }
        return cls(**{field: numbers[field](key) for field, key in self.router_keys.items()})

    def check(self, config: ModelConfig) -> None:
        """Raises UnsupportedModel for a model that the family's class cannot express."""
        if (config.moe is None) != (self.moe_keys is None):
            takes = "takes no" if self.moe_keys is None else "needs"
            raise UnsupportedModel(f"model.family = {config.family!r} {takes} model.moe")
        if (config.mla is None) != (self.mla_keys is None):
            takes = "takes no" if self.mla_keys is None else "needs"
            raise UnsupportedModel(f"model.family = {config.family!r} {takes} model.mla")
        actual = Attention(*(getattr(config, field) for field in Attention._fields))
        if actual not in self.attention:
            raise UnsupportedModel(
                f"model.{', '.join(Attention._fields)} = {tuple(actual)}: a Hugging Face"
                f" {config.family} model has {' or '.join(str(tuple(x)) for x in self.attention)},"
                " so this model cannot be exported"
            )
        scaled = written_scaling(config.rope_scaling)
        if scaled is not None and scaled["rope_type"] not in self.rope:
            raise UnsupportedModel(
                f"model.rope_scaling is of type {scaled['rope_type']}: the family {config.family}"
                f" has {' or '.join(self.rope) or 'none'}, so this model cannot be exported"
            )
        for field in _OPTIONAL.keys() - (self.moe_keys or {}).keys():
            if config.moe is not None and getattr(config.moe, field) != getattr(MoEConfig, field):
                raise UnsupportedModel(
                    f"model.moe.{field} = {getattr(config.moe, field)}: the family"
                    f" {config.family} has none, so this model cannot be exported"
                )
        if config.moe is not None and self._differs(config.moe.router):
            raise UnsupportedModel(
                f"model.moe.router = {describe_value(config.moe.router)}: the family"
                f" {config.family} has the"
                f" router {self.router}, so this model cannot be exported; name the router in a"
                " family of your own"
            )
        if reason := self.windows.unexported(config) or self._inexpressible(config):
            raise UnsupportedModel(f"{reason} in {config.family}, so it cannot be exported")
        values = self._values(config) | {"rope_theta": config.rope_theta}
        for key, value in self.fixed.items():
            if values.get(key, value) != value:
                raise UnsupportedModel(
                    f"the model's {key} is {values[key]}: a {self.model_type} model always has"
                    f" {value}, so this model cannot be exported"
                )

    def _inexpressible(self, config: ModelConfig) -> str:
        """Returns what of a model's rotary embeddings, dense layers and shared experts config.json
        cannot express; empty where it can all.
        """
        if config.rotary_fraction != 1 and self.rotary is None:
            return f"model.rotary_fraction = {config.rotary_fraction}: rotary turns whole heads"
        if config.moe is None or self.moe_keys is None:
            return ""
        dense, shared = config.moe.dense_layers, config.moe.shared_ffn
        key, is_mixed = self.keys["ffn"], len(config.moe_layers) < config.layers
        if is_mixed and key == self.moe_keys["ffn"] and config.ffn != config.moe.ffn:
            widths = f"model.ffn = {config.ffn} and model.moe.ffn = {config.moe.ffn}"
            return f"{widths}: dense layers and experts have one width, {key},"
        if self.moe_keys["dense_layers"] == FIRST_DENSE and dense != tuple(range(len(dense))):
            return f"model.moe.dense_layers = {dense}: dense layers are the first ones"
        if self.moe_keys.get("shared_ffn") == SHARED_COUNT and shared % config.moe.ffn:
            return (
                f"model.moe.shared_ffn = {shared}: it is a multiple of model.moe.ffn ="
                f" {config.moe.ffn}"
            )
        return ""

    def _differs(self, router: Router) -> bool:
        """Returns whether config.json cannot express a router: another class, or a field without a
        key that has another value than the class's default.
        """
        cls = seam_class(Router, self.router)
        if type(router) is not cls:
            return True
        fields = (x.name for x in dataclasses.fields(cls) if x.name not in self.router_keys)
        return any(getattr(router, name) != getattr(cls(), name) for name in fields)

    def _attention(self, raw: Raw) -> Attention:
        biased, normed = self._variants("qkv_bias"), self._variants("qk_norm")
        bias = raw.flag(self.bias_key, biased[0] if len(biased) == 1 else None)
        norm = raw.flag("use_qk_norm") if len(normed) > 1 else normed[0]
        for form in self.attention:
            if (form.qkv_bias, form.qk_norm) == (bias, norm):
                return form
        raise UnsupportedModel(
            f"{raw.where}: the family {self.model_type} has no attention with {self.bias_key} ="
            f" {bias} and use_qk_norm = {norm}: add it to the family's `attention`"
        )

    def _variants(self, field: str) -> list[bool]:
        """Returns the values of a field in the class's attention, the default first."""
        return list(dict.fromkeys(getattr(form, field) for form in self.attention))

    def _moe(self, raw: Raw) -> MoEConfig | None:
        key = self.moe_keys
        if key is None:
            return None
        spelled = [name for name in (key["experts"], _EXPERTS_TOO) if raw.get(name) is not None]
        experts = {raw.integer(name) for name in spelled or [key["experts"]]}
        if len(experts) > 1:
            raise WeightsError(
                f"{raw.where}: {key['experts']} = {raw.get(key['experts'])} and"
                f" {_EXPERTS_TOO} = {raw.get(_EXPERTS_TOO)} disagree"
            )
        optional = {field: of(raw, key[field]) for field, of in _OPTIONAL.items() if field in key}
        if key.get("shared_ffn") == SHARED_COUNT:
            optional["shared_ffn"] *= raw.integer(key["ffn"])
        return MoEConfig(
            experts=experts.pop(),
            top_k=raw.integer(key["top_k"]),
            ffn=raw.integer(key["ffn"]),
            norm_top_k=raw.flag(key["norm_top_k"]),
            router=self._router(raw),
            sparse_step=raw.integer(key["sparse_step"]),
            dense_layers=self._dense_layers(raw, key["dense_layers"]),
            **optional,
        )

    def _dense_layers(self, raw: Raw, name: str) -> tuple[int, ...]:
        """Returns the numbers of the dense layers: a list, or the number of first layers."""
        if name == FIRST_DENSE:
            return tuple(range(min(raw.integer(name), raw.integer(self.keys["layers"]))))
        dense = [] if raw.get(name) is None else raw.get(name)
        if not isinstance(dense, list) or not all(type(i) is int for i in dense):
            raise WeightsError(
                f"{raw.where}: {name} = {describe_value(dense)}, a list of layer numbers is"
                " expected"
            )
        return tuple(sorted(set(dense)))

    @property
    def read_keys(self) -> frozenset[str]:
        """The keys of config.json from which `read` builds the model."""
        of_moe = () if self.moe_keys is None else (*self.moe_keys.values(), _EXPERTS_TOO)
        of_moe = (*of_moe, *self.router_keys.values())
        of_mla = () if self.mla_keys is None else self.mla_keys.values()
        partial = () if self.rotary is None else (PARTIAL,)
        extra = (_EXTRA_LAYERS,) if self.extra_layers else ()
        return frozenset((*ALWAYS_READ, *self.keys.values(), *of_moe, *of_mla, *partial, *extra))

    def _unsupported(self, declared: JsonObject, raw: Raw) -> list[str]:
        """Returns a line for each thing in config.json that changes the maths and is not
        supported.
        """
        known, unread, lines = self.read_keys, [], []
        built, constants = known - ALWAYS_READ, {**self.fixed, **self.served}
        for field, value in declared.items():
            if field in self.unread or (field in constants and value == constants[field]):
                continue
            if field in constants:
                lines.append(unsupported(field, value, f"{constants[field]}, always"))
            # A key from which this family's model is built is checked when it is read.
            elif field in NEUTRAL and field not in built:
                allowed, supported = NEUTRAL[field]
                lines += [] if value in allowed else [unsupported(field, value, supported)]
            elif field not in known and not says_no_maths(field):
                unread.append(f"{field[:100]} = {describe_value(value)}")
        if unread:
            lines.append(
                f"{', '.join(unread)} is not supported (supported: the keys of a"
                f" {self.model_type} model; remove {'this one' if len(unread) == 1 else 'those'}"
                " that changes nothing that the model computes)"
            )
        if raw.get("architectures") not in (None, [], [self.architecture]):
            lines.append(unsupported("architectures", raw.get("architectures"), self.architecture))
        if (quantization := raw.get("quantization_config")) is not None:
            lines += quantization_problems(quantization)
        lines += self._other_attention(raw) + self.windows.problems(raw)
        return lines + rope_problems(declared, self.rope, self.rotary is not None)

    def _other_attention(self, raw: Raw) -> list[str]:
        """Returns the messages of `_unsupported` about biases and norms of attention."""
        lines, biased = [], raw.get(self.bias_key)
        forms = [form for form in self.attention if biased in (None, form.qkv_bias)]
        if biased is not None and not forms and type(biased) is bool:
            hint = f"{str(not biased).lower()} in {self.model_type}, whose class has no other"
            lines.append(unsupported(self.bias_key, biased, hint))
        form = (forms or self.attention)[0]
        for field, supported in (
            ("attention_bias", form.qkv_bias),
            ("qkv_bias", form.qkv_bias),
            ("use_qk_norm", form.qk_norm),
        ):
            by_key = field == self.bias_key or (
                field == "use_qk_norm" and len(self._variants("qk_norm")) > 1
            )
            if not by_key and raw.get(field) not in (None, supported):
                hint = f"{supported} in this {self.model_type} model"
                lines.append(unsupported(field, raw.get(field), hint))
        return lines

    def _absent(self, declared: JsonObject, raw: Raw) -> list[str]:
        """Returns a message with the keys that neither config.json nor the family has a
        value for.
        """
        optional = {self.keys["head_dim"] if self.mla_keys is None else "", self.keys["init_std"]}
        required = ["hidden_act", *(key for key in self.keys.values() if key not in optional)]
        required += [key for field, key in (self.mla_keys or {}).items() if field != "q_rank"]
        required += [self.bias_key] if len(self._variants("qkv_bias")) > 1 else []
        required += ["use_qk_norm"] if len(self._variants("qk_norm")) > 1 else []
        if self.moe_keys is not None and raw.get(_EXPERTS_TOO) is None:
            required += self.moe_keys.values()
        elif self.moe_keys is not None:
            required += (key for field, key in self.moe_keys.items() if field != "experts")
        absent = [key for key in dict.fromkeys(required) if raw.get(key) is None]
        if not thetas_of(declared) and raw.get("rope_theta") is None:
            absent.append("rope_theta")
        if not absent:
            return []
        sizes = {self.keys[field] for field in _SIZES}
        hint = (
            ""
            if sizes.issuperset(absent)
            else f", and the family {self.model_type} has no default: add the class's default to"
            " the family's `defaults`, or its constant value to `fixed`"
        )
        return [f"it has no {', '.join(absent)}{hint}"]


def in_one(where: str, problems: list[str]) -> str:
    """Joins the problems of a config.json into one message."""
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return "\n  ".join([f"{where} is not supported:", *problems])
