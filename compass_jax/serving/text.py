"""Tokens in, pieces of text out: in time linear in the answer, whatever the tokens are and whatever
ends it."""

from __future__ import annotations

from collections.abc import Sequence

from compass_jax.data.tokenizer import Tokenizer

SETTLED_AFTER = 32  # tokens; then those whose text cannot change any more are decoded no more
TRIED = 8  # token boundaries, from the end, at which the text may be cut


class StopText:
    """Knuth-Morris-Pratt: one stop text, looked for in text that comes in pieces."""

    def __init__(self, text: str):
        self.text = text
        self.matched = 0  # characters of `text` that the text so far ends with
        self._back = [0] * len(text)
        for i in range(1, len(text)):
            at = self._back[i - 1]
            while at and text[i] != text[at]:
                at = self._back[at - 1]
            self._back[i] = at + (text[i] == text[at])

    def push(self, character: str) -> bool:
        """Whether the text that ends with `character` ends with the stop text."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._back[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


class TextStream:
    """Bytes of an unfinished character and what may be the beginning of a stop text are held back.

    The first stop text that is complete ends the text; of several that end together, the longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer = tokenizer
        self._stops = [StopText(text) for text in sorted(stop, key=len, reverse=True)]
        self._ids: list[int] = []  # whose text may still change
        self._taken = 0  # characters of their text that were looked through
        self._held = ""  # looked through, and not sent
        self.stopped = False

    def push(self, ids: Sequence[int], last: bool) -> str:
        """The text that is new and certain; with `last`, all that is left. There is none after a
        stop text, which is cut off."""
        if self.stopped:
            return ""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        fresh = ""
        if len(self._ids) > SETTLED_AFTER:
            fresh, text = self._settle(text)
        certain = text if last else text.rstrip("\ufffd")
        fresh += certain[self._taken :]
        self._taken = max(self._taken, len(certain))
        return self._scan(fresh, last)

    def _settle(self, text: str) -> tuple[str, str]:
        """(text of tokens that are decoded no more, as far as it is new; text of the others)."""
        for kept in range(1, TRIED + 1):
            before, after = (
                self._tokenizer.decode(part) for part in (self._ids[:-kept], self._ids[-kept:])
            )
            # Equal: no character lies on both sides of the cut, and what follows cannot change
            # what precedes it.
            if before + after == text:
                fresh = before[self._taken :]
                self._taken = max(self._taken - len(before), 0)
                del self._ids[:-kept]
                return fresh, after
        return "", text

    def _scan(self, fresh: str, last: bool) -> str:
        start = len(self._held)
        text = self._held + fresh
        for at in range(start, len(text) if self._stops else start):
            # Every stop text sees every character: a list, so that none is left out after a match.
            found = [stop for stop in self._stops if stop.push(text[at])]
            if found:
                self.stopped = True
                return text[: at + 1 - len(found[0].text)]
        held = 0 if last else max((stop.matched for stop in self._stops), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def text_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text that each token adds to the text of all; a character of several tokens is the last
    one's.
    """
    stream = TextStream(tokenizer, ())
    return [stream.push([token], i + 1 == len(ids)) for i, token in enumerate(ids)]
