"""The full decoder: against a float64 numpy model, its three uses against each other, and router
replay.
"""

import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve

from compass_jax.config import ComputeConfig, ModelConfig, MoEConfig
from compass_jax.model import layer as decoder_layer
from compass_jax.model.logprobs import head_weights, token_logprobs
from compass_jax.model.params import abstract_params, layer_runs, to_decode, unroll
from compass_jax.model.transformer import Transformer, apply, init_cache

sys.path.insert(0, str(Path(__file__).parent))
from test_attention import numpy_attention, numpy_norm
from test_moe import dense_moe, softmax

# decoder layers: dense, MoE, dense, MoE: one run, a period of two
CONFIG = ModelConfig(
    family="qwen3_moe",
    vocab_size=23,
    hidden=12,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=6,
    ffn=10,
    rope_theta=50.0,
    norm_eps=1e-4,
    moe=MoEConfig(experts=5, top_k=2, ffn=7, sparse_step=2),
)
# dense, MoE, MoE, dense, MoE: the MoE layers spread over several runs
SPREAD = evolve(CONFIG, layers=5, moe={"sparse_step": 1, "dense_layers": (0, 3)})
# dense, MoE, MoE, twice: one run, two MoE layers behind a dense one in its period
TWO_OF_THREE = evolve(CONFIG, layers=6, moe={"sparse_step": 1, "dense_layers": (0, 3)})
F64 = ComputeConfig(dtype="float64", param_dtype="float64")
B, T = 2, 7
TOKENS = np.random.default_rng(5).integers(0, 23, (B, T)).astype(np.int32)
POSITIONS = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
LENGTHS = np.array([7, 5])
MASK = np.arange(T) < LENGTHS[:, None]


def random_params(config, dtype="float32", seed=0):
    """Returns weights as large as a trained model's, so that hidden states depend on every layer
    and experts differ.
    """
    leaves, structure = jax.tree.flatten(abstract_params(config, dtype))
    rng = np.random.default_rng(seed)
    return structure.unflatten(
        [jnp.asarray(rng.standard_normal(x.shape) * 0.5, dtype) for x in leaves]
    )


def random_routing(config, seed=0):
    rng = np.random.default_rng(seed)
    ids = np.argsort(
        rng.standard_normal((B, T, len(config.moe_layers), config.moe.experts)), axis=-1
    )[..., : config.moe.top_k]
    return ids.astype(np.uint8)


def forward(
    params,
    config,
    compute=ComputeConfig(),  # noqa: B008
    routes=None,
    tokens=TOKENS,
    mask=MASK,
    layout="stacked",
):
    params = {"stacked": lambda p: p, "unrolled": unroll, "decode": to_decode}[layout](params)
    return _forward(params, config, compute, routes, jnp.asarray(tokens), jnp.asarray(mask), layout)


@partial(jax.jit, static_argnums=(1, 2, 6))
def _forward(params, config, compute, routes, tokens, mask, layout):
    positions = jnp.asarray(POSITIONS)
    return apply(
        Transformer(config, compute, layout), params, tokens, positions, mask=mask, routes=routes
    )


