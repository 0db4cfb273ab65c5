"""Configurations of tiny RL runs in each variant of the loop."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from evolve import evolve, with_size
from replaying import GroupReplay
from tiny_run import tiny_run

from compass_jax.config import (
    EntropyConfig,
    OptimConfig,
    RLStage,
    RunConfig,
    ShapingConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.data.predictors.state import State
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.drafts import Coupled, Lenient

TIS = named_correction("tis")
AHEAD = {"steps": 3, "correction": TIS, "one_step_off": True, "eval_every": 2}
PARTIAL = {"steps": 3, "correction": TIS, "partial_prompts": 3}
STAGES = (
    RLStage(mix=((0.0, 0.5, 0.25), (0.5, 1.0, 0.75))),
    RLStage(2, ((0.0, 0.3, 0.5), (0.3, 1.0, 0.5)), 8, 6, 3e-3, Gspo()),
)
DYNAMIC = ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True, dynamic_batch=2, dynamic_rounds=4)
VERIFIED = ZeroVarianceConfig(rl_zvp=False)
RATES = {
    "steps": 3,
    "zero_variance": VERIFIED,
    "optim": OptimConfig(
        learning_rate=1e-2,
        warmup_steps=1,
        schedule="cosine",
        schedule_tokens=700,
        rate_by_groups=True,
    ),
}
# more than the policy has, so that the temperature rises from the fifth step on
HELD = EntropyConfig(keep=1.5, gain=0.5)
SCREENING = Screening(n0=2, min_chance=1.0, min_chance_hard=0.6)
ROUNDS = dataclasses.replace(SCREENING, rounds=3)
GROWING = {
    "zero_variance": ZeroVarianceConfig(rl_zvp=True, posterior=True, grow_to=12),
    "shaping": ShapingConfig(length_penalty=0.05, repetition_penalty=0.02, repetition_ngram=2),
    "correction": TIS,
}
# Variant -> (the verifier in odd_verifiers.py, the settings under `rl`).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("coin", {}),
    "growing": ("seldom", GROWING),
    "dynamic": ("seldom", {"group_size": 2, "zero_variance": DYNAMIC}),
    "stages": ("seldom", {"steps": 4, "stages": STAGES, "updates_per_rollout": 2}),
    "posterior": ("coin", {"zero_variance": ZeroVarianceConfig(rl_zvp=True, posterior=True)}),
    "state": (
        "coin",
        {"zero_variance": ZeroVarianceConfig(posterior=True), "predictor": State(16, refresh=2)},
    ),
    "screening": ("coin", {"step_policy": SCREENING}),
    "rounds": ("seldom", {"step_policy": ROUNDS, "zero_variance": VERIFIED}),
    "one step off, rounds": (
        "seldom",
        {
            **AHEAD,
            "step_policy": ROUNDS,
            "zero_variance": ZeroVarianceConfig(rl_zvp=False, posterior=True),
        },
    ),
    "prediction": (
        "coin",
        {
            "steps": 3,
            "step_policy": SCREENING,
            "advantage": Shrunk(),
            "zero_variance": ZeroVarianceConfig(posterior=True),
        },
    ),
    "one step off, screening": (
        "coin",
        {
            **AHEAD,
            "step_policy": SCREENING,
            "zero_variance": ZeroVarianceConfig(rl_zvp=True, posterior=True),
        },
    ),
    "average": (
        "coin",
        {"optim": OptimConfig(learning_rate=1e-2, average=0.7), "steps": 3, "eval_every": 1},
    ),
    "rates": ("seldom", RATES),
    "one step off, rates": ("seldom", RATES | {"correction": TIS, "one_step_off": True}),
    "partial": ("coin", PARTIAL),
    "partial, one step off": ("coin", {**PARTIAL, "one_step_off": True}),
    "one step off": ("coin", AHEAD),
    "drafts": ("coin", {"steps": 4, "drafts": Lenient()}),
    "one step off, drafts": ("coin", {**AHEAD, "steps": 4, "drafts": Lenient()}),
    "partial, drafts": ("coin", {**PARTIAL, "steps": 4, "drafts": Coupled()}),
    "one step off, dynamic": (
        "coin",
        {**AHEAD, "zero_variance": ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)},
    ),
    "one step off, growing": (
        "coin",
        {
            **AHEAD,
            "zero_variance": ZeroVarianceConfig(rl_zvp=True, grow_to=8, curriculum=True),
            "replay": "R2",
            "updates_per_rollout": 2,
            "group_size": 2,
        },
    ),
    "entropy": ("coin", {"steps": 7, "entropy": HELD}),
    "one step off, entropy": ("coin", {**AHEAD, "steps": 7, "entropy": HELD}),
}
VARIANTS |= {
    name: ("seldom", {"steps": 4, "correction": TIS, "zero_variance": VERIFIED} | settings)
    for name, settings in {
        "replay": {"hooks": (GroupReplay(groups=8, max_age=3, max_route_age=1),)},
        "replay, live": {"hooks": (GroupReplay(groups=8, max_age=3),)},
        "replay, R2": {
            "hooks": (GroupReplay(groups=8, max_age=4),),
            "replay": "R2",
            "updates_per_rollout": 2,
        },
        "replay, drafts": {
            "hooks": (GroupReplay(groups=8, max_age=3),),
            "drafts": Lenient(),
        },
        "replay, one step off": {
            "hooks": (GroupReplay(groups=8, max_age=3, max_route_age=2),),
            "one_step_off": True,
        },
    }.items()
}
VARIANTS["partial, replay"] = (
    "seldom",
    PARTIAL | {"zero_variance": VERIFIED, "hooks": (GroupReplay(groups=8, max_age=3),)},
)
EVALUATED = ("plain", "growing", "average")
EVALUATED += ("one step off", "one step off, dynamic", "one step off, growing")


def configured(
    variant: str, directory: Path | str, learning_rate: float | None = None, **rl: Any
) -> RunConfig:
    """Returns the configuration of a variant in `directory`; `rl` changes its settings."""
    verifier, settings = VARIANTS[variant]
    config = tiny_run(f"odd_verifiers:{verifier}")
    if learning_rate is not None:
        rl["optim"] = dataclasses.replace(config.rl.optim, learning_rate=learning_rate)
    data, rollout = config.data, config.rollout
    if variant not in EVALUATED:
        data = dataclasses.replace(data, eval_prompts=0)
    if "drafts" in variant:  # so few prompts that each is visited again
        data = with_size(data, 6)
    if variant.startswith("partial"):  # slots for a group and a half
        rollout = dataclasses.replace(rollout, slots=6)
    return evolve(config, run_dir=str(directory), data=data, rollout=rollout, rl={**settings | rl})


def limit_lengths(patch: pytest.MonkeyPatch) -> None:
    """Ends the samples of a prompt after 7, 10, 13 or 16 tokens; a random model hardly ever stops,
    and partial rollouts need samples of different lengths.
    """

    def limit(self, n):
        return len(self.prompts[n].tokens) + 16 - 3 * (self.prompts[n].id % 4)

    patch.setattr(Collection, "_limit", limit)
