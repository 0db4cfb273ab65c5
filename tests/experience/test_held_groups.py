"""The example of replay of groups: the groups that are replaced, compared with the rule in numpy;
the groups that are held; and the metrics of a step by hand.
"""

import itertools

import numpy as np
import pytest
from replaying import GroupReplay, age_of
from test_in_flight import ROUTES
from tiny import make_prompt

from compass_jax.base.records import GIVEN, Group, Rollout, Score
from compass_jax.experience.buffer import NO_ROW, ExperienceBuffer, without_rows
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.training.hooks.base import StepRecord

CONFIG = GroupReplay(groups=8, max_age=3)
SIZE = 3


def group(number, rewards, version, tokens=4, row=0):
    """Returns a group of prompt `number`; a reward of None is unknown. Its samples have `tokens`
    generated tokens, the first of which has the given version, and an environment's token after the
    first.
    """
    prompt = make_prompt(number, 3)
    versions = np.array([0] * 3 + [version, GIVEN] + [version + 1] * (tokens - 1), np.int32)
    zeros = np.zeros(len(versions), np.float32)
    rollouts = tuple(
        Rollout(prompt, i, np.full(len(zeros), 7, np.int32), zeros, zeros, False, versions, row + i)
        for i in range(len(rewards))
    )
    scores = tuple(Score(0.0 if x is None else x, x is not None) for x in rewards)
    return Group(prompt, rollouts, scores)


def reference(groups, stored, version, max_age, seed, step):
    """Returns {place: index of the stored group that replaces it}. The groups are drawn one after
    the other from those that are left, by the first of exponential clocks whose rates are the
    weights.
    """
    clocks = {}
    for i, (rewards, sampled) in enumerate(stored):
        if version - sampled <= max_age:
            known = np.array([x for x in rewards if x is not None], np.float64)
            variance = np.mean((known - known.mean()) ** 2)
            clocks[i] = variance * (max_age + 1 - (version - sampled))
    draws = np.random.default_rng((seed, 19, step)).exponential(size=len(clocks))
    times = dict(zip(clocks, draws, strict=True))
    out = {}
    for place, rewards in enumerate(groups):
        known = [x for x in rewards if x is not None]
        if (len(known) >= 2 and max(known) - min(known) > 1e-6) or not clocks:
            continue
        out[place] = min(clocks, key=lambda i: times[i] / clocks[i])
        del clocks[out[place]]
    return out


SAMPLED = [(1, 1, 1), (1, 0, 1), (0, 0, None), (None, None, 1), (0.5, 0.5, 0.5), (0, 0.2, 0)]
STORED = [((1, 0, 0), 4), ((1, 0, None), 6), ((0.5, 1, 1), 7), ((0, 1, 1), 3), ((0.9, 0, 0), 5)]


def replaced(seed, step, count, version=8):
    groups = [group(i, rewards, version) for i, rewards in enumerate(SAMPLED)]
    stored = [group(10 + i, *one) for i, one in enumerate(STORED[:count])]
    return groups, stored, record_of(groups, stored, version, seed, step)


def record_of(groups, held, version, seed=0, step=0, hook=CONFIG):
    """Returns the record of a step after the hook."""
    held = {one.prompt.key: one for one in held}
    record = StepRecord(step + 1, groups, version, seed, held, room=hook.groups)
    hook.on_groups(record, {})
    return record


@pytest.mark.parametrize("count", [0, 2, 5])
def test_uniform_groups_are_replaced_as_the_rule_says(count):
    seen = set()
    for seed, step in itertools.product(range(3), range(20)):
        groups, stored, update = replaced(seed, step, count)
        expected = reference(SAMPLED, STORED[:count], 8, CONFIG.max_age, seed, step)
        for place, one in enumerate(update.trained):
            if place in expected:
                assert one is stored[expected[place]] and update.earlier[place]
            else:
                assert one is groups[place]
        assert list(update.earlier) == list(expected)
        assert [x.prompt.id for x in update.replaced] == [groups[n].prompt.id for n in expected]
        # of the five, one is four updates old and one five
        assert len(expected) == min(4, sum(version >= 5 for _, version in STORED[:count]))
        seen.add(tuple(expected.items()))
    assert len(seen) == 1 if count < 3 else len(seen) > 3


def test_groups_are_drawn_by_variance_and_age():
    """The frequencies with which each group is the first, and among the first two, in 20,000 draws
    are the probabilities of drawing without replacement.
    """
    rewards = [(1, 0), (1, 0.5), (0.8, 0)]
    weights = np.array([0.25 * 1, 0.0625 * 3, 0.16 * 2])  # at ages 3, 1 and 2
    stored = [group(i, x, 9 - age) for i, (x, age) in enumerate(zip(rewards, (3, 1, 2)))]
    uniform = [group(10 + i, (0, 0), 9) for i in range(2)]
    first, first_two = np.zeros(3), np.zeros(3)
    for step in range(20_000):
        drawn = [x.prompt.id - 1000 for x in record_of(uniform, stored, 9, 5, step).trained]
        first[drawn[0]] += 1
        first_two[drawn] += 1
    share = weights / weights.sum()
    second = [
        sum(share[j] * share[i] / (1 - share[j]) for j in range(3) if j != i) for i in range(3)
    ]
    np.testing.assert_allclose(first / 20_000, share, atol=0.015)
    np.testing.assert_allclose(first_two / 20_000, share + second, atol=0.015)


