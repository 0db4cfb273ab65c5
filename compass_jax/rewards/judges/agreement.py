"""Agreement of a judge's verdicts with human preferences on the same pairs.

arXiv 2512.07710 reports agreement and recognised ties. Position bias is that of arXiv 2306.05685.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from compass_jax.rewards.verifiers.judge import TIE, both_orders


class Agreement(NamedTuple):
    """Counts and shares in [0, 1]; a share of zero pairs is NaN.

    Shares are over the judged pairs (both orders have a verdict) except where noted. The joint
    verdict of two orders that disagree is a tie.
    """

    pairs: int
    judged: int
    agreement: float  # joint verdict is the human one of three; chance is 1/3
    preference: float  # the same, over pairs that are not ties
    tie_recall: float  # share of human ties that the judge calls ties
    tie_precision: float  # share of the judge's ties that are human ties
    position_bias: float  # share of pairs whose two orders disagree
    favours_candidate: float  # among them: both orders favour the candidate position
    favours_anchor: float
    missing: float  # share of all pairs without a verdict in either or both orders


def agreement(
    gold: Sequence[int], first: Sequence[int | None], swapped: Sequence[int | None]
) -> Agreement:
    """Compares verdicts with human preferences: for each pair, `gold` is 1 if the candidate is
    better, 0 for a tie and -1 if it is worse; `first` is the judge's verdict on the candidate
    against the anchor, `swapped` that on the anchor against the candidate, or None.
    """
    rows = list(zip(gold, first, swapped, strict=True))
    judged = [(label, one, two) for label, one, two in rows if None not in (one, two)]
    pairs = [(label, both_orders(one, two)) for label, one, two in judged]
    sums = [(one or 0) + (two or 0) for _, one, two in judged]  # 0: the two orders agree
    return Agreement(
        pairs=len(rows),
        judged=len(judged),
        agreement=_share([label == joint for label, joint in pairs]),
        preference=_share([label == joint for label, joint in pairs if label != TIE]),
        tie_recall=_share([joint == TIE for label, joint in pairs if label == TIE]),
        tie_precision=_share([label == TIE for label, joint in pairs if joint == TIE]),
        position_bias=_share([one != 0 for one in sums]),
        favours_candidate=_share([one > 0 for one in sums if one]),
        favours_anchor=_share([one < 0 for one in sums if one]),
        missing=_share([None in row for row in rows]),
    )


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
