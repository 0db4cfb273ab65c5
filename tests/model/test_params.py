"""The split of a stack of dense and MoE layers into runs, and the two layouts of its parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import ModelConfig, MoEConfig, OptimConfig
from compass_jax.model.params import (
    abstract_params,
    decays,
    init_tree,
    is_spec,
    layer_runs,
    param_count,
    param_specs,
    stack,
    to_decode,
    unroll,
)
from compass_jax.training.optim import init_state


def config(layers, step=1, dense=(), moe=True, **other):
    return ModelConfig(
        family="qwen3_moe" if moe else "qwen3",
        vocab_size=10,
        hidden=4,
        layers=layers,
        heads=2,
        kv_heads=1,
        head_dim=2,
        ffn=6,
        moe=MoEConfig(experts=3, top_k=2, ffn=5, sparse_step=step, dense_layers=dense)
        if moe
        else None,
        **other,
    )


def windowed(layers, full=(), **experts):
    """Returns a model with a sliding window in all layers but `full`."""
    return dataclasses.replace(
        config(layers, **experts), sliding_window=3, full_attention_layers=full
    )


D, M = False, True


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (config(3, moe=False), [(0, (D,), 3)]),
        (config(4), [(0, (M,), 4)]),
        (config(1), [(0, (M,), 1)]),
        (config(6, step=2), [(0, (D, M), 3)]),
        (config(7, step=3), [(0, (D, D, M), 2), (6, (D,), 1)]),
        (config(5, dense=(0,)), [(0, (D,), 1), (1, (M,), 4)]),
        (config(6, step=2, dense=(3,)), [(0, (D,), 1), (1, (M,), 1), (2, (D,), 3), (5, (M,), 1)]),
        (config(4, dense=(0, 1, 2, 3)), [(0, (D,), 4)]),
        (config(8, dense=(0, 1, 4, 5)), [(0, (D, D, M, M), 2)]),
        (windowed(4), [(0, (M,), 4)]),
        (windowed(5, full=(1, 3)), [(0, (M, M), 2), (4, (M,), 1)]),
        (windowed(4, full=(2, 3)), [(0, (M,), 2), (2, (M,), 2)]),
        (windowed(4, full=(1, 3), step=2), [(0, (D, M), 2)]),
    ],
)
def test_runs(model, expected):
    assert [tuple(run) for run in layer_runs(model)] == expected


@pytest.mark.parametrize(
    "model",
    [
        config(13, step=3, dense=(2, 7)),
        config(20, dense=(0, 5, 11)),
        config(30, step=9),
        windowed(12, full=(2, 5, 8, 11), dense=(0,)),
    ],
)
def test_runs_cover_every_layer_once_in_order_with_its_kind(model):
    for run in layer_runs(model):
        for j in range(len(run.period)):
            layers = [run.layer(r, j) for r in range(run.repeats)]
            assert len({model.window_of(i) for i in layers}) == 1
    seen = [
        (run.layer(r, j), kind)
        for run in layer_runs(model)
        for r in range(run.repeats)
        for j, kind in enumerate(run.period)
    ]
    assert seen == [(i, model.is_moe(i)) for i in range(model.layers)]
    assert tuple(i for i, kind in seen if kind) == model.moe_layers


def test_parameter_count_by_hand():
    model = config(2, step=2, tie_embeddings=True, qkv_bias=True, o_bias=True)
    # q, k and v, o, biases, two norms of a head
    attention = 4 * 4 + 2 * (4 * 2) + 4 * 4 + (4 + 2 + 2 + 4) + 2 * 2
    dense, moe = 3 * 4 * 6, 4 * 3 + 3 * 3 * 4 * 5
    assert param_count(model) == 10 * 4 + 4 + 2 * (attention + 2 * 4) + dense + moe
    assert (
        param_count(config(2, step=2, tie_embeddings=False, qkv_bias=True, o_bias=True))
        == param_count(model) + 4 * 10
    )


def test_unstacking_gives_each_layer_its_own_slice_of_the_stack():
    model = config(6, step=2)
    numbers = iter(range(1000))
    stacked = jax.tree.map(
        lambda x: jnp.asarray(np.full(x.shape, next(numbers), np.float32)),
        abstract_params(model, "float32"),
    )

    def number_layers(x, spec):
        return (
            x + 0.1 * jnp.arange(3, dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
            if spec.stacked
            else x
        )

    stacked = jax.tree.map(number_layers, stacked, param_specs(model))
    loose = to_decode(stacked)
    shapes = jax.tree.map(lambda s: s.shape, param_specs(model, layout="decode"), is_leaf=is_spec)
    assert jax.tree.map(lambda x: x.shape, loose) == shapes
    assert jax.tree.structure(loose) == jax.tree.structure(
        param_specs(model, layout="decode"), is_leaf=is_spec
    )
    for r in range(3):
        mlp, stacked_mlp = loose["run_0"][r]["layer_1"]["mlp"], stacked["run_0"]["layer_1"]["mlp"]
        gate, up = np.split(mlp["gate_up"], 2, axis=-1)  # one matrix in an MoE layer
        for name, matrix in (("gate", gate), ("up", up), ("down", mlp["down"])):
            np.testing.assert_array_equal(matrix, stacked_mlp[name][r])
        np.testing.assert_array_equal(
            loose["run_0"][r]["layer_0"]["mlp"]["up"], stacked["run_0"]["layer_0"]["mlp"]["up"][r]
        )
    np.testing.assert_array_equal(loose["embed"], stacked["embed"])


def test_every_axis_is_named_and_the_stack_comes_first():
    model = config(6, step=2)
    axes = jax.tree.map(lambda spec: spec.axes, param_specs(model), is_leaf=is_spec)
    shapes = abstract_params(model, "bfloat16")
    jax.tree.map(
        lambda x, names: len(x.shape) == len(names) or pytest.fail(f"{x.shape} {names}"),
        shapes,
        axes,
    )
    assert axes["run_0"]["layer_1"]["mlp"]["down"] == ("layers", "expert", "expert_ffn", "embed")
    assert shapes["run_0"]["layer_1"]["mlp"]["down"] == jax.ShapeDtypeStruct(
        (3, 3, 5, 4), jnp.bfloat16
    )


def test_biases_and_norms_alone_take_no_weight_decay_and_matrices_alone_are_quantised():
    """The declarations hold this for every parameter of every family."""
    model = config(4, dense=(0,), qkv_bias=True, o_bias=True)
    for layout in ("stacked", "unrolled", "decode", "decode_stacked"):
        specs = jax.tree.leaves(param_specs(model, layout), is_leaf=is_spec)
        scales = {spec.name for spec in specs if not spec.decays}
        assert scales == {
            *("final_norm", "attention_norm", "mlp_norm", "attention.q_norm", "attention.k_norm"),
            *(f"attention.{name}_bias" for name in "qkvo"),
        }
        matrices = {spec.name.rpartition(".")[2] for spec in specs if spec.quantised}
        experts = {"gate", "up", "down"} | ({"gate_up"} if layout.startswith("decode") else set())
        assert matrices == {"q", "k", "v", "o"} | experts
        assert {spec.name for spec in specs} - scales == {"embed", "head", "moe.router"} | {
            spec.name for spec in specs if spec.quantised
        }
        assert decays(model, layout) == tuple(spec.decays for spec in specs)


def test_initial_values_have_their_spread_and_no_two_leaves_are_alike():
    specs = param_specs(config(1, moe=False, qkv_bias=True, o_bias=True))["run_0"]["layer_0"][
        "attention"
    ]
    wide = {
        name: spec._replace(shape=(64, 32)) if spec.init == "normal" else spec
        for name, spec in specs.items()
    }
    tree = init_tree(jax.random.key(0), wide, 0.3, "float32")
    matrices = [np.asarray(tree[name]).ravel() for name in ("q", "k", "v", "o")]
    np.testing.assert_allclose([x.std() for x in matrices], 0.3, rtol=0.06)
    assert np.abs(np.corrcoef(matrices) - np.eye(4)).max() < 0.1
    assert not np.any(tree["q_bias"]) and not np.any(tree["o_bias"]) and np.all(tree["k_norm"] == 1)


def test_every_parameter_tree_of_a_train_state_is_unrolled_and_stacked_again():
    """The parameters and both moments of Adam are unrolled, and the rest of the state is unchanged.
    Each layer of the unrolled tree is its slice of the stack.
    """
    model = config(6, step=2)
    shapes, keys = abstract_params(model, "float32"), iter(range(1000))
    params = jax.tree.map(lambda x: jax.random.normal(jax.random.key(next(keys)), x.shape), shapes)
    state = init_state(params, OptimConfig(weight_decay=0.1), 10)
    loose = unroll(state)
    for tree, stacked_tree in (
        (loose.params, state.params),
        (loose.opt_state[0].mu, state.opt_state[0].mu),
    ):
        assert jax.tree.structure(tree) == jax.tree.structure(
            param_specs(model, "unrolled"), is_leaf=is_spec
        )
        np.testing.assert_array_equal(
            tree["run_0"][1]["layer_1"]["mlp"]["gate"],
            stacked_tree["run_0"]["layer_1"]["mlp"]["gate"][1],
        )
    back = stack(loose)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    assert jax.tree.structure(unroll(loose)) == jax.tree.structure(loose) and jax.tree.structure(
        stack(state)
    ) == jax.tree.structure(state)
