"""What a judge's verdicts say of it, against counts by hand."""

import math

import pytest

from compass_jax.rewards.agreement import agreement

# gold, candidate against anchor, anchor against candidate
ROWS = [
    (1, 1, -1),  # right
    (1, 1, 1),  # both orders favour the candidate's place: a tie
    (1, -1, 1),  # wrong
    (-1, -1, 1),  # right
    (-1, -1, -1),  # both favour the anchor's place
    (0, 0, 0),  # right
    (0, 1, -1),  # wrong
    (0, 0, 1),  # orders disagree: a tie, which it was
    (1, None, -1),
    (0, None, None),
]


def test_shares_by_hand():
    found = agreement(*zip(*ROWS, strict=True))
    assert (found.pairs, found.judged) == (10, 8)
    assert found.agreement == 4 / 8 and found.preference == 2 / 5
    assert found.tie_recall == 2 / 3 and found.tie_precision == 2 / 4
    assert found.position_bias == 3 / 8 and found.missing == 2 / 10
    assert (found.favours_candidate, found.favours_anchor) == (2 / 3, 1 / 3)


def test_nothing_to_count_is_not_a_number():
    found = agreement([1], [None], [1])
    assert found.judged == 0 and found.missing == 1.0
    assert all(math.isnan(x) for x in found[2:9])
    with pytest.raises(ValueError, match="zip"):
        agreement([1], [], [])
