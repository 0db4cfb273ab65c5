"""The learning rate of a step by the run's tokens and by the groups that vary."""

import math

import numpy as np
import pytest
from evolve import evolve
from logged import lines
from test_rate_notices import COSINE
from tiny import make_prompt
from tiny_run import tiny_run
from variants import RATES

from compass_jax.base.records import Group, Score
from compass_jax.config import ConfigError, OptimConfig, RLConfig, SFTConfig, ZeroVarianceConfig
from compass_jax.training.header import describe_optimiser
from compass_jax.training.hooks.base import Hook, Hooks, StepRecord
from compass_jax.training.hooks.rates import RateFactors
from compass_jax.training.optim import rates
from compass_jax.training.rate_notices import moved_schedule


def group(n, rewards):
    return Group(make_prompt(n, 3), (), tuple(Score(x or 0.0, x is not None) for x in rewards))


# two vary; of the third only one reward is known
GROUPS = [group(0, (1, 0)), group(1, (1, 1)), group(2, (1, None)), group(3, (0.25, 0.5))]


def rates_of(hook, tokens, groups=GROUPS):
    """Returns the factors of steps that generate these numbers of tokens."""
    factors = []
    for number, count in enumerate(tokens, 1):
        step = StepRecord(number, groups, metrics={"waste/tokens_generated": float(count)})
        Hooks([hook]).call(Hook.on_arrays, step)
        factors.append(step.rate)
        Hooks([hook]).call(Hook.on_metrics, step)
    return factors


def test_the_rate_decays_by_the_tokens_before_a_step():
    """cos(pi x) by hand: 1 at 0, 0.75 at a third, 0.25 at two thirds, and 0 from the end on."""
    optim = OptimConfig(schedule="cosine", schedule_tokens=300)
    factors = rates_of(RateFactors(optim, 4), [100, 100, 250, 5, 5])
    np.testing.assert_allclose(factors, [1, 0.75, 0.25, 0, 0], atol=1e-12)


def test_a_restored_hook_goes_on_with_its_tokens():
    optim = OptimConfig(schedule="cosine", schedule_tokens=700)
    expected = rates_of(RateFactors(optim, 4), [100, 200, 300, 10])
    first, second = RateFactors(optim, 4), RateFactors(optim, 4)
    begun = rates_of(first, [100, 200])
    second.restore(first.state(), 2)
    assert begun + rates_of(second, [300, 10]) == expected
    assert RateFactors(OptimConfig(rate_by_groups=True), 4).state() == {}


def test_the_rate_follows_the_root_of_the_groups_that_vary():
    hook = RateFactors(OptimConfig(rate_by_groups=True), 4)
    assert rates_of(hook, [9]) == [math.sqrt(2 / 4)]
    assert rates_of(hook, [9], [GROUPS[1]] * 4) == [0] and rates_of(hook, [9], GROUPS[:1] * 4) == [
        1
    ]
    step = StepRecord(1, GROUPS, held_groups={(7, 0): GROUPS[0]})
    step.put(1, (7, 0))  # a held group that varies takes a place
    hook.on_arrays(step)
    assert step.rate == math.sqrt(3 / 4)


def test_the_updates_have_the_factors_and_the_warm_up(undisturbed):
    """`lr` is learning_rate * warm-up * cosine by tokens * root of the varied groups."""
    optim = RATES["optim"]
    rows = [row["metrics"] for row in lines(undisturbed("rates")[0])]
    tokens = np.cumsum([0, *(row["waste/tokens_generated"] for row in rows)])[:-1]
    decay = (1 + np.cos(np.pi * np.minimum(tokens / optim.schedule_tokens, 1))) / 2
    varied = np.sqrt([row["groups/varied_frac"] for row in rows])
    warm = np.array([0.5, 1, 1])
    np.testing.assert_allclose(
        [row["lr"] for row in rows], optim.learning_rate * warm * decay * varied, rtol=1e-5
    )
    assert decay[-1] < 0.5 < decay[1] < 1 and min(varied) < 1


def test_by_tokens_another_number_of_steps_moves_no_rate():
    optim = evolve(COSINE, schedule_tokens=1000)
    assert moved_schedule(RLConfig(steps=3, optim=optim), RLConfig(steps=6, optim=optim), 3) == ""
    np.testing.assert_allclose(rates(optim, 3, range(3)), 5e-4)
    text = describe_optimiser(evolve(optim, rate_by_groups=True), 3)
    assert "cosine decay to 0 at 1,000 tokens times sqrt(varied groups / prompts)" in text


def test_settings_without_effect_are_refused():
    groups = OptimConfig(rate_by_groups=True)
    for config, message in (
        (
            RLConfig(optim=OptimConfig(schedule_tokens=9)),
            r"rl\.optim\.schedule_tokens = 9: rl\.optim\.schedule = 'constant' does not decay",
        ),
        (
            RLConfig(optim=groups, zero_variance=ZeroVarianceConfig(rl_zvp=True)),
            r"rl_zvp gives the others an advantage too",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            config.validate("rl")
    for optim, name in (
        (evolve(COSINE, schedule_tokens=9), "schedule_tokens = 9"),
        (groups, "rate_by_groups = True"),
    ):
        with pytest.raises(ConfigError, match=rf"sft\.optim\.{name}: SFT generates no tokens"):
            SFTConfig(optim=optim).validate("sft")
    evolve(tiny_run(), rl=RATES).validate_for_rl()
