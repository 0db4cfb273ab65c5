"""Settings of a run's logs."""

from __future__ import annotations

from dataclasses import dataclass

from compass_jax.config.ranges import CountOrOff, Section


@dataclass(frozen=True)
class LogConfig(Section):
    """The samples that a run logs, for `compass show` and `compass report`, the parts of its logs,
    and how long it may log nothing.
    """

    groups: CountOrOff = 4
    """Number of groups of each step in rollouts.jsonl (a count); 0: none."""
    tokens: CountOrOff = 2048
    """Maximum number of these groups' tokens in tokens.jsonl at each step, about 45 bytes for each;
    0: none.
    """
    stall_s: CountOrOff = 3600
    """Time without progress (seconds) after which a process of a run with several ends, with its
    stacks on stderr; 0: never. Evaluated prompts, finished samples, micro-batches and saves are
    progress (docs/howto/failures.md).
    """
    part_steps: CountOrOff = 0
    """Steps of each part of metrics.jsonl, rollouts.jsonl and tokens.jsonl (a count); 0: 50 where
    the run directory is on a mounted bucket, else all.
    """
