"""Counters of a batcher."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class RolloutStats:
    """Counters of a batcher. The occupancy is the ratio of live slot-steps to all slot-steps."""

    tokens: int = 0
    # the first token of a sample comes from a prefill: n tokens without preemption are n - 1 steps
    live_steps: int = 0
    calls: int = 0
    steps: int = 0
    slot_steps: int = 0
    prefills: int = 0
    prefill_tokens: int = 0  # computed by prefills, without padding
    preempted: int = 0  # number of times that a sample left its slot for lack of pages
    seconds: float = 0.0
    environment_s: float = 0.0  # of `seconds`, while all samples waited for environments

    def metrics(self) -> dict[str, float]:
        """Returns the rollout's metrics."""
        occupancy = self.live_steps / self.slot_steps if self.slot_steps else 0.0
        return {
            "rollout/tokens_per_s": self.tokens / max(self.seconds, 1e-9),
            "rollout/slot_occupancy": occupancy,
            "rollout/preempted": float(self.preempted),
            "rollout/prefill_tokens": float(self.prefill_tokens),
            "time/rollout_s": self.seconds,
            **({"time/environment_s": self.environment_s} if self.environment_s else {}),
        }
