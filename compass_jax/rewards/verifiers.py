"""Answer checkers: text in, score out. Imported by reward workers: nothing here may import jax.

A score is the checker's own number, 1 for right and 0 for wrong; anything that raises is a failure of the check,
which the caller reports as unknown and never as 0.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

FORMAT_CREDIT = 0.05  # reasoning-gym's scorers give 0.01 or 0.05 for any answer that can be parsed


class Check(NamedTuple):
    """How the answers of one data source are checked. `kind`: "reasoning_gym", "math", or "module:function"."""

    kind: str
    dataset: str = ""
    options: tuple[tuple[str, Any], ...] = ()


class Task(NamedTuple):
    """One answer to check."""

    source: int  # index into the list of checks
    response: str  # the model's text
    answer: str  # the reference
    item: str  # the procedural entry as JSON


def extract_answer(response: str, tag: str) -> str | None:
    """The text between the last `<tag>` that is closed and its `</tag>`, stripped; None if there is none.

    An empty `tag` takes the whole response. Something that opens after the last closed answer and never closes is ignored.
    """
    if not tag:
        return response.strip()
    end = response.rfind(f"</{tag}>")
    start = response.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else response[start + len(tag) + 2 : end].strip()


def math_verify_score(answer: str, reference: str) -> float:
    """1.0 if math-verify finds `answer` equal to `reference`, else 0.0.

    A reference that is a word ("Paris") is compared as text, without regard to case and white space: as mathematics it
    would be a product of letters, equal to each of its anagrams. There is no time limit in here: math-verify's own limits
    turn an undecided comparison into "wrong". The worker is killed from outside instead.
    """
    if _plain(answer) == _plain(reference):
        return 1.0
    if re.search(r"[^\W\d_]{3,}", reference) and not re.search(r"[\d\\$=+*/^(){}\[\]]", reference):
        return 0.0
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    gold = math_verify.parse(_delimited(reference), parsing_timeout=None)
    found = math_verify.parse(_delimited(answer), parsing_timeout=None)
    if not gold or not found:
        return 0.0
    return float(math_verify.verify(gold, found, timeout_seconds=None, raise_on_error=True))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _delimited(text: str) -> str:
    """math-verify reads an expression as LaTeX only between delimiters."""
    return text if any(mark in text for mark in ("$", "\\boxed", "\\(", "\\[")) else f"${text}$"


def decode_item(item_json: str) -> dict[str, Any]:
    """A procedural entry from its JSON (written by `data.procedural.encode_item`), tuples, sets and non-text keys included."""
    return json.loads(item_json, object_hook=_untagged)


def _untagged(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        ((tag, content),) = value.items()
        if tag == "!tuple":
            return tuple(content)
        if tag == "!set":
            return set(content)
        if tag == "!dict":
            return {key: item for key, item in content}
    return value


@lru_cache(maxsize=256)
def _dataset(name: str, options: tuple[tuple[str, Any], ...]) -> Any:
    import reasoning_gym

    def as_list(value: Any) -> Any:
        return [as_list(item) for item in value] if isinstance(value, tuple) else value

    return reasoning_gym.create_dataset(name, **{key: as_list(value) for key, value in options})


def reasoning_gym_score(dataset_name: str, item_json: str, answer: str, options: tuple[tuple[str, Any], ...] = ()) -> float:
    """The score of the dataset's own scorer (some depend on the dataset's `options`), unchanged but for two cases.

    Up to FORMAT_CREDIT, which any parsable answer gets, counts as 0, so that a group of wrong answers is uniform. A scorer
    that raises on this answer but not on the reference could not read the answer: 0. One that raises on both raises here.
    """
    dataset, entry = _dataset(dataset_name, options), decode_item(item_json)
    try:
        score = float(dataset.score_answer(answer, entry))
    except (ArithmeticError, AttributeError, LookupError, SyntaxError, TypeError, ValueError):
        dataset.score_answer(entry["answer"], entry)
        return 0.0
    return 0.0 if 0.0 < score <= FORMAT_CREDIT else score


def build(check: Check, tag: str) -> Callable[[Task], float]:
    """The function that scores a source's tasks, everything it needs imported. A response without an answer scores 0."""
    if check.kind == "reasoning_gym":
        _dataset(check.dataset, check.options)
        score = lambda answer, task: reasoning_gym_score(check.dataset, task.item, answer, check.options)  # noqa: E731
    elif check.kind == "math":
        math_verify_score("$1/2$", "$0.5$")
        score = lambda answer, task: math_verify_score(answer, task.answer)  # noqa: E731
    else:
        module, _, function = check.kind.partition(":")
        verify = getattr(importlib.import_module(module), function)
        return lambda task: float(verify(task.response, task.answer))

    def score_response(task: Task) -> float:
        answer = extract_answer(task.response, tag)
        return 0.0 if answer is None else score(answer, task)

    return score_response
