"""Chat formats by the value of `data.chat_format`."""

from __future__ import annotations

import re
from functools import lru_cache

from compass_jax.base.chat.base import AUTO, ChatFormat, any_format, chat_formats
from compass_jax.config.errors import ConfigError, check
from compass_jax.config.named import is_name, load

_MARKS = re.compile(r"(\S{2,40}?)\s*\.\.\.\s*(\S{2,40})")


@lru_cache(maxsize=64)
def find_format(name: str) -> ChatFormat:
    """Returns the format of a name, of "auto" and "any" (any_format), of a user's file, written as
    "file.py:FORMAT", or of marks of thoughts, written as "<plan>...</plan>". Raises ConfigError for
    another name.
    """
    if name in (AUTO, "any", ""):
        return any_format()
    if (known := chat_formats().get(name)) is not None:
        return known
    setting = f"data.chat_format = {name!r:.200}"
    if is_name(name):
        value = load(name, "data.chat_format")
        kind = type(value).__name__
        hint = "make it a compass_jax.base.chat.base.ChatFormat"
        check(isinstance(value, ChatFormat), f"{setting}: it is a {kind}; {hint}")
        return value
    if (marks := _MARKS.fullmatch(name)) is not None:
        return ChatFormat(name, (marks.groups(),), any_format().own_calls)  # type: ignore[arg-type]
    raise ConfigError(
        f"{setting}: there is no such format; write auto, any, {', '.join(chat_formats())}, a"
        " format of yours as file.py:FORMAT, or marks of thoughts as '<plan>...</plan>'"
    )
