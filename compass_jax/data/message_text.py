"""Chat messages that a column holds as text: as JSON, or in forms that are refused."""

from __future__ import annotations

import json
import re
from typing import NoReturn

from compass_jax.base.aliases import Json
from compass_jax.base.untrusted import parse_json
from compass_jax.data.files import MOST_DIGITS, DataError

# the beginning of an object or of a list of objects: of JSON, of JSON that was encoded twice, of
# Python's repr and of numpy's
_BEGINS = re.compile(r"""\s*+"?+\s*+(?:array\(\s*+)?+\[?+\s*+\{\s*+\\*+["']""")
_NAMES = r"system|developer|user|assistant|tool|human|gpt|chatgpt|observation|function"
_SPEAKER = re.compile(rf"""["'](?:role|from)\\*["']\s*:\s*\\*["'](?:{_NAMES})\\*["']""")
_SPEECH = re.compile(r"""["'](?:content|value|tool_calls)\\*["']\s*:""")
_REMEDY = (
    "write the messages as a list, or as the JSON text of one (json.dumps); if it is a text that"
    " only shows messages, begin it with a word"
)


def messages_in(value: Json, where: str) -> Json:
    """Returns the messages of a JSON text, even if it was encoded twice, and every other value
    unchanged.

    A JSON value that is followed by text is a text, such as a question about it. Raises DataError,
    which names `where`, for messages in another form: Python's repr, JSON that is cut off, one
    message or an object instead of a list, one message per line.
    """
    if not isinstance(value, str) or not _BEGINS.match(value):
        return value
    try:
        parsed = parse_json(value, where, error=DataError, most_digits=MOST_DIGITS)
    except DataError as error:
        if _shows_messages(value) and not _is_followed_by_text(value, error):
            raise DataError(
                f"{where}: it begins as chat messages do, and cannot be read ({_reason(error)});"
                f" {_REMEDY}"
            ) from error
        return value
    if isinstance(parsed, str):
        inner = messages_in(parsed, where)
        return value if inner is parsed else inner
    if isinstance(parsed, list):
        return parsed if any(map(_is_message, parsed)) else value
    if _is_message(parsed):
        _refuse(where, "one chat message, and not a list")
    lists = [x for x in parsed.values() if isinstance(x, list) and any(map(_is_message, x))]
    if lists and _shows_messages(value):
        _refuse(where, "an object with chat messages inside")
    return value


def _shows_messages(text: str) -> bool:
    return bool(_SPEAKER.search(text) and _SPEECH.search(text))


def _is_message(value: Json) -> bool:
    """Returns whether a value has the fields of a chat message."""
    if not isinstance(value, dict):
        return False
    if {"from", "value"} <= set(value):
        return set(value) == {"from", "value"} or _shows_messages(json.dumps(value))
    return "role" in value and ("content" in value or "tool_calls" in value)


def _is_followed_by_text(text: str, error: DataError) -> bool:
    """Returns whether a complete JSON value is followed by something else than a further one."""
    cause = error.__cause__
    if not isinstance(cause, json.JSONDecodeError) or cause.msg != "Extra data":
        return False
    return text[cause.pos :].lstrip()[:1] not in ("{", "[", ",")


def _reason(error: DataError) -> str:
    return str(error.__cause__ or error)


def _refuse(where: str, form: str) -> NoReturn:
    raise DataError(f"{where}: the text is {form}; {_REMEDY}")
