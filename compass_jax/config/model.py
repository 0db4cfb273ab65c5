"""Settings of the model and its computation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from compass_jax.config.errors import check
from compass_jax.config.ranges import CountOrOff, Name, Range, Section, Share, Tokens
from compass_jax.config.rope import RopeScaling, YarnRope
from compass_jax.config.router import Router
from compass_jax.config.seam import seam_class

Width = Annotated[int, Range(1, 2**20)]
Heads = Annotated[int, Range(1, 65_536)]
DType = Literal["float32", "bfloat16", "float64"]
MAX_PARAMETERS = 10**13  # several times the count of the largest published model


@dataclass(frozen=True)
class MoEConfig(Section):
    """The mixture-of-experts layers."""

    experts: Annotated[int, Range(2, 65_535, note="a route has 16 bits")]
    """Number of experts of an MoE layer (HF num_experts)."""
    top_k: Annotated[int, Range(1, 65_535)]
    """Number of experts per token (HF num_experts_per_tok)."""
    ffn: Width
    """Hidden width of one expert (number of channels; HF moe_intermediate_size)."""
    norm_top_k: bool = True
    """Divide the gate weights of the chosen experts by their sum (HF norm_topk_prob)."""
    router: Router = field(default_factory=lambda: seam_class(Router, "softmax")())
    """The choice of a token's experts and their gates: softmax, sigmoid, or your own class."""
    sparse_step: Annotated[int, Range(1, 1000)] = 1
    """Layer i is an MoE layer if i + 1 is a multiple of this count (HF decoder_sparse_step)."""
    dense_layers: tuple[Annotated[int, Range(0, 999)], ...] = ()
    """Numbers, from 0, of the dense layers (HF mlp_only_layers)."""
    shared_ffn: Annotated[int, Range(0, 2**20)] = 0
    """Hidden width of an expert that every token takes too (number of channels; HF
    shared_expert_intermediate_size); 0: none.
    """
    shared_gate: bool = False
    """Multiply the shared expert's output by a sigmoid gate."""
    router_bias: bool = False
    """Add a bias to the router's scores, for the choice and for the gates."""
    expert_bias: bool = False
    """Add a bias to the projections of each routed expert."""
    swiglu_limit: Annotated[float, Range(0, 1000)] = 0.0
    """Clip the projections of routed experts at this value (a number) and use gpt-oss's activation
    (HF swiglu_limit); 0: SwiGLU.
    """


@dataclass(frozen=True)
class MLAConfig(Section):
    """Multi-head latent attention (arXiv 2412.19437, section 2.1.1): keys and values of all heads
    are expanded from one latent vector of a token. A head of queries and keys has `model.head_dim`
    channels, of which rotary embeddings turn the last `rope_dim`; these are one vector for the keys
    of all heads.
    """

    kv_rank: Width
    """Width of the latent vector of keys and values (number of channels; HF kv_lora_rank)."""
    rope_dim: Heads
    """Number of a head's channels that rotary embeddings turn (even; HF qk_rope_head_dim)."""
    value_dim: Heads
    """Width of a head of values (number of channels; HF v_head_dim)."""
    q_rank: Annotated[int, Range(0, 2**20)] = 0
    """Width of the latent vector of queries (number of channels; HF q_lora_rank); 0: none, queries
    are projected directly.
    """
    interleaved: bool = True
    """Turn channels 2i and 2i + 1 together (HF rope_interleave); False: i and i + rope_dim / 2."""

    def problems(self, key: str, model: ModelConfig) -> list[str]:
        """Returns the settings of `model`, named `key`, that do not fit this attention."""
        broken = {
            f"mla.rope_dim = {self.rope_dim}: must be even and below {key}.head_dim ="
            f" {model.head_dim}": self.rope_dim % 2 or self.rope_dim >= model.head_dim,
            f"kv_heads = {model.kv_heads}: every head has its keys and values; set it to"
            f" {key}.heads = {model.heads}": model.kv_heads != model.heads,
            f"rotary_fraction = {model.rotary_fraction}: {key}.mla.rope_dim says which channels"
            " turn; leave it at 1": model.rotary_fraction != 1,
            "qk_norm = True: the norms are those of the latent vectors; set it to"
            " False": model.qk_norm,
            "qkv_bias = True: the projections have no bias; set it to False": model.qkv_bias,
        }
        return [f"{key}.{text}" for text, holds in broken.items() if holds]


