"""Incremental detokenisation, in time linear in the length of the answer."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from compass_jax.data.tokenizer import Tokenizer

SETTLED_AFTER = 32  # pending tokens after which those with final text are dropped
MOST_PENDING = 3  # maximum number of bytes of an incomplete character
TRIED = 8  # number of token boundaries, from the end, that are tried as a cut


class TextStream:
    """The text of a stream of tokens, as rewards and logs decode it (`decode_response`).

    Bytes of an incomplete character are held back, and so is a possible beginning of a stop string.
    The first complete stop string ends the text; of several that end at the same place, the longest
    one.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []  # tokens whose text may still change
        self._taken = 0  # number of characters of their text that were searched
        self._held = ""  # text that was searched but not sent
        self.stopped = False

    def push(self, ids: Sequence[int], last: bool) -> str:
        """Returns the new text that is certain; with `last`, all remaining text. The stop string
        itself is removed, and after it every result is empty.
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
        """Returns the new text of tokens that are dropped, and the text of the others."""
        decode = self._tokenizer.decode_response
        for count in range(1, TRIED + 1):
            if self._is_within_character(len(self._ids) - count):
                continue
            before, after = decode(self._ids[:-count]), decode(self._ids[-count:])
            # If they are equal, later tokens cannot change the text before the cut.
            if before + after == text:
                fresh = before[self._taken :]
                self._taken = max(self._taken - len(before), 0)
                del self._ids[:-count]
                return fresh, after
        return "", text

    def _is_within_character(self, cut: int) -> bool:
        """Returns whether the tokens before the cut end with an incomplete character."""
        last_tokens = self._ids[max(cut - MOST_PENDING, 0) : cut]
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(b"".join(map(self._tokenizer.bytes_of, last_tokens)))
        pending, _ = decoder.getstate()
        return bool(pending)

    def _search(self, fresh: str, last: bool) -> str:
        """Returns the part of the pending and the new text that may be sent."""
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
    """Returns the text that each token adds. The text of a character that spans several tokens is
    attributed to the last of them.
    """
    stream = TextStream(tokenizer, ())
    return [stream.push([token], i + 1 == len(ids)) for i, token in enumerate(ids)]
