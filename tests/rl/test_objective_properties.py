"""What no arrangement of the same tokens may change: order of rows and tokens, padding, splits into micro-batches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.config import ObjectiveConfig, RLConfig
from compass_jax.rl.diagnostics import finalize_diagnostics, merge_diagnostics
from compass_jax.rl.objectives import policy_objective
from compass_jax.rl.prepare import Prepared, prepare

CONFIGS = {
    "grpo": ObjectiveConfig("grpo", kl_coef=0.1),
    "gspo": ObjectiveConfig("gspo", clip_low=0.02, clip_high=0.03),
    "espo": ObjectiveConfig(espo_quantiles=(0.5, 0.8)),
}
fast = settings(max_examples=12, deadline=None, derandomize=True, database=None)
names = pytest.mark.parametrize("name", CONFIGS)
TOL = dict(rtol=1e-10, atol=1e-13)


@functools.partial(jax.jit, static_argnames=("name", "n_groups"))
def prepared(name, mask, entropy, reward, known, group, n_groups):
    config = RLConfig(objective=CONFIGS[name])
    return prepare(mask, entropy, reward, known, group, n_groups=n_groups, config=config, right_at=1.0, wrong_at=0.0, max_new_tokens=16)


@functools.partial(jax.jit, static_argnames="name")
def per_token_and_grad(name, logp, old_logp, entropy, ref_logp, p: Prepared):
    def total(logp):
        per_token, diagnostics = policy_objective(
            logp, old_logp, entropy, p.advantage, p.weight, CONFIGS[name],
            mask=p.mask, entropy_group=p.entropy_group, ref_logp=ref_logp, vocab_size=50,
        )  # fmt: skip
        return per_token.sum(), (per_token, diagnostics)

    (_, (per_token, diagnostics)), grad = jax.value_and_grad(total, has_aux=True)(logp)
    return per_token, grad, diagnostics


def everything(name, toy, at=lambda x: x):
    """(Prepared, per-token objective, gradient in logp) of the toy with every array rearranged by `at`; in x64."""
    logp, old, entropy, ref_logp, mask = (jnp.asarray(at(x)) for x in (toy.logp(toy.theta), toy.old_logp, toy.old_entropy, toy.ref_logp, toy.mask))
    reward, known, group = (jnp.asarray(at(x)) for x in (toy.reward, toy.known, toy.group.astype(np.int32)))
    p, _ = prepared(name, mask, entropy, reward, known, group, toy.n_groups)
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
        before, after = everything(name, toy), everything(name, toy, move)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(move(np.asarray(a)), b, **TOL)


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
        before, after = everything(name, toy), everything(name, toy, pad)
        for a, x in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(a, x[:b, :t], **TOL)
        for x in after[1:]:
            assert not x[b:].any() and not x[:, t:].any()


@names
@fast
@given(seed=st.integers(0, 2**16))
def test_splitting_into_micro_batches_changes_nothing(name, seed):
    toy, rng = ref.make_toy(seed, drift=0.05), np.random.default_rng(seed)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(x) for x in (toy.logp(toy.theta), toy.old_logp, toy.old_entropy, toy.ref_logp)]
        p, _ = prepared(name, jnp.asarray(toy.mask), arrays[2], jnp.asarray(toy.reward), jnp.asarray(toy.known), jnp.asarray(toy.group), toy.n_groups)
        whole, whole_grad, whole_diagnostics = per_token_and_grad(name, *arrays, p)
        halves = np.split(rng.permutation(len(toy.reward)), 2)
        results = [per_token_and_grad(name, *(x[half] for x in arrays), jax.tree.map(lambda x: x[half], p)) for half in halves]  # noqa: B023
        np.testing.assert_allclose(sum(r[0].sum() for r in results), whole.sum(), **TOL)
        for half, (_, grad, _) in zip(halves, results, strict=True):
            np.testing.assert_allclose(grad, whole_grad[half], **TOL)
        merged = finalize_diagnostics(merge_diagnostics([d for *_, d in results]))
        for key, value in finalize_diagnostics(whole_diagnostics).items():
            np.testing.assert_allclose(merged[key], value, err_msg=key, **TOL)


@fast
@given(seed=st.integers(0, 2**16), reward=st.sampled_from([0.0, 0.5, 1.0]))
def test_uniform_groups_never_move_the_policy_without_entropy(seed, reward):
    toy = ref.make_toy(seed, drift=0.05)
    toy.reward[:] = reward
    with jax.enable_x64(True):
        p, per_token, grad = everything("espo", toy)
        if reward == 0.5:
            assert not np.any(p.advantage) and not per_token.any() and not grad.any()
        else:
            expected = ref.rl_zvp(toy, 1.0, 0.0, 0.1)
            np.testing.assert_allclose(p.advantage, expected, **TOL)
            assert np.all(p.advantage >= 0 if reward == 1.0 else p.advantage <= 0) and np.any(expected != 0)
