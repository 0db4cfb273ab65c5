"""Router replay: how it broke in other systems, and the test that fails here when the guard against
it is taken away.

     1  dense layers among MoE layers shift the layer index
            model/test_transformer.py:
                test_the_decoder_equals_a_numpy_model_with_each_route_in_its_layer
     2  an extra prediction layer reads layer 1's routes: such a model is refused, and so are routes
        of another number of layers
            weights/test_hf_config.py: test_what_would_change_the_maths_is_refused_by_name
            here: test_routes_of_another_number_of_layers_choices_or_type_are_refused
     3  position by construction order: of layers, and of tokens
            here: test_a_route_keeps_its_layer_and_token_in_whatever_order_the_layers_were_built
            rollout/test_engine.py: test_every_token_that_was_an_input_owns_a_route_and_no_other
     4  the field is dropped by an allow-list on the way: by the batch, in the loop
            training/test_learner.py:
                test_a_micro_batch_takes_rows_of_everything_alike_and_pads_with_nothing
            training/test_loop.py: test_other_replays_and_a_reference
     5  captured zeros, "expert 0 everywhere"
            weights/test_recorded.py: test_captured_zeros_are_refused
            rollout/test_engine.py: test_every_token_that_was_an_input_owns_a_route_and_no_other
     6  off by one at the seam of prompt and response, or at the last token
            rollout/test_engine.py: test_every_token_that_was_an_input_owns_a_route_and_no_other
            rollout/test_collect.py: test_every_request_is_answered_once_and_as_recorded
     7  padding routed to expert 0 overloads it; repeated ids
            model/test_moe.py: test_garbage_in_masked_tokens_reaches_nobody
            model/test_transformer.py: test_padding_changes_nothing_and_is_not_dispatched
            model/test_moe.py: test_routes_that_are_no_routes_are_refused_on_the_host
     8  prefix reuse loses the routes of the reused part: the samples of a group share a prefill;
        any other reuse is refused
            rollout/test_engine.py: test_every_token_that_was_an_input_owns_a_route_and_no_other
            rollout/test_engine.py:
                test_one_prefill_in_all_slots_of_a_group_equals_prefills_of_their_own
            rollout/test_engine_contract.py: test_what_cannot_be_served_is_refused
     9  int32 and host hops
            rollout/test_collect.py: test_routes_stay_on_the_device_in_one_byte_a_choice
    10  scores gathered after the top-k mask: dead gradients
            model/test_moe.py:
                test_router_gradient_equals_finite_differences_inside_and_outside_the_live_top_k
    11  selection bias leaking into the weights: no family here has one, and a sigmoid gate, which
        brings it, is refused
            weights/test_hf_config.py: test_what_would_change_the_maths_is_refused_by_name
            here: test_a_router_has_one_matrix_and_no_bias
    12  the ids recorded come from a second top-k that breaks ties differently
            here: test_the_ids_recorded_under_ties_are_the_ids_used
    13  softmax over a row masked with -inf; 0/0
            here: test_a_row_that_sees_nothing_is_no_nan
            here: test_gates_of_extreme_logits_are_finite
    14  undefined tail rows of a ragged buffer (they poisoned a quantisation scale; here no scale is
        taken over such a buffer)
            here: test_undefined_rows_behind_the_last_group_reach_nobody
            model/test_moe.py: test_garbage_in_masked_tokens_reaches_nobody
"""

import dataclasses
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import ComputeConfig, MoEConfig
from compass_jax.model.attention import LayerCache, _attend
from compass_jax.model.experts.build import grouped_matmul, moe_ffn
from compass_jax.model.moe import route
from compass_jax.model.params import param_specs
from compass_jax.model.transformer import Transformer, apply

sys.path.insert(0, str(Path(__file__).parent))
from test_transformer import (
    CONFIG,
    MASK,
    POSITIONS,
    SPREAD,
    TOKENS,
    forward,
    random_params,
    random_routing,
)

UNROLLED = ComputeConfig(scan_layers=False)
LITTLE = dataclasses.replace(CONFIG, layers=2)  # dense, MoE


def test_every_test_that_the_table_names_exists():
    tests, rows = (
        Path(__file__).parent.parent,
        re.findall(r"^ +(here|\w+/test_\w+\.py): (test_\w+)$", __doc__, re.MULTILINE),
    )
    files = [
        (tests / ("model/test_replay_failures.py" if file == "here" else file), name)
        for file, name in rows
    ]
    assert (
        len(rows) >= 14
        and [name for file, name in files if f"def {name}(" not in file.read_text()] == []
    )
    assert re.findall(r"^ {4,5}(\d+)  ", __doc__, re.MULTILINE) == [str(i) for i in range(1, 15)]


WRONG = {
    "one layer too many": lambda r: r[:, :, [0, 0]],
    "no layer": lambda r: r[:, :, :0],
    "one choice": lambda r: r[..., :1],
    "a token short": lambda r: r[:, :-1],
    "two bytes": lambda r: r.astype(np.uint16),
}


@pytest.mark.parametrize("change", WRONG)
def test_routes_of_another_number_of_layers_choices_or_type_are_refused(change, unchecked):
    """2: layers are cut out of the array by number, so that one too many would go unread and one
    too few be read twice.
    """
    wrong = WRONG[change](random_routing(LITTLE))
    with pytest.raises(
        ValueError,
        match=r"routes are uint\d+\[.*\], tokens \[2, 7\] of this model take uint8\[2, 7, 1, 2\]",
    ):
        jax.eval_shape(lambda: _apply(LITTLE, wrong))


