"""Majority voting: the answer of a response in a canonical form, so that equal answers are equal
texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compass_jax.config.data import DataConfig
from compass_jax.records import Prompt
from compass_jax.rewards.called import Case, called
from compass_jax.rewards.checks import weighted_verifiers
from compass_jax.tasks.rows import decode_row
from compass_jax.verifiers.answers import exact
from compass_jax.verifiers.extract import extract_answer, final_answer, reference
from compass_jax.verifiers.kinds.choice import chosen
from compass_jax.verifiers.kinds.numeric import value_of

Vote = Callable[[Prompt, str], str | None]


def votes(data: DataConfig, tag: str) -> list[Vote | None]:
    """Returns, for each of `data.keyed_sources()`, the function that extracts the vote of a
    response.

    The function returns None for a response without an answer. The entry itself is None for sources
    whose responses cannot be compared as texts (programs, conversations, a user's function).

    tag: rewards.answer_tag.
    """
    return [_vote(key, source, tag) for key, source in data.keyed_sources()]


def _vote(key: str, source: Any, tag: str) -> Vote | None:
    names = weighted_verifiers(source, key)
    read = next((function for name, function in READERS.items() if name in names), None)
    if read is None:
        return None
    call = called(read, key, dict(getattr(source, "verifier_args", ())), tag)
    return lambda prompt, text: call([Case(decode_row(prompt.row), text)])[0]


def _choice(response: str, answer_tag: str, choices: Any = None, options: Any = None) -> str | None:
    columns = {"choices": choices, "options": options}
    return chosen(response, answer_tag, **{k: x for k, x in columns.items() if x}) or None


def _number(response: str, answer_tag: str) -> str | None:
    answer = final_answer(response, answer_tag)
    value = None if answer is None else value_of(answer)
    return None if value is None else str(value)


def _final_answer(response: str, answer_tag: str) -> str | None:
    return _canonical(final_answer(response, answer_tag))


def _tagged_answer(response: str, answer_tag: str) -> str | None:
    return _canonical(extract_answer(response, answer_tag))


def _canonical(text: str | None) -> str | None:
    """Returns the value of a plain number ("0.50" equals "1/2"), or else the text without case and
    white space.
    """
    if not text:
        return None
    text = reference(text)
    plain = exact(text)
    return str(plain[1]) if plain else "".join(text.split()).casefold().strip(".$")


READERS: dict[str, Callable[..., str | None]] = {
    "choice": _choice,
    "numeric": _number,
    "math": _final_answer,
    "exact": _final_answer,
    "reasoning_gym": _tagged_answer,
}
