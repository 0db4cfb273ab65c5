"""Verifiers that compare or measure a text: characters, format, length, a pattern, a verdict, JSON
by value.
"""

from __future__ import annotations

import re
from json import dumps

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.chat.base import AUTO
from compass_jax.base.untrusted import UntrustedError, parse_json
from compass_jax.config.chat import find_format
from compass_jax.config.kinds import (
    FINAL_FORM,
    NOTHING,
    UNKNOWN_STEPS,
    Example,
    Form,
    Kind,
    complaints,
)
from compass_jax.rewards.verifiers.extract import final_answer, json_text, visible
from compass_jax.rewards.verifiers.judge import verdict
from compass_jax.rewards.verifiers.kinds.math import final_vote, first_text
from compass_jax.rewards.verifiers.limits import OutOfTime, processor_time
from compass_jax.rewards.verifiers.references import texts
from compass_jax.rewards.verifiers.schemas import conforms, decoded, schema_fault
from compass_jax.rewards.verifiers.values import equal, without_nulls


def exact(
    response: str, answer: Json, answer_tag: str, chat_format: str = AUTO
) -> float | JsonMapping:
    """Returns 1 if the final answer equals the reference, or any of its texts, character by
    character.

    Each run of white space counts as one blank.
    """
    text = final_answer(response, answer_tag, chat_format)
    if text is None:
        return NOTHING
    return float(text.split() in [right.split() for right in texts(answer)])


def form(response: str, answer_tag: str, think_tag: str = "think") -> float:
    """Returns 1 for exactly <think>...</think><answer>...</answer>: each mark once, in this order,
    with both parts non-empty. With an empty `answer_tag`, the answer is the text after the
    thoughts.
    """
    tags = [think_tag, answer_tag] if answer_tag else [think_tag]
    marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
    if any(response.count(mark) != 1 for mark in marks):
        return 0.0
    rest, filled = response, []
    for mark in marks:
        before, match, rest = rest.partition(mark)
        if not match:
            return 0.0
        filled.append(bool(before.strip()))
    filled.append(bool(rest.strip()))
    right = [False, True, False, True, False] if answer_tag else [False, True, True]
    return float(filled == right)


def length(response: str, most_chars: int, free_chars: int | None = None) -> float:
    """Returns 1 up to `free_chars` characters, decreasing linearly to 0 at `most_chars`. Without
    `free_chars`, returns 1 up to `most_chars` and 0 above.
    """
    free = most_chars if free_chars is None else free_chars
    if len(response) <= free:
        return 1.0
    left = max(0.0, most_chars - len(response))
    return left / (most_chars - free) if most_chars > free else 0.0


def _length_steps(arguments: JsonMapping) -> int:
    if "most_chars" not in arguments:
        return UNKNOWN_STEPS  # it may differ by row
    return max(1, arguments["most_chars"] - arguments.get("free_chars", arguments["most_chars"]))


def _length_complaint(arguments: JsonMapping) -> str:
    if "most_chars" not in arguments:
        return ""
    most, free = arguments["most_chars"], arguments.get("free_chars", arguments["most_chars"])
    numbers = all(isinstance(x, int) and not isinstance(x, bool) for x in (most, free))
    if numbers and 0 <= free <= most and most > 0:
        return ""
    return (
        f"most_chars = {most!r:.40} and free_chars = {free!r:.40} must be whole numbers,"
        " free_chars at most most_chars"
    )


def regex(response: str, pattern: str, chat_format: str = AUTO) -> float:
    """Returns 1 if the pattern is found in the response, in one second of processor time.

    Thoughts are searched only if the pattern contains "think" or a mark that opens one.
    """
    reader = find_format(chat_format)
    marks = ("think", *(mark.casefold() for mark, _ in reader.thoughts))
    named = any(mark in pattern.casefold() for mark in marks)
    text = response if named else reader.read(response).text
    try:
        with processor_time():
            return float(re.search(pattern, text) is not None)
    except OutOfTime:
        return 0.0


def _pattern_fault(pattern: Json) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError, RecursionError, OverflowError) as error:
        return f": {error}"
    return ""


def pair_verdict(response: str, answer: Json, chat_format: str = AUTO) -> float | JsonMapping:
    """Returns 1 if the last line with a verdict has the reference's verdict: Better, Tie or Worse.

    Raises ValueError for any other reference.
    """
    right = verdict(_answer_verdict({"answer": answer}))
    value = verdict(visible(response, chat_format))
    return NOTHING if value is None else float(value == right)


