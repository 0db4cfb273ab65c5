"""A recipe for the table on README's first screen.

    python -m benchmarks.leaderboard --recipe examples/recipe.py

This one chooses prompts by what their text predicts, and answers half of each group first.
"""

from __future__ import annotations

from dataclasses import replace

from compass_jax.config import RLConfig
from compass_jax.data.predictors.text import Text
from compass_jax.experience.step_policies.screening import Screening


def recipe(rl: RLConfig) -> RLConfig:
    """Returns the recipe's settings, from those of tuned GRPO."""
    chosen = replace(rl.zero_variance, posterior=True)
    optim = replace(rl.optim, schedule="cosine", schedule_tokens=160_000)
    return replace(
        rl,
        predictor=Text(),
        zero_variance=chosen,
        step_policy=Screening(n0=2),
        optim=optim,
    )
