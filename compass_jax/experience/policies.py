"""Step policies: which prompts are rolled out next, and when a step has its groups. They are pure
functions of the samples in flight, never of a clock, so that a stop changes no decision.

    plain       draws a step's prompts and trains on all their groups
    dynamic     DAPO (arXiv 2503.14476, section 3.2): draws prompts in rounds of dynamic_batch *
                prompts_per_step and keeps groups with at least two known rewards that differ, until
                there are prompts_per_step; after dynamic_rounds, uniform groups of the last round
                fill the rest
    partial     APRIL (arXiv 2509.18521): has partial_prompts more prompts in flight than the step
                needs; trains on the first prompts_per_step complete groups and carries the others
                into the next step. The last step of a run draws only its own prompts

Each composes with growth (stage 2 of the zero-variance elimination): a uniform group is doubled, up
to grow_to samples, until it varies. A group is complete when its last sample is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from compass_jax.config import SamplingConfig
from compass_jax.experience.buffer import ExperienceBuffer, GroupKey
from compass_jax.records import Group, SampleKey, Score
from compass_jax.rl.grouping import UNIFORM_WITHIN


class Policy(NamedTuple):
    """A step policy: pure functions of the samples in flight.

    `missing(buffer, last)` returns how many prompts to draw now; `last` is true in the run's last
    step. `chosen(buffer)` returns, once no sample is missing, the open groups that the step trains
    on; the others are dropped, or carried into the next step if the policy `carries` them.
    """

    missing: Callable[[ExperienceBuffer, bool], int]
    chosen: Callable[[ExperienceBuffer], list[GroupKey]]
    carries: bool = False


def policy_of(config: SamplingConfig) -> Policy:
    """Returns the configured policy."""
    if config.partial_prompts:
        return partial(config)
    return dynamic(config) if config.zero_variance.dynamic_sampling else plain(config)


def plain(config: SamplingConfig) -> Policy:
    """Returns the policy that trains on every group of a step's prompts."""

    def missing(buffer: ExperienceBuffer, last: bool) -> int:
        return config.prompts_per_step - len(buffer.prompts)

    return Policy(missing, lambda buffer: buffer.open)


def dynamic(config: SamplingConfig) -> Policy:
    """Returns DAPO's dynamic sampling: groups that vary, in rounds."""
    size, rounds = config.prompts_per_round, config.zero_variance.dynamic_rounds

    def missing(buffer: ExperienceBuffer, last: bool) -> int:
        return 0 if buffer.open else size

    def chosen(buffer: ExperienceBuffer) -> list[GroupKey]:
        groups, needed = buffer.open, config.prompts_per_step - len(buffer.kept)
        varied = [group for group in groups if varies(buffer.group(group))][:needed]
        if len(buffer.prompts) >= rounds * size:  # there is no further round
            rest = [group for group in groups if group not in varied]
            varied += rest[: needed - len(varied)]
        return varied

    return Policy(missing, chosen)


def partial(config: SamplingConfig) -> Policy:
    """Returns APRIL's partial rollouts: the groups that are complete first."""

    def missing(buffer: ExperienceBuffer, last: bool) -> int:
        in_flight = config.prompts_per_step if last else config.prompts_per_round
        return max(0, in_flight - len(buffer.prompts))

    def chosen(buffer: ExperienceBuffer) -> list[GroupKey]:
        complete = [x for x in buffer.open if buffer.done(x, grow(buffer.scores(x), config))]
        return complete[: config.prompts_per_step]

    return Policy(missing, chosen, carries=True)


# ---- growth --------------------------------------------------------------------------------------


def grow(scores: Sequence[Score | None], config: SamplingConfig) -> int:
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


def doublings(index: int, config: SamplingConfig) -> int:
    """Returns how often a group has been doubled when it has sample `index`."""
    size, count = config.group_size, 0
    while index >= size:
        size, count = 2 * size, count + 1
    return count


def queued(buffer: ExperienceBuffer, config: SamplingConfig, carries: bool) -> list[SampleKey]:
    """Returns the samples to run now: those that open groups should have and that are not done.

    Growth runs in rounds, fewest doublings first, so that a round's samples have one temperature
    and the same samples run together after a stop. Carried groups do not wait for each other.
    """
    keys = [
        SampleKey(*group, index)
        for group in buffer.open
        for index in range(grow(buffer.scores(group), config))
    ]
    keys = [key for key in keys if key not in buffer.samples or not buffer.samples[key].done]
    if carries or not keys:
        return keys
    first = min(doublings(key.index, config) for key in keys)
    return [key for key in keys if doublings(key.index, config) == first]


# ---- judging groups ------------------------------------------------------------------------------


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
