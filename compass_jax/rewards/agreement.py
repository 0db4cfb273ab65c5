"""How well a judge's verdicts fit what people said of the same pairs. arXiv 2512.07710 reports
agreement and recognised ties; position bias: arXiv 2306.05685.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from compass_jax.verifiers.judge import TIE, both_orders


class Agreement(NamedTuple):
    """Counts and shares in [0, 1], NaN where there is nothing to count.

    Of the judged pairs (both orders have a verdict) unless said otherwise; the joint verdict of two
    orders that disagree is a tie.
    """

    pairs: int
    judged: int
    agreement: float  # joint verdict equal to what was said, of three; a random judge's is a third
    preference: float  # the same, of pairs that were no tie
    tie_recall: float  # ties that the judge called ties
    tie_precision: float  # what the judge called a tie and was one
    position_bias: float  # pairs whose two orders disagree
    favours_candidate: float  # of those: both orders favoured the text in the candidate's place
    favours_anchor: float
    missing: float  # pairs without a verdict in one order or both, of all pairs


def agreement(
    gold: Sequence[int], first: Sequence[int | None], swapped: Sequence[int | None]
) -> Agreement:
    """Compares verdicts with what people said.

    Args:
        gold: of each pair 1 where the candidate is better, 0 of a tie, -1 where it is worse.
        first: the judge's verdict on the candidate against the anchor; None: there was none.
        swapped: its verdict when the two are exchanged, on the anchor against the candidate.

    Raises ValueError where their lengths differ.
    """
    rows = list(zip(gold, first, swapped, strict=True))
    judged = [
        (said, joint, one, two)
        for said, one, two in rows
        if one is not None and two is not None and (joint := both_orders(one, two)) is not None
    ]
    apart = [(one, two) for _, _, one, two in judged if one != -two]
    preferred = [said == joint for said, joint, _, _ in judged if said != TIE]
    return Agreement(
        pairs=len(rows),
        judged=len(judged),
        agreement=_share([said == joint for said, joint, _, _ in judged]),
        preference=_share(preferred),
        tie_recall=_share([joint == TIE for said, joint, _, _ in judged if said == TIE]),
        tie_precision=_share([said == TIE for said, joint, _, _ in judged if joint == TIE]),
        position_bias=_share([one != -two for _, _, one, two in judged]),
        favours_candidate=_share([one + two > 0 for one, two in apart]),
        favours_anchor=_share([one + two < 0 for one, two in apart]),
        missing=_share([one is None or two is None for _, one, two in rows]),
    )


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else math.nan
