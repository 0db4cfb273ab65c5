"""Incremental reading of an answer: text in, segments of thought, content and calls out.

A segment is final when it is returned, except that a mark that closes a thought which no mark
opened makes all text before it a thought: the prompt's template may have opened it. Calls are read
when the text is complete, because only then is it known where they end.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from compass_jax.base.chat.calls import (
    MalformedCall,
    ToolCall,
    begins_bare_call,
    check_count,
    check_size,
    read_bare_calls,
)
from compass_jax.base.chat.marked import Cursor

if TYPE_CHECKING:
    from compass_jax.base.chat.base import ChatFormat

THOUGHT, CONTENT, CALLS, NEW_THOUGHT, ALL_THOUGHT = "thought", "content", "calls", "new", "all"
# the marks of gpt-oss's messages (harmony), and those that end the body of a message
_MESSAGE, _CHANNEL, _START = "<|message|>", "<|channel|>", "<|start|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
HARMONY = (_MESSAGE, _CHANNEL, _START, *ENDS)
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_HEADER = re.compile(r"\s*(?:assistant)?\s*(?:to=[\w.-]*\s*)?")
_HEADER_WORDS = ("assistant", "to=")
_NOBODY = ("user", "assistant", "all")
_HEADER_CHARS = 300  # length of a header that may begin an answer
_MOST_TRIES = 2


class Segment(NamedTuple):
    """A part of an answer: its kind and text; for CALLS the calls, or why they are malformed."""

    kind: str
    text: str = ""
    calls: tuple[ToolCall, ...] = ()
    malformed: str = ""


@lru_cache(maxsize=256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(marks, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


@lru_cache(maxsize=256)
def _beginnings(marks: tuple[str, ...]) -> frozenset[str]:
    return frozenset(mark[:n] for mark in marks for n in range(1, len(mark)))


def pending_length(text: str, marks: tuple[str, ...]) -> int:
    """Returns the length of the longest end of a text that may be the beginning of a mark."""
    longest = max(map(len, marks), default=1) - 1
    tail, beginnings = text[-longest:] if longest else "", _beginnings(marks)
    return next((len(tail) - i for i in range(len(tail)) if tail[i:] in beginnings), 0)


class Reader:
    """The reader of one answer, in the form `chat_format`."""

    def __init__(self, chat_format: ChatFormat):
        self._format = chat_format
        self._openers = dict(chat_format.thoughts)
        self._closers = {close for _, close in chat_format.thoughts}
        self._forms = {form.open: form for form in chat_format.calls}
        harmony = HARMONY if chat_format.channels else ()
        marks = {*self._openers, *self._closers, *self._forms, *harmony, *chat_format.frames}
        self._marks = tuple(sorted(marks))
        self._text = ""  # text that is not read yet
        self._held: list[str] | None = None  # text from the first call on, read at the end
        self._pair: tuple[str, str] | None = None  # marks of the thought that is open
        self._depth = 0
        self._header: list[str] | None = None  # of a harmony message
        self._body = ""  # kind of the harmony message's body: "", THOUGHT, CONTENT or CALLS
        self._called = ""  # the tool that a harmony message calls
        self._arguments: list[str] = []
        self._count = 0  # calls so far
        self._tries = 0  # number of times that calls without marks were looked for
        self._failed = False  # whether a call was malformed
        self._begun = False  # whether a segment was returned
        self._channelled = False  # whether the body of a harmony message was reached

    @property
    def in_thought(self) -> bool:
        """Whether the text so far ends inside a thought."""
        return self._pair is not None or self._body == THOUGHT

    def push(self, text: str, last: bool = False) -> list[Segment]:
        """Returns the segments that new text makes certain; with `last`, all."""
        segments: list[Segment] = []
        if self._held is not None:
            self._held.append(text)
            if not last:
                return segments
            text, self._held = "".join(self._held), None
        self._text, at = self._text + text, 0
        if last and not self._begun:
            at = self._pass_bare_calls(segments, 0)
        while (mark := _pattern(self._present_marks()).search(self._text, at)) is not None:
            self._add(segments, self._text[at : mark.start()])
            at = mark.start()
            if mark[0] in self._forms and not last:
                self._held, self._text = [self._text[at:]], ""
                return segments
            at = self._pass_mark(segments, mark)
            if last and segments and segments[-1].kind in (THOUGHT, NEW_THOUGHT, ALL_THOUGHT):
                at = self._pass_bare_calls(segments, at)
        following = self._text[at:]
        ready = len(following) if last else self._certain(following)
        self._add(segments, following[:ready])
        self._text = following[ready:]
        if last and self._body == CALLS:
            self._end_body(segments)
        self._begun = self._begun or bool(segments)
        return segments

    @property
    def _in_content(self) -> bool:
        return self._header is None and self._body in ("", CONTENT)

    def _present_marks(self) -> tuple[str, ...]:
        """Returns the marks that mean something at the present place."""
        if self._pair is not None:
            return self._pair
        return self._marks if self._in_content else HARMONY

    def _certain(self, text: str) -> int:
        """Returns the number of characters that no later text makes part of a mark or header."""
        ready = len(text) - pending_length(text, self._present_marks())
        if self._format.channels and not self._begun and ready <= _HEADER_CHARS:
            begins = any(word.startswith(text[:ready].strip()) for word in _HEADER_WORDS)
            return 0 if begins or _HEADER.fullmatch(text, 0, ready) else ready
        return ready

    def _add(self, segments: list[Segment], text: str) -> None:
        if not text:
            return
        if self._header is not None:
            self._header.append(text)
        elif self._body == CALLS:
            self._arguments.append(text)
        else:
            segments.append(Segment(THOUGHT if self.in_thought else CONTENT, text))

    def _pass_mark(self, segments: list[Segment], mark: re.Match[str]) -> int:
        """Handles a mark; returns the position after it, or after the calls that it begins."""
        text = mark[0]
        if self._pair is not None:
            self._depth += 1 if text == self._pair[0] else -1
            if self._depth:
                self._add(segments, text)
            else:
                self._pair = None
        elif text in HARMONY:
            self._pass_harmony(segments, text)
        elif text in self._openers:
            self._pair, self._depth = (text, self._openers[text]), 1
            segments.append(Segment(NEW_THOUGHT))
        elif text in self._closers:
            self._restart(segments)
        elif text in self._forms:
            return self._read_calls(segments, text, mark.start())
        return mark.end()

    def _pass_bare_calls(self, segments: list[Segment], at: int) -> int:
        """Returns the position after calls without marks that reach to the end of the text: marks
        inside their strings mean nothing.
        """
        text = self._text[at:]
        if self.in_thought or not self._in_content or self._tries >= _MOST_TRIES:
            return at
        if not begins_bare_call(text) or text.rstrip()[-1:] not in ("]", "}", ")"):
            return at
        if not _pattern(self._marks).search(text):
            return at
        self._tries += 1
        if not read_bare_calls(text).calls:
            return at
        self._add(segments, text)
        return len(self._text)

    def _read_calls(self, segments: list[Segment], mark: str, at: int) -> int:
        form = self._forms[mark]
        try:
            if self._failed:
                raise MalformedCall("it follows a malformed call")
            calls, end = form.parse(self._text, at)
            self._count += len(calls)
            check_count(self._count)
            check_size(end - at)
        except MalformedCall as error:
            self._failed, calls, reason = True, [], str(error)
            match = self._text.find(form.close, at + len(mark)) if form.close else -1
            end = len(self._text) if match < 0 else match + len(form.close)
            segments.append(Segment(CALLS, self._text[at:end], malformed=reason))
            return end
        segments.append(Segment(CALLS, self._text[at:end], tuple(calls)))
        return end

    # ---- gpt-oss's channels ----------------------------------------------------------------------

    def _pass_harmony(self, segments: list[Segment], mark: str) -> None:
        if self._body == CALLS:
            self._end_body(segments)
        if not self._channelled and mark not in ENDS and self._header is None:
            self._begin_channels(segments)
        if mark == _MESSAGE:
            self._begin_body(segments)
        elif mark == _CHANNEL and self._header is not None:
            self._header.append(mark)
        elif self._channelled or mark not in ENDS:
            # no text between two messages is a part of the answer
            self._body, self._header = "", [mark]

    def _begin_channels(self, segments: list[Segment]) -> None:
        """Handles the text before the first mark of a message: its header, or no part of it."""
        before = "".join(x.text for x in segments if x.kind == CONTENT)
        if _HEADER.fullmatch(before):
            segments[:] = [x for x in segments if x.kind != CONTENT]
            self._header = [before]
        else:
            self._restart(segments)
            self._header = []

    def _restart(self, segments: list[Segment]) -> None:
        """Makes everything before a thought."""
        self._count, self._failed = 0, False
        segments.append(Segment(ALL_THOUGHT))

    def _begin_body(self, segments: list[Segment]) -> None:
        header = "".join(self._header or ())
        channel, recipient = _CHANNEL_NAME.search(header), _RECIPIENT.search(header)
        name = channel[1] if channel else "final"
        self._header, self._channelled = None, True
        if (
            recipient
            and recipient[1] not in _NOBODY
            and (name != "analysis" or "to=functions." in header)
        ):
            self._body, self._called, self._arguments = CALLS, recipient[1], []
        elif name == "final":
            self._body = CONTENT
        else:
            self._body = THOUGHT
            segments.append(Segment(NEW_THOUGHT))

    def _end_body(self, segments: list[Segment]) -> None:
        """Adds the call of the message that has ended."""
        text, self._body = "".join(self._arguments), ""
        try:
            self._count += 1
            check_count(self._count)
            check_size(len(text))
            cursor = Cursor(text, 0)
            call = cursor.arguments(self._called)
            cursor.blanks()
            if cursor.at < len(text):
                raise MalformedCall(f"text follows the arguments of {self._called:.40}")
        except MalformedCall as error:
            segments.append(Segment(CALLS, text, malformed=str(error)))
            return
        segments.append(Segment(CALLS, text, (call,)))


def read_segments(chat_format: ChatFormat, text: str) -> tuple[list[Segment], bool]:
    """Returns the segments of a complete text, and whether it ends inside a thought."""
    reader = Reader(chat_format)
    return reader.push(text, last=True), reader.in_thought
