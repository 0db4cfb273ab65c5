"""Settings of the model and of how it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from compass_jax.config.errors import check
from compass_jax.config.named import absolute
from compass_jax.config.ranges import CountOrOff, Name, Range, Tokens, check_fields

Width = Annotated[int, Range(1, 2**20)]
MOST_PARAMETERS = 10**13  # several times those of the largest model that was published


@dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts layers. `ffn` is the hidden width of one expert (HF
    `moe_intermediate_size`).
    """

    experts: Annotated[int, Range(2, 65_535, note="a route has 16 bits")]
    top_k: Annotated[int, Range(1, 65_535)]
    ffn: Width
    norm_top_k: bool = True  # HF norm_topk_prob: gate weights of the chosen experts sum to one
    # HF decoder_sparse_step: layer i is MoE when (i + 1) % sparse_step == 0
    sparse_step: Annotated[int, Range(1, 1000)] = 1
    dense_layers: tuple[Annotated[int, Range(0, 999)], ...] = ()  # HF mlp_only_layers

    def validate(self, layers: int) -> None:
        check_fields(self, "model.moe")
        check(
            self.top_k <= self.experts,
            f"model.moe.top_k = {self.top_k}: must be in 1..{self.experts} (experts)",
        )
        bad = [i for i in self.dense_layers if i >= layers]
        check(not bad, f"model.moe.dense_layers {bad}: the model has layers 0..{layers - 1}")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder of one of the supported families, in the terms of its Hugging Face config."""

    family: Name  # a file of compass_jax/families/, or your own as path/file.py:FAMILY
    vocab_size: Annotated[int, Range(1, 2**24)]
    hidden: Width
    layers: Annotated[int, Range(1, 1000)]
    heads: Annotated[int, Range(1, 65_536)]
    kv_heads: Annotated[int, Range(1, 65_536)]
    head_dim: Annotated[int, Range(1, 65_536)]
    ffn: Width  # hidden width of the dense layers' MLP (HF intermediate_size)
    moe: MoEConfig | None = None
    rope_theta: Annotated[float, Range(1, 1e15)] = 1_000_000.0
    norm_eps: Annotated[float, Range(1e-30, 1)] = 1e-6
    tie_embeddings: bool = False
    qk_norm: bool = True
    qkv_bias: bool = False
    o_bias: bool = False
    max_positions: Tokens = 32_768
    init_std: Annotated[float, Range(0, 1000)] = 0.02

    def __post_init__(self) -> None:
        # a checkpoint means the same file wherever it is read
        object.__setattr__(self, "family", absolute(self.family))

    def is_moe(self, layer: int) -> bool:
        """Whether decoder layer `layer` (0-based) is a mixture of experts."""
        moe = self.moe
        return (
            moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0
        )

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Decoder layers that are MoE, in order; entry i is layer i of a routing array's
        `l` axis.
        """
        return tuple(i for i in range(self.layers) if self.is_moe(i))

    @property
    def mixture(self) -> MoEConfig:
        """`moe` of a model that has MoE layers. ValueError for a dense one."""
        if self.moe is None:
            raise ValueError("a dense model has no experts")
        return self.moe

    def validate(self) -> None:
        check_fields(self, "model")
        check(
            self.heads % self.kv_heads == 0,
            f"model.heads = {self.heads} is not a multiple of model.kv_heads = {self.kv_heads}",
        )
        check(
            self.head_dim % 2 == 0,
            f"model.head_dim = {self.head_dim}: rotary embeddings need an even size",
        )
        if self.moe is not None:
            self.moe.validate(self.layers)
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        experts = 0 if self.moe is None else self.moe.experts * (3 * self.moe.ffn + 1)
        mlp = self.hidden * max(3 * self.ffn, experts)
        size = self.layers * (attention + mlp) + 2 * self.vocab_size * self.hidden
        found = f"model: its sizes make up to {size:.1e} parameters"
        check(size <= MOST_PARAMETERS, f"{found}, at most {MOST_PARAMETERS:.0e} are allowed")


@dataclass(frozen=True)
class ComputeConfig:
    """How the model is computed; none of these changes what it computes beyond rounding."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"  # activations and matmul inputs
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    remat: bool = False  # recompute each layer in the backward pass
    # one compiled body per run of equal layers; False unrolls: faster for few layers, slow to
    # compile for many
    scan_layers: bool = True
    # the same for prefill and decoding: what a TPU takes minutes to compile for a hundred layers
    scan_decode: bool = False
    # grouped matmul; auto: padded on CPU, ragged elsewhere
    experts: Literal["auto", "ragged", "padded"] = "auto"
    # splash: the TPU's kernel, in training and prefill; auto: on a TPU, where lengths fit
    attention: Literal["auto", "splash", "portable"] = "auto"
    # how training sends tokens to experts on other devices; prefill and decoding gather
    exchange: Literal["gather", "all_to_all"] = "gather"
    # tokens of a device that go through the experts at once, recomputed in the backward pass; 0:
    # all
    moe_chunk: CountOrOff = 0
    logprob_chunk: Tokens = 4096  # tokens whose [v] logits exist at once
    # computed in float32 where dtype is bfloat16
    float32_parts: tuple[Literal["attention", "gate", "mlp", "stream"], ...] = ()

    def dtype_of(self, part: str) -> str:
        """The dtype of one part's activations: `attention` (and its cache), the router's input
        (`gate`), the experts and dense layers (`mlp`), or the residual `stream` with the final norm
        and the LM head. Each includes the norm in front of it; weights are rounded as before."""
        return "float32" if self.dtype == "bfloat16" and part in self.float32_parts else self.dtype

    def validate(self) -> None:
        check_fields(self, "compute")
        check(
            len(set(self.float32_parts)) == len(self.float32_parts),
            f"compute.float32_parts = {self.float32_parts}: names a part twice",
        )
