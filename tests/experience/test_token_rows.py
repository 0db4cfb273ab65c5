"""Rows of tokens.jsonl: their samples, their number and the format of numbers."""

import json

import numpy as np
import pytest

from compass_jax.base.records import Group, Prompt, Rollout, Score
from compass_jax.experience.token_rows import evenly_spaced, token_rows

SIZE = 3  # rows of a group


def group(number, rewards, lengths, prompt_tokens=2):
    """Returns a group whose samples have `lengths` response tokens; a reward of None is unknown."""
    tokens = np.arange(prompt_tokens, dtype=np.int32)
    prompt = Prompt(number, 0, "sum", "1+1", tokens, "2")
    rollouts = []
    for i, n in enumerate(lengths):
        all_tokens, zeros = np.arange(prompt_tokens + n, dtype=np.int32), np.zeros(1)
        versions = np.where(all_tokens < prompt_tokens + 2, 4, 5)
        rollouts.append(Rollout(prompt, i, all_tokens, zeros, zeros, False, versions, 0))
    scores = [Score(0.0 if r is None else r, r is not None) for r in rewards]
    return Group(prompt, tuple(rollouts), tuple(scores))


def pieces(response):
    return ["ab"] * len(response)


def values(rows, length=12, **more):
    """Returns arrays by name; the entropy of token t of row r is r + t / 100."""
    at = np.arange(rows)[:, None] + np.arange(length) / 100
    return {"entropy": at, **more}


def test_a_row_has_the_numbers_of_its_sample_after_the_prompt():
    groups = [group(1, (0, 1), (3, 4)), group(2, (1,), (2,), prompt_tokens=5)]
    first, second = token_rows(groups, values(6), SIZE, pieces, 100)
    assert [x["sample"] for x in first["samples"]] == [1, 0] and first["group"] == 0
    assert first["samples"][0] == {
        "sample": 1,
        "tokens": 4,
        "text": [2, 2, 2, 2],
        "version": [4, 4, 5, 5],
        "entropy": [1.02, 1.03, 1.04, 1.05],
    }
    # row 3 * 1 + 0, from the end of its prompt
    assert second["samples"][0]["entropy"] == [3.05, 3.06]
    assert second["samples"][0]["version"] == 4
    np.testing.assert_allclose(first["means"]["entropy"], [0.03, 1.035], atol=0.006)


def test_the_best_and_the_worst_of_each_group_come_first_and_no_more_than_are_wanted():
    groups = [group(1, (0, 1, 0.5), (5, 5, 5)), group(2, (None, 0, 0), (5, 5, 5))]

    def logged_samples(most):
        rows = token_rows(groups, values(6), SIZE, pieces, most)
        return [[(x["sample"], x["tokens"]) for x in row["samples"]] for row in rows]

    assert logged_samples(12) == [[(1, 5), (0, 2)], [(1, 5)]]
    assert logged_samples(20) == [[(1, 5), (0, 5)], [(1, 5), (2, 5)]]
    assert logged_samples(10**9) == [[(1, 5), (0, 5), (2, 5)], [(1, 5), (2, 5), (0, 5)]]
    for most in range(31):
        assert sum(n for row in logged_samples(most) for _, n in row) == min(most, 30)


def test_numbers_are_short_and_one_stands_for_equal_ones():
    odd = np.zeros((3, 12))
    odd[0, 2:6] = [1.23456e-7, -0.98765, 1e5, np.nan]
    equal = np.full((3, 12), 0.25)
    diff = np.tile([1.0, -1.0], (3, 6))
    arrays = {"odd": odd, "advantage": equal, "logp_diff": diff}
    (row,) = token_rows([group(1, (1,), (4,))], arrays, SIZE, pieces, 100)
    (sample,) = row["samples"]
    assert json.dumps(sample["odd"]) == "[1.23e-07, -0.988, 100000, null]"
    assert sample["advantage"] == 0.25 and sample["logp_diff"] == [1, -1, 1, -1]
    assert row["means"]["logp_diff"] == [1] and row["means"]["odd"] == [None]


def test_a_default_step_stays_below_its_bytes():
    """A step of 2,048 tokens of 64 samples stays below the 45 bytes a token that the setting's
    description gives.
    """
    rng = np.random.default_rng(0)
    groups = [group(g, rng.random(16), [500] * 16) for g in range(4)]
    names = ("entropy", "logp", "logp_diff", "ratio")
    numbers = {name: rng.normal(0, 0.1, (64, 502)) for name in names}
    numbers |= {"advantage": np.full((64, 502), 0.5), "clipped": np.zeros((64, 502))}
    rows = token_rows(groups, numbers, 16, pieces, 2048)
    assert 20 < len(json.dumps(rows)) / 2048 < 45


@pytest.mark.parametrize(
    ("count", "most", "chosen"),
    [(64, 4, [0, 16, 32, 48]), (4, 4, [0, 1, 2, 3]), (2, 4, [0, 1]), (3, 2, [0, 1]), (5, 0, [])],
)
def test_logged_groups_lie_evenly_over_the_updates(count, most, chosen):
    assert evenly_spaced(count, most) == chosen
