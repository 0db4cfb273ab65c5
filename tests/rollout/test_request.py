"""The tokens of a request, which come in parts, and of all slots at once."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.base.records import Prompt
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine_api import ResultTokens
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.request import Columns, Request
from compass_jax.rollout.stats import RolloutStats


def request(number=0, limit=1000):
    return Request.of(Prompt.of_tokens([5, 6, 7], number), 0, 0, limit, version=2)


def columns(rng, n, dtype, version):
    logp, entropy = rng.standard_normal((2, n)).astype(dtype)
    return Columns.of(rng.integers(0, 2**31 - 1, n, np.int32), logp, entropy, version)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=12), st.integers(0, 2**16))
@settings(deadline=None)
def test_parts_are_joined_as_if_each_had_been_appended_at_once(dtype, parts, seed):
    """Whether tokens are read in between changes nothing."""
    rng, one = np.random.default_rng(seed), request()
    expected = one.columns
    for version, (n, reads) in enumerate(parts):
        new = columns(rng, n, dtype, version)
        expected = Columns(*map(np.concatenate, zip(expected, new, strict=True)))
        one.take(new.rows())
        assert one.count == one.length == len(expected.tokens)
        assert one.has_tokens == (one.count > 3)
        if reads:
            np.testing.assert_array_equal(one.tokens, expected.tokens)
    for actual, column in zip(one.columns, expected, strict=True):
        assert actual.dtype == column.dtype
        np.testing.assert_array_equal(actual, column)


def test_what_was_read_stays_as_it_was():
    rng, one = np.random.default_rng(0), request()
    one.take(columns(rng, 4, np.float32, 3).rows())
    before = one.rollout(())
    copies = [x.copy() for x in (before.tokens, before.logp, before.entropy, before.versions)]
    one.drop_last_token()
    one.take(columns(rng, 9, np.float32, 4).rows())
    assert one.count == 15 and one.rollout(()).versions.tolist() == [2] * 3 + [3] * 3 + [4] * 9
    for name, copy in zip(("tokens", "logp", "entropy", "versions"), copies, strict=True):
        np.testing.assert_array_equal(getattr(before, name), copy)


def results(rng, slots, m):
    """Returns a call's results with tokens in any columns, and those of slots without requests."""
    valid = rng.random((slots, m)) < 0.7
    tokens = rng.integers(0, 99, (slots, m))
    data = np.concatenate([tokens, valid, valid.sum(1, keepdims=True)], axis=1).astype(np.int32)
    logp, entropy = rng.standard_normal((2, slots, m)).astype(np.float32)
    top = TopLogprobs(rng.integers(0, 9, (slots, m, 2)), rng.standard_normal((slots, m, 2)))
    bounds = (0, m), (m, 2 * m), (2 * m, 2 * m + 1)
    return ResultTokens(data, *bounds, 1, logp, entropy, top, valid[:, 0], np.int32(m)), valid


def test_every_request_takes_the_tokens_of_its_slot():
    """The reference takes the row of each slot alone."""
    rng, batcher = np.random.default_rng(0), SimpleNamespace(version=7, stats=RolloutStats())
    entered = [request(n) for n in range(4)]
    for one, slot in zip(entered, (3, 0, 5, 2), strict=True):  # 1 and 4 are empty
        one.slot, one.logprobs = slot, slot == 5
    expected = {one.slot: one.columns for one in entered}
    taken, top, live_steps = 0, [], 0
    for _ in range(3):
        result, valid = results(rng, 6, 5)
        Batcher._take(batcher, entered, result)
        for slot, before in expected.items():
            row = result.get_result_at_slot(slot)
            chosen = row.valid[0].astype(bool)
            numbers = row.tokens[0][chosen], result.logp[slot][chosen], result.entropy[slot][chosen]
            new = Columns.of(*numbers, 7)
            expected[slot] = Columns(*map(np.concatenate, zip(before, new, strict=True)))
            taken += chosen.sum()
            live_steps += chosen[1:].sum()
        top.append(result.top.logp[5][valid[5]])
    for one in entered:
        for actual, column in zip(one.columns, expected[one.slot], strict=True):
            np.testing.assert_array_equal(actual, column)
    np.testing.assert_array_equal(entered[2].top.logp, np.concatenate(top))
    assert entered[0].top is None
    assert (batcher.stats.tokens, batcher.stats.live_steps) == (taken, live_steps)
