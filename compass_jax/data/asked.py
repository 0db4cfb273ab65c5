"""Validation of the question, reference answer and labels in rows for RL and evaluation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from compass_jax.data.files import INSTRUCTIONS, DataError, check_messages, refuse_blank
from compass_jax.tasks.rows import LABELS

MOST_LABEL = 80  # maximum characters of a label


def asked_of(prompt: Any, where: str) -> tuple[str, list[dict[str, Any]]]:
    """Returns (question, messages) of a row's prompt.

    The question of a conversation joins all its turns except the system's. Raises DataError, which
    names `where`, for a value that is not a prompt.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: empty; delete the row or write the question")
        return prompt, [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise DataError(
            f"{where}: a {type(prompt).__name__}; it must be text or a list of chat messages"
        )
    messages = check_messages(prompt, where)
    if messages[-1]["role"] == "assistant":
        raise DataError(f"{where}: ends with an assistant message; it must end with what is asked")
    if not any(message["role"] == "user" for message in messages):
        raise DataError(
            f"{where}: no message of role 'user': nothing is asked; add one or delete the row"
        )
    refuse_blank(messages, "user", where, "nothing is asked")
    return (
        "\n".join(
            message["content"] for message in messages if message["role"] not in INSTRUCTIONS
        ),
        messages,
    )


def answer_of(answer: Any, where: str, compared: bool) -> str:
    """Returns the reference answer as text.

    If a verifier compares it (`compared`), it must be text or a number, or DataError is raised. A
    custom verifier may read any form.
    """
    is_integer = isinstance(answer, int) and not isinstance(answer, bool)
    is_finite_float = isinstance(answer, float) and math.isfinite(answer)
    if (
        is_integer
        or is_finite_float
        or (isinstance(answer, str) and (answer.strip() or not compared))
    ):
        return str(answer)
    if compared:
        raise DataError(
            f"{where}: {answer!r:.80} is no reference answer; it must be text or a finite number"
        )
    return json.dumps(answer, ensure_ascii=False, default=str)


def labels_of(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Returns the labels in a row's columns, such as "domain/algebra". Raises DataError for a value
    that is not a label.
    """
    labels = []
    for name in LABELS:
        value = row.get(name)
        if value is None or value == "":
            continue
        if not isinstance(value, str | int | float) or len(str(value)) > MOST_LABEL:
            raise DataError(
                f"{where}, field {name!r}: {value!r:.80} is no label; write a text of at most"
                f" {MOST_LABEL} characters or a number, or give the column another name"
            )
        labels.append(f"{name}/{value}")
    return tuple(labels)
