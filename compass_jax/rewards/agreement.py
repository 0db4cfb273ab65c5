"""Agreement of a judge's verdicts with human preferences on the same pairs.

arXiv 2512.07710 reports agreement and recognised ties. Position bias is that of arXiv 2306.05685.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from compass_jax.verifiers.judge import TIE, both_orders


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
    """Compares verdicts with human preferences.

    Args:
        gold: for each pair 1 if the candidate is better, 0 for a tie, -1 if the candidate is worse.
        first: the judge's verdict on the candidate against the anchor, or None.
        swapped: the verdict on the anchor against the candidate, or None.

    Raises:
        ValueError: the lengths differ.
    """
    rows = list(zip(gold, first, swapped, strict=True))
    judged = [
        (label, joint, one, two)
        for label, one, two in rows
        if one is not None and two is not None and (joint := both_orders(one, two)) is not None
    ]
    disagreeing = [(one, two) for _, _, one, two in judged if one != -two]
    preferred = [label == joint for label, joint, _, _ in judged if label != TIE]
    return Agreement(
        pairs=len(rows),
        judged=len(judged),
        agreement=_share([label == joint for label, joint, _, _ in judged]),
        preference=_share(preferred),
        tie_recall=_share([joint == TIE for label, joint, _, _ in judged if label == TIE]),
        tie_precision=_share([label == TIE for label, joint, _, _ in judged if joint == TIE]),
        position_bias=_share([one != -two for _, _, one, two in judged]),
        favours_candidate=_share([one + two > 0 for one, two in disagreeing]),
        favours_anchor=_share([one + two < 0 for one, two in disagreeing]),
        missing=_share([one is None or two is None for _, one, two in rows]),
    )


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
