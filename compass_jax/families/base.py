"""What a Hugging Face model family is: its `config.json` in and out, the names of its tensors, what
its class can express, and what is refused.

A family is one file with one `FAMILY`. Those of this package are beside this file; your own may lie
anywhere and is named `family="path/file.py:FAMILY"`:

    from compass_jax.families.base import KEYS, MOE_KEYS, TENSORS, Family, renamed

    FAMILY = Family(
        model_type="acorn_moe",
        architecture="AcornForCausalLM",
        keys=KEYS | {"hidden": "n_embd"},
        moe_keys=MOE_KEYS,
        tensors=renamed(TENSORS, {"model.layers.": "transformer.h."}),
    )

What a file says and we cannot compute is refused by name: a model that loads and answers wrongly is
the worst outcome. Both spellings are read, the hub's (`num_experts`, `rope_theta`, `rope_scaling`)
and that of transformers 5 (`num_local_experts`, `rope_parameters`); the hub's is written, which
transformers 4 and 5 and the serving engines read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from compass_jax.config import ConfigError, ModelConfig, MoEConfig
from compass_jax.config.ranges import shown
from compass_jax.families.keys import ALWAYS_READ, HARMLESS, NEUTRAL, ROPE_KEYS
from compass_jax.families.raw import TOKEN_IDS, Raw, UnsupportedModel, WeightsError


class Tensor(NamedTuple):
    """One parameter in the files: its name, with `{i}` for the decoder layer and `{e}` for the
    expert; `transposed`: as torch keeps the weight of a Linear, [out, in].
    """

    name: str
    transposed: bool = False


def _linear(name: str) -> Tensor:
    return Tensor(name, transposed=True)


_LAYER = "model.layers.{i}."
# Parameter (model/params.py) -> its tensor; those of experts are one tensor each.
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
    "attention.q_norm": Tensor(_LAYER + "self_attn.q_norm.weight"),
    "attention.k_norm": Tensor(_LAYER + "self_attn.k_norm.weight"),
    "mlp_norm": Tensor(_LAYER + "post_attention_layernorm.weight"),
    "mlp.gate": _linear(_LAYER + "mlp.gate_proj.weight"),
    "mlp.up": _linear(_LAYER + "mlp.up_proj.weight"),
    "mlp.down": _linear(_LAYER + "mlp.down_proj.weight"),
    "moe.router": _linear(_LAYER + "mlp.gate.weight"),
    "moe.gate": _linear(_LAYER + "mlp.experts.{e}.gate_proj.weight"),
    "moe.up": _linear(_LAYER + "mlp.experts.{e}.up_proj.weight"),
    "moe.down": _linear(_LAYER + "mlp.experts.{e}.down_proj.weight"),
}


def renamed(tensors: Mapping[str, Tensor], changes: Mapping[str, str]) -> dict[str, Tensor]:
    """`tensors` with each part of a name that `changes` has replaced by what it says."""
    found = dict(tensors)
    for old, new in changes.items():
        found = {
            leaf: tensor._replace(name=tensor.name.replace(old, new))
            for leaf, tensor in found.items()
        }
    return found


# Field of ModelConfig -> key of config.json.
KEYS: Mapping[str, str] = {
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
MOE_KEYS: Mapping[str, str] = {
    "experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "ffn": "moe_intermediate_size",
    "norm_top_k": "norm_topk_prob",
    "sparse_step": "decoder_sparse_step",
    "dense_layers": "mlp_only_layers",
}
_EXPERTS_TOO = "num_local_experts"  # transformers 5's spelling


class Attention(NamedTuple):
    """What a family's attention has."""

    qk_norm: bool
    qkv_bias: bool
    o_bias: bool