def test_routes_for_a_dense_model_are_refused():
    dense = dataclasses.replace(CONFIG, family="qwen3", moe=None, layers=1)
    with pytest.raises(ValueError, match="has no MoE layers: routes must be None"):
        jax.eval_shape(lambda: _apply(dense, random_routing(LITTLE)))


def _apply(config, routes):
    arrays = jnp.asarray(TOKENS), jnp.asarray(POSITIONS)
    return apply(
        Transformer(config, UNROLLED),
        random_params(config),
        *arrays,
        mask=jnp.asarray(MASK),
        routes=jnp.asarray(routes),
    ).hidden


def test_a_route_keeps_its_layer_and_token_in_whatever_order_the_layers_were_built():
    """3: layers scanned in runs, unrolled, or held one by one as the engine holds them: index l is
    the l-th MoE layer of the model.
    """
    params, routes = random_params(SPREAD), random_routing(SPREAD, seed=2)
    assert all(np.any(routes[:, :, i] != routes[:, :, j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    expected = np.where(MASK[..., None, None], routes, 255)
    layouts = ((ComputeConfig(), "stacked"), (UNROLLED, "unrolled"), (UNROLLED, "decode"))
    scanned, unrolled, loose = (
        forward(params, SPREAD, compute, routes, layout=layout) for compute, layout in layouts
    )
    for out in (scanned, unrolled, loose):
        np.testing.assert_array_equal(out.routes, expected)
        np.testing.assert_allclose(
            np.asarray(out.hidden)[MASK], np.asarray(scanned.hidden)[MASK], atol=1e-5
        )


def test_a_router_has_one_matrix_and_no_bias():
    """11: what could leak into the weights does not exist; a parameter added to the router shows
    here.
    """
    run = param_specs(CONFIG)["run_0"]
    assert set(run["layer_1"]["mlp"]) == {"router", "gate", "up", "down"}


@pytest.mark.usefixtures("optimised_alike")
def test_the_ids_recorded_under_ties_are_the_ids_used():
    """12: a router of zeros ties every expert with every other; the record counts what was
    dispatched, and replaying it changes no bit.
    """
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "router" in jax.tree_util.keystr(path) else x,
        random_params(LITTLE),
    )
    live = forward(params, LITTLE, UNROLLED)
    ids = np.asarray(live.routes)[MASK].reshape(-1)
    np.testing.assert_array_equal(np.bincount(ids, minlength=5), live.aux.load[0])
    again = forward(params, LITTLE, UNROLLED, live.routes)
    np.testing.assert_array_equal(again.hidden, live.hidden)
    assert not np.any(again.aux.flips)


def test_a_row_that_sees_nothing_is_no_nan():
    """13: a padding row may see no key at all; its output is thrown away, but NaN in it would reach
    every gradient.
    """
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((1, 1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    )
    visible = jnp.asarray([[[True, False, False], [False] * 3, [True] * 3]])

    def total(q):
        out = _attend(q, LayerCache(k, v), visible)
        return jnp.sum(
            jnp.where(jnp.array([True, False, True])[None, None, None, :, None], out, 0.0)
        ), out

    grad, out = jax.grad(total, has_aux=True)(q)
    assert (
        np.isfinite(out).all()
        and np.isfinite(grad).all()
        and np.abs(np.asarray(grad)[:, :, :, 2]).max() > 0
    )
    np.testing.assert_allclose(out[0, 0, :, 0], np.broadcast_to(v[0, 0, 0], (2, 4)), rtol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_gates_of_extreme_logits_are_finite(norm):
    """13: replayed experts whose live probability underflows to 0: normalised over the chosen ones
    alone, never 0/0.
    """
    logits = jnp.array([[300.0, -300.0, -300.5, 0.0, 0.0]])
    _, gates, _ = route(
        logits,
        jnp.array([[1, 2]], jnp.uint8),
        jnp.ones(1, bool),
        MoEConfig(5, 2, 7, norm_top_k=norm),
    )
    wanted = np.array([1.0, np.exp(-0.5)]) / (1 + np.exp(-0.5)) if norm else [0.0, 0.0]
    np.testing.assert_allclose(gates[0], wanted, rtol=1e-6)


def test_undefined_rows_behind_the_last_group_reach_nobody(monkeypatch):
    """14: a TPU leaves the rows of a ragged product behind its last group as they were in memory;
    here they are NaN.
    """
    real, seen = jax.lax.ragged_dot, []

    def undefined_behind(x, w, sizes):
        behind = jnp.arange(x.shape[0])[:, None] >= jnp.sum(sizes)
        seen.append(x.shape[0] - int(sizes.sum()))
        return jnp.where(behind, jnp.nan, real(x, w, sizes))

    rng = np.random.default_rng(0)
    x, ids = (
        jnp.asarray(rng.standard_normal((6, 4)), jnp.float32),
        jnp.asarray([[0, 1]] * 6, jnp.int32),
    )
    weights = {
        n: jnp.asarray(rng.standard_normal(s), jnp.float32)
        for n, s in {"gate": (3, 4, 5), "up": (3, 4, 5), "down": (3, 5, 4)}.items()
    }
    mask = jnp.arange(6) < 4

    def run():
        """Values, and gradients in tokens, gates and weights: 0 x NaN would show in those of the
        gates.
        """

        def total(x, gates, weights):
            return jnp.sum(moe_ffn(x, ids, gates, mask, weights, grouped_matmul("ragged")) ** 2)

        return jax.value_and_grad(total, (0, 1, 2))(x, jnp.ones((6, 2)), weights)

    expected = run()
    monkeypatch.setattr(jax.lax, "ragged_dot", undefined_behind)
    jax.tree.map(np.testing.assert_array_equal, run(), expected)
    assert seen == [4, 4, 4] and min(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) > 0
