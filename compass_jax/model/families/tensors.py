"""Names and layouts of the tensors in a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


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


def _in_layer(name: str) -> Tensor:
    return Tensor("model.layers.{i}." + name)


def _linear(name: str) -> Tensor:
    return Tensor(f"model.layers.{{i}}.{name}.weight", transposed=True)


# MLP of this package (model/params.py) -> its module in a decoder layer, and the projections.
_MLPS = {"mlp": "mlp", "moe": "mlp.experts.{e}", "shared": "mlp.shared_expert"}
_PARTS = ("gate", "up", "down")
# Parameter (model/params.py) -> its tensor. Each expert has its own tensor.
TENSORS: Mapping[str, Tensor] = {
    "embed": Tensor("model.embed_tokens.weight"),
    "final_norm": Tensor("model.norm.weight"),
    "head": Tensor("lm_head.weight", transposed=True),
    "attention_norm": _in_layer("input_layernorm.weight"),
    **{f"attention.{x}": _linear(f"self_attn.{x}_proj") for x in "qkvo"},
    **{f"attention.{x}_bias": _in_layer(f"self_attn.{x}_proj.bias") for x in "qkvo"},
    "attention.sinks": _in_layer("self_attn.sinks"),
    "attention.q_a": _linear("self_attn.q_a_proj"),
    "attention.q_a_norm": _in_layer("self_attn.q_a_layernorm.weight"),
    "attention.q_b": _linear("self_attn.q_b_proj"),
    "attention.kv_a": _linear("self_attn.kv_a_proj_with_mqa"),
    "attention.kv_a_norm": _in_layer("self_attn.kv_a_layernorm.weight"),
    "attention.kv_b": _linear("self_attn.kv_b_proj"),
    "attention.q_norm": _in_layer("self_attn.q_norm.weight"),
    "attention.k_norm": _in_layer("self_attn.k_norm.weight"),
    "mlp_norm": _in_layer("post_attention_layernorm.weight"),
    "moe.router": _linear("mlp.gate"),
    "moe.router_bias": _in_layer("mlp.gate.bias"),
    "moe.router_selection": _in_layer("mlp.gate.e_score_correction_bias"),
    **{f"{mlp}.{x}": _linear(f"{name}.{x}_proj") for mlp, name in _MLPS.items() for x in _PARTS},
    **{f"moe.{x}_bias": _in_layer(f"{_MLPS['moe']}.{x}_proj.bias") for x in _PARTS},
    "shared.sigmoid": _linear("mlp.shared_expert_gate"),
}


def renamed(tensors: Mapping[str, Tensor], changes: Mapping[str, str]) -> dict[str, Tensor]:
    """Returns `tensors` with each key of `changes` in their names replaced by its value."""
    result = dict(tensors)
    for old, new in changes.items():
        for leaf, tensor in result.items():
            result[leaf] = tensor._replace(name=tensor.name.replace(old, new))
    return result
