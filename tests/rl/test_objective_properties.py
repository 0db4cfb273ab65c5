"""Invariance of the objectives to the arrangement of the same tokens: order of rows and tokens,
padding, buckets, splits into micro-batches.

Six cases cover every objective, both forms of GRPO's advantage, every correction and every shaping
penalty; two more the advantages that compare with a prediction, which are computed over the update.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st
from jitted import objective_of

from compass_jax.config import (
    RLConfig,
    ShapingConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.rl.advantages.grpo import GrpoAdvantage
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.bucketing import take_rows
from compass_jax.rl.diagnostics import finalize_diagnostics, merge_diagnostics
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.prepare import TRAINED, Prepared, RewardScale, UpdateRows, prepare

LENGTH, REPETITION = (
    ShapingConfig(length_penalty=0.2, length_free_tokens=2),
    ShapingConfig(repetition_penalty=0.2),
)
OVERLONG = ShapingConfig(overlong_penalty=0.2, overlong_buffer_tokens=12)
CONFIGS = {
    "grpo": RLConfig(
        objective=Grpo(kl_coef=0.1),
        correction=named_correction("tis", cap=1.2),
    ),
    "dapo": RLConfig(
        objective=dapo_surrogate(),
        shaping=OVERLONG,
        correction=named_correction("icepop", ratio_range=(0.7, 1.5)),
    ),
    "dr_grpo": RLConfig(
        objective=dr_grpo(), shaping=REPETITION, advantage=GrpoAdvantage(divide_by_std=False)
    ),
    "gspo": RLConfig(objective=Gspo(clip_low=0.02, clip_high=0.03), shaping=LENGTH),
    "cispo": RLConfig(
        objective=Cispo(ratio_max=1.2),
        correction=named_correction("sequence", ratio_range=(0.9, 1.2)),
    ),
    "espo": RLConfig(objective=Espo(quantiles=(0.5, 0.8), alpha=0.05)),
}
# with RL-ZVP, so that uniform groups have an advantage
CONFIGS = {
    name: dataclasses.replace(config, zero_variance=ZeroVarianceConfig(rl_zvp=True))
    for name, config in CONFIGS.items()
}
PREDICTING = {
    "predicted": RLConfig(
        objective=Grpo(), advantage=Predicted(), correction=named_correction("tis", cap=1.2)
    ),
    "shrunk": RLConfig(objective=dapo_surrogate(), advantage=Shrunk(), shaping=OVERLONG),
}
TOKENS = ("mask", "old_entropy", "old_logp", "rollout_logp")
jitted_prepare = jax.jit(prepare, static_argnames=("n_groups", "config", "scale"))
fast = settings(max_examples=12, deadline=None, derandomize=True, database=None)
names = pytest.mark.parametrize("name", [*CONFIGS, *PREDICTING])
TOL = dict(rtol=1e-10, atol=1e-13)
WITHOUT_ENTROPY = "without entropy"  # espo with the verifier's advantage alone
CONFIGS_AND_PLAIN = CONFIGS | {
    WITHOUT_ENTROPY: dataclasses.replace(
        CONFIGS["espo"], zero_variance=ZeroVarianceConfig(rl_zvp=False)
    ),
    **PREDICTING,
}


@functools.partial(jax.jit, static_argnames=("name", "n_groups"))
def prepared(
    name, mask, entropy, reward, known, group, repetition, old_logp, rollout_logp, columns, n_groups
):
    log_probs = {"old_logp": old_logp, "rollout_logp": rollout_logp}
    further = {"repetition": repetition, "columns": columns}
    rows = UpdateRows(mask, reward, known, group, entropy, **log_probs, **further)
    config = CONFIGS_AND_PLAIN[name]
    scale = RewardScale(1.0, 0.0, max_new_tokens=16, group_size=3)
    return prepare(rows, n_groups=n_groups, config=config, scale=scale)


@functools.partial(jax.jit, static_argnames="name")
def per_token_and_grad(name, logp, old_logp, entropy, ref_logp, p: Prepared):
    objective = CONFIGS_AND_PLAIN[name].objective
    reference = ref_logp if objective.kl_coef else None

    def total(logp):
        result = objective_of(logp, old_logp, entropy, p, objective, 50, reference)
        return result[0].sum(), result

    (_, (per_token, diagnostics)), grad = jax.value_and_grad(total, has_aux=True)(logp)
    return per_token, grad, diagnostics


def repetition_of(toy):
    return np.sin(np.arange(len(toy.reward))) ** 2


def arrays_of(toy):
    """Returns the toy's arrays. Per token: current and old log-probs, entropies, reference and
    rollout log-probs, mask. Per row: reward, known, group, repetition.
    """
    per_token = toy.logp(toy.theta), toy.old_logp, toy.old_entropy, toy.ref_logp, toy.rollout_logp
    return *per_token, toy.mask, toy.reward, toy.known, toy.group, repetition_of(toy)


def run_objective(name, toy, at=lambda x: x):
    """Returns (Prepared, per-token objective, gradient in logp) of the toy with every array
    rearranged by `at`; must be called in x64.
    """
    logp, old, entropy, ref_logp, rollout, mask, reward, known, group, repetition = (
        jnp.asarray(at(x)) for x in arrays_of(toy)
    )
    p, _ = prepared(
        name,
        mask,
        entropy,
        reward,
        known,
        group.astype(jnp.int32),
        repetition,
        old,
        rollout,
        {x: jnp.asarray(at(column)) for x, column in toy.columns.items()},
        toy.n_groups,
    )
    per_token, grad, _ = per_token_and_grad(name, logp, old, entropy, ref_logp, p)
    return p, np.asarray(per_token), np.asarray(grad)


@names
@fast
@given(seed=st.integers(0, 2**16))
def test_permuting_rows_and_tokens_permutes_the_result(name, seed):
    toy, rng = ref.make_toy(seed, drift=0.05), np.random.default_rng(seed)
    rows = rng.permutation(len(toy.reward))
    tokens = rng.permuted(np.tile(np.arange(toy.mask.shape[1]), (len(rows), 1)), axis=1)
    with jax.enable_x64(True):
        move = lambda x: x[rows] if x.ndim == 1 else np.take_along_axis(x[rows], tokens, axis=1)  # noqa: E731
        before, after = run_objective(name, toy), run_objective(name, toy, move)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(move(np.asarray(a)), b, **TOL)
        assert np.abs(before[2]).max() > 0


@names
@fast
@given(seed=st.integers(0, 2**16), garbage=st.sampled_from([0.0, np.nan, -np.inf, 1e30]))
def test_padding_changes_nothing(name, seed, garbage):
    toy = ref.make_toy(seed, drift=0.05)

    def pad(x):
        fill = {"b": False, "i": -1, "f": garbage}[x.dtype.kind]
        return np.pad(x, [(0, 3)] + [(0, 5)] * (x.ndim - 1), constant_values=fill)

    with jax.enable_x64(True):
        b, t = toy.mask.shape
        before, after = run_objective(name, toy), run_objective(name, toy, pad)
        for a, x in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(a, x[:b, :t], **TOL)
        for x in after[1:]:
            assert not x[b:].any() and not x[:, t:].any()


@names
@fast
@given(seed=st.integers(0, 2**16))
def test_rows_are_prepared_alike_alone_and_with_all(name, seed):
    """Bit for bit; the other rows have no tokens there, and one row is padding."""
    toy, rng = ref.make_toy(seed, drift=0.05), np.random.default_rng(seed)
    config, n = CONFIGS_AND_PLAIN[name], len(toy.reward)
    options = {"config": config, "n_groups": toy.n_groups}
    options["scale"] = RewardScale(1.0, 0.0, max_new_tokens=16, group_size=3)
    old_logp, entropy, _, rollout = (x.astype(np.float32) for x in arrays_of(toy)[1:5])
    rows = UpdateRows(
        *(toy.mask, toy.reward.astype(np.float32), toy.known, toy.group.astype(np.int32), entropy),
        old_logp,
        rollout,
        repetition=repetition_of(toy).astype(np.float32),
        columns={
            k: x.astype(x.dtype if x.dtype == bool else np.float32) for k, x in toy.columns.items()
        },
    )
    whole, metrics = jitted_prepare(rows, **options)
    places = rng.permutation(n)[: n // 2].astype(np.int32)
    part = np.append(places, np.int32(n))
    tokens = {
        x: take_rows(getattr(rows, x), np.append(places, -1), toy.mask.shape[1]) for x in TOKENS
    }
    some = rows._replace(**tokens, lengths=toy.mask.sum(1, dtype=np.int32), places=part)
    alone, counted = jitted_prepare(some, **options)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(x)[places], np.asarray(y)[:-1])
    assert not np.asarray(alone.mask)[-1].any() and set(counted) == {TRAINED}
    assert int(counted[TRAINED][0]) == np.asarray(whole.mask).sum() and TRAINED not in metrics


@names
@fast
@given(seed=st.integers(0, 2**16))
def test_splitting_into_micro_batches_and_buckets_changes_nothing(name, seed):
    """The split is random: a part of the short rows is in a bucket of 7 tokens, and both buckets
    are filled up with padding rows.
    """
    toy, rng = ref.make_toy(seed, drift=0.05), np.random.default_rng(seed)
    with jax.enable_x64(True):
        p, full, full_grad = run_objective(name, toy)
        arrays, n = arrays_of(toy)[:4], len(toy.reward)
        diagnostics = per_token_and_grad(name, *(jnp.asarray(x) for x in arrays), p)[2]
        lengths = np.where(toy.mask, np.arange(toy.mask.shape[1]) + 1, 0).max(1)
        in_short_bucket = (lengths <= 7) & (rng.random(n) < 0.8)
        parts, total = [], 0.0
        for length, rows in (
            (7, np.flatnonzero(in_short_bucket)),
            (toy.mask.shape[1], np.flatnonzero(~in_short_bucket)),
        ):
            rows = np.concatenate([rng.permutation(rows), np.full(n - len(rows), -1)])
            take = lambda x, rows=rows, length=length: take_rows(np.asarray(x), rows, length)  # noqa: E731
            per_token, grad, part = per_token_and_grad(
                name, *map(take, arrays), jax.tree.map(take, p)
            )
            np.testing.assert_allclose(grad, take(full_grad), **TOL)
            parts.append(part)
            total += float(per_token.sum())
        assert 0 < in_short_bucket.sum() < n
        np.testing.assert_allclose(total, full.sum(), **TOL)
        merged = finalize_diagnostics(merge_diagnostics(parts))
        for key, value in finalize_diagnostics(diagnostics).items():
            np.testing.assert_allclose(merged[key], value, err_msg=key, **TOL)


@names
@fast
@given(seed=st.integers(0, 2**16), everything_empty=st.booleans())
def test_empty_masks_give_zero_and_disturb_nobody(name, seed, everything_empty):
    """Responses without a trained token have zero weight and gradient and cause no NaN; if all
    responses are empty, every weight and gradient is zero.
    """
    toy, rng = ref.make_toy(seed, drift=0.05), np.random.default_rng(seed)
    empty = rng.random(len(toy.reward)) < (1.0 if everything_empty else 0.4)
    toy.mask[empty] = False
    with jax.enable_x64(True):
        p, per_token, grad = run_objective(name, toy)
        for x in jax.tree.leaves((p.advantage, p.weight, per_token, grad)):
            assert np.isfinite(x).all() and not np.asarray(x)[~toy.mask].any()
        rows = toy.mask.any(1) & toy.known & (toy.group >= 0)
        assert np.asarray(p.mask).any(1).tolist() == rows.tolist()
        assert everything_empty == (not np.any(p.weight))


def shaped(toy, config):
    """Returns the rewards less the penalties, by hand, of answers that are all right."""
    n, repetition, s = toy.mask.sum(1), repetition_of(toy), config.shaping
    length = np.clip((n - s.length_free_tokens) / (16 - s.length_free_tokens), 0, 1)
    late = np.clip((n - 16 + s.overlong_buffer_tokens) / s.overlong_buffer_tokens, 0, 1)
    return (
        toy.reward
        - s.length_penalty * length
        - s.repetition_penalty * repetition
        - s.overlong_penalty * late
    )


@pytest.mark.parametrize("name", CONFIGS)
@fast
@given(seed=st.integers(0, 2**16))
def test_uniform_right_groups_learn_from_shaping_undivided_else_from_entropy(name, seed):
    toy, config = ref.make_toy(seed, drift=0.05), CONFIGS[name]
    toy.reward[:] = 1.0
    reward = shaped(toy, config)
    expected, entropy = np.zeros(toy.mask.shape), ref.rl_zvp(toy, 1.0, 0.0, 0.1)
    for g in range(toy.n_groups):
        rows = (toy.group == g) & toy.known
        by_shaping = np.ptp(reward[rows]) > 1e-6
        expected[rows] = (
            np.where(toy.mask[rows], (reward[rows] - reward[rows].mean())[:, None], 0)
            if by_shaping
            else entropy[rows]
        )
    with jax.enable_x64(True):
        p, _, _ = run_objective(name, toy)
        np.testing.assert_allclose(p.advantage, expected, rtol=1e-9, atol=1e-12)
    assert (np.ptp(reward[toy.known]) > 0) == (config.shaping.total > 0) and np.abs(
        expected
    ).max() > 0


@fast
@given(seed=st.integers(0, 2**16), reward=st.sampled_from([0.0, 0.5, 1.0]))
def test_uniform_groups_never_move_the_policy_without_entropy(seed, reward):
    """The gradient is zero if RL-ZVP is off or the rewards are uniform in between. If all answers
    are right or all are wrong, the advantages are RL-ZVP's.
    """
    toy = ref.make_toy(seed, drift=0.05)
    toy.reward[:] = reward
    with jax.enable_x64(True):
        p, per_token, grad = run_objective(WITHOUT_ENTROPY, toy)
        assert not np.any(p.advantage) and not per_token.any() and not grad.any()
        p, per_token, grad = run_objective("espo", toy)
        if reward == 0.5:
            assert not np.any(p.advantage) and not per_token.any() and not grad.any()
        else:
            expected = ref.rl_zvp(toy, 1.0, 0.0, 0.1)
            np.testing.assert_allclose(p.advantage, expected, **TOL)
            assert np.all(p.advantage >= 0 if reward == 1.0 else p.advantage <= 0) and np.any(
                expected != 0
            )
