"""Scaled rotary embeddings: settings of `model.rope_scaling`, one class for each rope_type of
Hugging Face's config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from compass_jax.config.errors import check
from compass_jax.config.ranges import Range, Section, Tokens

Factor = Annotated[float, Range(0, 1e6, above=True)]


@dataclass(frozen=True)
class LinearRope(Section):
    """Position interpolation (arXiv 2306.15595): all frequencies divided by a factor."""

    factor: Factor
    """Ratio of the longest sequence to that of pretraining (HF factor)."""


@dataclass(frozen=True)
class Llama3Rope(Section):
    """Llama 3.1's scaling: low frequencies divided by a factor, high ones unchanged."""

    factor: Factor
    """Divisor of the low frequencies (HF factor)."""
    low_freq_factor: Factor
    """Turns within the pretraining length below which a frequency is low (a number)."""
    high_freq_factor: Factor
    """Turns within the pretraining length above which a frequency is high (a number)."""
    original_positions: Tokens
    """Longest sequence of pretraining in tokens (HF original_max_position_embeddings)."""

    def _check(self, key: str) -> None:
        check(
            self.low_freq_factor < self.high_freq_factor,
            f"{key}.low_freq_factor = {self.low_freq_factor}: must be below"
            f" {key}.high_freq_factor = {self.high_freq_factor}",
        )


@dataclass(frozen=True)
class YarnRope(Section):
    """YaRN (arXiv 2309.00071): low frequencies divided by a factor, a ramp between low and high
    ones, and scaled attention scores.
    """

    factor: Factor
    """Divisor of the low frequencies (HF factor)."""
    original_positions: Tokens
    """Longest sequence of pretraining in tokens (HF original_max_position_embeddings)."""
    beta_fast: Factor = 32.0
    """Number of turns within the pretraining length at which the ramp ends."""
    beta_slow: Factor = 1.0
    """Number of turns within the pretraining length at which the ramp begins."""
    truncate: bool = True
    """Round the ends of the ramp to whole dimensions."""
    attention_factor: Factor | None = None
    """Factor of cosine and sine; None: from factor, mscale and mscale_all_dim."""
    mscale: Annotated[float, Range(0, 1000)] = 0.0
    """Coefficient of log(factor) in the factor of cosine and sine; 0: not set."""
    mscale_all_dim: Annotated[float, Range(0, 1000)] = 0.0
    """Coefficient of log(factor) in its divisor; 0: not set."""


RopeScaling = LinearRope | Llama3Rope | YarnRope
