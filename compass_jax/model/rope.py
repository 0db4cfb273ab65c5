"""Rotary position embeddings (arXiv 2104.09864), plain and scaled to longer sequences."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from compass_jax.config import LinearRope, Llama3Rope, ModelConfig, RopeScaling, YarnRope
from compass_jax.model.precision import at_least_float32


def rope_tables(
    positions: Int[Array, "b t"],
    head_dim: int,
    theta: float,
    dtype,
    scaling: RopeScaling | None = None,
) -> tuple[Float[Array, "b t 1 d"], Float[Array, "b t 1 d"]]:
    """Computes cosine and sine of the rotary angles once for all layers; the two halves of a head
    rotate together.
    """
    # bfloat16 holds whole numbers exactly only up to 256, and positions go further.
    wide = at_least_float32(dtype)
    frequency = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=wide) / head_dim)
    if scaling is not None:
        frequency = jnp.asarray(scaled_frequencies(head_dim, theta, scaling), wide)
    angle = positions.astype(wide)[..., None] * frequency[None, None, :]
    angle = jnp.concatenate([angle, angle], axis=-1)[:, :, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    if isinstance(scaling, YarnRope):
        factor = yarn_attention_factor(scaling)
        cos, sin = cos * factor, sin * factor
    return cos.astype(dtype), sin.astype(dtype)


def apply_rope(x: Float[Array, "b t h d"], tables) -> Float[Array, "b t h d"]:
    """Applies rotary position embedding (arXiv 2104.09864) in the half-split form of the Hugging
    Face families, to the first channels where the tables have fewer than a head.
    """
    cos, sin = tables
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        return jnp.concatenate([apply_rope(x[..., :turned], tables), x[..., turned:]], axis=-1)
    first, second = jnp.split(x, 2, axis=-1)
    return x * cos + jnp.concatenate([-second, first], axis=-1) * sin


def deinterleaved(x: Float[Array, "b t h d"]) -> Float[Array, "b t h d"]:
    """Returns the channels of even numbers before those of odd numbers."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)


def scaled_frequencies(head_dim: int, theta: float, scaling: RopeScaling) -> np.ndarray:
    """Computes the `head_dim / 2` frequencies of scaled rotary embeddings, in float64."""
    frequency = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    if isinstance(scaling, LinearRope):
        return frequency / scaling.factor
    if isinstance(scaling, Llama3Rope):
        return _llama3(frequency, scaling)
    return _yarn(frequency, head_dim, theta, scaling)


def _llama3(frequency: np.ndarray, scaling: Llama3Rope) -> np.ndarray:
    """Divides frequencies of fewer than `low_freq_factor` turns within the pretraining length by
    `factor`, keeps those of more than `high_freq_factor`, and interpolates between them.
    """
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_positions * frequency / (2 * math.pi)
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return frequency * (unscaled + (1 - unscaled) / scaling.factor)


def _yarn(frequency: np.ndarray, head_dim: int, theta: float, scaling: YarnRope) -> np.ndarray:
    """Keeps frequencies of more than `beta_fast` turns within the pretraining length, divides those
    of fewer than `beta_slow` by `factor`, and interpolates linearly in the dimension.
    """

    def dimension(turns: float) -> float:
        """Returns the (fractional) dimension whose frequency makes `turns` turns."""
        wavelength = scaling.original_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low if high != low else 0.001  # as in the reference implementation
    divided = np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)
    return frequency * (1 - divided + divided / scaling.factor)


def yarn_attention_factor(scaling: YarnRope) -> float:
    """Computes YaRN's factor of cosine and sine: 0.1 log(factor) + 1, or the ratio of two such
    terms where both mscale and mscale_all_dim are set.
    """

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return _mscale(scaling, scaling.mscale) / _mscale(scaling, scaling.mscale_all_dim)
    return _mscale(scaling, 1.0)


def _mscale(scaling: YarnRope, coefficient: float) -> float:
    return 1.0 if scaling.factor <= 1 else 0.1 * coefficient * math.log(scaling.factor) + 1.0


def score_factor(config: ModelConfig) -> float:
    """Computes the factor of attention's scores besides 1 / sqrt(head_dim): in latent attention the
    square of YaRN's term of mscale_all_dim, which scales the channels that do not turn too.
    """
    scaling = config.rope_scaling
    if config.mla is None or not isinstance(scaling, YarnRope) or not scaling.mscale_all_dim:
        return 1.0
    return _mscale(scaling, scaling.mscale_all_dim) ** 2
