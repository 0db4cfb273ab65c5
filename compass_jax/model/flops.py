"""Floating-point operations of the model's arithmetic, independent of the implementation: the
measure of MFU (PaLM, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from compass_jax.config import ModelConfig
from compass_jax.model.params import param_count


def flops_per_token(config: ModelConfig) -> float:
    """Counts the operations of a forward pass in products with weights: 2 for each weight that a
    token uses (of the experts its top k), without attention scores.
    """
    c = config
    moe = 0
    if c.moe is not None:
        ffn = c.moe.top_k * c.moe.ffn + c.moe.shared_ffn
        moe = c.hidden * (c.moe.experts + 3 * ffn + c.moe.shared_gate)
    dense = (c.layers - len(c.moe_layers)) * 3 * c.hidden * c.ffn
    return 2.0 * (
        c.layers * c.attention_weights + len(c.moe_layers) * moe + dense + c.hidden * c.vocab_size
    )


def forward_flops(config: ModelConfig, lengths: Sequence[int] | np.ndarray) -> float:
    """Counts the operations of a forward pass over sequences of `lengths` tokens, with causal
    attention's scores and sums.
    """
    return flops_per_token(config) * float(np.sum(lengths)) + attention_flops(config, lengths)


def attention_flops(config: ModelConfig, lengths: Sequence[int] | np.ndarray) -> float:
    """Counts the operations of causal attention's scores and sums over sequences of `lengths`
    tokens: h (d + d_v) t^2 a layer for t tokens and heads of d and d_v channels, and
    h (d + d_v) (2 t - w) w with a sliding window of w < t.
    """
    sizes = np.asarray(lengths, np.float64)
    squares = 0.0
    for layer in range(config.layers):
        seen = np.minimum(sizes, config.window_of(layer) or np.inf)
        squares += float(((2 * sizes - seen) * seen).sum())
    return float(config.heads * (config.head_dim + config.value_dim)) * squares


def active_params(config: ModelConfig) -> int:
    """Counts parameters without the experts that a token does not choose: the active parameters in
    a model's name (A3B).
    """
    moe = config.moe
    idle = (
        0
        if moe is None
        else len(config.moe_layers) * 3 * (moe.experts - moe.top_k) * config.hidden * moe.ffn
    )
    return param_count(config) - idle
