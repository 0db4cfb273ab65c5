"""A Hugging Face model family: its `config.json` in and out, the names of its tensors, the models
that its class can express, and the fields that are refused.

A family is one file with one `FAMILY`. This package's families are in this folder; a user's own is
named `family="path/file.py:FAMILY"`:

    from compass_jax.model.families.base import KEYS, MOE_KEYS, TENSORS, Family, renamed

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
from collections.abc import Iterator, Mapping
from functools import cached_property, partial
from typing import Literal, NamedTuple

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.config import ConfigError, MLAConfig, ModelConfig, MoEConfig, Router, seam_class
from compass_jax.config.ranges import describe_value, field_hints
from compass_jax.model.families import fields, rope
from compass_jax.model.families.fields import EXPERTS_TOO, KEYS, MLA_KEYS, MOE_KEYS
from compass_jax.model.families.keys import ALWAYS_READ, NEUTRAL, says_no_maths
from compass_jax.model.families.quantized import quantization_problems
from compass_jax.model.families.raw import (
    TOKEN_IDS,
    Raw,
    UnsupportedModel,
    WeightsError,
    refuse,
    unsupported,
)
from compass_jax.model.families.tensors import TENSORS, Tensor
from compass_jax.model.families.tensors import renamed as renamed  # for files of families
from compass_jax.model.families.windows import Windows

_EXTRA_LAYERS = "num_nextn_predict_layers"
_NORM_KEY = "use_qk_norm"
_SIZES = ("vocab_size", "hidden", "layers", "heads", "kv_heads", "ffn")  # no class has a default
# Defaults of most classes for keys that config.json lacks.
COMMON: JsonMapping = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}


class Attention(NamedTuple):
    """The variants of a family's attention: fields of ModelConfig."""

    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
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
        Attention(qk_norm=True),
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
        optional = field_hints(MoEConfig).keys() - {"router"}
        for name, keys, common, allowed in (
            ("keys", self.keys, KEYS, KEYS.keys()),
            ("moe_keys", self.moe_keys or MOE_KEYS, MOE_KEYS, optional),
            ("mla_keys", self.mla_keys or MLA_KEYS, MLA_KEYS, MLA_KEYS.keys()),
        ):
            if wrong := sorted((keys.keys() - allowed) | (common.keys() - keys.keys())):
                raise ConfigError(
                    f"the family {self.model_type}: {name} must have a key of config.json for each"
                    f" of {', '.join(common)}; look at {', '.join(wrong)}"
                )
        for name, values in (("defaults", self.defaults), ("fixed", self.fixed)):
            if wrong := sorted(values.keys() - self.read_keys):
                raise ConfigError(
                    f"the family {self.model_type}: {name} has {', '.join(wrong)}, which is read"
                    " from no config.json: use the names that `keys` and `moe_keys` give"
                )

    @cached_property
    def all_keys(self) -> dict[str, str]:
        """Path of a field of ModelConfig -> the key of config.json that holds it."""
        switches = {"qkv_bias": self.bias_key, "qk_norm": _NORM_KEY}
        for field in [*switches]:
            if len({getattr(form, field) for form in self.attention}) == 1:
                del switches[field]
        parts = [("", self.keys), ("mla.", self.mla_keys or {}), ("", switches)]
        if self.moe_keys is not None:
            parts += [("moe.", self.moe_keys), ("moe.router.", self.router_keys)]
        return {prefix + field: key for prefix, keys in parts for field, key in keys.items()}

    @cached_property
    def read_keys(self) -> frozenset[str]:
        """The keys of config.json from which `read` builds the model."""
        more = [EXPERTS_TOO] * (self.moe_keys is not None) + [_EXTRA_LAYERS] * self.extra_layers
        more += [rope.PARTIAL] * (self.rotary is not None)
        return frozenset((*ALWAYS_READ, *self.all_keys.values(), *more))

    @cached_property
    def _limited(self) -> JsonObject:
        """The keys whose effect the model lacks: their neutral values, and these in words."""
        limits = {key: NEUTRAL[key] for key in NEUTRAL.keys() - (self.read_keys - ALWAYS_READ)}
        limits[self.keys["activation"]] = NEUTRAL["hidden_act"]
        for key, value in {**self.fixed, **self.served}.items():
            limits[key] = (value,), f"{value}, always"
        return {key: limit for key, limit in limits.items() if key not in self.unread}

    def tensor(self, leaf: str) -> Tensor:
        """Returns a parameter's tensor. Raises UnsupportedModel where the family names none."""
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
        refuse(where, self.problems(raw, where))
        declared, complete = self._values(raw, where)
        try:
            config = self._model(declared, complete, name)
            config.validate()
        except ConfigError as error:
            raise WeightsError(f"{where} describes an impossible model: {error}") from error
        # Called for its error: a config.json with ids outside the vocabulary.
        complete.token_ids(config.vocab_size)
        return config

    def _model(self, declared: Raw, raw: Raw, name: str) -> ModelConfig:
        read = partial(fields.read_fields, raw, self.all_keys)
        values = read(ModelConfig)
        if self.mla_keys is not None:
            values["mla"] = MLAConfig(**read(MLAConfig, "mla."))
        if self.moe_keys is not None:
            router = seam_class(Router, self.router)
            moe = {**read(MoEConfig, "moe."), "router": router(**read(router, "moe.router."))}
            values["moe"] = MoEConfig(**moe)
        defaults, positions = {**self.defaults, **self.fixed}, values["max_positions"]
        theta = self.keys["rope_theta"]
        return ModelConfig(
            **values
            | {"family": name, **self._attention(raw)._asdict()}
            | rope.read_rope(declared, defaults, theta, positions, self.rotary or 1.0)
            | self.windows.read(raw, values["layers"], self.keys["layers"])
        )

    def _attention(self, raw: Raw) -> Attention:
        first = self.attention[0]
        bias = raw.flag(self.bias_key, first.qkv_bias)
        norm = raw.flag(_NORM_KEY) if "qk_norm" in self.all_keys else first.qk_norm
        for form in self.attention:
            if (form.qkv_bias, form.qk_norm) == (bias, norm):
                return form
        raise UnsupportedModel(
            f"{raw.where}: the family {self.model_type} has no attention with {self.bias_key} ="
            f" {bias} and {_NORM_KEY} = {norm}: add it to the family's `attention`"
        )

    def _values(self, raw: JsonObject, where: str) -> tuple[Raw, Raw]:
        """Returns the values that config.json declares, and these with the class's constants, and
        its defaults for keys that are absent or null. A null window or rank of queries means none.
        """
        declared = {key: value for key, value in raw.items() if value is not None}
        defaults = dict(self.defaults)
        if self.own_kv_heads and self.keys["heads"] in declared:
            defaults[self.keys["kv_heads"]] = declared[self.keys["heads"]]
        for key in {"sliding_window", (self.mla_keys or MLA_KEYS)["q_rank"]} & raw.keys():
            defaults.pop(key, None)
        return Raw(declared, where), Raw({**defaults, **declared, **self.fixed}, where)

    def problems(self, raw: JsonObject, where: str) -> list[str]:
        """Returns a line for each thing in a config.json that changes the maths and is not
        supported, and one with the keys that are missing.
        """
        declared, complete = self._values(raw, where)
        lines = [
            unsupported(key, value, self._limited[key][1])
            for key, value in declared.values.items()
            if key in self._limited and value not in self._limited[key][0]
        ]
        if keys := self.unknown_keys(declared.values):
            values = (f"{key[:100]} = {describe_value(raw[key])}" for key in keys)
            lines.append(
                f"{', '.join(values)} is not supported (supported: the keys of a"
                f" {self.model_type} model; remove those that do not change what the model"
                " computes)"
            )
        if (classes := complete.get("architectures")) not in (None, [], [self.architecture]):
            lines.append(unsupported("architectures", classes, self.architecture))
        lines += quantization_problems(complete.get("quantization_config"))
        lines += self._attention_problems(complete) + self.windows.problems(complete)
        lines += rope.rope_problems(declared.values, self.rope, self.rotary is not None)
        return lines + self._absent(declared, complete)

    def unknown_keys(self, declared: JsonObject) -> list[str]:
        """Returns the keys of a config.json that may change the maths and are not in the family."""
        known = {*self.read_keys, *self.unread, *self._limited}
        return [key for key in declared if key not in known and not says_no_maths(key)]

    def _attention_problems(self, raw: Raw) -> list[str]:
        """Returns the messages of `problems` about biases and norms of attention."""
        lines, biased = [], raw.get(self.bias_key)
        forms = [form for form in self.attention if biased in (None, form.qkv_bias)]
        if not forms and type(biased) is bool:
            hint = f"{str(not biased).lower()} in {self.model_type}, whose class has no other"
            lines.append(unsupported(self.bias_key, biased, hint))
        bias, norm = (forms or self.attention)[0].qkv_bias, (forms or self.attention)[0].qk_norm
        supported = {"attention_bias": bias, "qkv_bias": bias, _NORM_KEY: norm}
        for key in [x for x in supported if x not in (self.bias_key, *self.all_keys.values())]:
            if raw.get(key) not in (None, supported[key]):
                hint = f"{supported[key]} in this {self.model_type} model"
                lines.append(unsupported(key, raw.get(key), hint))
        return lines

    def _absent(self, declared: Raw, raw: Raw) -> list[str]:
        """Returns a message with the keys whose value neither config.json nor the family has."""
        optional = {"init_std", "rope_theta", "mla.q_rank"}
        optional |= {f"moe.router.{x}" for x in self.router_keys}
        optional |= {"head_dim"} if self.mla_keys is None else set()
        optional |= {"moe.experts"} if raw.get(EXPERTS_TOO) is not None else set()
        required = [key for path, key in self.all_keys.items() if path not in optional]
        absent, theta = [key for key in required if raw.get(key) is None], self.keys["rope_theta"]
        if not rope.places(declared, rope.THETA, theta) and raw.get(theta) is None:
            absent.append(theta)
        hint = (
            f", and the family {self.model_type} has no default: add the class's default to the"
            " family's `defaults`, or its constant value to `fixed`"
        )
        if {self.keys[field] for field in _SIZES}.issuperset(absent):
            hint = ""
        return [f"it has no {', '.join(dict.fromkeys(absent))}{hint}"] if absent else []

    def write(self, config: ModelConfig, dtype: str, token_ids: JsonObject) -> JsonObject:
        """Returns the config.json of a model whose weights are stored as `dtype`; `token_ids` has
        the keys of `TOKEN_IDS`. Raises UnsupportedModel as `check` does.
        """
        self.check(config)
        raw: JsonObject = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "attention_dropout": 0.0,
            "use_cache": True,
            "torch_dtype": dtype,
            **self._to_config(config),
            **{name: token_ids.get(name) for name in TOKEN_IDS},
        }
        return {key: value for key, value in raw.items() if key not in self.fixed}

    def _to_config(self, config: ModelConfig) -> JsonObject:
        return {
            **rope.written_rope(config, self.defaults, self.rotary is not None),
            **self.windows.to_config(config),
            **self.served,
            **fields.written_fields(config, self.all_keys),
            **({_EXTRA_LAYERS: 0} if self.extra_layers else {}),
        }

    def check(self, config: ModelConfig) -> None:
        """Raises UnsupportedModel for a model that the family's class cannot express."""
        for reason in self._differences(config):
            raise UnsupportedModel(reason)

    def _differences(self, config: ModelConfig) -> Iterator[str]:
        """Yields the reasons why the class cannot express a model, of which the first is true."""
        name, end = config.family, "so this model cannot be exported"
        for part, keys in (("moe", self.moe_keys), ("mla", self.mla_keys)):
            if (getattr(config, part) is None) != (keys is None):
                takes = "takes no" if keys is None else "needs"
                yield f"model.family = {name!r} {takes} model.{part}"
        actual = Attention(*(getattr(config, field) for field in Attention._fields))
        if actual not in self.attention:
            forms = " or ".join(str(tuple(form)) for form in self.attention)
            message = f"model.{', '.join(Attention._fields)} = {tuple(actual)}: a Hugging Face"
            yield f"{message} {name} model has {forms}, {end}"
        scaling = config.rope_scaling
        if scaling is not None and (kind := rope.rope_type(scaling)) not in self.rope:
            has = f"the family {name} has {' or '.join(self.rope) or 'none'}"
            yield f"model.rope_scaling is of type {kind}: {has}, {end}"
        if config.moe is not None:
            yield from self._moe_differences(config, config.moe)
        reasons = [self.windows.unexported(config)]
        if config.rotary_fraction != 1 and self.rotary is None:
            fraction = config.rotary_fraction
            reasons.append(f"model.rotary_fraction = {fraction}: rotary turns whole heads")
        reasons += fields.unwritable_fields(config, self.all_keys)
        yield from (f"{x} in {name}, so it cannot be exported" for x in reasons if x)
        for key, value in self._to_config(config).items():
            if key in self.fixed and value != self.fixed[key]:
                always = f"a {self.model_type} model always has {self.fixed[key]}"
                yield f"the model's {key} is {value}: {always}, {end}"

    def _moe_differences(self, config: ModelConfig, moe: MoEConfig) -> Iterator[str]:
        name, end, key = config.family, "so this model cannot be exported", self.keys["ffn"]
        # a field without a key has its default
        for field in [x for x in field_hints(MoEConfig) if f"moe.{x}" not in self.all_keys]:
            if field != "router" and (value := getattr(moe, field)) != getattr(MoEConfig, field):
                yield f"model.moe.{field} = {value}: the family {name} has none, {end}"
        cls, router = seam_class(Router, self.router), moe.router
        fixed = {x.name for x in dataclasses.fields(cls)} - self.router_keys.keys()
        if type(router) is not cls or any(getattr(router, x) != getattr(cls(), x) for x in fixed):
            yield (
                f"model.moe.router = {describe_value(router)}: the family {name} has the router"
                f" {self.router}, {end}; name the router in a family of your own"
            )
        is_mixed = len(config.moe_layers) < config.layers
        if is_mixed and key == self.all_keys["moe.ffn"] and config.ffn != moe.ffn:
            widths = f"model.ffn = {config.ffn} and model.moe.ffn = {moe.ffn}"
            message = f"{widths}: dense layers and experts have one width, {key},"
            yield f"{message} in {name}, so it cannot be exported"
