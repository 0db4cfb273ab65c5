"""Tokens become text, piece by piece, in time linear in the answer."""

from __future__ import annotations

from collections.abc import Sequence

from compass_jax.data.tokenizer import Tokenizer

SETTLED_AFTER = 32  # tokens; then those whose text cannot change any more are decoded no more
TRIED = 8  # token boundaries, from the end, at which the text may be cut


class TextStream:
    """The text of tokens that come in pieces, as rewards and logs have it (`decode_response`).

    Bytes of an unfinished character are held back, and so is what may be the beginning of a stop
    text. The first stop text that is complete ends the text; of several that end together, the
    longest.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []  # whose text may still change
        self._taken = 0  # characters of their text that were searched
        self._held = ""  # searched, and not sent
        self.stopped = False

    def push(self, ids: Sequence[int], last: bool) -> str:
        """Returns the text that is new and certain; with `last`, all that is left. There is none
        after a stop text, which is cut off.
        """
        if self.stopped:
            return ""
        self._ids += ids
        text = self._tokenizer.decode_response(self._ids)
        fresh = ""
        if len(self._ids) > SETTLED_AFTER:
            fresh, text = self._settle(text)
        certain = text if last else text.rstrip("\ufffd")
        fresh += certain[self._taken :]
        self._taken = max(self._taken, len(certain))
        return self._search(fresh, last)

    def _settle(self, text: str) -> tuple[str, str]:
        """Returns the new text of tokens that need not be decoded again, and the text of the
        others.
        """
        decode = self._tokenizer.decode_response
        for count in range(1, TRIED + 1):
            before, after = decode(self._ids[:-count]), decode(self._ids[-count:])
            # Equal: no character lies on both sides of the cut, and what follows cannot change
            # what precedes it.
            if before + after == text:
                fresh = before[self._taken :]
                self._taken = max(self._taken - len(before), 0)
                del self._ids[:-count]
                return fresh, after
        return "", text

    def _search(self, fresh: str, last: bool) -> str:
        """Returns what may be sent of the text that was held back and the fresh text."""
        text = self._held + fresh
        matches = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            self.stopped = True
            return text[: min(matches)[1]]
        longest = max(map(len, self._stop), default=1) - 1
        sizes = range(0 if last else min(longest, len(text)), 0, -1)
        pending = next((n for n in sizes if any(x.startswith(text[-n:]) for x in self._stop)), 0)
        self._held = text[len(text) - pending :]
        return text[: len(text) - pending]


def text_pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Returns the text that each token adds to the text of all; a character of several tokens is
    the last one's.
    """
    stream = TextStream(tokenizer, ())
    return [stream.push([token], i + 1 == len(ids)) for i, token in enumerate(ids)]