def numpy_model(params, config, routes=None):
    """Computes hidden states and the ids used, from the definition. Layers come in the order in
    which the runs list them.
    """
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    runs = list(enumerate(layer_runs(config)))
    places = [
        (p[f"run_{n}"][f"layer_{j}"], r)
        for n, run in runs
        for r in range(run.repeats)
        for j in range(len(run.period))
    ]
    layers = [jax.tree.map(lambda x, r=r: x[r], tree) for tree, r in places]
    x, used = p["embed"][TOKENS], []
    for layer in layers:
        x = x + numpy_attention(
            numpy_norm(x, layer["attention_norm"], config.norm_eps),
            layer["attention"],
            POSITIONS,
            config,
        )
        y, mlp = numpy_norm(x, layer["mlp_norm"], config.norm_eps), layer["mlp"]
        if "router" not in mlp:
            gate = y @ mlp["gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (y @ mlp["up"])) @ mlp["down"]
            continue
        logits = (y @ mlp["router"]).reshape(B * T, -1)
        live = np.argsort(-logits, axis=1, kind="stable")[:, : config.moe.top_k]
        recorded = (
            live if routes is None else routes[:, :, len(used)].reshape(B * T, -1).astype(int)
        )
        ids = np.where(recorded == 255, live, recorded)
        gates = np.take_along_axis(softmax(logits), ids, axis=1)
        gates = gates / gates.sum(1, keepdims=True) if config.moe.norm_top_k else gates
        x = x + dense_moe(y.reshape(B * T, -1), ids, gates, MASK.reshape(-1), mlp).reshape(x.shape)
        used.append(ids.reshape(B, T, -1))
    return numpy_norm(x, p["final_norm"], config.norm_eps), np.stack(used, axis=2)


@pytest.mark.parametrize(
    ("config", "replay"),
    [
        (CONFIG, "live"),
        (SPREAD, "live"),
        (CONFIG, "replayed"),
        (SPREAD, "replayed"),
        (TWO_OF_THREE, "replayed"),
    ],
    ids=["periodic-live", "spread-live", "periodic", "spread", "two of three"],
)
def test_the_decoder_equals_a_numpy_model_with_each_route_in_its_layer(x64, config, replay):
    """Dense layers between MoE layers must not shift the layer axis of the routes: the reference
    counts MoE layers independently.
    """
    assert (
        config.moe_layers == {CONFIG: (1, 3), SPREAD: (1, 2, 4), TWO_OF_THREE: (1, 2, 4, 5)}[config]
    )
    params, routes = random_params(config, "float64"), random_routing(config)
    if replay == "live":
        routes = np.full_like(routes, 255)
    out = forward(params, config, F64, routes)
    hidden, used = numpy_model(params, config, routes)
    np.testing.assert_array_equal(np.asarray(out.routes)[MASK], used[MASK])
    np.testing.assert_array_equal(np.asarray(out.routes)[~MASK], 255)
    np.testing.assert_allclose(np.asarray(out.hidden)[MASK], hidden[MASK], atol=1e-11)
    load = np.stack(
        [np.bincount(used[:, :, i][MASK].reshape(-1), minlength=5) for i in range(used.shape[2])]
    )
    np.testing.assert_array_equal(out.aux.load, load)
    np.testing.assert_array_equal(out.aux.tokens, [MASK.sum()] * len(load))


def test_training_prefill_and_decode_give_the_same_log_probs():
    config, params = SPREAD, random_params(SPREAD)
    loose, model = to_decode(params), Transformer(config, ComputeConfig(), layout="decode")
    train = forward(params, config)

    @jax.jit
    def step(params, tokens, positions, mask, routes, cache):
        return apply(model, params, tokens, positions, mask=mask, routes=routes, cache=cache)

    def prefill(length):
        where = jnp.where(MASK, POSITIONS, 1000)[:, :length]  # padding is not written to the cache
        cache = init_cache(config, B, 16, ComputeConfig())
        return step(
            loose, TOKENS[:, :length], where, MASK[:, :length], train.routes[:, :length], cache
        )

    prefilled, part = prefill(T), prefill(1)
    pieces, cache = [part.hidden], part.cache
    for t in range(1, T):
        out = step(
            loose,
            TOKENS[:, t : t + 1],
            POSITIONS[:, t : t + 1],
            MASK[:, t : t + 1],
            train.routes[:, t : t + 1],
            cache,
        )
        pieces.append(out.hidden)
        cache = out.cache
    logps = [
        token_logprobs(hidden, head_weights(params), jnp.asarray(TOKENS), 1.0, 100)[0]
        for hidden in (train.hidden, prefilled.hidden, jnp.concatenate(pieces, axis=1))
    ]
    assert np.std(np.asarray(logps[0])[MASK]) > 0.5
    for other in logps[1:]:
        np.testing.assert_allclose(np.asarray(other)[MASK], np.asarray(logps[0])[MASK], atol=1e-5)
    np.testing.assert_array_equal(
        np.asarray(prefilled.routes)[MASK], np.asarray(train.routes)[MASK]
    )


@pytest.mark.usefixtures("optimised_alike")
@pytest.mark.parametrize("layout", ["stacked", "decode"])
def test_feeding_a_forward_its_own_routing_changes_no_bit(layout):
    params = random_params(SPREAD)
    live = forward(params, SPREAD, layout=layout)
    replayed = forward(params, SPREAD, routes=live.routes, layout=layout)
    np.testing.assert_array_equal(replayed.hidden, live.hidden)
    np.testing.assert_array_equal(replayed.routes, live.routes)
    assert not np.any(replayed.aux.flips) and not np.any(replayed.aux.unset)


@pytest.mark.parametrize("norm", [True, False])
def test_the_routers_gradient_under_replay_equals_finite_differences(x64, norm):
    """Some replayed experts are outside the live top-k. The loss is a log-prob, so that the
    gradient passes through the layers above.
    """
    config = evolve(SPREAD, layers=3, moe={"dense_layers": (0,), "norm_top_k": norm})
    params, routes = random_params(config, "float64"), random_routing(config, seed=3)
    assert np.all(forward(params, config, F64, routes).aux.flips > 3)

    @jax.jit
    def loss(router):
        run = params["run_1"] | {
            "layer_0": params["run_1"]["layer_0"]
            | {"mlp": params["run_1"]["layer_0"]["mlp"] | {"router": router}}
        }
        out = _forward(
            params | {"run_1": run},
            config,
            F64,
            jnp.asarray(routes),
            jnp.asarray(TOKENS),
            jnp.asarray(MASK),
            "stacked",
        )
        logp, _ = token_logprobs(out.hidden, head_weights(params), jnp.asarray(TOKENS), 1.0, 100)
        return jnp.sum(jnp.where(MASK, logp, 0.0))

    router = params["run_1"]["layer_0"]["mlp"]["router"]  # of decoder layers 1 and 2
    grad, rng, step = np.asarray(jax.grad(loss)(router)), np.random.default_rng(0), 1e-5
    assert np.abs(grad).min(axis=(1, 2)).max() > 0 and np.abs(grad).max() > 0.01
    for _ in range(6):
        direction = rng.standard_normal(router.shape)
        numeric = (loss(router + step * direction) - loss(router - step * direction)) / (2 * step)
        np.testing.assert_allclose(np.sum(grad * direction), numeric, rtol=1e-7)


def test_an_unset_row_routes_live_for_that_token_alone():
    params, routes = random_params(SPREAD), random_routing(SPREAD)
    partial_routes = routes.copy()
    partial_routes[0, 3] = 255
    live, full, holed = (
        forward(params, SPREAD, routes=r)
        for r in (np.full_like(routes, 255), routes, partial_routes)
    )
    expected = numpy_model(params, SPREAD, partial_routes)[1]
    np.testing.assert_array_equal(np.asarray(holed.routes)[MASK], expected[MASK])
    # the first MoE layer's input does not depend on replay
    np.testing.assert_array_equal(holed.routes[0, 3, 0], live.routes[0, 3, 0])
    assert np.any(np.asarray(holed.hidden[0, 3]) != np.asarray(full.hidden[0, 3]))
    np.testing.assert_array_equal(holed.hidden[0, :3], full.hidden[0, :3])
    np.testing.assert_array_equal(holed.hidden[1], full.hidden[1])
    np.testing.assert_array_equal(holed.aux.unset, [1, 1, 1])
    np.testing.assert_array_equal(full.aux.unset, [0, 0, 0])


def test_padding_changes_nothing_and_is_not_dispatched():
    params = random_params(CONFIG)
    other = np.where(MASK, TOKENS, 11 - TOKENS % 7).astype(np.int32)
    first, second = forward(params, CONFIG), forward(params, CONFIG, tokens=other)
    np.testing.assert_array_equal(np.asarray(first.hidden)[MASK], np.asarray(second.hidden)[MASK])
    for a, b in zip(first.aux, second.aux, strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.all(np.asarray(first.routes)[~MASK] == 255)


def gradients(params, config, compute, layout="stacked"):
    def loss(params):
        out = forward(params, config, compute, layout=layout)
        logp, _ = token_logprobs(out.hidden, head_weights(params), jnp.asarray(TOKENS), 1.0, 4)
        return jnp.sum(jnp.where(MASK, logp, jnp.zeros_like(logp))) + 0.1 * jnp.sum(
            out.aux.probs**2
        )

    return jax.jit(jax.value_and_grad(loss))(params)


def test_scan_unrolled_rematerialised_and_both_grouped_matmuls_agree(x64):
    """Values and every gradient agree in float64 between scanned and padded, the same with remat,
    and unrolled from the start and ragged.
    """
    params = random_params(CONFIG, "float64")
    value, grads = gradients(params, CONFIG, F64)
    variants = [
        gradients(params, CONFIG, dataclasses.replace(F64, remat=True)),
        gradients(
            params,
            CONFIG,
            dataclasses.replace(F64, scan_layers=False, experts="ragged"),
            "unrolled",
        ),
    ]
    for other_value, other in variants:
        np.testing.assert_allclose(other_value, value, rtol=1e-13)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), other, grads
        )
    assert min(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads)) > 1e-3