def test_the_age_counts_from_the_oldest_generated_token():
    # tokens of the prompt and the environment do not count
    assert age_of(group(0, (1, 0), 5), 8) == 3


def run_step(buffer, rewards_of, version, hook):
    """Runs a step whose groups have these rewards; returns the held prompts' numbers."""
    for number, rewards in rewards_of.items():
        buffer.add([make_prompt(number, 3)])
        one = group(number, rewards, version - 1, row=buffer.first[(1000 + number, 0)])
        for rollout, score in zip(one.rollouts, one.scores, strict=True):
            buffer.put(rollout, done=True)
            buffer.judge(rollout.key, score)
    buffer.keep([(1000 + number, 0) for number in rewards_of])
    record = StepRecord(1, buffer.step_groups(), version - 1, 0, buffer.held, hook.groups)
    hook.on_groups(record, {})
    buffer.end_step(record.to_hold)
    return [prompt - 1000 for prompt, _ in buffer.held]


@pytest.mark.parametrize("routed", [True, False])
def test_the_newest_varied_groups_are_held_and_their_rows_come_back(routed):
    hook = GroupReplay(groups=3, max_age=2)
    routes = RouteBuffer(lambda rows: None, lambda rows, at: None, 5 + 3 * routed, SIZE)
    buffer = ExperienceBuffer(routes, routed)
    assert run_step(buffer, {0: (0, 1, 1), 1: (0, 0, 0)}, 1, hook) == [0]
    assert run_step(buffer, {2: (1, 0), 3: (0, 1)}, 2, hook) == [0, 2, 3]
    assert run_step(buffer, {4: (1, 0)}, 2, hook) == [2, 3, 4]  # three are held
    # the groups of version 1 are two updates old before this one
    assert run_step(buffer, {5: (1, 1)}, 4, hook) == []
    assert buffer.empty and not buffer.samples
    # every row can be used again
    assert run_step(buffer, {n: (1, 0) for n in range(6, 11)}, 5, hook) == [8, 9, 10]
    rows = [x.row for one in buffer.held.values() for x in one.rollouts]
    assert (len(set(rows)) == 6 and max(rows) < len(routes)) if routed else set(rows) == {NO_ROW}
    assert set(buffer.first) == (set(buffer.held) if routed else set())


def test_the_metrics_and_routes_of_a_step_by_hand():
    """Two of three uniform groups are replaced, by groups one and three updates old."""
    groups = [group(0, (1, 1), 8), group(1, (1, 0), 8), group(2, (0, 0), 8), group(3, (0, 0), 8)]
    young, old = group(4, (1, 0), 7), group(5, (0, 1), 5, tokens=3)
    for age, live in ((0, [True, True]), (2, [True, False]), (3, [False, False])):
        hook = GroupReplay(groups=8, max_age=3, max_route_age=age)
        record = record_of(groups, [young, old], 8, hook=hook)
        by_age = sorted(record.earlier, key=lambda place: -age_of(record.trained[place], 8))
        assert [record.earlier[place] for place in by_age] == live
    assert record.metrics == {
        "group_replay/unfilled_groups": 1,
        "group_replay/held_groups": 2,
        "group_replay/age": 2,
    }
    assert [x.prompt.id for x in record.replaced] == [groups[n].prompt.id for n in (0, 2)]
    assert "group_replay/age" not in record_of(groups, [], 8).metrics


def test_a_hook_holds_what_there_is_and_no_more_than_it_announced():
    record = StepRecord(1, [group(0, (1, 0), 8), group(1, (1, 0), 8)], 8, room=1)
    for place, message in ((2, "place 2: the step has 2 groups"), (1, "no held group has the key")):
        with pytest.raises(ValueError, match=message):
            record.put(place, (7, 7))
    with pytest.raises(ValueError, match="no group of this step or held one has the key"):
        record.hold([(7, 7)])
    record.to_hold.clear()
    with pytest.raises(ValueError, match="2 groups to hold, and the hooks' held_groups are 1"):
        record.hold(x.prompt.key for x in record.groups)


def test_a_group_that_is_routed_live_has_no_routes_of_the_group_that_it_replaces():
    """The rows are in order and have routes of this step, so they are read without a copy."""
    buffer = ExperienceBuffer(RouteBuffer(*ROUTES, 2, SIZE))
    groups = []
    for number in range(2):
        buffer.add([make_prompt(number, 3)])
        first = buffer.first[(1000 + number, 0)]
        groups.append(group(number, (0, 0, 0), 3, row=first))
    buffer.routes.rows = buffer.routes.rows.at[:].set(4)
    assert buffer.routes_of(groups) is buffer.routes.rows
    for old, live in ((group(5, (1, 0, 0), 2, row=0), [0]), (group(5, (1, 0, 0), 2), [])):
        old = old if live else without_rows(old)
        routes = np.asarray(buffer.routes_of([old, groups[1]], live=live)).ravel()
        np.testing.assert_array_equal(routes, [255] * SIZE + [4] * SIZE)
