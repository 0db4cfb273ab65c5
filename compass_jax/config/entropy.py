"""Settings that keep the policy's entropy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from compass_jax.config.ranges import Range, Section


@dataclass(frozen=True)
class EntropyConfig(Section):
    """Control of the rollout's temperature, by which the policy's entropy stays at a share of that
    of the first steps (after arXiv 2602.11779; docs/howto/failures.md).
    """

    KEY: ClassVar[str] = "rl.entropy"

    keep: Annotated[float, Range(0, 10)] = 0.0
    """Share of the entropy of the run's first steps that the temperature holds; 0: no control."""
    gain: Annotated[float, Range(0, 10, above=True)] = 0.1
    """Change of the temperature's logarithm in a step (a factor of the logarithm of wanted over
    measured entropy).
    """
    most: Annotated[float, Range(1, 10, above=True)] = 1.5
    """Highest temperature, in times rollout.temperature; that is the lowest."""
