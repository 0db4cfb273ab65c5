"""The agreement of a judge's verdicts with gold labels, compared with counts by hand."""

import math

import pytest

from compass_jax.rewards.judges.agreement import agreement

# Each row: gold label, verdict of candidate against anchor, verdict of anchor against candidate.
ROWS = [
    (1, 1, -1),  # right
    (1, 1, 1),  # both orders favour the candidate's place: a tie
    (1, -1, 1),  # wrong
    (-1, -1, 1),  # right
    (-1, -1, -1),  # both orders favour the anchor's place
    (0, 0, 0),  # right
    (0, 1, -1),  # wrong
    (0, 0, 1),  # the orders disagree: a tie, which is right
    (1, None, -1),
    (0, None, None),
]


def test_shares_by_hand():
    shares = agreement(*zip(*ROWS, strict=True))
    assert (shares.pairs, shares.judged) == (10, 8)
    assert shares.agreement == 4 / 8 and shares.preference == 2 / 5
    assert shares.tie_recall == 2 / 3 and shares.tie_precision == 2 / 4
    assert shares.position_bias == 3 / 8 and shares.missing == 2 / 10
    assert (shares.favours_candidate, shares.favours_anchor) == (2 / 3, 1 / 3)


def test_nothing_to_count_is_not_a_number():
    shares = agreement([1], [None], [1])
    assert shares.judged == 0 and shares.missing == 1.0
    assert all(math.isnan(x) for x in shares[2:9])
    with pytest.raises(ValueError, match="zip"):
        agreement([1], [], [])
