"""Settings of the model and of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from compass_jax.config.errors import check


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers. `ffn` is the hidden width of one expert (HF `moe_intermediate_size`)."""

    experts: int
    top_k: int
    ffn: int
    norm_top_k: bool = True  # HF norm_topk_prob: gate weights of the chosen experts sum to one
    sparse_step: int = 1  # HF decoder_sparse_step: layer i is MoE when (i + 1) % sparse_step == 0
    dense_layers: tuple[int, ...] = ()  # HF mlp_only_layers

    def validate(self, layers: int) -> None:
        check(self.experts >= 2, f"model.moe.experts = {self.experts}: at least 2 are needed")
        check(1 <= self.top_k <= self.experts, f"model.moe.top_k = {self.top_k}: must be in 1..{self.experts} (experts)")
        check(self.ffn >= 1, f"model.moe.ffn = {self.ffn}: must be positive")
        check(self.sparse_step >= 1, f"model.moe.sparse_step = {self.sparse_step}: must be at least 1")
        bad = [i for i in self.dense_layers if not 0 <= i < layers]
        check(not bad, f"model.moe.dense_layers {bad}: the model has layers 0..{layers - 1}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the supported families, in the terms of its Hugging Face config."""

    family: Literal["qwen3_moe", "qwen3", "qwen2"]
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # hidden width of the dense layers' MLP (HF intermediate_size)
    moe: MoEConfig | None = None
    rope_theta: float = 1_000_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    max_positions: int = 32_768
    init_std: float = 0.02

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` (0-based) is a mixture of experts."""
        moe = self.moe
        return moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layers that are MoE, in order; entry i is layer i of a routing array's `l` axis."""
        return tuple(i for i in range(self.layers) if self.is_moe(i))

    def validate(self) -> None:
        for name in ("vocab_size", "hidden", "layers", "heads", "kv_heads", "head_dim", "ffn", "max_positions"):
            check(getattr(self, name) >= 1, f"model.{name} = {getattr(self, name)}: must be positive")
        check(self.heads % self.kv_heads == 0, f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}")
        check(self.head_dim % 2 == 0, f"model.head_dim = {self.head_dim}: rotary embeddings need an even size")
        check(
            (self.moe is not None) == (self.family == "qwen3_moe"),
            f"model.family = {self.family!r} {'needs' if self.moe is None else 'takes no'} model.moe",
        )
        if self.moe is not None:
            self.moe.validate(self.layers)


@dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed; none of these changes what it computes beyond rounding."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # activations and matmul inputs
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: bool = False  # recompute each layer in the backward pass
    scan_layers: bool = True  # one compiled body per run of equal layers; False unrolls: faster for few layers, slow to compile for many
    scan_decode: bool = False  # the same for prefill and decoding: what a TPU takes minutes to compile for a hundred layers
    experts: Literal["auto", "ragged", "padded"] = "auto"  # grouped matmul; auto: padded on CPU, ragged elsewhere
    attention: Literal["auto", "splash", "portable"] = "auto"  # splash: the TPU's kernel, in training and prefill; auto: on a TPU, where lengths fit
    exchange: Literal["gather", "all_to_all"] = "gather"  # how training sends tokens to experts on other devices; prefill and decoding gather
    moe_chunk: int = 0  # tokens of a device that go through the experts at once, recomputed in the backward pass; 0: all
    logprob_chunk: int = 4096  # tokens whose [v] logits exist at once
    float32_parts: tuple[Literal["attention", "gate", "mlp", "stream"], ...] = ()  # computed in float32 where dtype is bfloat16

    def dtype_of(self, part: str) -> str:
        """The dtype of one part's activations: `attention` (and its cache), the router's input (`gate`), the experts and dense layers
        (`mlp`), or the residual `stream` with the final norm and the LM head. Each includes the norm in front of it; weights are rounded
        as before."""
        return "float32" if self.dtype == "bfloat16" and part in self.float32_parts else self.dtype

    def validate(self) -> None:
        check(self.logprob_chunk >= 1, f"compute.logprob_chunk = {self.logprob_chunk}: must be positive")
        check(self.moe_chunk >= 0, f"compute.moe_chunk = {self.moe_chunk}: must be >= 0 (0: all tokens at once)")
        check(len(set(self.float32_parts)) == len(self.float32_parts), f"compute.float32_parts = {self.float32_parts}: names a part twice")
