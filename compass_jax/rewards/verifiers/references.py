"""Reading of a row's reference: the texts of which any is the right answer.

Published rows have texts, numbers, truth values, lists with one answer, lists as JSON text
(Skywork-OR1: `["2"]`) and several right answers (Search-R1: `{"target": ["Paris", "paris"]}`). Any
other form is an error with a remedy, because no answer could equal it as a text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from compass_jax.base.aliases import Json
from compass_jax.rewards.verifiers.extract import hashed

TARGET = "target"  # the key of several right answers
Scalar = str | int | float


def scalars(answer: Json) -> tuple[Scalar, ...]:
    """Returns the right answers of a reference, each a text that is not blank or a number.

    Raises ValueError, which names the form and the remedy, for any other reference.
    """
    if isinstance(answer, str):
        answer = _decoded(answer)
    if isinstance(answer, Mapping):
        if set(answer) != {TARGET}:
            raise ValueError(
                f"the reference is an object with {', '.join(map(repr, answer)) or 'no key'}: write"
                f' its answer as text, or as {{"{TARGET}": [...]}} if any of several is right; the'
                " verifier 'json' compares objects"
            )
        targets = answer[TARGET] if isinstance(answer[TARGET], list | tuple) else [answer[TARGET]]
        if not targets:
            raise ValueError(f"the reference's {TARGET!r} is empty: write at least one answer")
        return tuple(form for target in targets for form in _forms(target))
    if isinstance(answer, list | tuple):
        if len(answer) != 1:
            raise ValueError(
                f"the reference is a list of {len(answer)} values: write"
                f' {{"{TARGET}": [...]}} if any of them is right, or one text such as "1, 2" if an'
                " answer must have all; the verifier 'json' compares lists"
            )
        return _forms(answer[0])
    return _forms(answer)


def texts(answer: Json) -> tuple[str, ...]:
    """Returns the right answers of a reference as texts. If a text contains ####, its part after
    that mark counts. Raises ValueError like `scalars`.
    """
    return tuple(hashed(text) or text for text in map(str, scalars(answer)))


def _forms(value: Json) -> tuple[Scalar, ...]:
    """Returns a value; for a truth value both spellings, that of Python first."""
    if isinstance(value, bool):
        return str(value), str(value).lower()
    if isinstance(value, str) and value.strip():
        return (value,)
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return (value,)
    if value is None:
        raise ValueError("the row has no reference answer: write one, or leave the row out")
    raise ValueError(
        f"{value!r:.80} is no reference answer; it must be text or a finite number, a list with one"
        f' of them, or {{"{TARGET}": [...]}}'
    )


def _decoded(text: str) -> Json:
    """Returns the list of texts or the object that a text encodes as JSON; other texts unchanged.

    A list of numbers, such as [1, 2], is an answer of mathematics.
    """
    if text.strip()[:1] not in ("[", "{"):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if value and not _is_numeric(value) else text


def _is_numeric(value: Json) -> bool:
    if isinstance(value, list):
        return all(map(_is_numeric, value))
    return isinstance(value, int | float) and not isinstance(value, bool)
