r"""Parsing of a model's answers: `ChatFormat` reads a text as a Message of a thought, a content and
tool calls. Everything that reads answers does so here: verifiers, environments, the server, distil
and the loss masks of SFT.

A format is one file of `formats/` with a `FORMAT`. All formats also read the thoughts and calls
that prompts ask any model for: <think>, <thinking>, <thought> and <reasoning>; <tool_call>, JSON
and Python's syntax. `any_format` reads the marks of every format, for texts of an unknown model.

A thought that is cut off reaches to the end of the text. A mark that closes a thought which no mark
opened closes one that the prompt's template opened: all text before it is the thought.
"""

from __future__ import annotations

import importlib
import logging
import pkgutil
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import chain

from compass_jax.base.chat import formats as folder
from compass_jax.base.chat.calls import BareCalls, MalformedCall, ToolCall, read_bare_calls
from compass_jax.base.chat.marked import FUNCTION, CallForm, tagged_form
from compass_jax.base.chat.reader import (
    ALL_THOUGHT,
    CALLS,
    HARMONY,
    NEW_THOUGHT,
    THOUGHT,
    Segment,
    read_segments,
)

logger = logging.getLogger(__name__)

Pair = tuple[str, str]
AUTO = "auto"
THINK: Pair = ("<think>", "</think>")
# thoughts and calls that prompts ask any model for
PROMPTED: tuple[Pair, ...] = (
    THINK,
    *((f"<{name}>", f"</{name}>") for name in ("thinking", "thought", "reasoning")),
)
TAGGED = tagged_form("<tool_call>", "</tool_call>")
# tokens that begin a message: an answer that goes on has them, and they mark no thought or call
TURNS = ("<|im_start|>", "<|start_header_id|>", "<|user|>", "<|assistant|>", "<|system|>")
# spelled control tokens, and tags whose names are those of thoughts or calls
_NAMED = r"(?:think|thought|reason|scratchpad|tool|function|invoke|action|channel|plugin)"
_MARK = re.compile(
    r"<\|[\w:.-]{1,40}\|?>|<[\w:.-]{1,40}\|>|</?｜[^<>\s]{1,40}｜[^<>\n]{0,60}>"
    r"|(?-i:\[/?(?:[A-Z]{1,20}_)?(?:THINK|TOOL|CALL|ARG)(?:ING|S)?(?:_[A-Z]{1,20})?\])"
    rf"|</?(?:[\w-]{{1,20}}:)?{_NAMED}\w{{0,20}}(?:[_-]calls?)?(?::\w{{1,20}})?>",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Message:
    """An answer: its thought, its content and its tool calls.

    `content` has neither thoughts nor calls between marks. `text` is the answer without thoughts,
    but with the text of the calls. `cut` is whether the text ends inside a thought.
    """

    thought: str
    content: str
    text: str
    marked: tuple[ToolCall, ...] = ()  # the calls between marks
    fault: str = ""  # why a call between marks is malformed
    cut: bool = False
    unknown_marks: tuple[str, ...] = ()  # marks in the text that the format does not know

    @cached_property
    def bare(self) -> BareCalls:
        """The calls without marks; they are part of the content."""
        return BareCalls() if self.marked or self.fault else read_bare_calls(self.content)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls, in their order; empty if one of them is malformed."""
        return [] if self.malformed else [*self.marked, *self.bare.calls]

    @property
    def malformed(self) -> str:
        """Why a call cannot be read; empty if all can."""
        return self.fault or self.bare.malformed


@dataclass(frozen=True, eq=False)
class ChatFormat:
    """A form of answers.

    Args:
        name: the name, as in the setting `data.chat_format`.
        own_thoughts: (opening mark, closing mark) of the form's own thoughts; all formats read
            those of PROMPTED.
        own_calls: the form's own tool calls; all formats read <tool_call> and <function=.
        ends: tokens that end a turn. The engine stops at those that the model's folder names; a
            test compares the two.
        template: texts that a chat template of this form writes, by which it is recognised, beside
            the marks of thoughts and calls.
        frames: marks around the answer that mean nothing.
        channels: whether an answer is made of gpt-oss's messages with channels.
    """

    name: str
    own_thoughts: tuple[Pair, ...] = ()
    own_calls: tuple[CallForm, ...] = ()
    ends: tuple[str, ...] = ()
    template: tuple[str, ...] = ()
    frames: tuple[str, ...] = ()
    channels: bool = False

    @cached_property
    def thoughts(self) -> tuple[Pair, ...]:
        """The marks of all thoughts that the format reads."""
        return tuple(dict.fromkeys((*self.own_thoughts, *PROMPTED)))

    @cached_property
    def calls(self) -> tuple[CallForm, ...]:
        """The forms of all calls that the format reads."""
        return tuple({x.open: x for x in (FUNCTION, TAGGED, *self.own_calls)}.values())

    @cached_property
    def own_marks(self) -> tuple[str, ...]:
        """The marks by which a template of this format is recognised."""
        pairs = [mark for pair in self.own_thoughts for mark in pair]
        return (*pairs, *(x.open for x in self.own_calls), *self.template)

    def read(self, text: str) -> Message:
        """Returns what an answer means, in time linear in its length. It may be cut off anywhere,
        and may begin inside a thought.
        """
        segments, cut = read_segments(self, text)
        return _message(segments, cut, self)

    def opened(self, prompt: str) -> str:
        """Returns the mark that opens a thought at a prompt's end, with its white space, or ""."""
        match = _opening(self).search(prompt[-200:])
        return match[0] if match else ""

    def closing(self, opened: str) -> str:
        """Returns the mark that closes the thought that a text opens."""
        return dict(self.thoughts).get(opened.strip(), "")

    def write(self, thought: str, content: str) -> str:
        """Returns a text that reads as this thought and content."""
        begin, end = self.thoughts[0]
        return f"{begin}\n{thought}\n{end}\n\n{content}" if thought else content

    def with_opening(self, text: str) -> str:
        """Returns a text with the mark that opens the thought in which it begins, if it does."""
        first = _thought_marks(self).search(text)
        if first is None or first[0] in dict(self.thoughts):
            return text
        message = self.read(text)
        return self.write(message.thought, message.text)

    def unclosed(self, text: str) -> str:
        """Returns the fault of the marks of thoughts in a text: one opens inside another thought,
        closes nothing, or is never closed. Empty if all marks pair up.
        """
        open_mark, closes = "", dict(self.thoughts)
        for mark in _thought_marks(self).findall(text):
            if mark in closes and open_mark:
                return f"{mark} is opened inside {open_mark}"
            if mark not in closes and closes.get(open_mark) != mark:
                return f"{mark} closes nothing"
            open_mark = mark if mark in closes else ""
        return f"{open_mark} is never closed" if open_mark else ""


@lru_cache(maxsize=64)
def _opening(chat_format: ChatFormat) -> re.Pattern[str]:
    openers = [re.escape(mark) for mark, _ in chat_format.thoughts]
    if chat_format.channels:
        openers.append(r"<\|channel\|>analysis<\|message\|>")
    return re.compile(rf"(?:{'|'.join(openers)})\s*\Z")


@lru_cache(maxsize=64)
def _thought_marks(chat_format: ChatFormat) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(x) for pair in chat_format.thoughts for x in pair))


