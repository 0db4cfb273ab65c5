"""What a run writes down of its samples."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config.ranges import CountOrOff


@dataclass(frozen=True)
class LogConfig:
    """What a run writes down of its samples, for `compass show` and `compass report`."""

    groups: CountOrOff = 4
    """The run writes so many groups of each step, whole, into rollouts.jsonl; 0: none."""
    tokens: CountOrOff = 2048
    """The run writes the numbers of at most so many tokens of these groups at each step into
    tokens.jsonl, about 45 bytes for each; 0: none.
    """
