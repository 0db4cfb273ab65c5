"""The guard of a run: it watches each step's numbers for failure signatures (rl/signatures.py)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.base.records import GOLD, Group, Score
from compass_jax.config import GuardConfig, RewardConfig
from compass_jax.rl.signatures import (
    SPIKE,
    STAGNANT,
    gain_bound,
    parting_p,
    rise_bound,
    spike_size,
    trend,
)
from compass_jax.training.hooks.base import Hook, StepRecord

T = TypeVar("T")
MIN_EVALUATED = 20  # held-out prompts, for a notice on their rewards
PAGE = "docs/howto/failures.md says what to look at and what to change"


class RewardExploited(CompassError, RuntimeError):
    """The reward rises while the gold label falls, and rl.guard.action is stop."""


class Audit(NamedTuple):
    """Mean reward and mean gold label of the same answers of a step: means over groups of the
    means over their answers that have both. NaN without such an answer.
    """

    reward: float
    gold: float


def audit(groups: Sequence[Group]) -> Audit:
    """Returns the audit of a step's groups."""
    means = []
    for group in groups:
        pairs = [(s.reward, s.components[GOLD]) for s in group.scores if _is_audited(s)]
        means += [np.mean(pairs, 0, dtype=np.float64)] if pairs else []
    reward, gold = np.mean(means, 0) if means else (math.nan, math.nan)
    return Audit(float(reward), float(gold))


def _is_audited(score: Score) -> bool:
    return score.known and GOLD in score.components


