"""Instructions that a program can check, as IFEval's rows have them (arXiv 2311.07911)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compass_jax.verifiers.base import UNKNOWN_STEPS, Example, Kind
from compass_jax.verifiers.constraints import CONSTRAINTS


def judge(
    response: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any] | None],
    credit: str = "all",
) -> Mapping[str, float]:
    """1 where the response follows every instruction; with credit "share" the share that it
    follows, which is the component "followed" in both. An empty response follows none.

    Raises ValueError, so that the sample is left out, for an instruction that nobody knows, and for
    arguments that it does not take.
    """
    if len(instruction_id_list) != len(kwargs) or not instruction_id_list:
        raise ValueError(
            f"{len(instruction_id_list)} instructions and {len(kwargs)} kwargs: one for each"
        )
    followed = [_follows(*one, response) for one in zip(instruction_id_list, kwargs)]
    share = sum(followed) / len(followed)
    return {"reward": share if credit == "share" else float(all(followed)), "followed": share}


def _follows(name: str, arguments: Mapping[str, Any] | None, response: str) -> bool:
    if name not in CONSTRAINTS:
        raise ValueError(f"no instruction {name!r:.80}; there are {', '.join(CONSTRAINTS)}")
    # files that hold all rows in one table write the others' arguments as null
    given = {key: value for key, value in (arguments or {}).items() if value is not None}
    try:
        return bool(response.strip()) and CONSTRAINTS[name](response, **given)
    except TypeError as error:
        raise ValueError(f"{name} with {given!r:.200}: {error}") from error


def _complaint(given: Mapping[str, Any]) -> str:
    credit = given.get("credit", "all")
    return "" if credit in ("all", "share") else f"credit = {credit!r:.40} must be all or share"


KIND = Kind(
    judge,
    "the response follows each instruction of IFEval's kinds, or the share with credit=share",
    Example(
        {
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{}, {"num_words": 3, "relation": "at least"}],
        },
        "no comma here",
        "yes, a comma",
    ),
    answer=False,
    takes=("instruction_id_list", "kwargs", "credit"),
    looks_for="",
    steps=lambda given: UNKNOWN_STEPS if given.get("credit") == "share" else 1,
    may_hang=True,  # a row's words become patterns
    complaint=_complaint,
)
