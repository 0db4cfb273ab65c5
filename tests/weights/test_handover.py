"""Training parameters to rollout parameters: the same numbers in the other layout and type."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, random_params

from compass_jax.model.params import layer_runs
from compass_jax.weights import handover
from compass_jax.weights.handover import hand_over


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layer_gets_its_own_weights(dtype):
    params = random_params()
    decode, metrics = hand_over(params, dtype)
    leaves, count = jax.tree.leaves(decode), 0
    for n, run in enumerate(layer_runs(MODEL)):
        assert len(decode[f"run_{n}"]) == run.repeats
        for repeat, tree in enumerate(decode[f"run_{n}"]):
            expected = jax.tree.map(lambda x, i=repeat: x[i].astype(dtype), params[f"run_{n}"])
            for name, layer in expected.items():
                if "router" in layer["mlp"]:  # the experts' gate and up come side by side
                    gate, up = np.split(tree[name]["mlp"].pop("gate_up"), 2, axis=-1)
                    tree[name]["mlp"] |= {"gate": gate, "up": up}
            jax.tree.map(np.testing.assert_array_equal, tree, expected)
            count += len(tree)
    assert count == MODEL.layers
    for name in ("embed", "final_norm", "head"):
        np.testing.assert_array_equal(decode[name], params[name].astype(dtype))
    assert {x.dtype for x in leaves} == {jnp.dtype(dtype)}
    numbers = sum(x.size for x in jax.tree.leaves(params))
    assert metrics["handover/bytes"] == numbers * jnp.dtype(dtype).itemsize and metrics["time/handover_s"] > 0


def test_the_rollouts_copy_outlives_an_update_that_consumes_the_training_parameters():
    params = random_params()
    decode, _ = hand_over(params, "float32")
    before = np.array(params["final_norm"])
    jax.tree.map(lambda x: x.delete(), params)
    np.testing.assert_array_equal(decode["final_norm"], before)


def rounded_int8(w):
    """int8 with one scale per output channel, in float64."""
    wide = np.asarray(w, np.float64)
    scale = np.abs(wide).max(axis=-2, keepdims=True) / 127
    return np.round(wide / scale) * scale


def test_quantised_matrices_hold_what_eight_bits_leave_of_the_unrounded_weights():
    """Scales of one expert's or layer's channel come from that channel alone: a stack of layers is not one matrix, nor are gate and up."""
    params = random_params()
    layer = params["run_0"]["layer_0"]
    layer["mlp"]["gate"] = layer["mlp"]["gate"] * 50
    decode, _ = hand_over(params, "float32", "int8")
    for repeat, tree in enumerate(decode["run_0"]):
        got = tree["layer_0"]
        for name in ("q", "k", "v", "o"):
            np.testing.assert_allclose(got["attention"][name], rounded_int8(layer["attention"][name][repeat]), rtol=1e-5, atol=1e-7)
        both = [rounded_int8(layer["mlp"][name][repeat]) for name in ("gate", "up")]
        np.testing.assert_allclose(got["mlp"]["gate_up"], np.concatenate(both, -1), rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(got["mlp"]["down"], rounded_int8(layer["mlp"]["down"][repeat]), rtol=1e-5, atol=1e-7)
        for name in ("q_norm", "k_norm"):
            np.testing.assert_array_equal(got["attention"][name], layer["attention"][name][repeat])
        np.testing.assert_array_equal(got["mlp"]["router"], layer["mlp"]["router"][repeat])
    for name in ("embed", "final_norm", "head"):
        np.testing.assert_array_equal(decode[name], params[name])
    half, metrics = hand_over(params, "bfloat16", "e4m3")
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype("bfloat16")}
    assert metrics["handover/bytes"] == 2 * sum(x.size for x in jax.tree.leaves(params))
    np.testing.assert_array_equal(half["head"], params["head"].astype("bfloat16"))


@pytest.mark.parametrize(("chip", "kind"), [("TPU7x", "e4m3"), ("TPU v6 lite", "int8"), ("cpu", "off")])
def test_auto_goes_by_the_first_device(monkeypatch, chip, kind):
    expected, _ = hand_over(random_params(), "float32", kind)
    monkeypatch.setattr(handover.jax, "devices", lambda: [SimpleNamespace(device_kind=chip)])
    got, _ = hand_over(random_params(), "float32", "auto")
    jax.tree.map(np.testing.assert_array_equal, got, expected)
