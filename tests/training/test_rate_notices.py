"""Notices on the learning rate, on rewards that stand still and on what a run will do."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from tiny_run import tiny_run
from worded import override

from compass_jax.config import (
    GuardConfig,
    OptimConfig,
    RewardConfig,
    RLConfig,
    SFTConfig,
    ZeroVarianceConfig,
)
from compass_jax.config.lora import LoRAConfig
from compass_jax.training.header import rl_method, sft_method
from compass_jax.training.hooks.guard import Guard
from compass_jax.training.presets import default_rate, preset
from compass_jax.training.rate_notices import hardly_moves, moved_schedule
from compass_jax.training.rl import run_rl

COSINE = OptimConfig(learning_rate=5e-4, schedule="cosine")


def test_a_longer_run_of_a_cosine_schedule_says_both_curves():
    """cos(pi u / n) by hand: step 3 of 3 has 5e-4 (1 + cos(2 pi / 3)) / 2 = 1.25e-4, of 6 3.75e-4;
    step 4 has 0 and 2.5e-4.
    """
    three, six = RLConfig(steps=3, optim=COSINE), RLConfig(steps=6, optim=COSINE)
    text = moved_schedule(three, six, 3)
    assert "rl.steps = 6, 3 before" in text
    assert (
        "step 3 had 0.000125, and has 0.000375" in text and "step 4 has 0.00025, and 0 in" in text
    )
    shorter = moved_schedule(six, three, 2)
    assert "step 2 had 0.000467, and has 0.000375" in shorter
    several = dataclasses.replace(six, prompts_per_step=16, updates_per_rollout=4)
    fewer = dataclasses.replace(several, steps=3)
    assert "step 3 had 0.000125, and has 0.000375" in moved_schedule(fewer, several, 3)
    sft = SFTConfig(steps=3, optim=COSINE), SFTConfig(steps=6, optim=COSINE)
    assert "sft.steps = 6, 3 before: sft.optim.schedule = 'cosine'" in moved_schedule(*sft, 3)


@pytest.mark.parametrize(
    ("before", "now", "done"),
    [
        (None, RLConfig(steps=6, optim=COSINE), 0),
        (RLConfig(steps=3, optim=COSINE), RLConfig(steps=6, optim=COSINE), 0),
        (RLConfig(steps=6, optim=COSINE), RLConfig(steps=6, optim=COSINE), 3),
        (RLConfig(steps=3), RLConfig(steps=6), 3),
    ],
)
def test_a_schedule_that_stays_is_not_mentioned(before, now, done):
    assert moved_schedule(before, now, done) == ""


def test_the_run_says_it_when_it_goes_on(tmp_path, capsys):
    changes = {"steps": 1, "optim": COSINE}
    config = evolve(tiny_run(), run_dir=str(tmp_path), rl=changes, data={"eval_prompts": 0})
    run_rl(config)
    assert "its rates move" not in capsys.readouterr().out
    run_rl(evolve(config, rl={"steps": 2}))
    assert "rl.steps = 2, 1 before: rl.optim.schedule" in capsys.readouterr().out


WEIGHTS = {"w": jnp.full((8, 8), 0.18), "bias": jnp.zeros(8), "empty": jnp.zeros((4, 4))}
NO_LORA = LoRAConfig()


@pytest.mark.parametrize(
    ("optim", "updates", "share"),
    [
        (OptimConfig(learning_rate=1e-6), 100, "0.06%"),  # SmolLM2-135M with the papers' rate
        (OptimConfig(learning_rate=1e-5), 100, ""),
        (OptimConfig(learning_rate=5e-6, schedule="cosine"), 100, "0.14%"),  # half of the peak
        (OptimConfig(learning_rate=5e-6), 100, ""),
        (OptimConfig(learning_rate=3e-6, warmup_steps=99), 100, "0.08%"),
        (OptimConfig(learning_rate=0.0), 100, "0.00%"),
        (OptimConfig(name="optax:lion", learning_rate=1e-6, b1=0.9), 100, "0.06%"),
        (
            OptimConfig(name="optax:sgd", learning_rate=1e-6),
            100,
            "",
        ),
    ],
)
def test_weights_that_hardly_move_are_said(optim, updates, share):
    text = hardly_moves(optim, updates, WEIGHTS, NO_LORA, None)
    assert bool(text) == bool(share)
    if share:
        assert f"rl.optim.learning_rate = {optim.learning_rate:g}: 100 updates" in text
        assert f"{share} of the weights' root mean square, 0.18" in text


def test_adapters_move_weights_by_their_product():
    """A of rank 4 with entries of 0.5, scale 2: 100 updates of 1e-5 change a weight by at most
    1e-3 x 2 x 0.5 x 2.
    """
    lora = LoRAConfig(rank=4, alpha=8.0)
    adapters = {"a": jnp.full((8, 4), 0.5), "b": jnp.zeros((4, 8))}
    text = hardly_moves(OptimConfig(learning_rate=1e-5), 100, adapters, lora, WEIGHTS)
    assert text == ""
    text = hardly_moves(OptimConfig(learning_rate=1e-6), 100, adapters, lora, WEIGHTS)
    assert "change a weight by 0.0002 at most, 0.11% of" in text


def test_the_default_rates_move_the_weights():
    for parameters, size in ((3e6, 0.05), (135e6, 0.18), (7e9, 0.02), (200e9, 0.01)):
        optim = OptimConfig(learning_rate=default_rate(int(parameters), adapters=False))
        assert not hardly_moves(optim, 100, {"w": jnp.full((8, 8), size)}, NO_LORA, None)
    assert default_rate(10**7, False) == 1.5e-4 and default_rate(10**10, False) == 1e-6
    assert default_rate(10**10, True) == 1e-5


def test_the_header_says_what_a_step_does():
    rl = dataclasses.replace(preset("screened", 256), prompts_per_step=16, optim=COSINE)
    lines = rl_method(rl, tiny_run().rollout)
    assert lines == {
        "objective": "grpo, advantage grpo, step policy screening, posterior selection",
        "a step": "16 prompts x 4 samples of at most 16 tokens, 1 update",
        "optimiser": "adamw, learning rate 0.0005, cosine decay to 0; 100 updates",
    }
    words = ["--rl.step-policy", "plain", "--rl.step-policy.rounds", "3"]
    level = override(evolve(tiny_run(), rl={"zero_variance": ZeroVarianceConfig()}), words).rl
    assert rl_method(level, tiny_run().rollout)["objective"] == (
        "espo, advantage grpo, step policy plain, at most 3 rounds of prompts"
    )
    espo = rl_method(preset("espo", 256), tiny_run().rollout)
    assert espo["objective"] == "espo, advantage grpo, RL-ZVP 0.1"
    assert espo["a step"].endswith("4 updates") and espo["optimiser"].endswith("400 updates")
    warm = OptimConfig(learning_rate=1e-4, warmup_steps=5)
    assert sft_method(SFTConfig(steps=7, batch=3, optim=warm)) == {
        "a step": "3 rows, 1 update",
        "optimiser": "adamw, learning rate 0.0001, constant after 5 updates of warm-up; 7 updates",
    }


def evaluated(guard, step, mean, prompts=200, spread=0.3, seed=0):
    hard = np.random.default_rng(0).normal(0, spread, prompts)
    draws = (mean + hard + np.random.default_rng(seed).normal(0, 0.1, prompts)).clip(0, 1)
    guard.of_evaluation(step, {str(i): float(x) for i, x in enumerate(draws)})


@pytest.mark.parametrize(
    ("means", "prompts", "steady", "is_said"),
    [
        ((0.3, 0.3, 0.3), 200, True, True),
        ((0.3, 0.25, 0.2), 200, True, True),  # it falls
        ((0.3, 0.3, 0.4), 200, True, False),
        ((0.3, 0.32, 0.34), 200, True, False),  # may still have risen by 0.05
        ((0.3, 0.3, 0.3), 12, True, False),  # too few to tell
        ((0.3, 0.3, 0.3), 200, False, False),  # the training's rewards tell
        ((0.99, 0.99, 0.99), 200, True, False),  # it cannot rise further
    ],
)
def test_held_out_rewards_that_stand_still_under_posterior_selection(
    means, prompts, steady, is_said
):
    said = []
    guard = Guard(GuardConfig(window=16), 100, RewardConfig(), lambda *x: said.append(x), steady)
    for step, mean in zip((10, 20, 30), means, strict=True):
        evaluated(guard, step, mean, prompts, spread=0.05 if mean > 0.9 else 0.3, seed=step)
        assert not (said and step < 26)
    assert [kind for kind, _ in said] == ["stagnant reward"] * is_said
    if is_said:
        assert "from step 10 to step 30 the mean reward of 200 held-out prompts" in said[0][1]


def test_a_resumed_guard_compares_with_the_same_evaluation():
    said = []
    settings = GuardConfig(window=16), 100, RewardConfig(), lambda *x: said.append(x), True
    guard, again = Guard(*settings), Guard(*settings)
    evaluated(guard, 10, 0.3, seed=1)
    again.restore(json.loads(json.dumps(guard.state())), 20)
    evaluated(again, 40, 0.3, seed=2)
    assert len(said) == 1 and "from step 10 to step 40" in said[0][1]


def test_a_run_that_learnt_and_then_stands_still_for_a_third_of_its_steps_is_told():
    """From 0.3 to 0.6 in 60 steps, then nothing: at step 90 the evaluation of step 60 decides."""
    said = []
    guard = Guard(GuardConfig(window=16), 200, RewardConfig(), lambda *x: said.append(x), True)
    for step in range(0, 100, 10):
        evaluated(guard, step, 0.3 + 0.3 * min(step, 60) / 60, seed=step)
        assert not (said and step < 90)
    assert "from step 60 to step 90" in said[0][1]
    assert len(guard.state()["evaluations"]) <= 5  # no more than the next ones need
