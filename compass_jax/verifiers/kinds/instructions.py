"""Instructions that a program can check, as IFEval's rows have them (arXiv 2311.07911)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compass_jax.verifiers.base import UNKNOWN_STEPS, Example, Kind
from compass_jax.verifiers.constraints import CONSTRAINTS, variants
from compass_jax.verifiers.extract import visible


def judge(
    response: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[Mapping[str, Any] | None],
    credit: str = "all",
) -> Mapping[str, float]:
    """Returns 1 where the response follows every instruction, an empty one follows none.

    With credit "share" it is the share that is followed, the component "followed" in both. "loose"
    is 1 where every instruction is followed in IFEval's loose reading. Thoughts do not count.

    Raises ValueError, so that the sample is left out, for an instruction that is not known, and for
    arguments that it does not take.
    """
    if len(instruction_id_list) != len(kwargs) or not instruction_id_list:
        raise ValueError(
            f"{len(instruction_id_list)} instructions and {len(kwargs)} kwargs: one for each"
        )
    text = visible(response)
    pairs = list(zip(instruction_id_list, kwargs))
    followed = [_follows(*one, text) for one in pairs]
    loose = all(
        strict or any(_follows(*one, other) for other in variants(text)[1:])
        for one, strict in zip(pairs, followed)
    )
    share = sum(followed) / len(followed)
    reward = share if credit == "share" else float(all(followed))
    return {"reward": reward, "followed": share, "loose": float(loose)}


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
