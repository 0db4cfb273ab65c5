"""Growth of groups (stage 2 of the zero-variance elimination), and which groups are uniform.

Growth composes with every step policy: a uniform group is doubled, up to grow_to samples, until it
varies. A group is complete when its last sample is scored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from compass_jax.base.records import Group, SampleKey, Score
from compass_jax.config import SamplingConfig
from compass_jax.experience.buffer import ExperienceBuffer, GroupKey
from compass_jax.rl.grouping import UNIFORM_WITHIN


def doubled_size(scores: Sequence[Score | None], config: SamplingConfig) -> int:
    """Returns how many samples a group should have: group_size, doubled up to grow_to while all of
    them are scored and uniform. `scores` are those of its samples in order, None where missing.
    """
    size = config.group_size
    while size < config.capacity and len(scores) >= size:
        known = [score for score in scores[:size] if score is not None]
        if len(known) < size or not is_uniform(known):
            break
        size = min(2 * size, config.capacity)
    return size


def queued(
    buffer: ExperienceBuffer,
    sizes: Mapping[GroupKey, int],
    config: SamplingConfig,
) -> list[SampleKey]:
    """Returns the samples to run now: those that open groups should have, by `sizes`, and that are
    not done.

    They run in the rounds of the step policy, so that the same samples run together after a stop.
    Carried groups do not wait for each other.
    """
    policy = config.policy
    keys = [SampleKey(*group, index) for group, size in sizes.items() for index in range(size)]
    keys = [key for key in keys if key not in buffer.samples or not buffer.samples[key].done]
    if policy.carries or not keys:
        return keys
    rounds = [policy.round_of(config, key.index) for key in keys]
    return [key for key, number in zip(keys, rounds, strict=True) if number == min(rounds)]


def known_rewards(scores: Sequence[Score]) -> list[float]:
    """Returns the known rewards."""
    return [score.reward for score in scores if score.known]


def is_uniform(scores: Sequence[Score]) -> bool:
    """Returns whether at least two rewards are known and all known ones are equal within 1e-6."""
    known = known_rewards(scores)
    return len(known) >= 2 and max(known) - min(known) <= UNIFORM_WITHIN


def varies(group: Group) -> bool:
    """Returns whether at least two rewards are known and two of them differ."""
    return len(known_rewards(group.scores)) >= 2 and not is_uniform(group.scores)
