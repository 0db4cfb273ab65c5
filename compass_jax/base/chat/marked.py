"""Parsers of tool calls between marks. Each takes a text and the position of a mark that begins
calls, and returns the calls and the position after them. Marks inside a string of JSON are part of
the string. The text is untrusted: every parser takes linear time, and evaluates nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compass_jax.base.aliases import Json
from compass_jax.base.chat.calls import (
    MalformedCall,
    ToolCall,
    calls_in_json,
    check_count,
    read_bare_calls,
)
from compass_jax.base.untrusted import UntrustedError, parse_json

Calls = list[ToolCall]
_NAME = re.compile(r"[\w.:/-]{1,256}")
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]{1,256}?)(?::\d{1,9})?")
_METHOD = re.compile(r"([A-Za-z_]\w*)\.call\(")
_STRING = re.compile(r'\sstring="(true|false)"')
_DECODER = json.JSONDecoder()


@dataclass(frozen=True)
class CallForm:
    """A form of tool calls: the mark that begins them, and their parser. Malformed calls end after
    `close`.
    """

    open: str
    parse: Callable[[str, int], tuple[Calls, int]]
    close: str = ""


class Cursor:
    """A position in a text, moved by the parsers. Its methods raise MalformedCall."""

    def __init__(self, text: str, at: int):
        self.text, self.at = text, at

    def skip(self, mark: str) -> bool:
        """Moves over white space and, if it follows, the mark; returns whether it does."""
        self.blanks()
        if not self.text.startswith(mark, self.at):
            return False
        self.at += len(mark)
        return True

    def blanks(self) -> None:
        """Moves over white space."""
        match = re.compile(r"\s*").match(self.text, self.at)
        self.at = match.end() if match else self.at

    def require(self, mark: str, before: str) -> None:
        """Moves over white space and the mark."""
        if not self.skip(mark):
            raise MalformedCall(f"{before} has no {mark} after it")

    def until(self, mark: str, what: str) -> str:
        """Returns the text up to the next such mark, and moves over it."""
        end = self.text.find(mark, self.at)
        if end < 0:
            raise MalformedCall(f"{what} has no {mark}")
        start, self.at = self.at, end + len(mark)
        return self.text[start:end]

    def value(self, what: str) -> Json:
        """Returns the JSON value that follows, and moves over it."""
        self.blanks()
        start = self.at
        try:
            _, self.at = _DECODER.raw_decode(self.text, start)
        except (ValueError, RecursionError) as error:
            raise MalformedCall(f"{what}: not JSON: {error}") from error
        return parse_json(self.text[start : self.at], what, error=MalformedCall)

    def arguments(self, name: str) -> ToolCall:
        """Returns the call of a name whose arguments follow as a JSON object."""
        name = _checked_name(name)
        value = self.value(f"the arguments of {name:.40}")
        if not isinstance(value, Mapping):
            raise MalformedCall(f"the arguments of {name:.40} are no object: {value!r:.80}")
        return ToolCall(name, dict(value))


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name := name.strip()):
        raise MalformedCall(f"{name[:80]!r} is no name of a tool")
    return name


def call_from_texts(name: str, texts: Mapping[str, str]) -> ToolCall:
    """Returns the call whose arguments are written without quotes."""
    return ToolCall(_checked_name(name), {k: _spelt(x) for k, x in texts.items()}, texts=texts)


def _spelt(text: str) -> Json:
    """Returns the JSON value that a text spells, or the text."""
    try:
        value = parse_json(text, "an argument")
    except UntrustedError:
        return text
    return text if isinstance(value, str) else value


def json_form(open_mark: str, close: str = "") -> CallForm:
    """Returns the form of JSON after a mark: an object or a list of them, and a closing mark."""

    def parse(text: str, at: int) -> tuple[Calls, int]:
        cursor = Cursor(text, at + len(open_mark))
        calls = calls_in_json(cursor.value(f"after {open_mark}"))
        if close and not cursor.skip(close) and text[cursor.at :].strip():
            raise MalformedCall(f"a {open_mark} has no {close} after its JSON")
        return calls, cursor.at

    return CallForm(open_mark, parse, close)


def tagged_form(open_mark: str, close: str) -> CallForm:
    """Returns the form of tags around calls, each as JSON (Hermes, Qwen), as `<function=` (Qwen3
    Coder) or as a name with `<arg_key>` (GLM).
    """

    def parse(text: str, at: int) -> tuple[Calls, int]:
        cursor, calls = Cursor(text, at + len(open_mark)), Calls()
        cursor.blanks()
        if text.startswith("<function=", cursor.at):
            while text.startswith("<function=", cursor.at):
                calls.append(_function(cursor))
                cursor.blanks()
        elif _begins_name(text, cursor.at):
            return [_glm_call(cursor, close)], cursor.at
        else:
            calls += calls_in_json(cursor.value(f"after {open_mark}"))
            if not cursor.skip(close):
                raise MalformedCall(f"a {open_mark} has no {close} after its JSON")
            return calls, cursor.at
        cursor.require(close, f"a {open_mark}")
        return calls, cursor.at

    return CallForm(open_mark, parse, close)


def _begins_name(text: str, at: int) -> bool:
    name = _NAME.match(text, at)
    return name is not None and re.compile(r"\s*<").match(text, name.end()) is not None


def _glm_call(cursor: Cursor, close: str) -> ToolCall:
    name, texts = _NAME.match(cursor.text, cursor.at), dict[str, str]()
    assert name is not None
    cursor.at = name.end()
    while cursor.skip("<arg_key>"):
        key = cursor.until("</arg_key>", f"an argument of {name[0]:.40}").strip()
        cursor.require("<arg_value>", f"the argument {key:.40}")
        if key in texts:
            raise MalformedCall(f"{name[0]:.40} gets {key:.40} more than once")
        texts[key] = cursor.until("</arg_value>", f"the argument {key:.40}")
    cursor.require(close, f"the call of {name[0]:.40}")
    return call_from_texts(name[0], texts)


def _function(cursor: Cursor) -> ToolCall:
    """Returns the call of `<function=name>` with `<parameter=key>` or a JSON object."""
    cursor.require("<function=", "a call")
    name, texts = _checked_name(cursor.until(">", "<function=")), dict[str, str]()
    cursor.blanks()
    if cursor.text.startswith("{", cursor.at):
        call = cursor.arguments(name)
        cursor.require("</function>", f"the call of {name:.40}")
        return call
    while cursor.skip("<parameter="):
        key = cursor.until(">", f"an argument of {name:.40}").strip()
        if key in texts:
            raise MalformedCall(f"{name:.40} gets {key:.40} more than once")
        text = cursor.until("</parameter>", f"the argument {key:.40}")
        texts[key] = text.removeprefix("\n").removesuffix("\n")
    cursor.require("</function>", f"the call of {name:.40}")
    return call_from_texts(name, texts)


def _parse_function(text: str, at: int) -> tuple[Calls, int]:
    cursor = Cursor(text, at)
    return [_function(cursor)], cursor.at


FUNCTION = CallForm("<function=", _parse_function, "</function>")


def invoke_form(open_mark: str, close: str, prefix: str = "") -> CallForm:
    """Returns the form of `<invoke name="...">` with `<parameter name="...">` between two marks.
    `prefix` stands before the names of these tags. A parameter with string="true" is a text.
    """
    tag = f"<{prefix}invoke "

    def parse(text: str, at: int) -> tuple[Calls, int]:
        cursor, calls = Cursor(text, at + len(open_mark)), Calls()
        while cursor.skip(tag):
            calls.append(_invoked(cursor, prefix))
            check_count(len(calls))
        cursor.require(close, f"a {open_mark}")
        return calls, cursor.at

    return CallForm(open_mark, parse, close)


def _invoked(cursor: Cursor, prefix: str) -> ToolCall:
    name = _attribute(cursor.until(">", "<invoke"))
    texts, strings, end = dict[str, str](), set[str](), f"</{prefix}parameter>"
    while cursor.skip(f"<{prefix}parameter "):
        head = cursor.until(">", f"an argument of {name:.40}")
        key, declared = _attribute(head), _STRING.search(head)
        if key in texts:
            raise MalformedCall(f"{name:.40} gets {key:.40} more than once")
        texts[key] = cursor.until(end, f"the argument {key:.40}")
        if declared and declared[1] == "true":
            strings.add(key)
    cursor.require(f"</{prefix}invoke>", f"the call of {name:.40}")
    return call_from_texts(name, texts).with_texts(strings)


def _attribute(head: str) -> str:
    match = re.match(r'\s*name="([^"<>]{1,256})"', head)
    if match is None:
        raise MalformedCall(f'{head[:80]!r} has no name="..."')
    return match[1]


def parse_deepseek(text: str, at: int) -> tuple[Calls, int]:
    """Returns DeepSeek's calls: the name and a fenced JSON (V3), or the name and JSON (V3.1)."""
    cursor, calls = Cursor(text, at), Calls()
    has_section = cursor.skip("<｜tool▁calls▁begin｜>")
    while cursor.skip("<｜tool▁call▁begin｜>"):
        head = cursor.until("<｜tool▁sep｜>", "a call")
        cursor.blanks()
        if not text.startswith("{", cursor.at):
            head = cursor.until("\n", "the name of a call")
            cursor.require("```json", f"the call of {head:.40}")
            calls.append(cursor.arguments(head))
            cursor.require("```", f"the call of {head:.40}")
        else:
            calls.append(cursor.arguments(head))
        cursor.require("<｜tool▁call▁end｜>", f"the call of {head:.40}")
        check_count(len(calls))
    closed = cursor.skip("<｜tool▁calls▁end｜>")
    # R1's template leaves the end of a single call's list out
    if not calls or (has_section and not closed and text[cursor.at :].strip()):
        raise MalformedCall("a <｜tool▁calls▁begin｜> has no <｜tool▁calls▁end｜>")
    return calls, cursor.at


