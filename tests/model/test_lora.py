"""Low-rank adapters in the model: the function of the merged matrices, and the losses of full
fine-tuning.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tiny import COMPUTE, MODEL, random_params

from compass_jax.config import ConfigError, MeshConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.lora import (
    Adapter,
    LowRank,
    any_low_rank,
    combine,
    init_adapters,
    is_low_rank,
    merged,
    trainable,
)
from compass_jax.model.params import in_layout, place
from compass_jax.model.transformer import Transformer
from compass_jax.training.step import forward, forward_and_pullback, pull, sft_gradients

ALL = (*LoRAConfig().targets, "experts")
LORA = LoRAConfig(rank=3, alpha=6.0, targets=ALL)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(2, 40, (3, 12)), jnp.int32)
LENGTHS = jnp.array([12, 7, 10], jnp.int32)


def random_adapters(lora=LORA, layout="stacked", model=MODEL):
    """Returns adapters whose products are not small."""
    zero = init_adapters(model, lora, jax.random.key(1), layout)
    leaves, structure = jax.tree.flatten(zero)
    rng = np.random.default_rng(1)
    return structure.unflatten(
        [jnp.asarray(rng.standard_normal(x.shape) * 0.3, x.dtype) for x in leaves]
    )


@pytest.mark.parametrize("layout", ["stacked", "unrolled"])
def test_the_model_with_adapters_is_the_model_of_the_merged_matrices(layout):
    compute = replace(COMPUTE, scan_layers=layout == "stacked")
    model = Transformer(MODEL, compute, layout)
    base = in_layout(random_params(), layout)
    params = combine(base, random_adapters(layout=layout), LORA.scale)
    expected = forward(model, merged(params), TOKENS, LENGTHS, None, 1.0)
    actual = forward(model, params, TOKENS, LENGTHS, None, 1.0)
    np.testing.assert_allclose(actual[0], expected[0], rtol=2e-4, atol=2e-5)
    plain = forward(model, base, TOKENS, LENGTHS, None, 1.0)
    assert np.abs(np.asarray(plain[0] - actual[0])).max() > 0.1


def test_a_merged_matrix_is_the_equation():
    rng = np.random.default_rng(2)
    w, a, b = (rng.standard_normal(shape) for shape in ((5, 7), (5, 2), (2, 7)))
    low_rank = LowRank(*(jnp.asarray(x, jnp.float32) for x in (w, a, b)), scale=1.5)
    np.testing.assert_allclose(merged({"q": low_rank})["q"], w + 1.5 * a @ b, rtol=1e-5)


def test_new_adapters_change_nothing_and_are_where_the_targets_are():
    lora = replace(LORA, targets=("q_proj", "down_proj"))
    adapters = init_adapters(MODEL, lora, jax.random.key(0))
    params = combine(random_params(), adapters, lora.scale)
    np.testing.assert_array_equal(
        merged(params)["run_0"]["layer_0"]["attention"]["q"],
        random_params()["run_0"]["layer_0"]["attention"]["q"],
    )
    places = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_low_rank)[0]
    names = {path[-1].key for path, leaf in places if is_low_rank(leaf)}
    assert names == {"q", "down"}
    experts = params["run_0"]["layer_0"]["mlp"]  # a layer with experts
    assert "router" in experts and not any_low_rank(experts)
    first = params["run_0"]["layer_0"]["attention"]["q"]
    bound = MODEL.hidden**-0.5
    assert np.abs(np.asarray(first.a)).max() <= bound < 1.2 * np.abs(np.asarray(first.a)).max()


def test_the_gradient_is_that_of_the_merged_matrices_by_the_chain_rule():
    model = Transformer(MODEL, COMPUTE, "unrolled")
    adapters = random_adapters(layout="unrolled")
    params = combine(in_layout(random_params(), "unrolled"), adapters, LORA.scale)

    def gradient(params):
        (logp, _, _, aux), pullback = forward_and_pullback(
            model, params, TOKENS, LENGTHS, None, 1.0
        )
        cotangents = jnp.cos(jnp.arange(logp.size, dtype=logp.dtype)).reshape(logp.shape)
        return pull(model, params, pullback, (cotangents, jnp.zeros_like(aux.probs)))

    low, full = gradient(params), gradient(merged(params))
    assert jax.tree.structure(low) == jax.tree.structure(adapters)

    def compare(g_full, g, adapter):
        if g is None:
            return
        over = LORA.scale * jnp.swapaxes(adapter.b, -1, -2)
        np.testing.assert_allclose(g.a, g_full @ over, rtol=2e-3, atol=2e-4)
        under = LORA.scale * jnp.swapaxes(adapter.a, -1, -2)
        np.testing.assert_allclose(g.b, under @ g_full, rtol=2e-3, atol=2e-4)

    jax.tree.map(compare, full, low, adapters)


def test_full_rank_adapters_have_the_losses_of_full_fine_tuning():
    """For W + I B with I frozen, alpha = r and no decay, in float64, B is updated as W would be."""
    size = 32
    config = replace(MODEL, moe=replace(MODEL.mixture, ffn=size), heads=4, head_dim=8, ffn=size)
    compute = replace(COMPUTE, dtype="float64", param_dtype="float64")
    lora = LoRAConfig(rank=size, alpha=float(size), targets=ALL)
    with jax.enable_x64(True):
        model = Transformer(config, compute, "unrolled")
        base = in_layout(random_params(config, "float64"), "unrolled")
        specs = init_adapters(config, lora, jax.random.key(0), "unrolled")

        def identity(pair):
            eye = jnp.broadcast_to(jnp.eye(size, dtype="float64"), pair.a.shape)
            return Adapter(eye, pair.b.astype("float64"))

        def is_pair(x):
            return isinstance(x, Adapter)

        adapters = jax.tree.map(identity, specs, is_leaf=is_pair)
        # both runs train the same matrices only
        chosen = jax.tree.map(lambda w, pair: jnp.full((), pair is not None), base, specs)
        weight = jnp.where(
            jnp.arange(12, dtype=jnp.int32)[None] < LENGTHS[:, None] - 1, 1.0 / 26, 0.0
        )
        arguments = (TOKENS, LENGTHS, weight, jnp.float64(1), 0.0)
        optimizer = optax.adam(0.01)

        def losses(params_of, tree, mask):
            state, result = optimizer.init(tree), []
            for _ in range(4):
                grads, metrics = sft_gradients(model, params_of(tree), *arguments)
                result.append(float(metrics["loss"][0]))
                grads = jax.tree.map(lambda g, keep: jnp.where(keep, g, 0.0), grads, mask)
                with jax.numpy_dtype_promotion("standard"):
                    updates, state = optimizer.update(grads, state, tree)
                    tree = optax.apply_updates(tree, updates)
            return result

        full = losses(lambda tree: tree, base, chosen)
        frozen_a = jax.tree.map(
            lambda pair: Adapter(jnp.array(False), jnp.array(True)), adapters, is_leaf=is_pair
        )
        low = losses(lambda tree: combine(base, tree, lora.scale), adapters, frozen_a)
    np.testing.assert_allclose(low, full, rtol=1e-10)
    assert full[-1] < full[0] - 0.1


def test_parameters_without_adapters_are_trained_whole():
    params = random_params()
    tree, put = trainable(params)
    assert tree is params and put(tree) is params


def test_targets_that_the_model_lacks_are_refused():
    dense = replace(MODEL, family="qwen3", moe=None)
    with pytest.raises(ConfigError, match="names experts: the model is dense"):
        init_adapters(dense, LORA, jax.random.key(0))
    sparse = replace(MODEL, moe=replace(MODEL.mixture, dense_layers=()))
    with pytest.raises(ConfigError, match="the model has none of these matrices"):
        init_adapters(sparse, replace(LORA, targets=("up_proj",)), jax.random.key(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alpha": 8.0}, "lora.rank = 0 trains all weights"),
        ({"rank": -1}, "lora.rank = -1"),
        ({"rank": 4, "targets": ()}, "lora.targets is empty"),
        ({"rank": 4, "targets": ("q_proj", "q_proj")}, "names a matrix twice"),
        ({"rank": 4, "targets": ("lm_head",)}, "lora.targets"),
        ({"rank": 4, "alpha": 0.0}, "lora.alpha = 0.0"),
    ],
)
def test_settings_that_cannot_act_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        LoRAConfig(**change).validate()


def test_a_mesh_gives_the_gradients_of_one_device():
    config = replace(MODEL, moe=replace(MODEL.mixture, experts=8), heads=8, kv_heads=8)
    tokens = jnp.tile(TOKENS, (3, 2))[:8, :16]
    lengths = jnp.array([16, 12, 0, 5, 16, 9, 2, 14], jnp.int32)
    weight = jnp.where(jnp.arange(16, dtype=jnp.int32)[None] < lengths[:, None] - 1, 0.02, 0.0)
    adapters = random_adapters(layout="unrolled", model=config)

    def gradients(placement):
        params = in_layout(random_params(config, scale=0.2), "unrolled")
        base, low = (place(tree, config, placement) for tree in (params, adapters))
        model = Transformer(config, COMPUTE, "unrolled", placement)
        arguments = tokens, lengths, weight, jnp.float32(1), 0.01
        return sft_gradients(model, combine(base, low, LORA.scale), *arguments)

    alone = gradients(None)
    mesh = MeshConfig(fsdp=2, expert=2, tensor=2)
    split = jax.device_get(gradients(Placement(make_mesh(mesh))))
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-5), split[0], alone[0]
    )