@dataclasses.dataclass(frozen=True)
class Family:
    """A Hugging Face model family. `model_type` and `architecture` are those of its config.json.

    Args:
        keys, moe_keys: field of ModelConfig and of MoEConfig -> key of config.json; moe_keys None:
            a family without experts
        tensors: parameter -> its tensor in the files
        attention: what the family's class can express; the first is its default
        head_dim: the class's default; None: hidden size / heads
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
    head_dim: int | None = None

    def tensor(self, leaf: str) -> Tensor:
        """The tensor of a parameter; UnsupportedModel where the family names none."""
        if leaf not in self.tensors:
            raise UnsupportedModel(
                f"the family {self.model_type} names no tensor for the parameter {leaf}:"
                " add it to the family's `tensors`"
            )
        return self.tensors[leaf]

    def read(self, raw: dict[str, Any], where: str, name: str) -> ModelConfig:
        """The ModelConfig of a parsed config.json whose family is called `name` in configurations.

        Raises UnsupportedModel for a field that changes the maths and is not supported,
        WeightsError for what is missing or malformed. Fields that are absent take the defaults of
        the family's transformers class.
        """
        given, key = Raw(raw, where), self.keys
        self._refuse_other_maths(given)
        hidden, heads = given.integer(key["hidden"]), given.integer(key["heads"])
        try:
            config = ModelConfig(
                family=name,
                vocab_size=given.integer(key["vocab_size"]),
                hidden=hidden,
                layers=given.integer(key["layers"]),
                heads=heads,
                kv_heads=given.integer(key["kv_heads"]),
                head_dim=given.integer(key["head_dim"], self.head_dim or hidden // max(heads, 1)),
                ffn=given.integer(key["ffn"]),
                moe=self._moe(given),
                rope_theta=_rope_theta(given),
                norm_eps=given.number(key["norm_eps"], 1e-6),
                tie_embeddings=given.flag(key["tie_embeddings"], False),
                max_positions=given.integer(key["max_positions"], 32_768),
                init_std=given.number(key["init_std"], 0.02),
                **self._attention(given)._asdict(),
            )
            config.validate()
        except ConfigError as error:
            raise WeightsError(f"{where} describes an impossible model: {error}") from error
        _check_layer_types(given, config.layers)
        for field, ours in (("qkv_bias", config.qkv_bias), ("use_qk_norm", config.qk_norm)):
            if raw.get(field) not in (None, ours):
                raise given.unsupported(field, raw[field], f"{ours} in this {name} model")
        given.token_ids(config.vocab_size)
        return config

    def write(self, config: ModelConfig, dtype: str, token_ids: dict[str, Any]) -> dict[str, Any]:
        """The config.json of a model whose weights are stored as `dtype`; `token_ids` as
        `TOKEN_IDS`. UnsupportedModel where the family's class cannot express the model.
        """
        self.check(config)
        raw: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "hidden_act": "silu",
            "rope_theta": config.rope_theta,
            "rope_scaling": None,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "use_cache": True,
            "torch_dtype": dtype,
        }
        raw |= {key: getattr(config, field) for field, key in self.keys.items()}
        if len(self.attention) > 1:
            raw["attention_bias"] = config.qkv_bias
        if config.moe is not None and self.moe_keys is not None:
            moe = {field: getattr(config.moe, field) for field in self.moe_keys}
            moe["dense_layers"] = list(moe["dense_layers"])
            raw |= {key: moe[field] for field, key in self.moe_keys.items()}
        return raw | {name: token_ids.get(name) for name in TOKEN_IDS}

    def check(self, config: ModelConfig) -> None:
        """Raises UnsupportedModel for a model that the family's class cannot express."""
        if (config.moe is None) != (self.moe_keys is None):
            takes = "takes no" if self.moe_keys is None else "needs"
            raise UnsupportedModel(f"model.family = {config.family!r} {takes} model.moe")
        actual = Attention(config.qk_norm, config.qkv_bias, config.o_bias)
        if actual not in self.attention:
            raise UnsupportedModel(
                f"model.qk_norm, qkv_bias, o_bias = {tuple(actual)}: a Hugging Face"
                f" {config.family} model has {' or '.join(str(tuple(x)) for x in self.attention)},"
                " so this model cannot be exported"
            )

    def _attention(self, given: Raw) -> Attention:
        biased = given.flag("attention_bias", self.attention[0].qkv_bias)
        for form in self.attention:
            if form.qkv_bias == biased:
                return form
        only = str(not biased).lower()
        raise given.unsupported(
            "attention_bias", biased, f"{only} in {self.model_type}, whose class knows no other"
        )

    def _moe(self, given: Raw) -> MoEConfig | None:
        key = self.moe_keys
        if key is None:
            return None
        spelled = [name for name in (key["experts"], _EXPERTS_TOO) if given.get(name) is not None]
        experts = {given.integer(name) for name in spelled or [key["experts"]]}
        if len(experts) > 1:
            raise WeightsError(
                f"{given.where}: {key['experts']} = {given.get(key['experts'])} and"
                f" {_EXPERTS_TOO} = {given.get(_EXPERTS_TOO)} disagree"
            )
        name = key["dense_layers"]
        dense = [] if given.get(name) is None else given.get(name)
        if not isinstance(dense, list) or not all(type(i) is int for i in dense):
            raise WeightsError(
                f"{given.where}: {name} = {shown(dense)}, a list of layer numbers is expected"
            )
        return MoEConfig(
            experts=experts.pop(),
            top_k=given.integer(key["top_k"], 8),
            ffn=given.integer(key["ffn"], 768),
            norm_top_k=given.flag(key["norm_top_k"], False),
            sparse_step=given.integer(key["sparse_step"], 1),
            dense_layers=tuple(sorted(set(dense))),
        )

    @property
    def read_keys(self) -> frozenset[str]:
        """The keys of config.json that `read` takes its model from."""
        of_moe = () if self.moe_keys is None else (*self.moe_keys.values(), _EXPERTS_TOO)
        return frozenset((*ALWAYS_READ, *self.keys.values(), *of_moe))

    def _refuse_other_maths(self, given: Raw) -> None:
        known = HARMLESS | self.read_keys
        for field, value in given.values.items():
            if value is None or field in known:
                continue
            if field not in NEUTRAL:
                hint = (
                    f"the keys of a {self.model_type} model; remove this one if it changes nothing"
                    " that the model computes"
                )
                raise given.unsupported(field[:100], value, hint)
            allowed, supported = NEUTRAL[field]
            if value not in allowed:
                raise given.unsupported(field, value, supported)
        if given.get("architectures") not in (None, [], [self.architecture]):
            raise given.unsupported("architectures", given.get("architectures"), self.architecture)


