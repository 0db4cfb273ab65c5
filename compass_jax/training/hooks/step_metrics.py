"""Metrics of a step's groups and arrays, and its histograms."""

from __future__ import annotations

import numpy as np

from compass_jax.base.records import EARLIER
from compass_jax.config import RewardConfig, ShapingConfig
from compass_jax.config.curriculum import Stage
from compass_jax.data.difficulty import label_of
from compass_jax.devices.machine import peak_bytes
from compass_jax.experience.assemble import repetition
from compass_jax.experience.episodes.record import episode_metrics
from compass_jax.experience.metrics import (
    earlier_metrics,
    entropy_metrics,
    group_metrics,
    label_inversion,
    label_metrics,
    permute_rewards,
    staleness,
    step_histograms,
)
from compass_jax.training.hooks.base import Hook, StepRecord
from compass_jax.training.parts import Prompts

MAX_LABELS = 32  # with separate metrics; more would hide the others


class PermutedRewards(Hook):
    """Shuffles the rewards of each group (rl.permute_rewards), as a control experiment: they carry
    no signal, so nothing should be learnt.
    """

    name = "permuted rewards"

    def __init__(self, seed: int):
        self._seed = seed

    def on_arrays(self, step: StepRecord) -> None:
        """Shuffles the rewards in the step's arrays."""
        permute_rewards(step.filled, (self._seed, step.number - 1))


class StepMetrics(Hook):
    """Adds the metrics of a step's groups. With several labels, at most MAX_LABELS, each has
    metrics of its own.
    """

    name = "metrics"

    def __init__(
        self, prompts: Prompts, rewards: RewardConfig, shaping: ShapingConfig, stage: Stage
    ):
        self._stream, self._rewards = prompts.stream, rewards
        self._by_label = 1 < len(prompts.labels) <= MAX_LABELS
        self._ngram, tokens = shaping.repetition_ngram, prompts.filter_tokens
        self._fixed = {"waste/filter_tokens": float(tokens)} if tokens else {}
        if stage.total:
            self._fixed["curriculum/stage"] = float(stage.number)

    def on_arrays(self, step: StepRecord) -> None:
        """Adds what is known before the update."""
        step.metrics |= {
            **group_metrics(step.groups),
            **episode_metrics(step.groups),
            **staleness(step.trained, step.version),
            "repetition_frac": self._repetition(step),
            "epoch": self._stream.epoch,
            **self._fixed,
            **(earlier_metrics(step.trained, step.earlier) if step.room else {}),
        }
        if self._by_label:
            labels = [label_of(group.prompt) for group in step.groups]
            step.metrics |= label_metrics(step.groups, labels, self._rewards.right_at)

    def on_metrics(self, step: StepRecord) -> None:
        """Adds what the update has shown, and the step's histograms."""
        step.metrics |= label_inversion(step.trained, step.filled, step.advantage)
        labels = [label_of(group.prompt) for group in step.trained] if self._by_label else []
        right_at = self._rewards.right_at
        step.metrics |= entropy_metrics(step.filled, step.entropy, right_at, labels)
        step.metrics["memory/peak_gib"] = peak_bytes() / 2**30
        step.histograms = step_histograms(step.groups)

    def _repetition(self, step: StepRecord) -> float:
        """Returns the mean share of repeated n-grams in the responses that the step sampled."""
        arrays = step.filled
        sampled = arrays.group >= 0
        if EARLIER in arrays.columns:
            sampled &= ~arrays.columns[EARLIER]
        replaced = [repetition(x, self._ngram) for g in step.replaced for x in g.rollouts]
        return float(np.append(arrays.repetition[sampled], np.asarray(replaced, np.float32)).mean())
