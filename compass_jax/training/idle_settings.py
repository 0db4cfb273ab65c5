"""Notices about settings without effect."""

from __future__ import annotations

from dataclasses import replace

import jax

from compass_jax.config import (
    DataConfig,
    Objective,
    PolicyConfig,
    RewardConfig,
    RLConfig,
    RolloutConfig,
    ScalarJudgeConfig,
    ScoredConfig,
    ShapingConfig,
)
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.model.quantize import kind_for
from compass_jax.rewards.checks import gold_places, judged_sources
from compass_jax.rl.objectives.grpo import Grpo


def idle_settings(
    rl: RLConfig, policy: PolicyConfig, scored: ScoredConfig, prompts: int, labels: int
) -> list[str]:
    """Returns notices about valid settings that cannot act in this run, each with the reason and
    the remedy.

    Args:
        rl, policy, scored: of the run, or of one of its stages.
        prompts: number of prompts in one pass over the data.
        labels: number of their different labels (data/difficulty.py).
    """
    notices = []
    if rl.replay != "off" and not policy.model.moe_layers:
        notices.append(
            f"rl.replay = {rl.replay!r}: the model has no MoE layers, so there are no routes to"
            " replay; it runs as with 'off'"
        )
    if rl.updates_per_rollout == rl.epochs == 1 and _clip_matters(rl.objective):
        notices.append(
            f"rl.objective: the clip of {rl.objective.name} cannot act, because the only update of"
            " a rollout begins at the policy that it is compared with; raise rl.updates_per_rollout"
            " or rl.epochs"
        )
    rollout, data = policy.rollout, scored.data
    if rollout.quantize == "auto" and _eight_bit(rollout) == "off":
        notices.append(
            "rollout.quantize = 'auto': no 8-bit type is known to be faster on this device; it runs"
            " as with 'off'"
        )
    mesh = policy.sampling_mesh
    if rollout.slots % (shards := mesh.devices // mesh.tensor):
        notices.append(
            f"rollout.slots = {rollout.slots}: {shards} devices share the slots, and not"
            f" equally, so that several decode the same ones; make it a multiple of {shards}"
        )
    if gold_places(data) and rl.steps < rl.guard.window:
        notices.append(
            f"rl.guard.window = {rl.guard.window}: rl.steps = {rl.steps} never fill it, so that a"
            " reward that rises while the gold label falls is not seen; lower rl.guard.window"
        )
    rollouts = rl.steps * rl.prompts_per_round
    repeated = any(source.repeat > 1 for source in data.sources)
    if rl.drafts is not None and rollouts <= prompts and not repeated:
        notices.append(
            f"rl.drafts.name = {rl.drafts.name!r}: drafts are answers of a prompt's last visit, and"
            f" {rollouts} rollouts are not more than one pass over {prompts} prompts: no draft will"
            " be used; raise rl.steps"
        )
    if rl.zero_variance.curriculum and labels == 1:
        notices.append(
            "rl.zero_variance.curriculum: all prompts have the same label, so that only a prompt's"
            " own earlier result tells it from another; give data sources labels by task or"
            " difficulty"
        )
    return (
        notices
        + _idle_rewards(rl, scored.rewards, data)
        + _idle_training(rl, policy)
        + _idle_evaluation(rl, scored)
        + idle_stages(rl)
    )


def _clip_matters(objective: Objective) -> bool:
    """Returns whether a clip without effect is likely to be a mistake. It is none for GRPO with the
    default clip, which is then the plain policy gradient.
    """
    usual = Grpo()
    clips = ("clip_low", "clip_high", "dual_clip")
    return not isinstance(objective, Grpo) or any(
        getattr(objective, name) != getattr(usual, name) for name in clips
    )


def _idle_rewards(rl: RLConfig, rewards: RewardConfig, data: DataConfig) -> list[str]:
    """Returns notices about growth, screening and shaping."""
    notices = []
    judged = judged_sources(data)
    if isinstance(rewards.judge, ScalarJudgeConfig) and len(judged) == len(data.sources):
        if rl.zero_variance.grow_to:
            notices.append(
                f"rl.zero_variance.grow_to = {rl.zero_variance.grow_to}: groups grow whose rewards"
                " are equal, and those of a scalar reward model never are; set it to 0"
            )
        if rl.optim.rate_by_groups:
            notices.append(
                "rl.optim.rate_by_groups: rewards of a scalar reward model are never equal, so that"
                " every group counts and the factor is 1; set it to False"
            )
        if isinstance(rl.policy, Screening):
            notices.append(
                f"rl.step_policy.name = {rl.policy.name!r}: groups stop whose rewards are equal,"
                " and those of a scalar reward model never are; set it to none"
            )
    usual = ShapingConfig()
    for penalty, settings in _PENALTIES.items():
        changed = [name for name in settings if _of(rl.shaping, name) != _of(usual, name)]
        if changed and not _of(rl.shaping, penalty):
            notices.append(
                f"rl.shaping.{changed[0]} = {_of(rl.shaping, changed[0])}: rl.shaping.{penalty} is"
                " 0, so that nothing is taken off; raise it, or leave both out"
            )
    return notices


_PENALTIES = {
    "length_penalty": ("length_free_tokens",),
    "repetition_penalty": ("repetition_ngram",),
    "overlong_penalty": ("overlong_buffer_tokens",),
}


def _of(settings: ShapingConfig, name: str) -> float:
    return getattr(settings, name)


def _eight_bit(rollout: RolloutConfig) -> str:
    """Returns the 8-bit type of the rollout's weights on this device, or "off"."""
    kind = rollout.quantize
    return kind_for(jax.devices()[0].device_kind) if kind == "auto" else kind


def _idle_training(rl: RLConfig, policy: PolicyConfig) -> list[str]:
    """Returns notices about the correction and the warm-up."""
    notices, rollout = [], policy.rollout
    exact = policy.compute.dtype == policy.rollout_compute.dtype == "float32"
    rounded = _eight_bit(rollout) != "off" or rollout.kv_quantize != "off"
    off_policy = rl.one_step_off or rl.policy.carries or rl.held_groups > 0
    if rl.correction.acts and exact and not rounded and not off_policy:
        notices.append(
            f"rl.correction.name = {rl.correction.name!r}: rollout and training compute the same"
            " policy in float32, so that every weight is 1 but for rounding; it is for 8-bit or"
            " bfloat16 rollouts, rl.one_step_off, rl.partial_prompts and hooks that hold groups"
        )
    if rl.optim.warmup_steps >= rl.total_updates:
        notices.append(
            f"rl.optim.warmup_steps = {rl.optim.warmup_steps}: the run has {rl.total_updates}"
            " updates, so that the learning rate is never reached; lower it"
        )
    return notices


def _idle_evaluation(rl: RLConfig, scored: ScoredConfig) -> list[str]:
    """Returns notices about evaluations that never come."""
    at = scored.evaluation.at
    if not scored.data.evaluated:
        return [
            f"{name} = {value}: data.eval_prompts is 0 and data.eval_sets is empty, so that there"
            " is nothing to evaluate on; raise the one or name a set"
            for name, value in (("rl.eval_every", rl.eval_every), ("evaluation.at", at))
            if value
        ]
    if unreached := [step for step in at if step > rl.steps]:
        return [
            f"evaluation.at = {at}: the run ends after {rl.steps} steps (rl.steps) and never comes"
            f" to {', '.join(map(str, unreached))}; leave out what lies beyond, or raise rl.steps"
        ]
    return []


def idle_stages(rl: RLConfig) -> list[str]:
    """Returns notices about stages that never begin or that change nothing."""
    notices = []
    for i, stage in enumerate(rl.stages):
        if stage.after_steps >= rl.steps:
            notices.append(
                f"rl.stages[{i}]: it begins after {stage.after_steps} steps, and the run ends after"
                f" {rl.steps} (rl.steps): it has 0 steps; raise rl.steps"
            )
        elif i and replace(rl.stages[i - 1], after_steps=stage.after_steps) == stage:
            notices.append(
                f"rl.stages[{i}]: it has the settings of the stage before it, so that nothing"
                " changes where it begins; leave it out"
            )
    return notices
