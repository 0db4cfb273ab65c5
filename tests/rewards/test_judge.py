"""A judge's verdict is what its last word on the matter says, or nothing."""

import itertools

import pytest

from compass_jax.rewards.judge import BETTER, TIE, WORSE, both_orders, verdict

SAID = [
    ("Better", BETTER),
    ("The anchor is worse in style.\nVerdict: **Tie**.", TIE),
    ("# verdict\n\n`WORSE`\n", WORSE),
    ("Ｂｅｔｔｅｒ", BETTER),
    ("Urteil: besser", BETTER),
    ("结论：更差", WORSE),
    ("\\boxed{tie}", TIE),
    ("Better\nHope that helps!", BETTER),
    ("", None),
    ("<html><body>502 Bad Gateway</body></html>", None),
    ("tiebreak betterment worsened", None),
    ("It is not better.", None),
    ("Better, Tie or Worse", None),
    ("Better\n\nBetter or Worse?", None),
]


@pytest.mark.parametrize(("text", "expected"), SAID)
def test_the_last_line_with_a_verdict_decides(text, expected):
    assert verdict(text) == expected


def test_orders_that_disagree_are_a_tie_and_a_missing_one_leaves_none():
    agree = {(BETTER, WORSE): BETTER, (WORSE, BETTER): WORSE, (TIE, TIE): TIE}
    for pair in itertools.product((BETTER, TIE, WORSE), repeat=2):
        assert both_orders(*pair) == agree.get(pair, TIE)
    for one in (BETTER, TIE, WORSE, None):
        assert both_orders(one, None) is None and both_orders(None, one) is None
