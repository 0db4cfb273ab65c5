"""Screening: the groups that get all their samples, also after a stop, and refused settings."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from evolve import evolve
from scipy import stats
from test_in_flight import CONFIGS, World, drawn, run
from tiny_run import tiny_run

from compass_jax.base.records import Outcome, SampleKey, Score
from compass_jax.config import (
    ConfigError,
    RewardConfig,
    RLConfig,
    RLStage,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.experience.step_policies.inputs import StepInputs
from compass_jax.experience.step_policies.screening import Screening, chance_to_vary

GROUP = (1, 0)
STRICT = Screening(n0=2, min_chance=1.0, min_chance_hard=1.0)
FOUR = Screening(n0=4)


def size(policy, rewards, n=8, prior=(1.0, 1.0), wrong_at=0.0):
    """Returns the size of a group whose first rewards are these; None is an unknown reward, and
    NOT_YET a sample that has no score.
    """
    scores = [
        None if x is NOT_YET else Score(0.0 if x is None else x, x is not None) for x in rewards
    ]
    prompt = SimpleNamespace(predicted=prior)
    buffer = SimpleNamespace(scores=lambda key: scores, prompts={GROUP: prompt})
    sampling = RLConfig(group_size=n, step_policy=policy).sampling
    rewards_config = RewardConfig(wrong_at=wrong_at)
    inputs = StepInputs(buffer, sampling, False, rewards_config)
    return policy.grow(inputs, GROUP)


@pytest.mark.parametrize("prior", [(1.0, 1.0), (0.3, 5.7), (12.0, 4.0)])
@pytest.mark.parametrize(("right", "wrong"), [(0, 0), (0, 3), (4, 0), (1, 2)])
def test_the_chance_to_vary_is_that_of_the_beta_binomial_distribution(right, wrong, prior):
    further = 5
    counts = stats.betabinom(further, prior[0] + right, prior[1] + wrong)
    n, expected = right + wrong + further, 0.0
    for more in range(further + 1):
        expected += counts.pmf(more) * (0 < right + more < n)
    assert chance_to_vary(right, wrong, further, prior) == pytest.approx(expected, abs=1e-12)


def test_a_group_continues_where_it_varies_or_is_likely_to():
    # after four equal rewards of Beta(1, 1) four more differ with probability 4/9
    policy = Screening(n0=4)
    assert size(policy, [1, 0, 0, 0]) == 8 and size(policy, [1, 1]) == 4 == size(policy, [])
    assert size(policy, [1, 1, 1, 1]) == 4 and size(policy, [0, 0, 0, 0]) == 8
    assert size(replace(policy, min_chance=0.44), [1, 1, 1, 1]) == 8
    assert size(replace(policy, min_chance_hard=0.45), [0, 0, 0, 0]) == 4
    strict = replace(policy, min_chance=1.0, min_chance_hard=1.0)
    assert size(strict, [0] * 4) == size(strict, [1] * 4) == 4 and size(strict, [0, 0, 1, 0]) == 8


def test_a_predicted_pass_rate_decides_with_the_rewards():
    policy = Screening(n0=2)
    assert size(policy, [1, 1], prior=(16.0, 16.0)) == 8 and size(policy, [1, 1], n=4) == 2
    assert size(policy, [1, 1], prior=(31.0, 1.0)) == 2
    assert size(policy, [0, 0], prior=(0.5, 31.5)) == 2  # hardly ever right
    assert size(policy, [0, 0], prior=(2.0, 30.0)) == 8  # right answers are rare
    assert size(policy, [0, 0], prior=(2.0, 30.0), n=4) == 2  # too rare for two more


def test_unknown_rewards_and_those_between_right_and_wrong():
    policy = Screening(n0=4)
    assert size(policy, [None, 1, 0, None]) == 8 and size(policy, [None, 1, 1, None]) == 8
    assert size(policy, [None] * 4, prior=(1.0, 1.0)) == 8
    assert size(policy, [None] * 4, prior=(31.0, 0.1)) == 4
    # all Tie: the pass rate does not predict other verdicts
    for prior in ((1.0, 1.0), (16.0, 16.0)):
        assert size(policy, [0.0] * 4, wrong_at=-1.0, prior=prior) == 4
        assert size(policy, [-1.0] * 4, wrong_at=-1.0, prior=prior) == 8


NOT_YET, UNKNOWN = object(), None  # a sample without a score, and a score without a reward
RIGHT, WRONG, BETWEEN = 1.0, 0.0, 0.5


def reference_size(policy, first_scores, n, prior):
    """Returns the size of a group by the rule of Screening's docstring, in float64: `first_scores`
    are its scores so far, of which the first n0 alone decide: once two differ, or all are there.
    """
    decisive = list(first_scores)[: policy.n0]
    rewards = np.array([x for x in decisive if x not in (UNKNOWN, NOT_YET)], np.float64)
    if rewards.size and np.ptp(rewards) > 1e-6:
        return n
    if len(decisive) < policy.n0 or NOT_YET in decisive:
        return policy.n0
    a, b = np.array((1.0, 1.0) if BETWEEN in rewards else prior, np.float64)
    a, b = a + np.sum(rewards > WRONG), b + np.sum(rewards == WRONG)
    i = np.arange(n - policy.n0, dtype=np.float64)
    stays_right, stays_wrong = (np.prod((x + i) / (a + b + i)) for x in (a, b))
    all_wrong = rewards.size and np.all(rewards == WRONG)
    chance = 1 - stays_right * (not all_wrong) - stays_wrong * (all_wrong or not rewards.size)
    return (
        n if chance >= (policy.min_chance_hard if all_wrong else policy.min_chance) else policy.n0
    )


@pytest.mark.parametrize("prior", [(1.0, 1.0), (0.6, 9.4), (9.4, 0.6)])
@pytest.mark.parametrize(
    "policy",
    [Screening(n0=2), Screening(), Screening(n0=3, min_chance=0.9, min_chance_hard=0.1), STRICT],
)
def test_every_sequence_of_scores_decides_as_the_float64_reference(policy, prior):
    """Also sequences of fewer than n0 scores, which decide where they vary already."""
    sizes = Counter()
    for length in range(policy.n0 + 2):
        for scores in itertools.product((RIGHT, WRONG, BETWEEN, UNKNOWN, NOT_YET), repeat=length):
            expected = reference_size(policy, scores, 8, prior)
            assert size(policy, scores, prior=prior) == expected, scores
            sizes[expected, NOT_YET in scores or length < policy.n0] += 1
    assert set(sizes) >= {(policy.n0, True), (8, False)}


@pytest.mark.parametrize("policy", [Screening(n0=2), Screening(), Screening(n0=7)])
def test_a_group_waits_for_all_of_its_first_scores_unless_two_differ(policy):
    early = [WRONG] * (policy.n0 - 1)
    assert size(policy, early) == policy.n0
    assert size(policy, [*early, NOT_YET, RIGHT, WRONG]) == policy.n0
    assert size(policy, [NOT_YET, *early[1:], RIGHT]) == (8 if early[1:] else policy.n0)


LEVEL = Screening(n0=2, min_chance=0.9, min_chance_hard=0.4, rounds=3)
WORLDS = {
    "screening": RLConfig(prompts_per_step=3, group_size=5, step_policy=STRICT),
    "screening by chance": RLConfig(
        prompts_per_step=8, group_size=4, step_policy=Screening(n0=2, min_chance_hard=0.3)
    ),
    "screening in rounds": RLConfig(prompts_per_step=4, group_size=5, step_policy=LEVEL),
}


@pytest.fixture(autouse=True)
def screening_configs(monkeypatch):
    for name, config in WORLDS.items():
        monkeypatch.setitem(CONFIGS, name, config.validate("rl"))


@pytest.mark.parametrize("name", WORLDS)
def test_a_stop_at_any_sample_leads_to_the_same_groups_and_rounds(name):
    baseline = World(name)
    expected = run(baseline)
    config, n0 = CONFIGS[name], CONFIGS[name].policy.n0
    assert {len(keys) > 0 for keys in baseline.batches} == {True}
    for keys in baseline.batches:  # a round has either first samples or later ones
        assert len({key.index >= n0 for key in keys}) == 1
    sizes = Counter(Outcome(*x).samples for step in expected for _, x in step[1])
    assert set(sizes) == {n0, config.group_size}
    for at in range(1, len(baseline.finished) + 1, 3):
        world = World(name, stop_at=at)
        assert run(world) == expected, at
        assert Counter(world.finished) == Counter(baseline.finished)
        for keys in world.batches:
            assert len({key.index >= n0 for key in keys}) == 1
    assert run(World(name), restart=lambda step, stopped: True) == expected


def test_every_sample_is_trained_on_and_the_metrics_count_the_groups():
    world = World("screening by chance")
    buffer, policy = world.new_buffer(), CONFIGS["screening by chance"].policy
    metrics = world.collector()(buffer, None, 0, world.draw, False, world.stopped)
    groups = buffer.step_groups()
    assert len(groups) == 8 and sum(len(x.rollouts) for x in groups) == len(world.finished)
    stopped = [x for x in groups if len(x.rollouts) == policy.n0]
    continued = [x for x in groups if len(x.rollouts) == 4]
    assert stopped and continued and len(stopped) + len(continued) == 8
    uniform = [x for x in continued if np.ptp([drawn(r.key)[1] for r in x.rollouts[:2]]) == 0]
    rescued = [x for x in uniform if np.ptp([s.reward for s in x.scores]) > 0]
    expected = {
        "stopped_groups": len(stopped),
        "stopped_frac": len(stopped) / 8,
        "saved_samples": 2 * len(stopped),
        "continued_tokens": sum(r.response_length for x in continued for r in x.rollouts[2:]),
        "continued_uniform_groups": len(uniform),
        "rescued_groups": len(rescued),
    }
    actual = {k.removeprefix("screening/"): v for k, v in metrics.items() if "screening/" in k}
    assert actual == expected and len(uniform) > 0


def fractions(metrics):
    return {k.removeprefix("screening/"): v for k, v in metrics.items() if "screening/" in k}


def reference_step(policy, prompts, group_size, first):
    """Returns the prompts that a step trains on, the sizes of all its groups by prompt, and the
    number of its rounds of `prompts` each, from prompt `first` on; the prior is Beta(1, 1).
    """
    trained, sizes = [], {}
    for number in range(policy.rounds):
        places = range(first + number * prompts, first + (number + 1) * prompts)
        keys = [(i % 7 + 1000, i // 7) for i in places]
        varied, others = [], []
        for key in keys:
            rewards = [drawn(SampleKey(*key, index))[1] for index in range(group_size)]
            sizes[key] = reference_size(policy, rewards, group_size, (1.0, 1.0))
            (varied if len(set(rewards[: sizes[key]])) > 1 else others).append(key)
        last = number == policy.rounds - 1
        if len(keys) == prompts - len(trained) and last:
            varied, others = keys, []
        trained += [*varied, *(others if last else ())][: prompts - len(trained)]
        if len(trained) == prompts:
            break
    return trained, sizes, number + 1


@pytest.mark.parametrize(("rounds", "taken", "filled"), [(1, 1, 0), (2, 2, 2), (9, 3, 0)])
def test_a_step_in_rounds_trains_on_groups_that_vary(monkeypatch, rounds, taken, filled):
    """Each round's prompts get first samples and continue; uniform groups are taken in the last."""
    policy = replace(STRICT, rounds=rounds)
    rl = RLConfig(prompts_per_step=6, group_size=3, step_policy=policy).validate("rl")
    monkeypatch.setitem(CONFIGS, "rounds", rl)
    world, first = World("rounds"), 42  # a place where two rounds are not enough
    trained, sizes, expected_rounds = reference_step(policy, 6, 3, first)
    world.place, buffer = first, world.new_buffer()
    metrics = world.collector()(buffer, None, 0, world.draw, False, world.stopped)
    groups = buffer.step_groups()
    assert [x.prompt.key for x in groups] == trained and len(groups) == 6
    assert (world.place - first) // 6 == expected_rounds == taken
    assert Counter(key[:2] for key in world.finished) == sizes
    stopped = sum(count == 2 for count in sizes.values())
    tokens = sum(drawn(key)[0] for key in world.finished)
    kept = sum(r.response_length for x in groups for r in x.rollouts)
    assert buffer.dropped_tokens == tokens - kept
    found = {k.partition("/")[2]: v for k, v in metrics.items() if "/" in k}
    assert found["stopped_groups"] == found["saved_samples"] == stopped
    assert found["stopped_frac"] == pytest.approx(stopped / len(sizes))
    later = (drawn(key)[0] for key in world.finished if key.index >= 2)
    assert found["continued_tokens"] == sum(later)
    if rounds == 1:
        assert "dynamic_rounds" not in found and buffer.dropped_tokens == 0
        return
    uniform = sum(len({score.reward for score in x.scores}) == 1 for x in groups)
    assert found["dynamic_rounds"] == taken
    assert found["dynamic_dropped_groups"] == len(sizes) - 6
    assert found["dynamic_dropped_tokens"] == tokens - kept > 0
    assert found.get("dynamic_filled_groups", 0) == filled == uniform


