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
    """Mixture-of-experts layers."""

    experts: Annotated[int, Range(2, 65_535, note="a route has 16 bits")]
    """Each MoE layer has this count of experts (HF num_experts)."""
    top_k: Annotated[int, Range(1, 65_535)]
    """The router sends each token to this count of experts (HF num_experts_per_tok)."""
    ffn: Width
    """The hidden width of one expert is this count of channels (HF moe_intermediate_size)."""
    norm_top_k: bool = True
    """The gate weights of the chosen experts are divided by their sum (HF norm_topk_prob)."""
    sparse_step: Annotated[int, Range(1, 1000)] = 1
    """Layer i is an MoE layer where i + 1 is a multiple of this count (HF decoder_sparse_step)."""
    dense_layers: tuple[Annotated[int, Range(0, 999)], ...] = ()
    """The layers with these numbers, counted from 0, are dense (HF mlp_only_layers)."""

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

    family: Name
    """The architecture is a file of compass_jax/families/, or your own as path/file.py:FAMILY."""
    vocab_size: Annotated[int, Range(1, 2**24)]
    """The embedding has rows for this count of token ids (HF vocab_size)."""
    hidden: Width
    """The residual stream has this count of channels (HF hidden_size)."""
    layers: Annotated[int, Range(1, 1000)]
    """The decoder has this count of layers (HF num_hidden_layers)."""
    heads: Annotated[int, Range(1, 65_536)]
    """Each layer's attention has this count of query heads (HF num_attention_heads)."""
    kv_heads: Annotated[int, Range(1, 65_536)]
    """Each layer's attention has this count of key and value heads (HF num_key_value_heads)."""
    head_dim: Annotated[int, Range(1, 65_536)]
    """A head has this count of channels, an even one (HF head_dim)."""
    ffn: Width
    """The hidden width of a dense layer's MLP is this count of channels (HF intermediate_size)."""
    moe: MoEConfig | None = None
    """The mixture-of-experts layers; None: all layers are dense."""
    rope_theta: Annotated[float, Range(1, 1e15)] = 1_000_000.0
    """The slowest rotary frequency follows from this base, a number without a unit (HF rope_theta).
    """
    norm_eps: Annotated[float, Range(1e-30, 1)] = 1e-6
    """The norms add this number, without a unit, to the mean square (HF rms_norm_eps)."""
    tie_embeddings: bool = False
    """The LM head uses the embedding's weights (HF tie_word_embeddings)."""
    qk_norm: bool = True
    """Queries and keys are normalised before the rotary embedding."""
    qkv_bias: bool = False
    """The projections to queries, keys and values have a bias (HF attention_bias)."""
    o_bias: bool = False
    """The attention's output projection has a bias."""
    max_positions: Tokens = 32_768
    """The longest sequence that the model takes has this many tokens (HF max_position_embeddings).
    """
    init_std: Annotated[float, Range(0, 1000)] = 0.02
    """Random weights are drawn with this standard deviation, a number without a unit."""

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

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Activations and the inputs of matrix products have this type."""
    param_dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """The parameters that are trained have this type."""
    remat: bool = False
    """The backward pass computes each layer again, which saves memory."""
    scan_layers: bool = True
    """Training compiles one body for each run of equal layers; False: a few layers run faster, many
    compile slowly.
    """
    scan_decode: bool = False
    """Prefill and decoding compile one body, too: a TPU takes minutes to compile a hundred layers.
    """
    experts: Literal["auto", "ragged", "padded"] = "auto"
    """The grouped matrix product of the experts; auto: padded on a CPU, ragged elsewhere."""
    attention: Literal["auto", "splash", "portable"] = "auto"
    """The attention of training and prefill; splash is the TPU's kernel; auto: splash on a TPU,
    where lengths fit.
    """
    exchange: Literal["gather", "all_to_all"] = "gather"
    """Training sends tokens to experts on other devices in this way; prefill and decoding gather.
    """
    moe_chunk: CountOrOff = 0
    """So many tokens of a device go through the experts at once, and again in the backward pass; 0:
    all.
    """
    logprob_chunk: Tokens = 4096
    """The logits of so many tokens exist at once."""
    float32_parts: tuple[Literal["attention", "gate", "mlp", "stream"], ...] = ()
    """These parts of the model are computed in float32 where dtype is bfloat16."""

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
