"""The position in a text whose bytes come token by token."""

from __future__ import annotations

import codecs


class TextPosition:
    """The number of characters of the tokens so far, as the tokenizer's decoder counts them.

    Bytes that are no UTF-8 are U+FFFD: in byte-level vocabularies each longest beginning of a
    character, as in WHATWG's decoder; of byte tokens (SentencePiece's <0xE4>) each byte of a run
    that is not UTF-8 as a whole.
    """

    def __init__(self) -> None:
        self._complete = 0  # characters that later bytes cannot change
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._run: _Run | None = None  # byte tokens since the last other token

    @property
    def characters(self) -> int:
        """Number of characters so far, as if the text ended here."""
        pending, _ = self._decoder.getstate()
        in_run = 0 if self._run is None else self._run.characters
        return self._complete + len(pending.decode(errors="replace")) + in_run

    def push(self, data: bytes, is_byte_token: bool) -> int:
        """Moves past the bytes of a token. Returns the index of the character in which they
        begin.
        """
        if is_byte_token:
            self._run = self._run or _Run()
            return self._complete + self._run.push(data)
        self.end_run()
        self._complete += len(self._decoder.decode(data[:1]))
        begin = self.characters - 1  # the first byte is in the last character
        self._complete += len(self._decoder.decode(data[1:]))
        return begin

    def end(self) -> None:
        """Ends the text: an incomplete character stays one."""
        self.end_run()
        self._complete += len(self._decoder.decode(b"", final=True))

    def end_run(self) -> None:
        """Ends a run of byte tokens; an incomplete character makes all its bytes invalid."""
        if self._run is not None:
            self._complete += self._run.count if self._run.is_incomplete else self._run.characters
            self._run = None

    def drop(self, count: int) -> None:
        """Moves back: the text lacks the first `count` characters of a token."""
        self._complete -= count


class _Run:
    """Consecutive byte tokens, which are decoded together."""

    def __init__(self) -> None:
        self.count = self._complete = 0
        self._decoder: codecs.IncrementalDecoder | None = codecs.getincrementaldecoder("utf-8")()

    @property
    def is_incomplete(self) -> bool:
        """Whether the bytes end within a character."""
        return self._decoder is not None and bool(self._decoder.getstate()[0])

    @property
    def characters(self) -> int:
        """Number of characters so far."""
        return self.count if self._decoder is None else self._complete + self.is_incomplete

    def push(self, data: bytes) -> int:
        """Adds the byte of a token; returns the index of its character in the run."""
        self.count += len(data)
        if self._decoder is not None:
            try:
                begin = self._complete
                self._complete += len(self._decoder.decode(data))
                return begin
            except UnicodeDecodeError:
                self._decoder = None
        return self.count - len(data)
