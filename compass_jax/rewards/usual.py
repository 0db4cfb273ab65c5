"""The usual verifiers, by the names of config/verifiers.py: functions of what their parameters name
(rewards/called.py). Each gives a reward in [0, 1], and says where it found no answer.

None of them evaluates text. `math` and `regex` may take long on a hostile one, and run where they
can be killed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from compass_jax.rewards.extract import chosen_letter, final_answer, hashed, json_text
from compass_jax.rewards.verifiers import math_decided, math_verify_score
from compass_jax.untrusted import UntrustedError, parse_json

NOTHING = {"reward": 0.0, "extracted": False}  # there was no answer to judge: wrong, and counted


def math(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any]:
    """1 where the final answer equals the reference by math-verify. Of a reference with #### in it,
    what follows counts.
    """
    found = final_answer(response, answer_tag)
    return NOTHING if found is None else math_verify_score(found, _reference(answer))


def math_at_once(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any] | None:
    """What `math` gives, where no algebra is needed to say it; else None."""
    found = final_answer(response, answer_tag)
    return NOTHING if found is None else math_decided(found, _reference(answer))


def exact(response: str, answer: Any, answer_tag: str) -> float | Mapping[str, Any]:
    """1 where the final answer is the reference, character by character; a run of white space
    counts as one blank.
    """
    found = final_answer(response, answer_tag)
    if found is None:
        return NOTHING
    return float(" ".join(found.split()) == " ".join(_reference(answer).split()))


def choice(
    response: str, answer: Any, answer_tag: str, choices: str = "ABCDEFGHIJ"
) -> float | Mapping[str, Any]:
    """1 where the chosen letter is the reference: a letter, or its number counted from 0."""
    letters = choices.upper()
    found = chosen_letter(response, answer_tag, letters)
    if found is None:
        return NOTHING
    if isinstance(answer, int) and not isinstance(answer, bool):
        return float(0 <= answer < len(letters) and found == letters[answer])
    return float(found == _reference(answer).strip().strip("().").upper())


def json(response: str, answer_tag: str, answer: Any = None) -> Mapping[str, Any]:
    """1 for JSON that equals the reference (JSON as text, or a value), or for any JSON where there
    is no reference.
    """
    try:
        found = parse_json(json_text(response, answer_tag), "the answer")
    except UntrustedError:
        return NOTHING
    if answer is None:
        return {"reward": 1.0}
    wanted = parse_json(answer, "the reference") if isinstance(answer, str) else answer
    return {"reward": float(_equal(found, wanted))}


def regex(response: str, pattern: str) -> float:
    """1 where the pattern is found in the response."""
    return float(re.search(pattern, response) is not None)


def format(response: str, answer_tag: str, think_tag: str = "think") -> float:
    """1 for <think>...</think><answer>...</answer> and nothing else: each mark once, in this order,
    neither part empty. With an empty `answer_tag` the answer is what follows the thoughts.
    """
    marks = [f"<{think_tag}>", f"</{think_tag}>"]
    marks += [f"<{answer_tag}>", f"</{answer_tag}>"] if answer_tag else []
    if any(response.count(mark) != 1 for mark in marks):
        return 0.0
    rest, parts = response, []
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:
            return 0.0
        parts.append(before.strip())
    parts.append(rest.strip())
    wanted = [False, True, False, True, False] if answer_tag else [False, True, True]
    return float([bool(part) for part in parts] == wanted)


def length(response: str, most_chars: int, free_chars: int | None = None) -> float:
    """1 up to `free_chars` characters, down to 0 at `most_chars` in a straight line; without
    `free_chars` 1 up to `most_chars` and 0 above.
    """
    free = most_chars if free_chars is None else free_chars
    if len(response) <= free:
        return 1.0
    return (
        max(0.0, (most_chars - len(response)) / (most_chars - free)) if most_chars > free else 0.0
    )


def _reference(answer: Any) -> str:
    if answer is None:
        raise ValueError("the row has no reference answer")
    text = str(answer)
    return hashed(text) or text


def _equal(a: Any, b: Any) -> bool:
    """Whether two values are the same JSON: true is not 1, and 1 is 1.0."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, int | float) and isinstance(b, int | float):
        return a == b
    return type(a) is type(b) and a == b
