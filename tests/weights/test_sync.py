"""Training parameters to rollout parameters: the same numbers in another layout and type."""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, random_params

from compass_jax.config import ComputeConfig, MeshConfig
from compass_jax.devices.sharding import Placement, make_mesh, move, ordered
from compass_jax.model.params import layer_runs, place
from compass_jax.model.quantize import Quantized
from compass_jax.model.transformer import Transformer, apply, init_cache
from compass_jax.weights import sync
from compass_jax.weights.sync import sync_weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_gets_its_own_weights(dtype):
    params = random_params()
    decode, metrics = sync_weights(params, MODEL, dtype)
    leaves, count = jax.tree.leaves(decode), 0
    for n, run in enumerate(layer_runs(MODEL)):
        assert len(decode[f"run_{n}"]) == run.repeats
        for repeat, tree in enumerate(decode[f"run_{n}"]):
            expected = jax.tree.map(lambda x, i=repeat: x[i].astype(dtype), params[f"run_{n}"])
            for name, layer in expected.items():
                if "router" in layer["mlp"]:  # the experts' gate and up are in one matrix
                    gate, up = np.split(tree[name]["mlp"].pop("gate_up"), 2, axis=-1)
                    tree[name]["mlp"] |= {"gate": gate, "up": up}
            jax.tree.map(np.testing.assert_array_equal, tree, expected)
            count += len(tree)
    assert count == MODEL.layers
    for name in ("embed", "final_norm", "head"):
        np.testing.assert_array_equal(decode[name], params[name].astype(dtype))
    assert {x.dtype for x in leaves} == {jnp.dtype(dtype)}
    numbers = sum(x.size for x in jax.tree.leaves(params))
    assert (
        metrics["handover/bytes"] == numbers * jnp.dtype(dtype).itemsize
        and metrics["time/handover_s"] > 0
    )


def test_the_rollouts_copy_outlives_an_update_that_consumes_the_training_parameters():
    params = random_params()
    decode, _ = sync_weights(params, MODEL, "float32")
    before = np.array(params["final_norm"])
    jax.tree.map(lambda x: x.delete(), params)
    np.testing.assert_array_equal(decode["final_norm"], before)


def rounded_int8(w):
    """Returns `w` rounded to int8 with one scale per output channel, in float64."""
    wide = np.asarray(w, np.float64)
    scale = np.abs(wide).max(axis=-2, keepdims=True) / 127
    return np.round(wide / scale) * scale


def test_quantised_matrices_hold_what_eight_bits_leave_of_the_unrounded_weights():
    """The scale of a channel depends on that channel of one expert or layer only: neither a stack
    of layers nor gate and up count as one matrix.
    """
    params = random_params()
    layer = params["run_0"]["layer_0"]
    layer["mlp"]["gate"] = layer["mlp"]["gate"] * 50
    decode, _ = sync_weights(params, MODEL, "float32", "int8")
    for repeat, tree in enumerate(decode["run_0"]):
        got = tree["layer_0"]
        for name in ("q", "k", "v", "o"):
            np.testing.assert_allclose(
                got["attention"][name],
                rounded_int8(layer["attention"][name][repeat]),
                rtol=1e-5,
                atol=1e-7,
            )
        rounded = [rounded_int8(layer["mlp"][name][repeat]) for name in ("gate", "up")]
        np.testing.assert_allclose(
            got["mlp"]["gate_up"], np.concatenate(rounded, -1), rtol=1e-5, atol=1e-7
        )
        np.testing.assert_allclose(
            got["mlp"]["down"], rounded_int8(layer["mlp"]["down"][repeat]), rtol=1e-5, atol=1e-7
        )
        for name in ("q_norm", "k_norm"):
            np.testing.assert_array_equal(got["attention"][name], layer["attention"][name][repeat])
        np.testing.assert_array_equal(got["mlp"]["router"], layer["mlp"]["router"][repeat])
    for name in ("embed", "final_norm", "head"):
        np.testing.assert_array_equal(decode[name], params[name])
    half, metrics = sync_weights(params, MODEL, "bfloat16", "e4m3")
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    assert metrics["handover/bytes"] == 2 * sum(x.size for x in jax.tree.leaves(params))
    np.testing.assert_array_equal(half["head"], params["head"].astype("bfloat16"))


