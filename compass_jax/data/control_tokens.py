"""Control tokens spelt in message contents are encoded as plain text.

Otherwise a message could open or end a turn.

1. `hide` inserts a sentinel into each spelling in the messages before they are rendered.
2. In the rendered text a spelling without a sentinel was written by the template.
3. `encode` replaces each of these by a mark, removes the sentinels, and encodes the text with a
   copy of the tokenizer that has the marks and no control tokens.

Texts without spellings skip all of this. Sentinel and marks are Unicode noncharacters (U+FDD0 to
U+FDEF).
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import Any

from compass_jax.base.aliases import Json
from compass_jax.base.chat.base import any_format
from compass_jax.base.errors import UserError

# not treated as control tokens: they do not open or close a turn, and a thought that is trained on
# or judged needs the tokens that a template writes for it
THOUGHTS = frozenset(mark for pair in any_format().thoughts for mark in pair)
SENTINEL = "\ufdd0"
_RESERVED = re.compile("[\ufdd0-\ufdef]")
LONG = 4096  # characters from which a text is encoded without Python's lock
_DIGITS = [chr(0xFDD2 + n) for n in range(16)]


def ids_of(backend: Any, text: str) -> list[int]:
    """Returns the ids of a text. Releases Python's lock for a long one."""
    if len(text) < LONG:
        return backend.encode(text, add_special_tokens=False).ids
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


class ControlTokenError(UserError):
    """Messages spell control tokens that cannot be encoded as text."""


class ControlTokens:
    """The control tokens of a tokenizer, and the encoding of contents that spell them.

    Special tokens of one character are not included: a newline that ends a turn is also ordinary
    text.

    Args:
        backend: a `tokenizers.Tokenizer`.
        named: special tokens by their names in tokenizer_config.json. Text may be encoded as the
            `unk_token`.
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
        self._meaning: dict[int, int | None] = {}  # mark id in the copy -> control token id

    @property
    def ids(self) -> set[int]:
        """The ids of the control tokens."""
        return self._control

    # ---- before rendering ------------------------------------------------------------------------

    def hide(self, value: Json) -> Json:
        """Returns `value` (messages, or any JSON) with a sentinel in each text that spells a
        control token or could be part of a spelling. Reserved noncharacters become U+FFFD.
        """
        if isinstance(value, str):
            return self._hidden_text(_RESERVED.sub("\ufffd", value))
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(part) for key, part in value.items()}
        return [self.hide(part) for part in value] if isinstance(value, list | tuple) else value

    def _hidden_text(self, text: str) -> str:
        hidden, may_begin = text, any(first in text for first in self._firsts)
        # Repeated, because `sub` skips a spelling that overlaps with the one before it.
        while may_begin and self._spelling.search(hidden):
            hidden = self._spelling.sub(lambda m: m[0][0] + SENTINEL + m[0][1:], hidden)
        if self._normaliser is not None and self._spelling.search(
            self._normaliser.normalize_str(text)
        ):
            hidden = SENTINEL.join(text)
        # The template or an adjacent content could complete a partial spelling at either end.
        core = text.strip()
        sizes = range(1, min(self._longest, len(core) + 1))
        if may_begin and any(core[-n:] in self._beginnings for n in sizes):
            at = len(hidden.rstrip())
            hidden = hidden[:at] + SENTINEL + hidden[at:]
        if core[:1] in self._second and any(core[:n] in self._ends for n in sizes):
            at = len(hidden) - len(hidden.lstrip())
            hidden = hidden[:at] + SENTINEL + hidden[at:]
        return hidden

    # ---- after rendering -------------------------------------------------------------------------

    @staticmethod
    def visible(text: str) -> str:
        """Returns a rendered text without the sentinels."""
        return text.replace(SENTINEL, "")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Returns (start, end) of each spelling without a sentinel in a rendered text."""
        return [mark.span() for mark in self._spelling.finditer(text)]

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text rendered from hidden messages: spellings without a sentinel
        become control tokens, the others become text.
        """
        plain, spelt = self.visible(text), self._spelling.findall
        is_same = self._normaliser is None and spelt(plain) == spelt(text)
        return ids_of(self._backend, plain) if is_same else self.encode_apart(text)

    def encode_apart(self, text: str) -> list[int]:
        """Implements `encode` with the copy that has no control tokens. Raises ControlTokenError if
        the vocabulary still yields one.
        """
        copy = self._without_control_tokens()
        marked = self._spelling.sub(lambda m: _mark(self._ids[m[0]]), text)
        # some vocabularies contain the spelling: split it in two
        for attempt in (self.visible(marked), marked):
            ids = ids_of(copy, attempt)
            if self._control.isdisjoint(ids):
                token_ids = [self._meaning.get(i, i) for i in ids]
                return [i for i in token_ids if i is not None]
        raise ControlTokenError(
            "they spell control tokens, which this tokenizer cannot encode as text: remove them"
        )

    def _without_control_tokens(self) -> Json:
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
    """Returns the noncharacters that represent a control token; no two marks overlap."""
    return "\ufdd1" + "".join(_DIGITS[int(digit, 16)] for digit in f"{index:x}") + "\ufdef"
