"""Metrics of the mismatch of rollout and training: values by hand, also merged over parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config.seam import ComponentFailed
from compass_jax.rl import correction
from compass_jax.rl.corrections.icepop import IcePop
from compass_jax.rl.diagnostics import finalize_diagnostics, merge_diagnostics

mismatch = jax.jit(correction.mismatch)


def test_values_and_merging(x64):
    rng = np.random.default_rng(0)
    rollout, mask = rng.normal(size=(6, 8)) - 2, rng.random((6, 8)) < 0.7
    old = rollout + 0.5 * rng.normal(size=(6, 8))
    d = (old - rollout)[mask]
    rho = np.exp(d)
    expected = {
        "mismatch/logp_abs_diff": np.abs(d).mean(),
        "mismatch/kl_k3": (rho - 1 - np.log(rho)).mean(),
        "mismatch/extreme_frac": np.mean(np.maximum(rho, 1 / rho) > 2),
        "mismatch/ess": rho.sum() ** 2 / (len(rho) * (rho**2).sum()),
    }
    assert 0.05 < expected["mismatch/extreme_frac"] < 0.5 and expected["mismatch/ess"] < 0.95
    dirty = [jnp.where(mask, x, jnp.nan) for x in (old, rollout)]
    full = mismatch(*dirty, jnp.asarray(mask))
    parts = [
        mismatch(dirty[0][rows], dirty[1][rows], jnp.asarray(mask[rows]))
        for rows in (slice(0, 3), slice(3, 6))
    ]
    for diagnostics in (full, merge_diagnostics(parts)):
        assert {k: float(v) for k, v in finalize_diagnostics(diagnostics).items()} == pytest.approx(
            expected, rel=1e-9
        )


def test_equal_log_probs_and_empty_masks():
    x = jnp.full((2, 3), -1.5, jnp.float32)
    metrics = {
        k: float(v) for k, v in finalize_diagnostics(mismatch(x, x, jnp.ones((2, 3), bool))).items()
    }
    assert metrics == {
        "mismatch/logp_abs_diff": 0,
        "mismatch/kl_k3": 0,
        "mismatch/extreme_frac": 0,
        "mismatch/ess": 1,
    }
    empty = finalize_diagnostics(mismatch(x, x, jnp.zeros((2, 3), bool)))
    assert not any(float(v) for v in empty.values())


def test_the_ratio_is_clamped_but_the_difference_is_not():
    d = finalize_diagnostics(
        mismatch(jnp.zeros((1, 1)), jnp.full((1, 1), -100.0), jnp.ones((1, 1), bool))
    )
    assert (
        d["mismatch/kl_k3"] == pytest.approx(np.exp(20) - 21, rel=1e-5)
        and d["mismatch/logp_abs_diff"] == 100
        and d["mismatch/extreme_frac"] == 1
    )


class OfRows(IcePop):
    """A correction of a user's with a weight a row."""

    def weights(self, inputs):
        return jnp.ones(inputs.mask.shape[0])


def test_a_correction_of_another_shape_is_refused_by_name():
    logp, mask = jnp.zeros((4, 4)), jnp.ones((4, 4), bool)
    with pytest.raises(ComponentFailed, match=r"OfRows': weights failed: .* has shape \[4\]"):
        correction.correction_weight(logp, logp, mask, OfRows())