def test_settings_that_screening_cannot_be_combined_with_are_refused():
    growing = ZeroVarianceConfig(grow_to=16)
    dynamic = ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)
    tis = named_correction("tis")
    for policy, fields, message in (
        (Screening(n0=8), {}, "n0 = 8: rl.group_size = 8 leaves no samples to decide on"),
        (Screening(n0=9), {}, "n0 = 9: rl.group_size = 8 leaves no samples to decide on"),
        (Screening(n0=1), {}, "rl.step_policy.n0 = 1: must be at least 2"),
        (Screening(min_chance=1.5), {}, "rl.step_policy.min_chance = 1.5: must be at most 1"),
        (
            Screening(min_chance=0.0, min_chance_hard=0.0),
            {},
            "min_chance = rl.step_policy.min_chance_hard = 0: every group would get all",
        ),
        (
            Screening(n0=4),
            {"zero_variance": growing},
            "screening gives them fewer; set grow_to to 0",
        ),
        (FOUR, {"zero_variance": dynamic}, "dynamic_sampling would have no effect"),
        (Screening(rounds=0), {}, "rl.step_policy.rounds = 0: must be positive"),
        (
            Screening(rounds=2),
            {"zero_variance": ZeroVarianceConfig(rl_zvp=True)},
            "further rounds of prompts drop the uniform groups that rl.zero_variance.rl_zvp learns",
        ),
        (
            Screening(n0=4),
            {"partial_prompts": 2, "correction": tis},
            "partial_prompts would have no",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            RLConfig(**{"step_policy": policy, "group_size": 8, **fields}).validate("rl")
    run_config = evolve(tiny_run(), rl={"step_policy": Screening(n0=4), "group_size": 6})
    run_config.validate_for_rl()
    stages = (RLStage(group_size=8), RLStage(2, group_size=4))
    with pytest.raises(ConfigError, match=r"rl\.stages\[1\].*rl\.group_size = 4 leaves no samples"):
        evolve(run_config, rl={"stages": stages}).validate_for_rl()
    for policy, fields in itertools.product(
        (Screening(n0=4), STRICT),
        ({}, {"one_step_off": True, "correction": tis}, {"stages": (RLStage(group_size=6),)}),
    ):
        RLConfig(**{"step_policy": policy, "group_size": 8, **fields}).validate("rl")
