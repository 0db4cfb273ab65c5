"""Optimisers named by import path: their equation, a run of two steps, a mesh, and refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from logged import lines
from test_optim import DECAYS, tree
from tiny_run import tiny_run
from worded import override

from compass_jax.config import ConfigError, MeshConfig, OptimConfig
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.devices.sharding import placements
from compass_jax.model.params import decays, place
from compass_jax.model.transformer import init_params
from compass_jax.training import optim, step
from compass_jax.training.rl import run_rl
from compass_jax.training.sft import run_sft

LION = OptimConfig(
    learning_rate=0.01,
    name="optax:lion",
    options={"b1": 0.8, "b2": 0.9, "weight_decay": 0.3},
    clip_grad_norm=1e9,
)


def numpy_lion(params, gradients):
    """Returns the parameters after updates by Lion (arXiv 2302.06675, algorithm 2), with weight
    decay on everything but norms and biases.
    """
    flat, structure = jax.tree.flatten(params)
    momentum = [np.zeros_like(x) for x in flat]
    for gradient in gradients:
        for i, g in enumerate(jax.tree.leaves(gradient)):
            direction = np.sign(0.8 * momentum[i] + 0.2 * g)
            flat[i] = flat[i] - 0.01 * (direction + 0.3 * flat[i] * DECAYS[i])
            momentum[i] = 0.9 * momentum[i] + 0.1 * g
    return structure.unflatten(flat)


def test_lion_by_its_import_path_equals_numpy(x64):
    gradients = [tree(10 + n) for n in range(4)]
    state = optim.init_state(jax.tree.map(jnp.asarray, tree(0)), LION, 4)
    for gradient in gradients:
        gradient = jax.tree.map(jnp.asarray, gradient)
        state, _ = step.apply(state, gradient, config=LION, total_steps=4, decays=DECAYS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12),
        state.params,
        numpy_lion(tree(0), gradients),
    )


def test_a_run_trains_and_resumes_with_lion(tmp_path):
    config = tiny_run("odd_verifiers:coin")
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    config = override(config, ["--rl.optim.name", "optax:lion", "--rl.steps", "1"])
    config = override(config, ["--rl.optim.options", '[["b1", 0.8]]'])
    assert config.rl.optim.options == (("b1", 0.8),)
    assert config_from_json(config_to_json(config)) == config
    run_rl(config)
    run_rl(override(config, ["--rl.steps", "2"]))
    rows = lines(tmp_path / "run", "metrics")
    assert [row["step"] for row in rows] == [1, 2]
    assert min(row["metrics"]["grad_norm"] for row in rows) > 0


OTHERS = {
    "factored": OptimConfig(name="optax:adafactor", options={"min_dim_size_to_factor": 8}),
    "masked": OptimConfig(name="optax.contrib:muon"),
    "without moments": OptimConfig(name="optax:sgd"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_states_of_other_shapes_have_a_place_on_a_mesh(name):
    """Adafactor keeps rows and columns of a matrix, Muon no moment of a masked leaf."""
    config, base = OTHERS[name], tiny_run()
    placement = placements(MeshConfig(fsdp=2), None, False)[0]
    params = init_params(base.model, base.compute, jax.random.key(0))
    state = optim.init_state(params, config, 2)
    placed = place(state, base.model, placement)
    leaves = decays(base.model, "stacked")
    ones = jax.tree.map(jnp.ones_like, placed.params)
    moved, info = step.apply(placed, ones, config=config, total_steps=2, decays=leaves)
    alone, _ = step.apply(
        optim.init_state(params, config, 2),
        jax.tree.map(jnp.ones_like, params),
        config=config,
        total_steps=2,
        decays=leaves,
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6),
        moved.params,
        alone.params,
    )
    assert np.isfinite(info["grad_norm"])


@pytest.mark.parametrize("name", ["optax:lion", "optax.contrib:muon", "optax:sgd"])
def test_a_gradient_of_zero_changes_the_place_in_the_schedule_alone(name):
    config = OptimConfig(name=name, learning_rate=0.1, warmup_steps=4)
    params = {"w": jnp.ones((3, 4)), "b": jnp.ones(4)}
    state, rates = optim.init_state(params, config, 9), []
    for value in (1.0, 0.0, 0.0):
        before = jax.device_get(state)
        gradient = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), params)
        state, info = step.apply(state, gradient, config=config, total_steps=9, decays=(True,) * 2)
        rates.append(float(info["lr"]))
        is_schedule = optim._is_schedule
        old, new = (
            [x for x in jax.tree.leaves(of, is_leaf=is_schedule) if not is_schedule(x)]
            for of in (before, state)
        )
        same = all(np.array_equal(a, b) for a, b in zip(old, new, strict=True))
        assert same == (value == 0)
    np.testing.assert_allclose(rates, [0.02, 0.04, 0.06], rtol=1e-6)


def test_sgd_with_its_options_equals_numpy(x64):
    """theta <- theta - rate * m, m <- 0.9 m + g, after clipping to a norm of 1.5."""
    config = OptimConfig("optax:sgd", {"momentum": 0.9}, learning_rate=0.05, clip_grad_norm=1.5)
    gradients = [tree(10 + n) for n in range(4)]
    state = optim.init_state(jax.tree.map(jnp.asarray, tree(0)), config, 4)
    flat, structure = jax.tree.flatten(tree(0))
    momentum = [np.zeros_like(x) for x in flat]
    for gradient in gradients:
        arrays = jax.tree.map(jnp.asarray, gradient)
        state, _ = step.apply(state, arrays, config=config, total_steps=4, decays=DECAYS)
        leaves = jax.tree.leaves(gradient)
        scale = min(1.0, 1.5 / np.sqrt(sum(np.sum(x**2) for x in leaves)))
        momentum = [0.9 * m + scale * g for m, g in zip(momentum, leaves, strict=True)]
        flat = [x - 0.05 * m for x, m in zip(flat, momentum, strict=True)]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
        state.params,
        structure.unflatten(flat),
    )


def test_what_cannot_be_an_optimiser_is_refused():
    def refused(**fields):
        config = OptimConfig(**fields)
        config.validate("rl.optim")
        optim.check_optimizer(config, 2, "sft.optim")

    with pytest.raises(ConfigError, match=r"rl\.optim\.name = 'lion': must be module:name"):
        refused(name="lion")
    with pytest.raises(ConfigError, match=r"rl\.optim\.b1 = 0\.5 is AdamW's; give optax:lion its"):
        refused(name="optax:lion", b1=0.5)
    with pytest.raises(ConfigError, match=r"rl\.optim\.options: adamw takes none"):
        refused(options={"b1": 0.8})
    with pytest.raises(ConfigError, match=r"^sft\.optim\.name = .* has no lyon; did you mean lion"):
        refused(name="optax:lyon")
    with pytest.raises(
        ConfigError, match=r"^sft\.optim\.name = .*cannot be called with .*{'b9': 0.8}"
    ):
        refused(name="optax:lion", options={"b9": 0.8})
    with pytest.raises(ConfigError, match=r"^sft\.optim\.name = .* returns float, not an optax"):
        refused(name="test_named_optimizer:no_transformation")
    with pytest.raises(ConfigError, match=r"^sft\.optim\.name = .* KeyError: 'rate'"):
        refused(name="test_named_optimizer:broken")


def no_transformation(learning_rate):
    return 1.0


def broken(learning_rate):
    return {}["rate"]


def test_a_run_names_the_setting_of_its_optimiser_before_it_reads_weights(tmp_path):
    base, lyon = tiny_run(), OptimConfig(name="optax:lyon")
    base = dataclasses.replace(base, run_dir=str(tmp_path / "run"), init_from=str(tmp_path))
    for section, run in (("rl", run_rl), ("sft", run_sft)):
        part = dataclasses.replace(getattr(base, section), optim=lyon)
        with pytest.raises(ConfigError, match=rf"^{section}\.optim\.name = .* has no lyon"):
            run(dataclasses.replace(base, **{section: part}))