def _answer_verdict(arguments: JsonMapping) -> str:
    text = first_text(arguments)
    if verdict(text) is None:
        raise ValueError(f"the reference {text!r:.40} is no verdict; write Better, Tie or Worse")
    return text


def json(
    response: str,
    answer_tag: str,
    answer: Json = None,
    schema: Json = None,
    chat_format: str = AUTO,
) -> JsonMapping:
    """Returns 1 for JSON that conforms to the schema and equals the reference, if they are given.

    Schema and reference are JSON texts or values. With a schema, the component "valid" is 1 if the
    answer conforms to it.
    """
    try:
        value = parse_json(json_text(response, answer_tag, chat_format), "the answer")
    except UntrustedError:
        return NOTHING
    is_equal = answer is None or _equals_reference(value, answer)
    if schema is None:
        return {"reward": float(is_equal)}
    valid = conforms(value, decoded(schema))
    return {"reward": float(is_equal and valid), "valid": float(valid)}


def _json_at_once(
    response: str,
    answer_tag: str,
    answer: Json = None,
    schema: Json = None,
    chat_format: str = AUTO,
) -> JsonMapping | None:
    """Returns the result of `json`; None with a schema, whose patterns may run forever."""
    return json(response, answer_tag, answer, None, chat_format) if schema is None else None


def _equals_reference(value: Json, answer: Json) -> bool:
    """Returns whether the answer equals the reference. Null fields count as absent if the reference
    is an object of the row, but not if it is JSON text.
    """
    if isinstance(answer, str):
        return equal(value, parse_json(answer, "the reference"))
    return equal(without_nulls(value), without_nulls(answer))


def _answer_json(arguments: JsonMapping) -> str:
    """Returns the reference as JSON text; empty without one. Raises ValueError for a faulty
    reference or schema.
    """
    answer, schema = arguments.get("answer"), arguments.get("schema")
    if schema is not None and (fault := schema_fault(schema)):
        raise ValueError(f"its schema{fault}")
    if not isinstance(answer, str):
        return "" if answer is None else dumps(answer, ensure_ascii=False, default=str)
    try:
        parse_json(answer, "the reference")
    except UntrustedError as error:
        raise ValueError(f"{error}; the verifier 'json' compares JSON") from error
    return answer


KINDS = {
    "exact": Kind(
        exact,
        "the final answer is the reference, character by character",
        Example({"answer": "New York"}, "<answer>New  York</answer>", "<answer>York</answer>"),
        form=FINAL_FORM,
        vote=final_vote,
        answer_text=first_text,
    ),
    "format": Kind(
        form,
        "the response is <think>...</think><answer>...</answer> and nothing else",
        Example(
            {}, "<think>so</think><answer>5</answer>", "<think>so</think> <answer>5</answer> bye"
        ),
        answer=False,
        takes=("think_tag",),
        form=Form(
            "<think>",
            "Think between <think> and </think>, then answer between <{tag}> and </{tag}>.",
        ),
        looks_for="",
    ),
    "length": Kind(
        length,
        "the response has at most `free_chars` characters, down to 0 at `most_chars`",
        Example({"most_chars": 10, "free_chars": 4}, "four", "ten or more"),
        answer=False,
        takes=("most_chars", "free_chars"),
        looks_for="",
        steps=_length_steps,
        complaint=_length_complaint,
    ),
    "regex": Kind(
        regex,
        "the pattern is found in the response",
        Example({"pattern": r"\bParis\b"}, "It is Paris.", "It is Parisian."),
        answer=False,
        takes=("pattern",),
        looks_for="",
        may_hang=True,  # a pattern can run forever
        complaint=complaints(pattern=_pattern_fault),
    ),
    "verdict": Kind(
        pair_verdict,
        "the last verdict of the response, Better, Tie or Worse, is the reference",
        Example({"answer": "Tie"}, "Both say the same.\nTie", "The candidate says more.\nBetter"),
        looks_for="the last line with Better, Tie or Worse",
        answer_text=_answer_verdict,
    ),
    "json": Kind(
        json,
        "the answer is JSON that fits `schema` and equals the reference, where they are given",
        Example({"answer": '{"a": [1, true]}'}, '{"a": [1.0, true]}', '{"a": [1, 1]}'),
        answer=False,
        takes=("schema",),
        form=Form("json", "Answer with one JSON object in a block between ```json and ```."),
        looks_for="JSON: {last}, else in a block between ``` marks, else all of it",
        may_hang=True,
        at_once=_json_at_once,
        answer_text=_answer_json,
        complaint=complaints(schema=schema_fault),
    ),
}
