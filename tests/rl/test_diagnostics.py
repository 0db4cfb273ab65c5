"""Merging and finalizing of diagnostics."""

import jax.numpy as jnp
import pytest

from compass_jax.rl.diagnostics import finalize_diagnostics, mean_of, merge_diagnostics, share_of


def scalars(*values):
    return tuple(jnp.asarray(v, jnp.float32) for v in values)


def test_each_kind_of_entry():
    parts = [
        {
            "a/mean": scalars(1, 2),
            "a/x_max": scalars(3, 1),
            "a/total": scalars(5),
            "a/ess": scalars(3, 5, 2),
        },
        {
            "a/mean": scalars(5, 10),
            "a/x_max": scalars(-4, 1),
            "a/total": scalars(6),
            "a/ess": scalars(1, 1, 2),
            "only/here": scalars(1, 4),
        },
        {
            "a/mean": scalars(0, 0),
            "a/x_max": scalars(2, 1),
            "a/total": scalars(0),
            "a/ess": scalars(0, 0, 0),
        },
    ]
    got = {k: float(v) for k, v in finalize_diagnostics(merge_diagnostics(parts)).items()}
    assert got == pytest.approx(
        {"a/mean": 0.5, "a/x_max": 3, "a/total": 11, "a/ess": 16 / 24, "only/here": 0.25}
    )
    assert merge_diagnostics([]) == {}


def test_nothing_over_nothing_is_zero():
    assert finalize_diagnostics({"a": scalars(0, 0), "b": scalars(0, 0, 0)}) == {"a": 0, "b": 0}


def test_entries_from_arrays():
    x, mask = jnp.asarray([1.0, 2.0, jnp.nan]), jnp.asarray([True, True, False])
    assert mean_of(x, mask) == (3, 2)
    assert share_of(jnp.asarray([True, False, True]), mask) == (1, 2)


def test_malformed_entries_are_refused():
    with pytest.raises(ValueError, match="'a' has 4 parts"):
        finalize_diagnostics({"a": scalars(1, 2, 3, 4)})
    with pytest.raises(ValueError, match="shorter"):
        merge_diagnostics([{"a": scalars(1, 2)}, {"a": scalars(1)}])