class Guard(Hook):
    """The numbers of the latest steps and the failures found in them; all are in the checkpoint.

    `level` is the level of one test (rl.guard.false_alarms over the number of tests of the run).
    `parted` is the step after which reward and gold label were found to part, 0 before, and
    `last_sound` is the last step before the window of that test. `ended` is true if the run ended
    there with an earlier policy.
    """

    name = "guard"

    def __init__(
        self,
        config: GuardConfig,
        steps: int,
        rewards: RewardConfig,
        tell: Callable[[str, str], None],
        steady: bool = False,
    ):
        """Creates a guard of a run of `steps` steps. `tell` prints the first notice of a kind;
        `steady`: the choice of prompts keeps the mean reward near a constant, so that a constant
        one is no sign of a failure; the held-out prompts are watched instead (`of_evaluation`).
        """
        self.config, self._rewards, self._tell, self._steady = config, rewards, tell, steady
        # A run makes at most one test a step, from the first full window on; they share the level.
        self.level = config.false_alarms / max(steps - config.window + 1, 1)
        self._means: list[float] = []
        self._audits: list[Audit] = []
        # Steps without a gold label have no audit, so the window can span more steps than audits.
        self._audited_steps: list[int] = []
        self._losses: list[float] = []
        # step and mean reward of each prompt, by its id, of whole evaluations, the oldest first
        self._evaluations: list[tuple[int, dict[str, float]]] = []
        self.parted, self.last_sound, self.ended = 0, 0, False

    def on_metrics(self, step: StepRecord) -> None:
        """Adds the guard's metrics, and prints notices."""
        step.metrics |= self.of_step(step.number, step.groups, step.metrics)

    def on_evaluation(self, number: int, rewards: Mapping[str, float]) -> None:
        """Compares the held-out prompts' rewards with those of an earlier evaluation."""
        self.of_evaluation(number, rewards)

    def of_step(
        self, step: int, groups: Sequence[Group], metrics: Mapping[str, float]
    ) -> dict[str, float]:
        """Adds a step's groups and metrics; returns the guard's metrics, and prints notices."""
        audited, size = audit(groups), self.config.window
        has_gold = math.isfinite(audited.gold)
        self._audits = _appended(self._audits, audited, has_gold, size)
        self._audited_steps = _appended(self._audited_steps, step, has_gold, size)
        mean, loss = (float(metrics.get(name, math.nan)) for name in ("reward/mean", "loss"))
        self._means = _appended(self._means, mean, math.isfinite(mean), size)
        self._losses = _appended(self._losses, loss, math.isfinite(loss), size)
        return self._of_loss() | self._of_mean() | self._of_audits(step)

    def of_evaluation(self, step: int, rewards: Mapping[str, float]) -> None:
        """Compares the mean reward of each held-out prompt, by its id, with that of the latest
        evaluation in the run's first two thirds so far; prints a notice if after a window of steps
        or more it has hardly risen, and is not near the best reward.

        Does so only if `steady`: otherwise the training's rewards show whether the run learns.
        """
        if not self._steady:
            return
        self._evaluations.append((step, dict(rewards)))
        latest = min(2 * step / 3, step - self.config.window)
        while len(self._evaluations) > 1 and self._evaluations[1][0] <= latest:
            del self._evaluations[0]
        start_step, first = self._evaluations[0]
        gains = np.array([rewards[key] - first[key] for key in first if key in rewards])
        if step - start_step < self.config.window or gains.size < MIN_EVALUATED:
            return
        low, high = self._rewards.wrong_at, self._rewards.right_at
        bound, mean = gain_bound(gains), float(np.mean(list(rewards.values())))
        if bound < STAGNANT * (high - low) and mean < high - STAGNANT * (high - low):
            self._tell(
                "stagnant reward",
                f"stagnant reward: from step {start_step} to step {step} the mean reward of"
                f" {gains.size} held-out prompts rose by {max(bound, 0):.3g} at most, and is"
                f" {mean:.3g}; {PAGE}",
            )

    def _of_loss(self) -> dict[str, float]:
        if len(self._losses) < self.config.window:
            return {}
        size = spike_size(np.array(self._losses))
        if size >= SPIKE:
            self._tell(
                "loss spike",
                f"loss spike: the loss of this step is {size:.0f} median distances from the median"
                f" of the {self.config.window - 1} steps before it; {PAGE}",
            )
        return {"guard/loss_spike": size}

    def _of_mean(self) -> dict[str, float]:
        if len(self._means) < self.config.window:
            return {}
        window, rewards = np.array(self._means), self._rewards
        bound, least = float(rise_bound(window)), STAGNANT * (rewards.right_at - rewards.wrong_at)
        if not self._steady and bound < least and window.mean() < rewards.right_at - least:
            self._tell(
                "stagnant reward",
                f"stagnant reward: over the last {self.config.window} steps reward/mean rose by"
                f" {max(bound, 0):.3g} at most, and is {window.mean():.3g}; {PAGE}",
            )
        return {"guard/reward_rise_bound": bound}

    def _of_audits(self, step: int) -> dict[str, float]:
        if len(self._audits) < self.config.window:
            return {}
        reward, gold = np.array(self._audits).T
        p, span = float(parting_p(reward, gold)), self.config.window - 1
        slopes = float(trend(reward).slope), float(trend(gold).slope)
        if p <= self.level:
            if not self.parted:
                self.parted, self.last_sound = step, self.before_window(step)
            self._tell(
                "reward up, gold down",
                f"reward up, gold down: over the last {self.config.window} audited steps the reward"
                f" rose by {slopes[0] * span:.3g} and the gold label of the same answers fell by"
                f" {-slopes[1] * span:.3g} (p = {p:.2g}): the policy exploits its reward; {PAGE}",
            )
        return {
            "guard/reward_slope": slopes[0],
            "guard/gold_slope": slopes[1],
            "guard/parting_p": p,
        }

    def before_window(self, step: int) -> int:
        """Returns the last step before the audits of the window after `step`. No later test can
        need an older policy.
        """
        return self._audited_steps[0] - 1 if self._audited_steps else step

    def refuse_parted(self, directory: str) -> None:
        """Raises RewardExploited if reward and gold label parted and the action is stop."""
        if self.parted and self.config.action == "stop":
            raise RewardExploited(
                f"reward up, gold down: the run stopped after step {self.parted} and was saved in"
                f" {directory}; the last step before they parted is {self.last_sound}. {PAGE}. With"
                " rl.guard.action = 'warn' the same command goes on"
            )

    def state(self) -> JsonObject:
        """Returns the guard's state for a checkpoint."""
        return {
            "means": self._means,
            "audits": [list(one) for one in self._audits],
            "audited_steps": self._audited_steps,
            "losses": self._losses,
            "evaluations": self._evaluations,
            "parted": self.parted,
            "last_sound": self.last_sound,
            "ended": self.ended,
        }

    def restore(self, state: JsonObject, step: int) -> None:
        """Returns to the state of the checkpoint of `step`; an empty one is that of the start."""
        size = self.config.window
        self._means = state.get("means", [])[-size:]
        self._audits = [Audit(*one) for one in state.get("audits", [])[-size:]]
        # States of older commits lack the steps; they took them for consecutive.
        latest_steps = [*range(step - len(self._audits) + 1, step + 1)]
        self._audited_steps = state.get("audited_steps", latest_steps)[-size:]
        self._losses = state.get("losses", [])[-size:]
        self._evaluations = [(number, dict(x)) for number, x in state.get("evaluations", [])]
        self.ended = state.get("ended", False)
        # parted before the action became restore: the next test decides
        is_over = self.config.action == "restore" and not self.ended
        self.parted = 0 if is_over else state.get("parted", 0)
        self.last_sound = state.get("last_sound", max(self.parted - size, 0))


def _appended(values: list[T], value: T, is_known: bool, size: int) -> list[T]:
    return [*values, value][-size:] if is_known else values