@lru_cache(maxsize=64)
def _known_marks(chat_format: ChatFormat) -> frozenset[str]:
    """Returns the marks that a format knows in a content."""
    marks = {mark for pair in chat_format.thoughts for mark in pair}
    marks |= {mark for form in chat_format.calls for mark in (form.open, form.close)}
    marks |= {*TURNS, *chat_format.ends, *(HARMONY if chat_format.channels else ())}
    return frozenset(marks)


def _message(segments: Iterable[Segment], cut: bool, chat_format: ChatFormat) -> Message:
    thoughts: list[list[str]] = [[]]
    parts: list[Segment] = []  # content and calls
    for segment in segments:
        if segment.kind == THOUGHT:
            thoughts[-1].append(segment.text)
        elif segment.kind == NEW_THOUGHT:
            thoughts.append([])
        elif segment.kind == ALL_THOUGHT:
            thoughts = [[*chain(*thoughts), *(x.text for x in parts)], []]
            parts = []
        else:
            parts.append(segment)
    thought = "\n".join(filter(None, ("".join(x).strip("\n") for x in thoughts)))
    content, text = "", "".join(x.text for x in parts)
    follows = False
    for part in parts:
        if part.kind == CALLS:
            content, follows = content.rstrip(), True
        elif not follows:
            content += part.text
        elif tail := part.text.strip():
            content, follows = f"{content}\n{tail}" if content else tail, False
    if len(thoughts) > 1 or thought:
        content, text = content.lstrip("\r\n"), text.lstrip("\r\n")
    fault = next((x.malformed for x in parts if x.malformed), "")
    marked = () if fault else tuple(call for x in parts for call in x.calls)
    known = _known_marks(chat_format)
    unknown_marks = dict.fromkeys(x for x in _MARK.findall(content) if x not in known)
    return Message(thought, content, text, marked, fault, cut, tuple(unknown_marks)[:8])


# ---- the formats ---------------------------------------------------------------------------------


@cache
def chat_formats() -> dict[str, ChatFormat]:
    """Returns the formats of the folder `formats` by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    modules = [importlib.import_module(f"{folder.__name__}.{name}") for name in names]
    return {module.FORMAT.name: module.FORMAT for module in modules}


@cache
def any_format() -> ChatFormat:
    """Returns the format that reads the marks of every format."""
    known = chat_formats().values()
    return ChatFormat(
        "any",
        tuple(dict.fromkeys((THINK, *(pair for x in known for pair in x.own_thoughts)))),
        tuple({form.open: form for x in known for form in x.own_calls}.values()),
        tuple(dict.fromkeys(mark for x in known for mark in x.ends)),
        frames=tuple(mark for x in known for mark in x.frames),
        channels=any(x.channels for x in known),
    )


def read_calls(text: str) -> list[ToolCall]:
    """Returns the tool calls of a text. Raises MalformedCall for a malformed one."""
    message = any_format().read(text)
    if message.malformed:
        raise MalformedCall(message.malformed)
    return message.calls


class UnknownMarks:
    """A notice of marks that a format does not know, given once a run for each of them."""

    def __init__(self, chat_format: ChatFormat):
        self._format = chat_format
        self._told: set[str] = set()

    def note(self, text: str) -> None:
        """Logs a warning if an answer has new unknown marks."""
        if _MARK.search(text):
            self.warn(self._format.read(text).unknown_marks)

    def warn(self, marks: Iterable[str]) -> None:
        """Logs a warning of unknown marks, unless they were logged before."""
        new = [mark for mark in marks if mark not in self._told]
        if not new or len(self._told) > 16:
            return
        self._told.update(new)
        logger.warning(
            "an answer has %s, which the chat format %s does not know: if it marks a thought or a"
            " call, name the form in data.chat_format (%s, or own marks as '<plan>...</plan>'); as"
            " it is, it is read as a part of the answer",
            ", ".join(map(repr, new)),
            self._format.name,
            ", ".join(chat_formats()),
        )
