"""Settings of the logged samples."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config.ranges import CountOrOff, Section


@dataclass(frozen=True)
class LogConfig(Section):
    """The samples that a run logs, for `compass show` and `compass report`."""

    groups: CountOrOff = 4
    """Number of groups of each step in rollouts.jsonl (a count); 0: none."""
    tokens: CountOrOff = 2048
    """Maximum number of these groups' tokens in tokens.jsonl at each step, about 45 bytes for each;
    0: none.
    """
