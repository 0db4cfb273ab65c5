"""The training step by value: no split changes the gradient, and replay uses the recorded routes in
every pass.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from tiny import COMPUTE, MODEL, UNSET, random_params

from compass_jax.base.records import StepArrays
from compass_jax.config import OptimConfig, RLConfig, ZeroVarianceConfig
from compass_jax.model.moe import RouterStats
from compass_jax.model.params import decays
from compass_jax.model.transformer import Transformer
from compass_jax.rl.bucketing import MicroBatch, plan
from compass_jax.rl.diagnostics import finalize_diagnostics, merge_diagnostics
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.prepare import RewardScale, UpdateRows
from compass_jax.training import optim, step
from compass_jax.training.scored import Scored, put_rows, record_routes, sequences, update_batch

TINY = evolve(MODEL, layers=2, moe={"dense_layers": (0,)})
F64 = dataclasses.replace(COMPUTE, dtype="float64", param_dtype="float64")

GROUPS, SAMPLES, LONGEST = 4, 3, 24
BASE = RLConfig(
    prompts_per_step=GROUPS,
    group_size=SAMPLES,
    buckets=(12, LONGEST),
    micro_batch_tokens=144,
    objective=Espo(),
    step_policy=None,
    zero_variance=ZeroVarianceConfig(rl_zvp=True),
)
WHOLE = ((LONGEST,), LONGEST * 12)  # buckets, tokens of a micro-batch: all in one
OBJECTIVES = {
    "espo": Espo(),
    "gspo": Gspo(clip_low=3e-4, clip_high=4e-4),
    "grpo": Grpo(),
}


def rollout(dtype=np.float32):
    """Returns a rollout of 12 sequences of 5 to 24 tokens, and its routes. The groups: varied, all
    right, varied with an unknown reward, all wrong.
    """
    rng = np.random.default_rng(0)
    n = GROUPS * SAMPLES
    lengths = np.array([5, 24, 11, 9, 17, 8, 12, 6, 20, 7, 10, 13], np.int32)
    in_sequence = np.arange(LONGEST) < lengths[:, None]
    tokens = np.where(in_sequence, rng.integers(2, MODEL.vocab_size, in_sequence.shape), 0).astype(
        np.int32
    )
    mask = in_sequence & (np.arange(LONGEST) >= 3)
    reward, known = np.array([1, 0, 0, 1, 1, 1, 1, 0.5, 0, 0, 0, 0], dtype), np.arange(n) != 7
    ids = np.argsort(rng.random((n, 32, 1, 6)), axis=-1)[..., :2].astype(np.uint8)
    routes = np.where((np.arange(32) < lengths[:, None] - 1)[:, :, None, None], ids, UNSET).astype(
        np.uint8
    )
    group = np.repeat(np.arange(GROUPS, dtype=np.int32), SAMPLES)
    return StepArrays(
        tokens,
        lengths,
        mask,
        np.zeros(in_sequence.shape, dtype),
        reward,
        known,
        np.zeros(n, dtype),
        group,
    ), jnp.asarray(routes)


def score(model, params, arrays, routes, split=WHOLE, temperature=1.0):
    """Returns (the scored rollout, the routes used, per row, and the diagnostics)."""
    used, parts = jnp.full((len(arrays.lengths), 32, 1, 2), UNSET, jnp.uint8), []
    old_logp, old_entropy = np.zeros((2, *arrays.mask.shape), arrays.reward.dtype)
    for micro in split if isinstance(split, list) else plan(arrays.lengths, *split):
        logp, entropy, recorded, diagnostics = step.score(
            model, params, *sequences(arrays, micro, routes), temperature=temperature
        )
        put_rows(old_logp, micro, logp)
        put_rows(old_entropy, micro, entropy)
        used = record_routes(used, micro, recorded)
        parts.append(diagnostics)
    scored = Scored(arrays, routes, old_logp, old_entropy, None, None)
    return scored, used, finalize_diagnostics(merge_diagnostics(parts))


def gradient(model, params, scored, config, split, temperature=1.0):
    """Returns (gradient of one update of all groups, its diagnostics), summed over the
    micro-batches of `split`.
    """
    arrays = scored.arrays
    inputs = UpdateRows(arrays.mask, arrays.reward, arrays.known, arrays.group, scored.old_entropy)
    prepared, diagnostics = step.prepare(
        inputs, n_groups=GROUPS, config=config, scale=RewardScale(1.0, 0.0, 16)
    )
    prepared, total, parts = jax.device_get(prepared), None, [diagnostics]
    for micro in split if isinstance(split, list) else plan(arrays.lengths, *split):
        inputs = sequences(arrays, micro, scored.routes)
        batch = update_batch(scored, micro, inputs, prepared, 0)
        share = jnp.float32(batch.mask.sum() / prepared.mask.sum())
        grads, diagnostics, _ = step.gradients(
            model, params, batch, share, objective=config.objective, temperature=temperature
        )
        total = step.add(total, grads)
        parts.append(diagnostics)
    return total, finalize_diagnostics(merge_diagnostics(parts))


def norm(tree):
    return float(
        np.sqrt(sum(np.sum(np.asarray(x, np.float64) ** 2) for x in jax.tree.leaves(tree)))
    )


def moved(params, size=0.003):
    """Returns parameters of some updates later: ratios differ from one, and clipping acts."""
    rng = np.random.default_rng(9)
    return jax.tree.map(
        lambda x: x + jnp.asarray(size * rng.standard_normal(x.shape), x.dtype), params
    )


def shuffled(arrays):
    """Returns small micro-batches in another order, in two buckets, with padding rows."""
    order = np.random.default_rng(4).permutation(len(arrays.lengths))

    def cut(rows, length, size):
        rows = np.concatenate([rows, np.full(-len(rows) % size, -1)])
        return [MicroBatch(length, part) for part in rows.reshape(-1, size)]

    return cut(order[arrays.lengths[order] > 12], LONGEST, 3) + cut(
        order[arrays.lengths[order] <= 12], 12, 5
    )


@pytest.mark.parametrize(
    ("dtype", "objective", "limit"),
    [
        pytest.param("float32", "espo", 2e-6, marks=pytest.mark.slow),
        ("float64", "espo", 1e-12),
    ],
)
def test_no_split_into_buckets_or_micro_batches_changes_the_gradient(
    request, dtype, objective, limit
):
    if dtype == "float64":
        request.getfixturevalue("x64")
    model = Transformer(TINY, F64 if dtype == "float64" else COMPUTE)
    params = random_params(TINY, dtype)
    arrays, routes = rollout(dtype)
    scored, *_ = score(model, params, arrays, routes)
    config = dataclasses.replace(BASE, objective=OBJECTIVES[objective])
    one, metrics = gradient(model, moved(params, 0.02), scored, config, WHOLE)
    many, split_metrics = gradient(model, moved(params, 0.02), scored, config, shuffled(arrays))
    difference = norm(jax.tree.map(jnp.subtract, one, many)) / norm(one)
    assert difference <= limit, difference
    assert {x.dtype for x in jax.tree.leaves(one)} == {jnp.dtype(dtype)}
    assert float(metrics["policy/clip_frac"]) > 0 and float(metrics["policy/ratio_dev_max"]) > 1e-3
    for name in metrics:
        np.testing.assert_allclose(
            split_metrics[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=name
        )
    print(f"gradient split {dtype} {objective}: {difference:.2e}")


@pytest.mark.parametrize("objective", list(OBJECTIVES))
@pytest.mark.parametrize("replay", ["R3", "off"])
def test_sequences_that_share_rows_have_the_gradient_of_rows_of_their_own(x64, objective, replay):
    """The scores, routes and metrics are the same, too: a sequence is computed as if it were alone
    in its row.
    """
    model, params = Transformer(TINY, F64), random_params(TINY, "float64")
    arrays, routes = rollout("float64")
    packed = plan(arrays.lengths, (4, LONGEST), 96, packed_row_tokens=48)
    assert max(np.bincount(b.packing.row[b.packing.size > 0]).max() for b in packed) > 2
    replayed = routes if replay == "R3" else None
    scored, used, _ = score(model, params, arrays, replayed)
    together, used_together, _ = score(model, params, arrays, replayed, packed)
    np.testing.assert_array_equal(used_together, used)
    for name in ("old_logp", "old_entropy"):
        one, other = (getattr(x, name)[arrays.mask] for x in (scored, together))
        np.testing.assert_allclose(other, one, rtol=1e-12, atol=1e-12, err_msg=name)
    config = dataclasses.replace(BASE, objective=OBJECTIVES[objective])
    one, metrics = gradient(model, moved(params, 0.02), scored, config, WHOLE)
    many, packed_metrics = gradient(model, moved(params, 0.02), scored, config, packed)
    assert norm(jax.tree.map(jnp.subtract, one, many)) <= 1e-12 * norm(one)
    assert float(metrics["policy/ratio_dev_max"]) > 1e-3
    for name in metrics.keys() - {"moe/load_max_over_mean"}:  # of each micro-batch
        np.testing.assert_allclose(
            packed_metrics[name], metrics[name], rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_replay_uses_the_recorded_routes_in_every_pass_whatever_the_weights_have_become():
    """R3 uses the rollout's routes, which live routing would not choose; R2 uses those that scoring
    recorded; off routes live.
    """
    model, params = Transformer(TINY, COMPUTE), random_params(TINY)
    arrays, routes = rollout()
    valid = np.asarray(routes)[..., 0] != UNSET

    scored, used, metrics = score(model, params, arrays, routes)
    np.testing.assert_array_equal(used, routes)
    assert float(metrics["replay/flip_frac"]) > 0.5 and float(metrics["replay/unset_frac"]) == 0
    _, metrics = gradient(model, moved(params), scored, BASE, WHOLE)
    assert float(metrics["replay/flip_frac"]) > 0.5

    # R2: live routing is recorded ...
    live, recorded, metrics = score(model, params, arrays, None)
    assert (
        float(metrics["replay/flip_frac"]) == 0
        and np.abs(live.old_logp - scored.old_logp)[arrays.mask].max() > 0.01
    )
    np.testing.assert_array_equal(np.asarray(recorded)[..., 0] != UNSET, valid)
    far = moved(params, 0.3)
    _, replayed, metrics = score(model, far, rollout()[0], recorded)  # ... and replayed
    np.testing.assert_array_equal(replayed, recorded)
    assert float(metrics["replay/flip_frac"]) > 0.1
    _, live, metrics = score(model, far, rollout()[0], None)
    assert float(metrics["replay/flip_frac"]) == 0 and np.any(
        np.asarray(live) != np.asarray(recorded)
    )


def test_the_penalty_to_the_reference_starts_at_zero_and_grows():
    model, params = Transformer(TINY, COMPUTE), random_params(TINY)
    arrays, routes = rollout()
    scored, *_ = score(model, params, arrays, routes)
    config = dataclasses.replace(BASE, objective=Grpo(kl_coef=0.1))
    scored = dataclasses.replace(scored, ref_logp=scored.old_logp)
    _, first = gradient(model, params, scored, config, WHOLE)
    _, later = gradient(model, moved(params), scored, config, WHOLE)
    assert 0 <= float(first["policy/ref_kl_k3"]) < 1e-10 and float(later["policy/ref_kl_k3"]) > 1e-5


def test_an_update_raises_the_objective():
    """One step along the gradient makes right answers of varied groups likelier than wrong ones."""
    model, params = Transformer(TINY, COMPUTE), random_params(TINY)
    arrays, routes = rollout()
    scored, *_ = score(model, params, arrays, routes)
    config = dataclasses.replace(BASE, objective=OBJECTIVES["grpo"])
    grads, before = gradient(model, params, scored, config, WHOLE)
    state = optim.init_state(params, OptimConfig(learning_rate=1e-4), 1)
    state, _ = step.apply(state, grads, config=OptimConfig(learning_rate=1e-4), **ONCE)
    _, after = gradient(model, state.params, scored, config, WHOLE)
    assert float(after["loss"]) < float(before["loss"]) - 1e-3


ONCE = {"total_steps": 1, "decays": decays(TINY, "stacked")}


def test_a_nan_anywhere_is_skipped_by_the_whole_step():
    """A NaN in one weight makes every gradient NaN; parameters and optimiser do not change."""
    model, params = Transformer(TINY, COMPUTE), random_params(TINY)
    arrays, routes = rollout()
    scored, *_ = score(model, params, arrays, routes)
    poisoned = params | {"final_norm": params["final_norm"].at[3].set(jnp.nan)}
    grads, _ = gradient(
        model,
        poisoned,
        scored,
        dataclasses.replace(BASE, objective=OBJECTIVES["grpo"]),
        WHOLE,
    )
    state = optim.init_state(params, OptimConfig(learning_rate=1e-4), 1)
    before = jax.device_get((state.params, state.opt_state))
    state, info = step.apply(state, grads, config=OptimConfig(learning_rate=1e-4), **ONCE)
    assert np.isnan(info["grad_norm"]) and (
        int(state.step),
        int(state.bad_steps),
        int(state.skipped),
    ) == (0, 1, 1)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before
    )


def test_the_load_balancing_loss_is_one_when_balanced_and_e_over_k_when_collapsed():
    stats = partial(RouterStats, flips=jnp.zeros(1), unset=jnp.zeros(1), tokens=jnp.full(1, 10.0))
    even = stats(probs=jnp.full((1, 4), 2.5), load=jnp.full((1, 4), 5.0))
    one = stats(probs=jnp.array([[10.0, 0, 0, 0]]), load=jnp.array([[10.0, 10.0, 0, 0]]))
    assert float(step.load_balancing_loss(even, 2)) == pytest.approx(1.0)
    assert float(step.load_balancing_loss(one, 2)) == pytest.approx(2.0)
    diagnostics = step.router_diagnostics(
        one._replace(flips=jnp.full(1, 4.0), unset=jnp.full(1, 1.0))
    )
    assert {k: float(v) for k, v in finalize_diagnostics(diagnostics).items()} == pytest.approx(
        {"replay/flip_frac": 0.4, "replay/unset_frac": 0.1, "moe/load_max_over_mean": 2.0}
    )
    assert step.router_diagnostics(None) == {}
