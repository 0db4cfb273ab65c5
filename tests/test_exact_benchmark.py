"""benchmarks/exact.py: the tiles compute the function of all rows, and the log-probs of rollout and
training are equal bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.exact_model import attend, by_tiles


@pytest.mark.parametrize("heads", [1, 3])
def test_attention_in_blocks_of_keys_is_softmax_attention(heads):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 2, heads, 70, 8))
    k, v = rng.standard_normal((2, 2, 2, 100, 8))
    positions = np.arange(3, 73)
    scores = np.einsum("bkgtd,bksd->bkgts", q, k)
    weights = np.where(np.arange(100) <= positions[:, None], np.exp(scores), 0)
    expected = np.einsum("bkgts,bksd->bkgtd", weights, v) / weights.sum(-1)[..., None]
    q, k, v = (jnp.asarray(x, jnp.float32) for x in (q, k, v))
    at = jnp.asarray(np.broadcast_to(positions, (2, 70)), jnp.int32)
    np.testing.assert_allclose(attend(q, k, v, at), expected, rtol=1e-4, atol=1e-5)
    last = attend(q[:, :, :, -1:], k, v, at[:, -1:])
    np.testing.assert_allclose(last, expected[:, :, :, -1:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 32, 65])
def test_tiles_compute_the_function_of_all_rows(n):
    x = jnp.arange(2 * n, dtype=jnp.float32).reshape(n, 2)
    double, total = by_tiles(lambda y: (2 * y, jnp.sum(y, axis=1)), x)
    np.testing.assert_array_equal(double, 2 * np.asarray(x))
    np.testing.assert_array_equal(total, np.asarray(x).sum(axis=1))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_hundred_thousand_tokens_have_the_same_log_probs(dtype, tmp_path):
    out = tmp_path / "exact.jsonl"
    command = [sys.executable, "-m", "benchmarks.exact", "--only", "schedule"]
    subprocess.run(
        [*command, "--dtype", dtype, "--out", str(out)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0", "XLA_FLAGS": ""},
        check=True,
    )
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["tokens"] >= 100_000
    for row in rows:
        assert row["R3"] == row["off"] == {"equal": 1.0, "largest_nats": 0.0}
    assert all(row["first"] == 1.0 for row in rows[1:])
