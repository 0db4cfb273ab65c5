"""Agreement of a judge's verdicts with human preferences on the same pairs. arXiv 2512.07710
reports agreement and recognised ties; position bias: arXiv 2306.05685.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from compass_jax.verifiers.judge import TIE, both_orders


class Agreement(NamedTuple):
    """Counts and shares in [0, 1], NaN for a share of no pairs.

    They are of the judged pairs (both orders have a verdict) except where noted; the joint verdict
    of two orders that disagree is a tie.
    """

    pairs: int
    judged: int
    agreement: float  # the joint verdict is the human one, of three; a random judge has a third
    preference: float  # the same, of pairs that are no tie
    tie_recall: float  # ties that the judge called ties
    tie_precision: float  # ties of the judge that are ties
    position_bias: float  # pairs whose two orders disagree
    favours_candidate: float  # of those: both orders favoured the text in the candidate's place
    favours_anchor: float
    missing: float  # pairs without a verdict in one order or both, of all pairs


def agreement(
    gold: Sequence[int], first: Sequence[int | None], swapped: Sequence[int | None]
) -> Agreement:
    """Compares verdicts with human preferences.

    Args:
        gold: of each pair 1 where the candidate is better, 0 of a tie, -1 where it is worse.
        first: the judge's verdict on the candidate against the anchor; None: there was none.
        swapped: the verdict on the anchor against the candidate.

    Raises ValueError where their lengths differ.
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
