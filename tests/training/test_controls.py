"""Numbers that a controller may change between updates: they act, and compile nothing again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from test_learner import CONFIG, samples

from compass_jax.config import ConfigError, OptimConfig
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.training import optim, step
from compass_jax.training.learner import Learner


def learner_of(config):
    params = init_params(config.model, config.compute, jax.random.key(0))
    return Learner.start(config.learner, Transformer(config.model, config.compute), params)


def test_a_temperature_that_is_set_is_that_of_the_settings_and_compiles_nothing():
    learner, arrays = learner_of(CONFIG), samples(0)
    learner.score(arrays)
    compiled = step.forward_and_pullback._cache_size()
    for temperature in (0.5, 2.0):
        learner.temperature = temperature
        scored = learner.score(arrays)
        assert step.forward_and_pullback._cache_size() == compiled
        usual = learner_of(evolve(CONFIG, rollout={"temperature": temperature})).score(arrays)
        np.testing.assert_array_equal(scored.old_logp, usual.old_logp)
    plain = learner_of(CONFIG).score(arrays)
    assert (scored.old_entropy > plain.old_entropy)[arrays.mask].all(), "2 is flatter than 1"


def test_betas_that_are_set_are_those_of_the_update_and_compile_once():
    """AdamW (arXiv 1711.05101, algorithm 2) in float64, with other betas from the second update."""
    config = OptimConfig(learning_rate=0.1, weight_decay=0.0, clip_grad_norm=1e9, eps=1e-8)
    values, betas = np.array([1.0, -2.0, 0.5]), [None, (0.5, 0.7), (0.3, 0.9)]
    state = optim.init_state({"w": jnp.asarray(values, jnp.float32)}, config, 10)
    moment, square = np.zeros(3), np.zeros(3)
    compiled = []
    for t, chosen in enumerate(betas, 1):
        gradient = np.array([0.3, -0.1, 0.7]) * t
        (b1, b2) = chosen or (config.b1, config.b2)
        moment = b1 * moment + (1 - b1) * gradient
        square = b2 * square + (1 - b2) * gradient**2
        first, second = moment / (1 - b1**t), square / (1 - b2**t)
        values = values - 0.1 * first / (np.sqrt(second) + 1e-8)
        state, _ = step.apply(
            state,
            {"w": jnp.asarray(gradient, jnp.float32)},
            config=dataclasses.replace(config, schedule="constant"),
            total_steps=10,
            decays=(False,),
            factor=jnp.float32(1),
            betas=chosen,
        )
        compiled.append(step.apply._cache_size())
        np.testing.assert_allclose(state.params["w"], values, rtol=2e-6)
    assert compiled[2] == compiled[1]


def test_betas_of_another_optimiser_are_refused():
    learner = learner_of(evolve(CONFIG, rl={"optim": OptimConfig(name="optax:lion")}))
    learner.betas = 0.9, 0.99
    scored = learner.score(samples(0))
    with pytest.raises(ConfigError, match=r"optim\.name = 'optax:lion': other betas"):
        learner.update(scored, learner.updates[0])