def _check_layer_types(given: Raw, layers: int) -> None:
    kinds = given.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise given.unsupported("layer_types", kinds, "'full_attention' in every layer")
    if len(kinds) != layers:
        raise WeightsError(
            f"{given.where}: layer_types has {len(kinds)} entries, num_hidden_layers is {layers}"
        )


def _rope_theta(given: Raw) -> float:
    """theta of plain rotary embeddings; any scaling is refused, and so is a key that we do not
    know: it would change the angles.
    """
    found = {"rope_theta": given.values} if given.get("rope_theta") is not None else {}
    for field in ("rope_scaling", "rope_parameters"):
        rope = given.get(field)
        if rope is None:
            continue
        known = isinstance(rope, dict) and set(rope) <= ROPE_KEYS
        if (
            not known
            or any(rope.get(key, "default") != "default" for key in ("rope_type", "type"))
            or rope.get("partial_rotary_factor", 1.0) != 1.0
        ):
            raise given.unsupported(
                field, rope, "rope_type 'default' with rope_theta, over the whole head"
            )
        if rope.get("rope_theta") is not None:
            found[field] = rope
    thetas = {
        field: Raw(values, f"{given.where}: {field}").number("rope_theta", 0.0)
        for field, values in found.items()
    }
    if len(set(thetas.values())) > 1:
        raise WeightsError(
            f"{given.where}: "
            + " and ".join(f"{field} gives rope_theta = {value}" for field, value in thetas.items())
            + "; they disagree"
        )
    return next(iter(thetas.values()), 10_000.0)