@pytest.mark.parametrize(
    "implementation", [pytest.param("padded", marks=pytest.mark.slow), "ragged"]
)
@pytest.mark.parametrize(
    ("kind", "dtype", "limit"),
    [("int8", "float32", 1e-5), ("e4m3", "float32", 1e-5), ("e4m3", "bfloat16", 0.03)],
)
def test_stored_eight_bit_weights_compute_what_emulated_ones_do(implementation, kind, dtype, limit):
    """A prefill of many rows and a step of few use the two code paths of a TPU's sampler. In
    bfloat16, emulation rounds a second time.
    """
    params, routes = random_params(), None
    model = Transformer(MODEL, ComputeConfig(dtype=dtype, experts=implementation), "decode")
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, MODEL.vocab_size, (3, 21)), jnp.int32)

    forward = jax.jit(partial(apply, model))

    def run(decode):
        nonlocal routes
        cache, outs = init_cache(MODEL, 3, 32, model.compute), []
        for part in (slice(0, 20), slice(20, 21)):
            positions = jnp.broadcast_to(
                jnp.arange(21, dtype=jnp.int32)[None, part], tokens[:, part].shape
            )
            replayed = None if routes is None else routes[:, part]
            outs.append(
                forward(
                    decode,
                    tokens[:, part],
                    positions,
                    mask=positions >= 0,
                    routes=replayed,
                    cache=cache,
                )
            )
            cache = outs[-1].cache
        # the same experts in every run
        routes = jnp.concatenate([out.routes for out in outs], axis=1)
        return np.concatenate([np.asarray(out.hidden, np.float64) for out in outs], axis=1)

    hidden = {}
    for name, (what, stored) in {
        "emulated": (kind, False),
        "stored": (kind, True),
        "exact": ("off", False),
    }.items():
        decode, metrics = sync_weights(params, MODEL, dtype, what, stored)
        matrices = [
            x
            for x in jax.tree.leaves(decode, is_leaf=lambda x: isinstance(x, Quantized))
            if isinstance(x, Quantized)
        ]
        assert bool(matrices) == stored and metrics["handover/bytes"] == sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(decode)
        )
        assert all(
            x.values.dtype.itemsize == 1 and x.scales.size * x.shape[-2] == x.values.size
            for x in matrices
        )
        hidden[name] = run(decode)
    error = {
        name: np.abs(hidden[name] - hidden["stored"]).max() / np.abs(hidden["stored"]).max()
        for name in ("emulated", "exact")
    }
    assert 0 < error["emulated"] < limit and error["exact"] > 1.5 * error["emulated"], error


@pytest.mark.parametrize(
    ("chip", "kind"), [("TPU7x", "e4m3"), ("TPU v6 lite", "int8"), ("cpu", "off")]
)
def test_auto_goes_by_the_first_device(monkeypatch, chip, kind):
    expected, _ = sync_weights(random_params(), MODEL, "float32", kind)
    monkeypatch.setattr(sync.jax, "devices", lambda: [SimpleNamespace(device_kind=chip)])
    got, _ = sync_weights(random_params(), MODEL, "float32", "auto")
    jax.tree.map(np.testing.assert_array_equal, got, expected)


def on(numbers, use="train", **axes) -> Placement:
    """Returns a placement on the devices with these numbers, in this order."""
    return Placement(make_mesh(MeshConfig(**axes), [jax.devices()[i] for i in numbers]), use)


def test_devices_in_the_order_of_a_torus_sync_to_others():
    """A mesh on TPUs seldom lists its devices by number, and jax refuses to convert arrays to a
    mesh of another order.
    """
    params, target = random_params(MODEL), on((6, 7, 5, 4), "decode", expert=2, tensor=2)
    expected = sync_weights(
        place(params, MODEL, on((0, 1, 2, 3), fsdp=4)), MODEL, "float32", placement=target
    )[0]
    actual = sync_weights(
        place(params, MODEL, on((0, 1, 3, 2), fsdp=4)), MODEL, "float32", placement=target
    )[0]
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.parametrize("target", [(0, 1, 3, 2), (4, 5, 6, 7)])
def test_what_lies_on_devices_of_another_order_is_moved(target):
    x, sharding = (
        jax.device_put(np.arange(8), on((0, 1, 2, 3), fsdp=4).rows(8)),
        on(target, fsdp=4).rows(8),
    )
    moved = move({"x": x}, {"x": sharding})["x"]
    assert ordered(moved.sharding) == tuple(jax.devices()[i] for i in target)
    np.testing.assert_array_equal(moved, np.arange(8))
