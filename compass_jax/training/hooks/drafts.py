"""The account of a step whose samples may begin with drafts (rl.drafts)."""

from __future__ import annotations

import numpy as np

from compass_jax.base.records import SAMPLED
from compass_jax.training.hooks.base import Hook, StepRecord


class DraftAccount(Hook):
    """Marks the tokens that were sampled, so that others are not counted as generated."""

    name = "drafts"

    def on_arrays(self, step: StepRecord) -> None:
        """Adds the column of sampled tokens, and the accepted share of the drafts' tokens."""
        arrays = step.filled
        sampled, size = np.zeros_like(arrays.mask), len(arrays.lengths) // len(step.trained)
        for g, group in enumerate(step.trained):
            for x in group.rollouts:
                # Prompts with drafts have no environment (check_turns): the rest was sampled.
                start, end = len(x.prompt.tokens) + x.drafted, len(x.tokens)
                sampled[g * size + x.sample, start:end] = True
        arrays.columns[SAMPLED] = sampled
        accepted, scored = (
            step.metrics[name] for name in ("waste/tokens_drafted", "drafts/scored_tokens")
        )
        step.metrics["drafts/accepted_frac"] = accepted / max(scored, 1.0)
