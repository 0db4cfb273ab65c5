"""Where the answer stands in a response, and which numbers a verifier may return. Each function
reads a text once, however it is made.
"""

from __future__ import annotations

import math
import numbers
import re
from typing import Any

_BRACES = re.compile(r"\\boxed\s{0,8}\{|\\.|[{}]", re.DOTALL)
_LEADING = re.compile(r"(?:\\(?:text|math)[a-z]{0,4}\{|\W){0,10}([A-Za-z])(?=\W|$)")
_NAMED = re.compile(
    r"\b(?:answer|choice|option)\W{1,10}(?:is\W{1,10})?(?:option\W{1,10})?([A-Z])\b", re.IGNORECASE
)
_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


def extract_answer(response: str, tag: str) -> str | None:
    """The text between the last `<tag>` that is closed and its `</tag>`, stripped; None if there is
    none.

    An empty `tag` takes the whole response. Something that opens after the last closed answer and
    never closes is ignored.
    """
    if not tag:
        return response.strip()
    end = response.rfind(f"</{tag}>")
    start = response.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else response[start + len(tag) + 2 : end].strip()


def boxed(text: str) -> str | None:
    r"""What the last closed \boxed{...} holds, stripped; None where there is none."""
    opened: list[int] = []  # where each open bracket's content begins; -1: it is no box's
    found = None
    for mark in _BRACES.finditer(text):
        if mark[0].startswith("\\boxed"):
            opened.append(mark.end())
        elif mark[0] == "{":
            opened.append(-1)
        elif mark[0] == "}" and opened and (start := opened.pop()) >= 0:
            found = text[start : mark.start()].strip()
    return found


def hashed(text: str) -> str | None:
    """What follows the last #### on its line, stripped; None where nothing does."""
    _, mark, rest = text.rpartition("####")
    return (rest.split("\n", 1)[0].strip() or None) if mark else None


def final_answer(response: str, tag: str) -> str | None:
    r"""The text in the last closed `<tag>`; else in the last \boxed{...}; else after the last ####;
    None where there is none of them. An empty `tag` takes the whole response.
    """
    for found in (extract_answer(response, tag), boxed(response), hashed(response)):
        if found is not None:
            return found or None
    return None


def chosen_letter(response: str, tag: str, choices: str) -> str | None:
    """The letter out of `choices` that a response chooses: the first of its final answer, else the
    last that "the answer is", "choice" or "option" comes before; None where there is none.
    """
    found = final_answer(response, tag)
    if found is not None and (lead := _LEADING.match(found)) and lead[1].upper() in choices:
        return lead[1].upper()
    said = [mark[1].upper() for mark in _NAMED.finditer(found or response)]
    return next((letter for letter in reversed(said) if letter in choices), None)


def json_text(response: str, tag: str) -> str:
    """The last closed `<tag>`; else the last block between ``` marks; else the whole response."""
    if (found := extract_answer(response, tag)) is not None:
        return found
    blocks = _FENCED.findall(response)
    return blocks[-1].strip() if blocks else response.strip()


def reference(answer: Any) -> str:
    """The row's reference as text; of one with #### in it, what follows. Raises ValueError where
    there is none.
    """
    if answer is None:
        raise ValueError("the row has no reference answer")
    text = str(answer)
    return hashed(text) or text


def number(value: Any) -> float:
    """`value` as a float. Raises TypeError for what is no number ("1"), ValueError for NaN."""
    if not isinstance(value, numbers.Real) and type(value).__module__ != "numpy":
        raise TypeError(f"the check returned {value!r:.100}: it must be a number")
    if not math.isfinite(found := float(value)):
        raise ValueError(f"the check returned {found}")
    return found
