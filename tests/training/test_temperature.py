"""The control of the rollout's temperature: its law, and runs whose temperature moves."""

import math

import pytest
from evolve import evolve
from tiny_run import tiny_run

from compass_jax.config import ConfigError, EntropyConfig, apply
from compass_jax.training.hooks.base import StepRecord
from compass_jax.training.hooks.temperature import FIRST, TemperatureControl
from compass_jax.training.rl import rl_steps


class Places:
    """What the control sets."""

    def __init__(self):
        self.sampled, self.trained = [], []

    def control(self, **settings):
        return TemperatureControl(
            EntropyConfig(**settings), 1.0, self.sampled.append, self.trained.append
        )


def run(control, entropies, first=1):
    """Runs steps whose measured entropies are given; returns their temperatures."""
    of = []
    for number, entropy in enumerate(entropies, first):
        control.before_rollout(number)
        step = StepRecord(number, [], metrics={"entropy_nats": entropy})
        control.on_groups(step)
        control.on_metrics(step)
        of.append(step.metrics["rollout/temperature"])
    return of


def test_the_temperature_follows_the_law_within_its_bounds():
    places = Places()
    entropies = [0.4, 0.6, 0.5, 0.5, 0.2, 0.2, 0.01, 0.01, 0.01, 5.0, 5.0]
    of = run(places.control(keep=0.6, gain=0.3, most=1.8), entropies)
    assert places.sampled == places.trained == of
    assert of[: FIRST + 1] == [1.0] * (FIRST + 1)
    expected = 1.0
    for i in range(FIRST, len(entropies) - 1):
        expected *= math.exp(0.3 * (math.log(0.6 * 0.5) - math.log(entropies[i])))
        expected = min(max(expected, 1.0), 1.8)
        assert of[i + 1] == pytest.approx(expected)
    assert max(of) == 1.8 and of[-1] < 1.8


def test_a_step_without_an_entropy_changes_nothing():
    assert run(Places().control(keep=2.0), [0.5] * 4 + [math.nan, 0.0, math.inf, 0.5]) == [1.0] * 8


def test_a_control_that_is_restored_goes_on_as_before():
    entropies = [0.5] * 4 + [0.3, 0.2, 0.25, 0.1]
    whole = run(Places().control(keep=1.0), entropies)
    first = Places().control(keep=1.0)
    run(first, entropies[:5])
    first.before_rollout(6)  # the kill comes within this rollout
    places = Places()
    second = places.control(keep=1.0)
    second.restore(first.state(), 5)
    assert places.sampled == [whole[5]]
    step = StepRecord(6, [], metrics={"entropy_nats": entropies[5]})
    second.on_groups(step)
    second.on_metrics(step)
    assert places.trained == [whole[5]] == [step.metrics["rollout/temperature"]]
    assert run(second, entropies[6:], first=7) == whole[6:]


def test_log_probs_are_those_of_the_temperature_that_sampled(tmp_path):
    """In float32 the rollout's log-probs are training's up to rounding, at each temperature."""
    config = evolve(
        tiny_run(),
        run_dir=str(tmp_path),
        trackers=(),
        rl={"steps": FIRST + 3, "entropy": {"keep": 2.0, "gain": 1.0}, "save_every": 0},
    )
    metrics = [step.metrics for step in rl_steps(config)]
    temperatures = [one["rollout/temperature"] for one in metrics]
    assert temperatures[: FIRST + 1] == [1.0] * (FIRST + 1) and temperatures[-1] > 1.2
    assert max(one["mismatch/kl_k3"] for one in metrics) < 1e-9
    assert metrics[-1]["entropy_nats"] > metrics[FIRST]["entropy_nats"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rl.partial_prompts": 2, "rl.correction": "tis"}, "rl.partial_prompts takes tokens"),
        ({"rl.drafts": "lenient"}, "rl.drafts takes tokens"),
        ({"samplers.address": "127.0.0.1:1"}, "they sample at rollout.temperature alone"),
    ],
)
def test_what_samples_at_one_temperature_is_refused(settings, message):
    config = apply(tiny_run(), {"rl.entropy.keep": 0.5, **settings})
    with pytest.raises(ConfigError, match=message):
        config.validate_for_rl()