def test_bfloat16_stays_near_float32_and_keeps_router_and_log_probs_wide():
    params = random_params(CONFIG)
    exact = forward(params, CONFIG)
    half = forward(
        params,
        CONFIG,
        ComputeConfig(dtype="bfloat16", param_dtype="bfloat16"),
        routes=exact.routes,
    )
    assert half.hidden.dtype == jnp.bfloat16 and half.aux.probs.dtype == jnp.float32
    logps = [
        token_logprobs(out.hidden, head_weights(params), jnp.asarray(TOKENS), 1.0, 100)[0]
        for out in (exact, half)
    ]
    assert logps[1].dtype == jnp.float32
    error = np.abs(np.asarray(logps[1] - logps[0])[MASK])
    assert 0 < error.max() < 0.3 and error.mean() < 0.05
    np.testing.assert_allclose(half.aux.probs, exact.aux.probs, atol=0.3)


def test_more_than_255_experts_are_recorded_and_replayed_in_two_bytes():
    config = dataclasses.replace(
        CONFIG, layers=2, moe=MoEConfig(experts=300, top_k=2, ffn=2, sparse_step=2)
    )
    params = random_params(config)
    routes = np.stack([np.full((B, T, 1), 299), np.full((B, T, 1), 255)], axis=-1).astype(np.uint16)
    routes[0, 0] = 65535
    out, live = (
        forward(params, config, routes=routes),
        forward(params, config, routes=np.full_like(routes, 65535)),
    )
    assert out.routes.dtype == np.uint16
    expected = np.where(MASK[..., None, None], routes, 65535)
    expected[0, 0] = live.routes[0, 0]
    np.testing.assert_array_equal(out.routes, expected)
    np.testing.assert_array_equal(
        out.aux.load[0, [255, 299]],
        11 + np.sum(np.asarray(live.routes[0, 0, 0])[:, None] == [255, 299], axis=0),
    )


