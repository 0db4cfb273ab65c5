"""What is rolled out next, and when a step has its groups: three small pure policies over what is
in flight. They depend on results alone, never on a clock, so a stop changes no decision.

    plain       a step's prompts are drawn; all their groups are trained on
    dynamic     DAPO (arXiv 2503.14476, section 3.2): prompts are drawn in rounds of dynamic_batch *
                prompts_per_step; groups with at least two known rewards that differ are kept, until
                there are prompts_per_step; after dynamic_rounds, uniform groups of the last round
                fill the rest
    partial     APRIL (arXiv 2509.18521): partial_prompts more prompts than the step needs are in
                flight; the first prompts_per_step whole groups are trained on, the others are
                carried into the next step. The last step of a run takes none beyond its own

Each of them composes with growth (stage 2 of the zero-variance elimination): a uniform group is
doubled, up to grow_to samples, until it varies. A group is whole when its last sample is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from compass_jax.config import RLConfig
from compass_jax.experience.buffer import ExperienceBuffer, GroupKey
from compass_jax.records import Group, SampleKey, Score
from compass_jax.rl.grouping import UNIFORM_WITHIN


class Policy(NamedTuple):
    """Pure functions of the samples in flight.

    `missing(buffer, last)`: how many prompts to draw now; `last`: no step comes after this one.
    `chosen(buffer)`: once nothing more is to be sampled of them, which open groups the step trains
    on; the others are dropped, or go on in the next step where the policy `carries` them.
    """

    missing: Callable[[ExperienceBuffer, bool], int]
    chosen: Callable[[ExperienceBuffer], list[GroupKey]]
    carries: bool = False


def policy_of(config: RLConfig) -> Policy:
    """The policy that the configuration asks for."""
    if config.partial_prompts:
        return partial(config)
    return dynamic(config) if config.zero_variance.dynamic_sampling else plain(config)


def plain(config: RLConfig) -> Policy:
    """Every group of a step's prompts."""

    def missing(buffer: ExperienceBuffer, last: bool) -> int:
        return config.prompts_per_step - len(buffer.prompts)

    return Policy(missing, lambda buffer: buffer.open)


def dynamic(config: RLConfig) -> Policy:
    """Groups that vary, in rounds."""
    size, rounds = config.prompts_per_round, config.zero_variance.dynamic_rounds

    def missing(buffer: ExperienceBuffer, last: bool) -> int:
        return 0 if buffer.open else size

    def chosen(buffer: ExperienceBuffer) -> list[GroupKey]:
        groups, wanted = buffer.open, config.prompts_per_step - len(buffer.kept)
        found = [group for group in groups if varies(buffer.group(group))][:wanted]
        if len(buffer.prompts) >= rounds * size:  # there is no further round
            rest = [group for group in groups if group not in found]
            found += rest[: wanted - len(found)]
        return found

    return Policy(missing, chosen)


def partial(config: RLConfig) -> Policy:
    """The groups that are whole first."""

    def missing(buffer: ExperienceBuffer, last: bool) -> int:
        in_flight = config.prompts_per_step if last else config.prompts_per_round
        return max(0, in_flight - len(buffer.prompts))

    def chosen(buffer: ExperienceBuffer) -> list[GroupKey]:
        whole = [x for x in buffer.open if buffer.done(x, grow(buffer.scores(x), config))]
        return whole[: config.prompts_per_step]

    return Policy(missing, chosen, carries=True)


# ---- growth --------------------------------------------------------------------------------------


def grow(scores: Sequence[Score | None], config: RLConfig) -> int:
    """How many samples a group is to have: group_size, doubled up to grow_to while all that many
    are scored and uniform. `scores`: of its samples in order, None where there is none yet.
    """
    size = config.group_size
    while size < config.capacity and len(scores) >= size:
        known = [score for score in scores[:size] if score is not None]
        if len(known) < size or not is_uniform(known):
            break
        size = min(2 * size, config.capacity)
    return size


def doublings(index: int, config: RLConfig) -> int:
    """How often a group has been doubled when it has sample `index`."""
    size, count = config.group_size, 0
    while index >= size:
        size, count = 2 * size, count + 1
    return count


def queued(buffer: ExperienceBuffer, config: RLConfig, carries: bool) -> list[SampleKey]:
    """The samples to run now: those that open groups are to have and that are not done.

    Growth has rounds of its own, so that a round's samples are of one temperature, and the same
    ones run together after a stop: the fewest doublings come first. Carried groups differ in how
    far they are; nobody waits for another one.
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
    """The rewards that a verifier gave."""
    return [score.reward for score in scores if score.known]


def is_uniform(scores: Sequence[Score]) -> bool:
    """Whether at least two rewards are known and all known ones are equal within 1e-6."""
    known = known_rewards(scores)
    return len(known) >= 2 and max(known) - min(known) <= UNIFORM_WITHIN


def varies(group: Group) -> bool:
    """Whether at least two rewards are known and two of them differ."""
    return len(known_rewards(group.scores)) >= 2 and not is_uniform(group.scores)