def parse_kimi(text: str, at: int) -> tuple[Calls, int]:
    """Returns Kimi's calls, whose ids are "functions.name:0"."""
    cursor, calls = Cursor(text, at), Calls()
    cursor.require("<|tool_calls_section_begin|>", "a call")
    while cursor.skip("<|tool_call_begin|>"):
        identity = cursor.until("<|tool_call_argument_begin|>", "a call").strip()
        name = _KIMI_ID.fullmatch(identity)
        calls.append(cursor.arguments(name[1] if name else identity))
        cursor.require("<|tool_call_end|>", f"the call of {identity:.40}")
        check_count(len(calls))
    cursor.require("<|tool_calls_section_end|>", "a <|tool_calls_section_begin|>")
    return calls, cursor.at


def parse_mistral(text: str, at: int) -> tuple[Calls, int]:
    """Returns Mistral's calls: a JSON list, or a name with [ARGS] (tokenizers from v11 on)."""
    cursor = Cursor(text, at + len("[TOOL_CALLS]"))
    cursor.blanks()
    name = _NAME.match(text, cursor.at)
    if name is None:
        return calls_in_json(cursor.value("after [TOOL_CALLS]")), cursor.at
    cursor.at = name.end()
    if cursor.skip("[CALL_ID]") and (identity := _NAME.match(text, cursor.at)):
        cursor.at = identity.end()
    cursor.skip("[ARGS]")
    return [cursor.arguments(name[0])], cursor.at


def parse_python_tag(text: str, at: int) -> tuple[Calls, int]:
    """Returns Llama's calls after <|python_tag|>: JSON objects with ";" between them, the method
    `call` of a built-in tool, or a program, which is the argument `code` of code_interpreter.
    """
    cursor, calls = Cursor(text, at + len("<|python_tag|>")), Calls()
    cursor.blanks()
    body = text[cursor.at :].strip()
    if body.startswith(("{", "[")):
        while cursor.at < len(text) and text[cursor.at] in "{[":
            calls += calls_in_json(cursor.value("after <|python_tag|>"))
            check_count(len(calls))
            cursor.skip(";")
            cursor.blanks()
        return calls, cursor.at
    if method := _METHOD.match(body):
        bare = read_bare_calls(f"{method[1]}({body[method.end() :]}")
        if bare.malformed:
            raise MalformedCall(bare.malformed)
        return list(bare.calls), len(text)
    if not body:
        raise MalformedCall("nothing follows <|python_tag|>")
    return [ToolCall("code_interpreter", {"code": body})], len(text)