def test_a_dense_model_has_no_routing():
    config = dataclasses.replace(CONFIG, family="qwen3", moe=None, layers=1)
    out = forward(random_params(config), config)
    assert out.routes is None and out.aux is None and out.cache is None


def test_a_cache_with_stacked_parameters_is_refused():
    cache = init_cache(CONFIG, B, 16, ComputeConfig())
    with pytest.raises(ValueError, match="needs the decode layout of the parameters"):
        apply(
            Transformer(CONFIG),
            random_params(CONFIG),
            jnp.asarray(TOKENS),
            jnp.asarray(POSITIONS),
            mask=jnp.asarray(MASK),
            cache=cache,
        )


@pytest.mark.parametrize("layout", ["unrolled", "decode"])
def test_equal_layers_are_traced_once(monkeypatch, layout):
    calls = []

    def attention(*arguments):
        calls.append(arguments)
        return attention_of_model(*arguments)

    attention_of_model = decoder_layer.attention
    monkeypatch.setattr(decoder_layer, "attention", attention)
    config = evolve(SPREAD, norm_eps=7e-4)  # used in no other test, since a trace is cached
    compute = ComputeConfig(scan_layers=False)
    params = random_params(config)
    out = forward(params, config, compute, random_routing(config), layout=layout)
    assert len(calls) == 2 and out.aux.load.shape[0] == 3  # a dense layer and an MoE layer


@pytest.mark.parametrize("name", ["embed", "run_0"])
def test_parameters_of_another_shape_are_refused(name):
    params = random_params(CONFIG)
    params[name] = jax.tree.map(lambda x: x[..., :-1], params[name])
    with pytest.raises(ValueError, match=rf"^{name}.* has shape \(.*\), the model has \("):
        forward(params, CONFIG)
