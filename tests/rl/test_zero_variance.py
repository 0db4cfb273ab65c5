"""Kinds of groups, RL-ZVP and the account of the rollout's tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref

from compass_jax.base.records import Outcome
from compass_jax.rl import zero_variance
from compass_jax.rl.diagnostics import finalize_diagnostics, merge_diagnostics
from compass_jax.rl.zero_variance import GroupKind, rl_zvp_advantage

group_kind = jax.jit(zero_variance.group_kind, static_argnames=("n_groups", "right_at", "wrong_at"))
waste = jax.jit(zero_variance.waste, static_argnames=("rl_zvp", "uniform_teaches"))
F, T = False, True
U, V, R, W, B = (
    GroupKind.UNDECIDED,
    GroupKind.VARIED,
    GroupKind.ALL_RIGHT,
    GroupKind.ALL_WRONG,
    GroupKind.UNIFORM_BETWEEN,
)


def kinds(groups, right_at=1.0, wrong_at=0.0):
    """Returns the kinds of groups that are given as lists of rewards; None is an unknown reward.
    The rows are interleaved, and a padding row is added.
    """
    rows = [(r, g) for g, rewards in enumerate(groups) for r in rewards]
    rows = [*rows[::2], (1.0, -1), *rows[1::2]]
    reward = jnp.asarray([np.nan if r is None else r for r, _ in rows], jnp.float32)
    known = jnp.asarray([r is not None for r, _ in rows])
    group = jnp.asarray([g for _, g in rows], jnp.int32)
    return list(
        np.asarray(
            group_kind(
                reward, known, group, n_groups=len(groups), right_at=right_at, wrong_at=wrong_at
            )
        )
    )


def test_kinds_by_hand():
    groups = [
        [1, 1, 1],
        [0, 0],
        [1, 0, 1],
        [0.5, 0.5],
        [1],
        [1, None],
        [None, None],
        [],
        [0, None, 0],
        [1, None, 0],
        [1, 1 - 1e-4],
    ]
    assert kinds(groups) == [R, W, V, B, U, U, U, U, W, V, V]


def test_thresholds_of_a_judge():
    assert kinds([[1, 1], [-1, -1], [0, 0], [1, -1]], right_at=1.0, wrong_at=-1.0) == [R, W, B, V]
    assert kinds([[0.95, 0.95], [0.05, 0.05], [0.5, 0.5]], right_at=0.9, wrong_at=0.1) == [R, W, B]
    with pytest.raises(ValueError, match=r"wrong_at = 1.0 must be below right_at = 0.0"):
        kinds([[1, 1]], right_at=0.0, wrong_at=1.0)


def test_rl_zvp_by_hand():
    entropy = jnp.asarray([[9.0, 0.5, 2.0, jnp.nan]] * 5)
    mask = jnp.asarray([[F, T, T, F]] * 5)
    got = rl_zvp_advantage(entropy, mask, jnp.asarray([R, W, V, B, U], jnp.int32), 0.1)
    expected = np.zeros((5, 4))
    expected[0, 1:3] = [0.05, 0.2]
    expected[1, 1:3] = [-0.15, 0.0]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_rl_zvp_agrees_with_the_reference(seed, x64):
    toy = ref.make_toy(seed)
    group, mask = jnp.asarray(toy.group), jnp.asarray(toy.mask & toy.known[:, None])
    kind = group_kind(
        jnp.asarray(toy.reward),
        jnp.asarray(toy.known),
        group,
        n_groups=toy.n_groups,
        right_at=1.0,
        wrong_at=0.0,
    )[group]
    got = rl_zvp_advantage(
        jnp.asarray(toy.old_entropy), mask, jnp.where(group < 0, int(U), kind), 0.2
    )
    expected = ref.rl_zvp(toy, 1.0, 0.0, 0.2)
    np.testing.assert_allclose(got, expected, rtol=1e-9)
    assert (expected > 0).any() and (expected < 0).any()


def test_waste_by_hand():
    lengths = np.array([1, 2, 3, 4, 5, 6])
    mask = jnp.asarray(np.arange(8) < lengths[:, None])
    known = jnp.asarray([T, T, T, F, T, T])
    row_kind, group_kinds = (
        jnp.asarray([V, R, W, V, B, U], jnp.int32),
        jnp.asarray([V, R, R, W, B, U, U], jnp.int32),
    )
    unshaped = jnp.zeros(6, bool)
    with_zvp = waste(mask, known, row_kind, group_kinds, rl_zvp=True, by_shaping=unshaped)
    without = waste(mask, known, row_kind, group_kinds, rl_zvp=False, by_shaping=unshaped)
    names = [
        "tokens_generated",
        "frac_verifier_signal",
        "frac_shaping_signal",
        "frac_entropy_signal",
        "frac_prediction_signal",
        "frac_none",
    ]
    as_list = lambda d: [float(finalize_diagnostics(d)[f"waste/{n}"]) for n in names]  # noqa: E731
    assert as_list(with_zvp) == pytest.approx([21, 1 / 21, 0, 5 / 21, 0, 15 / 21])
    assert as_list(without) == pytest.approx([21, 1 / 21, 0, 0, 0, 20 / 21])
    shaped = waste(
        mask, known, row_kind, group_kinds, rl_zvp=True, by_shaping=jnp.asarray([F, T, F, F, F, F])
    )
    assert as_list(shaped) == pytest.approx([21, 1 / 21, 2 / 21, 3 / 21, 0, 15 / 21])
    # all known samples but those of the varied group: right, wrong, in between and alone
    predicted = waste(
        *(mask, known, row_kind, group_kinds),
        rl_zvp=False,
        by_shaping=jnp.asarray([F, T, F, F, F, F]),
        uniform_teaches=True,
    )
    assert as_list(predicted) == pytest.approx([21, 1 / 21, 2 / 21, 0, 14 / 21, 4 / 21])
    assert as_list(merge_diagnostics([with_zvp, without])) == pytest.approx(
        [42, 1 / 21, 0, 5 / 42, 0, 35 / 42]
    )
    dropped = zero_variance.waste_of_dropped(21)
    replaced = zero_variance.waste_of_replaced([Outcome(2, 0.0, 21, "hard", 2)])
    assert as_list(merge_diagnostics([predicted, dropped, replaced])) == pytest.approx(
        [63, 1 / 63, 2 / 63, 0, 14 / 63, 46 / 63]
    )
    rates = finalize_diagnostics(with_zvp)
    assert rates["zero_variance/rate_all_right"] == pytest.approx(2 / 5) and rates[
        "zero_variance/rate_all_wrong"
    ] == pytest.approx(1 / 5)