@dataclass(frozen=True)
class ModelConfig(Section):
    """A decoder of one of the supported families, in the terms of its Hugging Face config."""

    KEY: ClassVar[str] = "model"
    CODE: ClassVar[tuple[str, ...]] = ("family",)

    family: Name
    """Architecture: a file of compass_jax/model/families/, or your own as path/file.py:FAMILY."""
    vocab_size: Annotated[int, Range(1, 2**24)]
    """Number of token ids of the embedding (HF vocab_size)."""
    hidden: Width
    """Width of the residual stream (number of channels; HF hidden_size)."""
    layers: Annotated[int, Range(1, 1000)]
    """Number of decoder layers (HF num_hidden_layers)."""
    heads: Heads
    """Number of query heads of a layer (HF num_attention_heads)."""
    kv_heads: Heads
    """Number of key and value heads of a layer (HF num_key_value_heads)."""
    head_dim: Heads
    """Width of a head (an even number of channels; HF head_dim)."""
    ffn: Width
    """Hidden width of a dense layer's MLP (number of channels; HF intermediate_size)."""
    moe: MoEConfig | None = None
    """Mixture-of-experts layers; None: every layer is dense."""
    mla: MLAConfig | None = None
    """Multi-head latent attention; None: attention with projections of keys and values."""
    rope_theta: Annotated[float, Range(1, 1e15)] = 1_000_000.0
    """Base of the rotary frequencies (a number; HF rope_theta)."""
    rotary_fraction: Share = 1.0
    """Fraction of a head's channels that rotary embeddings turn (HF partial_rotary_factor)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies to longer sequences (HF rope_scaling); None: none."""
    norm_eps: Annotated[float, Range(1e-30, 1)] = 1e-6
    """Epsilon that norms add to the mean square (a number; HF rms_norm_eps)."""
    tie_embeddings: bool = False
    """Use the embedding's weights in the LM head (HF tie_word_embeddings)."""
    qk_norm: bool = True
    """Normalise queries and keys before the rotary embedding."""
    qk_norm_scope: Literal["head", "projection"] = "head"
    """Part that a norm of queries or keys covers: each head, or all heads together."""
    qkv_bias: bool = False
    """Add a bias to the projections to queries, keys and values (HF attention_bias)."""
    o_bias: bool = False
    """Add a bias to the attention's output projection."""
    attention_sinks: bool = False
    """Add one learned score per head to the attention's softmax, which takes weight from the keys.
    """
    sliding_window: CountOrOff = 0
    """Sliding window of attention in tokens, with a token's own (HF sliding_window); 0: none."""
    full_attention_layers: tuple[Annotated[int, Range(0, 999)], ...] = ()
    """Numbers, from 0, of the layers without the sliding window (HF layer_types)."""
    max_positions: Tokens = 32_768
    """Longest sequence of the model in tokens (HF max_position_embeddings)."""
    init_std: Annotated[float, Range(0, 1000)] = 0.02
    """Standard deviation of random initial weights (a number)."""

    def is_moe(self, layer: int) -> bool:
        """Returns whether decoder layer `layer` (0-based) is a mixture of experts."""
        moe = self.moe
        return (
            moe is not None and layer not in moe.dense_layers and (layer + 1) % moe.sparse_step == 0
        )

    @property
    def rotary_dim(self) -> int:
        """The number of a head's channels that rotary embeddings turn."""
        return int(self.head_dim * self.rotary_fraction) if self.mla is None else self.mla.rope_dim

    @property
    def value_dim(self) -> int:
        """The width of a head of values."""
        return self.head_dim if self.mla is None else self.mla.value_dim

    @property
    def cache_width(self) -> int:
        """The number of channels of one layer's keys and values of a token."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def attention_weights(self) -> int:
        """The number of weights of a layer's attention, without norms, biases and sinks."""
        outputs = self.heads * self.value_dim * self.hidden
        if self.mla is None:
            return outputs + self.hidden * (self.heads * self.head_dim + self.cache_width)
        mla, queries = self.mla, self.heads * self.head_dim
        q = mla.q_rank * (self.hidden + queries) if mla.q_rank else self.hidden * queries
        expanded = self.heads * (self.head_dim - mla.rope_dim + mla.value_dim)
        return outputs + q + self.hidden * (mla.kv_rank + mla.rope_dim) + mla.kv_rank * expanded

    def window_of(self, layer: int) -> int:
        """Returns the sliding window of decoder layer `layer`; 0: it attends to all tokens."""
        return 0 if layer in self.full_attention_layers else self.sliding_window

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The numbers of the MoE layers; entry i belongs to index i of a routing array's
        `l` axis.
        """
        return tuple(i for i in range(self.layers) if self.is_moe(i))

    @property
    def mixture(self) -> MoEConfig:
        """The settings of the MoE layers. Raises ValueError for a dense model."""
        if self.moe is None:
            raise ValueError("a dense model has no experts")
        return self.moe

    def _check(self, key: str) -> None:
        check(
            self.heads % self.kv_heads == 0,
            f"{key}.heads = {self.heads} is not a multiple of {key}.kv_heads = {self.kv_heads}",
        )
        check(
            self.head_dim % 2 == 0,
            f"{key}.head_dim = {self.head_dim}: rotary embeddings need an even size",
        )
        check(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"{key}.rotary_fraction = {self.rotary_fraction}: it turns {self.rotary_dim} of"
            f" {self.head_dim} channels, and rotary embeddings need an even number from 2",
        )
        if self.mla is not None:
            problems = self.mla.problems(key, self)
            check(not problems, "\n".join(problems))
        if self.rope_scaling is not None:
            self.rope_scaling.validate(f"{key}.rope_scaling")
            check(
                self.rope_theta > 1 or not isinstance(self.rope_scaling, YarnRope),
                f"{key}.rope_theta = {self.rope_theta}: YaRN needs a base above 1",
            )
        missing = [i for i in self.full_attention_layers if i >= self.layers]
        layers = f"the model has layers 0..{self.layers - 1}"
        check(not missing, f"{key}.full_attention_layers {missing}: {layers}")
        check(
            self.sliding_window > 0 or not self.full_attention_layers,
            f"{key}.full_attention_layers = {self.full_attention_layers}: every layer attends to"
            f" all tokens; set {key}.sliding_window",
        )
        experts = 0
        if self.moe is not None:
            check(
                self.moe.top_k <= self.moe.experts,
                f"{key}.moe.top_k = {self.moe.top_k}: must be in 1..{self.moe.experts} (experts)",
            )
            self.moe.router.validate()
            self.moe.router.check(self.moe)
            missing = [i for i in self.moe.dense_layers if i >= self.layers]
            check(not missing, f"{key}.moe.dense_layers {missing}: {layers}")
            check(
                self.moe.shared_ffn > 0 or not self.moe.shared_gate,
                f"{key}.moe.shared_gate = True: there is no shared expert; set"
                f" {key}.moe.shared_ffn",
            )
            experts = self.moe.experts * (3 * self.moe.ffn + 1) + 3 * self.moe.shared_ffn
        mlp = self.hidden * max(3 * self.ffn, experts)
        size = self.layers * (self.attention_weights + mlp) + 2 * self.vocab_size * self.hidden
        sizes = f"{key}: its sizes make up to {size:.1e} parameters"
        check(size <= MAX_PARAMETERS, f"{sizes}, at most {MAX_PARAMETERS:.0e} are allowed")


@dataclass(frozen=True)
class ComputeConfig(Section):
    """The computation of the model; no setting changes the result beyond rounding."""

    KEY: ClassVar[str] = "compute"

    dtype: DType = "float32"
    """Type of activations and of the inputs of matrix products."""
    param_dtype: DType = "float32"
    """Type of the trained parameters."""
    remat: bool = False
    """Rematerialise each layer in the backward pass, which saves memory."""
    remat_attention: bool = False
    """With `remat`, compute the TPU's attention kernel again, too. Otherwise its output is kept: 2
    bytes a token, layer and channel of all heads in bfloat16.
    """
    scan_layers: bool = True
    """Compile one body for each run of equal layers in training; False: few layers run faster, many
    compile slowly.
    """
    scan_decode: bool = False
    """Compile one body in prefill and decoding too; a TPU compiles a hundred layers for minutes."""
    experts: Literal["auto", "ragged", "padded", "tokamax"] = "auto"
    """Grouped matrix product of the experts; auto: padded on a CPU, tokamax's kernels on a GPU if
    the package is installed, ragged elsewhere. On a TPU with tokamax, prefill and decoding with
    `scan_decode` read the experts in the stack of layers.
    """
    attention: Literal["auto", "splash", "cudnn", "portable"] = "auto"
    """Attention of training and prefill; splash: the TPU's kernel; cudnn: cuDNN's flash attention;
    auto: splash on a TPU and cudnn on a GPU, where shapes and types fit.
    """
    exchange: Literal["gather", "all_to_all"] = "gather"
    """Exchange of tokens between experts' devices in training; prefill and decoding gather."""
    moe_chunk: CountOrOff = 0
    """Number of a device's tokens in the experts at once, recomputed in the backward pass; 0: all.
    """
    logprob_chunk: Tokens = 4096
    """Number of tokens whose logits exist at once."""
    float32_parts: tuple[Literal["attention", "gate", "mlp", "stream"], ...] = ()
    """Parts of the model that are computed in float32 if dtype is bfloat16."""

    def dtype_of(self, part: str) -> str:
        """Returns the dtype of one part's activations.

        The parts are `attention` (with its cache), the router's input (`gate`), the experts and
        dense layers (`mlp`), and the residual `stream` with the final norm and the LM head. Each
        includes its norm. The rounding of weights does not change.
        """
        return "float32" if self.dtype == "bfloat16" and part in self.float32_parts else self.dtype

    def _check(self, key: str) -> None:
        check(
            len(set(self.float32_parts)) == len(self.float32_parts),
            f"{key}.float32_parts = {self.float32_parts}: names a part twice",
        )
