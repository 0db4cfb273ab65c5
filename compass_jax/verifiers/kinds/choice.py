"""Multiple choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from compass_jax.verifiers.base import IN_ANSWER, NOTHING, Example, Kind
from compass_jax.verifiers.extract import chosen_letter, final_answer, reference

LETTERS = "ABCDEFGHIJ"


def judge(
    response: str,
    answer: Any,
    answer_tag: str,
    choices: str = LETTERS,
    options: Sequence[str] | Mapping[str, str] = (),
) -> float | Mapping[str, Any]:
    """1 where the chosen option is the reference: a letter, its number counted from 0, or its text.
    A final answer that is an option's text chooses this option.
    """
    letters = choices.upper()
    found = chosen(response, answer_tag, choices, options)
    if found is None:
        return NOTHING
    if isinstance(answer, int) and not isinstance(answer, bool):
        return float(0 <= answer < len(letters) and found == letters[answer])
    text = reference(answer)
    said = _of_text(text, _texts(options, letters))
    return float(found == (said or text.strip().strip("().").upper()))


def chosen(
    response: str, tag: str, choices: str = LETTERS, options: Sequence[str] | Mapping[str, str] = ()
) -> str | None:
    """The letter of the option that a response chooses, None where it chooses none; the arguments
    are those of `judge`.
    """
    letters = choices.upper()
    found = _of_text(final_answer(response, tag), _texts(options, letters))
    return found or chosen_letter(response, tag, letters)


def _texts(options: Any, letters: str) -> dict[str, str]:
    """Letter -> text, from a list in the letters' order or a mapping; anything else has none."""
    if isinstance(options, Mapping):
        pairs = [(str(name).upper(), text) for name, text in options.items()]
    else:
        pairs = list(zip(letters, options if isinstance(options, list | tuple) else ()))
    return {letter: _plain(text) for letter, text in pairs if isinstance(text, str)}


def _of_text(text: str | None, texts: Mapping[str, str]) -> str | None:
    """The one letter whose text this is; a text that is a letter itself is read as the letter."""
    plain = _plain(text or "")
    found = [letter for letter, said in texts.items() if said == plain]
    return found[0] if len(found) == 1 and plain.upper() not in texts else None


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().strip(".")


KIND = Kind(
    judge,
    "the chosen option is the reference: its letter, number or text",
    Example({"answer": "B", "options": ["iron", "gold"]}, r"\boxed{Gold}", "The answer is (A)."),
    takes=("choices", "options"),
    looks_for=IN_ANSWER + "; else a letter after 'the answer is'",
)
