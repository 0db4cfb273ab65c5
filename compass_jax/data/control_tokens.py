"""Contents that spell control tokens: encoded as text, so that no message opens a turn or ends one.

1. `hide` puts a sentinel into each spelling inside the messages, before the template sees them.
2. In the rendered text a spelling without a sentinel is the template's own.
3. `encode` puts a mark in the place of each of these, takes the sentinels out, and encodes the text
   with
   a copy of the tokenizer that knows the marks and no control token.

Texts without spellings take none of these ways. Sentinel and marks are noncharacters of Unicode
(U+FDD0 to U+FDEF).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from compass_jax.errors import UserError

# not kept apart where they are special tokens: they open and close no turn, and a thought that is
# learnt or judged has to have the tokens that a template writes for it
THOUGHTS = ("<think>", "</think>")
SENTINEL = "\ufdd0"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
LONG = 4096  # characters
_DIGITS = [chr(0xFDD2 + n) for n in range(16)]


def ids_of(backend: Any, text: str) -> list[int]:
    """Ids of a text. Other threads go on while a long one is encoded; `encode` of the library keeps
    Python's lock.
    """
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=False).ids
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


class ControlTokenError(UserError):
    """Messages whose spellings of control tokens cannot be encoded as text."""


class ControlTokens:
    """The special tokens of a tokenizer (`tokenizers.Tokenizer`), and how contents that spell them
    are kept apart.

    Those of one character are not: a newline that ends a turn is text as well. `named`: special
    tokens by their names in tokenizer_config.json, of which `unk_token` is what text may well be
    encoded as.
    """

    def __init__(self, backend: Any, named: Mapping[str, str]):
        added = backend.get_added_tokens_decoder()
        self._backend = backend
        special = [
            token.content
            for token in added.values()
            if token.special and token.content not in THOUGHTS
        ] + list(named.values())
        self._ids = {token: backend.token_to_id(token) for token in special if len(token) > 1}
        unknowns = (named.get("unk_token"), getattr(backend.model, "unk_token", None))
        self._control = {index for token, index in self._ids.items() if token not in unknowns}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._spelling = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = {token[:n] for token in self._ids for n in range(1, len(token))}
        self._ends = {token[n:] for token in self._ids for n in range(1, len(token))}
        self._firsts = {token[0] for token in self._ids}
        self._second = {end[0] for end in self._ends}
        self._longest = max(map(len, self._ids), default=1)
        self._normaliser = (
            backend.normalizer if any(t.normalized for t in added.values() if t.special) else None
        )
        self._lock = threading.Lock()
        self._copy: Any = None
        self._meaning: dict[int, int | None] = {}  # ids of the copy's marks

    @property
    def ids(self) -> set[int]:
        """The ids of the control tokens."""
        return self._control

    # ---- before rendering ------------------------------------------------------------------------

    def hide(self, value: Any) -> Any:
        """`value` (messages, or any JSON) with a sentinel in every text that spells a control
        token, or could be part of a spelling.

        The same object where there is none. Raises ControlTokenError where a text has noncharacters
        beside them.
        """
        hidden = self._hidden(value)
        if hidden is not value and _holds(value, _RESERVED):
            raise ControlTokenError(
                "they spell control tokens and have noncharacters (U+FDD0 to U+FDEF): remove these"
            )
        return hidden

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._hidden_text(value)
        if isinstance(value, Mapping):
            changed = {self._hidden(k): self._hidden(v) for k, v in value.items()}
            same = len(changed) == len(value) and all(
                k in value and v is value[k] for k, v in changed.items()
            )
            return value if same else changed
        if isinstance(value, list | tuple):
            parts = [self._hidden(v) for v in value]
            return value if all(a is b for a, b in zip(parts, value, strict=True)) else parts
        return value

    def _hidden_text(self, text: str) -> str:
        found, may_begin = text, any(first in text for first in self._firsts)
        while may_begin and self._spelling.search(found):
            found = self._spelling.sub(lambda m: m[0][0] + SENTINEL + m[0][1:], found)
        if self._normaliser is not None and self._spelling.search(
            self._normaliser.normalize_str(text)
        ):
            found = SENTINEL.join(text)
        # A fence where the template, or another content beside it, could complete a part to a
        # spelling.
        core = text.strip()
        sizes = range(1, min(self._longest, len(core) + 1))
        if may_begin and any(core[-n:] in self._beginnings for n in sizes):
            at = len(found.rstrip())
            found = found[:at] + SENTINEL + found[at:]
        if core[:1] in self._second and any(core[:n] in self._ends for n in sizes):
            at = len(found) - len(found.lstrip())
            found = found[:at] + SENTINEL + found[at:]
        return found

    # ---- after it --------------------------------------------------------------------------------

    @staticmethod
    def shown(text: str) -> str:
        """A rendered text without the sentinels."""
        return text.replace(SENTINEL, "")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of each control token that a rendered text spells without a sentinel."""
        return [mark.span() for mark in self._spelling.finditer(text)]

    def encode(self, text: str) -> list[int]:
        """Ids of a text that was rendered from hidden messages: spellings without a sentinel are
        control tokens, others are text.
        """
        plain = self.shown(text)
        if self._normaliser is None and self._spelling.findall(plain) == self._spelling.findall(
            text
        ):
            return ids_of(self._backend, plain)
        return self.encode_apart(text)

    def encode_apart(self, text: str) -> list[int]:
        """`encode` by the copy that knows no control token. Raises ControlTokenError where the
        vocabulary gives one all the same.
        """
        copy = self._without_control_tokens()
        marked = self._spelling.sub(lambda m: _mark(self._ids[m[0]]), text)
        # some models have the spelling in their vocabulary: cut it in two
        for attempt in (self.shown(marked), marked):
            ids = ids_of(copy, attempt)
            if self._control.isdisjoint(ids):
                found = [self._meaning.get(i, i) for i in ids]
                return [i for i in found if i is not None]
        raise ControlTokenError(
            "they spell control tokens, which this tokenizer cannot encode as text: remove them"
        )

    def _without_control_tokens(self) -> Any:
        from tokenizers import AddedToken

        with self._lock:
            if self._copy is not None:
                return self._copy
            copy = type(self._backend).from_str(self._backend.to_str())
            copy.encode_special_tokens = True
            added = self._backend.get_added_tokens_decoder()
            marks = {SENTINEL: None}
            tokens = [AddedToken(SENTINEL, normalized=False)]
            for index in self._ids.values():
                token, mark = added.get(index), _mark(index)
                sides = {
                    side: getattr(token, side, False)
                    for side in ("lstrip", "rstrip", "single_word")
                }
                marks[mark] = index
                tokens.append(AddedToken(mark, normalized=False, **sides))
            copy.add_tokens(tokens)
            self._meaning = {copy.token_to_id(mark): index for mark, index in marks.items()}
            self._copy = copy
            return copy


def _mark(index: int) -> str:
    """Noncharacters that stand for a control token: no two marks overlap."""
    return "\ufdd1" + "".join(_DIGITS[int(digit, 16)] for digit in f"{index:x}") + "\ufdef"


def _holds(value: Any, pattern: re.Pattern) -> bool:
    if isinstance(value, str):
        return pattern.search(value) is not None
    parts = (*value.keys(), *value.values()) if isinstance(value, Mapping) else value
    return isinstance(parts, list | tuple) and any(_holds(part, pattern) for part in parts)
