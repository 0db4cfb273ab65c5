"""A Hugging Face tokenizer with its chat template: conversations to ids and loss masks.

Messages are text: control_tokens.py distinguishes control tokens spelt in them from those that the
template writes.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO, ChatFormat
from compass_jax.config import ConfigError, DataConfig
from compass_jax.config.chat import find_format
from compass_jax.data.chat_detection import detect
from compass_jax.data.control_tokens import ControlTokens
from compass_jax.data.templates import (
    TODAY,
    TemplateFailure,
    ToolsNotShown,
    render_chat,
    strftime_of,
)
from compass_jax.data.vocabulary import TokenizerError, Vocabulary, folder_templates

logger = logging.getLogger(__name__)

Messages = Sequence[JsonObject]
Tools = Sequence[JsonObject]
Example = tuple[np.ndarray, np.ndarray]  # tokens int32 [t], mask bool [t]

# name of a chat template -> its file, as transformers writes it
_TAIL = 12  # tokens at the end of a prompt that are searched for an opened thought
MARK = "mark-of-a-turn"  # content of an assistant message in a probe of the template


class Chat(NamedTuple):
    """A conversation with its tools, with spelt control tokens hidden."""

    messages: Messages
    tools: Tools = ()
    has_tools: bool = False  # whether it has tools, also where none is described


class Tokenizer(Vocabulary):
    """The tokenizer of a folder.

    Args:
        template_args: variables of the chat template.
        date: the date that the chat template reads, as YYYY-MM-DD; empty: the present one.
        chat_format: the form of answers (data.chat_format); auto: by the chat template.

    Raises the errors of Vocabulary, and TokenizerError for a chat template that cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        template_args: JsonMapping | None = None,
        date: str = "",
        chat_format: str = AUTO,
    ):
        super().__init__(folder)
        self._variables = {TODAY: strftime_of(date), **(template_args or {})}
        templates = folder_templates(Path(folder), self._config.chat_template)
        self._chat_template = templates.get("default")
        self._tool_template = templates.get("tool_use", self._chat_template)
        self.has_template = self._chat_template is not None
        self._warned: set[str] = set()
        self._openings: dict[str, int | None] = {}
        self._format_name = chat_format

    @classmethod
    def load(cls, folder: str | Path, template_args: JsonMapping | None = None) -> Tokenizer:
        """Returns the tokenizer of a folder."""
        return cls(folder, template_args)

    @classmethod
    def for_model(
        cls,
        folder: str | Path,
        vocab_size: int,
        template_args: JsonMapping | None = None,
        date: str = "",
        chat_format: str = AUTO,
    ) -> Tokenizer:
        """Returns the tokenizer. Raises TokenizerError for ids from `vocab_size` on."""
        tokenizer = cls(folder, template_args, date, chat_format)
        if tokenizer.vocab_size > vocab_size:
            raise TokenizerError(
                f"the tokenizer {folder} has ids up to {tokenizer.vocab_size - 1}, and the model"
                f" has rows for {vocab_size} ids: name the tokenizer that belongs to the model, or"
                " raise model.vocab_size"
            )
        return tokenizer

    @cached_property
    def chat_format(self) -> ChatFormat:
        """The form of answers."""
        if self._format_name != AUTO or self._tool_template is None:
            return find_format(self._format_name)
        return detect(self._tool_template, {**self._specials, **self._variables})

    def opened_thought(self, prompt: Sequence[int]) -> str:
        """Returns the mark with which a prompt's end opens a thought, with its white space, or
        "".
        """
        return self.chat_format.opened(self.decode(prompt[-_TAIL:], special=True))

    def template_names(self, word: str) -> bool:
        """Returns whether a chat template names a role or a variable."""
        return any(word in (self._template(tools) or "") for tools in (True, False))

    def _template(self, has_tools: bool) -> str | None:
        return self._tool_template if has_tools else self._chat_template

    def render(
        self,
        messages: Messages,
        tools: Tools = (),
        add_generation_prompt: bool = True,
        **template_args: Json,
    ) -> str:
        """Renders a conversation; `template_args` override those of the tokenizer.

        Raises TokenizerError with the template's message if it refuses the messages, fails, or does
        not show the tools.
        """
        chat = self._prepared(messages, tools)
        text = self._render(chat, len(messages), add_generation_prompt, template_args, strict=True)
        return ControlTokens.visible(text)

    def encode_prompt(
        self, messages: Messages, tools: Tools | None = None, **template_args: Json
    ) -> list[int]:
        """Returns the ids of `render`'s text, with spelt control tokens as text."""
        chat = self._prepared(messages, tools or ())
        return self.ids(self._render(chat, len(messages), True, template_args, strict=True))

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools = ()
    ) -> list[int]:
        """Returns the ids of a row's conversation.

        They are those of `encode_prompt`, except that a template that does not show the tools only
        causes a warning. Raises TokenizerError if the result is empty.
        """
        ids = self.ids(self.rendered(messages, add_generation_prompt, tools))
        if messages and not ids:
            raise TokenizerError(
                f"the chat template of {self._folder} makes nothing of these messages: no token is"
                " left"
            )
        return ids

    def rendered(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        tools: Tools = (),
        has_tools: bool = False,
    ) -> str:
        """Renders a conversation for `ids`, with spellings of control tokens hidden. `has_tools`:
        with the template for tools, even if none is described.
        """
        chat = self._prepared(messages, tools)
        chat = chat._replace(has_tools=chat.has_tools or has_tools)
        return self._render(chat, len(messages), add_generation_prompt)

    def _prepared(self, messages: Messages, tools: Tools = ()) -> Chat:
        """Prepares a conversation for the template: hides spellings of control tokens, and turns
        the developer role into the system role if the template does not name it.
        """
        if "developer" not in (self._template(bool(tools)) or ""):
            messages = [
                {**m, "role": "system"} if m.get("role") == "developer" else m for m in messages
            ]
        return Chat(self._control.hide(messages), self._control.hide(tools), bool(tools))

    def _render(
        self,
        chat: Chat,
        count: int,
        add_generation_prompt: bool,
        template_args: JsonMapping | None = None,
        strict: bool = False,
    ) -> str:
        """Renders the first `count` messages of a prepared conversation. Tools that the template
        does not show are an error if `strict`, else a warning.
        """
        template = self._template(chat.has_tools)
        if template is None:
            raise TokenizerError(f"{self._folder} has no chat template: add chat_template.jinja")
        variables = {**self._specials, **self._variables, **(template_args or {})}
        messages, tools = chat.messages[:count], chat.tools or None
        where = f"the chat template of {self._folder}"
        try:
            try:
                text = render_chat(template, messages, tools, add_generation_prompt, variables)
            except ToolsNotShown as error:
                if strict:
                    raise
                if (warning := str(error)) not in self._warned:
                    self._warned.add(warning)
                    logger.warning("%s: %s. The rows are used without their tools", where, error)
                plain = self._chat_template or template
                text = render_chat(plain, messages, None, add_generation_prompt, variables)
        except TemplateFailure as error:
            raise TokenizerError(f"{where} refuses these messages: {error}") from error
        return text

    def encode_example(self, messages: Messages) -> Example:
        """Returns (tokens int32 [t], mask bool [t]) of a conversation.

        The mask selects each assistant message's content and its end token. The text before an
        assistant message is encoded separately, so that it has the ids of a rollout's prompt.
        Nothing follows the last end token.

        Raises TokenizerError, with the message's index, if there is no assistant message, or if the
        template rewrites earlier turns or ends them with a token other than the end token.
        """
        example, *further_examples = self.encode_turns(messages)
        if further_examples:
            turns = [i for i, m in enumerate(messages) if m.get("role") == "assistant"]
            raise TokenizerError(
                f"messages[{turns[1]}]: the chat template of {self._folder} renders what"
                " precedes it differently once it is there"
            )
        return example

    def encode_turns(
        self, messages: Messages, tools: Tools = (), untrained: int = 0
    ) -> list[Example]:
        """Returns the examples of a conversation: one, or several if the template rewrites earlier
        turns, so that each assistant message is trained in the context of a rollout. The first
        `untrained` messages are only context.
        """
        chat = self._prepared(messages, tools)
        parts: list[tuple[list[int], list[bool]]] = []
        done = ""  # the text of the last part
        for i, message in enumerate(chat.messages):
            if i < untrained or message.get("role") != "assistant":
                continue
            before = self._render(chat, i, True)
            target = self._target(chat, i)
            # If the prompt does not begin with the text so far, the template has rewritten earlier
            # turns, and a new sequence begins.
            continued = bool(parts) and before.startswith(done)
            context = self.ids_after(done, before[len(done) :]) if continued else self.ids(before)
            answer = self._answer(chat, i, before, target)
            if not continued:
                parts.append(([], []))
            ids, mask = parts[-1]
            if ids and context[:1] == ids[-1:] and ids[-1] != self.eos_id:
                context = context[1:]  # the token that ends a turn and opens the next message
            ids += context + answer.ids
            mask += [False] * len(context) + [j < answer.end for j in range(len(answer.ids))]
            done = before + target
        if not parts:
            raise TokenizerError(
                "no message has the role 'assistant': there is nothing to learn from"
            )
        return [_trimmed(ids, mask) for ids, mask in parts]

    def _target(self, chat: Chat, i: int) -> str:
        """Returns the text of assistant message `i` after the prompt of a rollout."""
        message, prompt = chat.messages[i], self._render(chat, i, True)
        opened = bool(self.chat_format.opened(prompt))
        for history in _histories(chat.messages[:i]):
            shorter, n = chat._replace(messages=[*history, message]), len(history)
            before, after = self._render(shorter, n, True), self._render(shorter, n + 1, False)
            thought = self.chat_format.opened(before)
            if after.startswith(before) and opened == bool(thought):
                return after[len(before) :]
            start = len(before) - len(thought)
            if thought and after.startswith(before[:start]):
                rendered = after[start:]
                marks = thought.strip(), self.chat_format.closing(thought)
                return _with_thought(message, rendered, *marks) if opened else rendered
        raise TokenizerError(
            f"messages[{i}]: the chat template of {self._folder} opens the assistant's turn with"
            f" {ControlTokens.visible(prompt)[-40:]!r}, and the message that it writes does not"
            " begin"
            " so: use a template whose turns begin as its generation prompt does"
        )

    def _answer(self, chat: Chat, i: int, before: str, target: str) -> _Answer:
        """Returns the ids of assistant message `i`, whose text `target` follows the text `before`,
        and the number of them that is trained.
        """
        ids = self.ids_after(before, target)
        ends = [j for j, token in enumerate(ids) if token in self.end_ids]
        if not ends and self.closes_turns and not self._closes_with_end:
            raise TokenizerError(
                f"messages[{i}]: the chat template of {self._folder} does not end it with the end"
                f" token {self._specials['eos_token']!r}: name the token that it writes as the"
                " eos_token of tokenizer_config.json"
            )
        if ends:
            return _Answer(ids, ends[-1] + 1)
        return _Answer([*ids, self._end_before(chat, i)], len(ids) + 1)

    def _end_before(self, chat: Chat, i: int) -> int:
        """Returns the token that ends assistant message `i` if the template writes none: the one
        that opens the next message, if it is an end token (GLM's <|user|>), else the end token.
        """
        if self.closes_turns:
            return self.eos_id
        following = chat.messages[i + 1 : i + 2]
        role = str(following[0].get("role")) if following else "assistant"
        if role == "assistant":
            role = "tool" if chat.messages[i].get("tool_calls") else "user"
        opening = self._opening_id(role)
        return opening if opening in self.end_ids else self.eos_id

    def _opening_id(self, role: str) -> int | None:
        """Returns the first token of a message of this role after an assistant's, or None."""
        if role not in self._openings:
            probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            following = [{"role": role, "content": "?"}]
            try:
                texts = [
                    self._render(Chat([*probe, *suffix]), 3, False) for suffix in ([], following)
                ]
            except TokenizerError:
                texts = ["", ""]
            short_tail, long_tail = (text.rpartition(MARK)[2] for text in texts)
            ids = (
                self.ids(long_tail[len(short_tail) :].lstrip())
                if long_tail.startswith(short_tail)
                else []
            )
            self._openings[role] = ids[0] if ids else None
        return self._openings[role]

    @cached_property
    def _closing_ids(self) -> list[int]:
        """Control tokens that the template writes after an assistant message's content."""
        chat = Chat([{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}])
        text = self._render(chat, 2, False)
        return [i for i in self.ids(text.rpartition(MARK)[2]) if i in self._control.ids]

    @property
    def closes_turns(self) -> bool:
        """Whether the template writes a control token after an assistant message. GLM's does not:
        the opening of the next message ends it.
        """
        return bool(self._closing_ids)

    @property
    def _closes_with_end(self) -> bool:
        return any(token in self.end_ids for token in self._closing_ids)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns (start, end) of each control token that the template wrote into a text."""
        return self._control.spans(text)


class _Answer(NamedTuple):
    """The ids of an assistant message; the first `end` of them are trained."""

    ids: list[int]
    end: int


def _trimmed(ids: list[int], mask: list[bool]) -> Example:
    """Returns the arrays of an example up to the last trained token."""
    last = len(mask) - mask[::-1].index(True)
    return np.asarray(ids[:last], np.int32), np.asarray(mask[:last], bool)


def _histories(messages: Messages) -> Iterator[list[JsonObject]]:
    """Yields the messages before an assistant message, then shorter histories that a template may
    not rewrite: without reasoning, without system messages, from the last question on, and the last
    question only.
    """
    yield list(messages)
    thoughts = ("reasoning_content", "thinking")
    plain = [{k: v for k, v in one.items() if k not in thoughts} for one in messages]
    yield plain
    dialogue = [one for one in plain if one.get("role") not in ("system", "developer")]
    yield dialogue
    questions = [i for i, one in enumerate(dialogue) if one.get("role") == "user"]
    if questions:
        yield dialogue[questions[-1] :]
        yield dialogue[questions[-1] : questions[-1] + 1]


def _with_thought(message: JsonObject, rendered: str, begin: str, end: str) -> str:
    """Returns the text that follows an opened thought: the closed thought, or an empty one, and the
    answer. The thought is that of the `rendered` text, else that of the message's content.
    """
    content = str(message.get("content") or "")
    for text in (rendered, content):
        thought, mark, _ = text.rpartition(end)
        thought = re.sub(rf"\A\s*{re.escape(begin)}\n?", "", thought)
        if thought.strip():
            return thought + mark + rendered.rpartition(end)[2]
    return f"\n{end}\n\n" + rendered.rpartition(end)[2]


def load_tokenizer(data: DataConfig, vocab_size: int) -> Tokenizer:
    """Returns the run's tokenizer. Raises ConfigError if none is configured, and TokenizerError if
    its ids exceed the model's vocabulary.
    """
    if not data.tokenizer:
        raise ConfigError(
            "data.tokenizer is empty: name a folder with tokenizer.json and tokenizer_config.json"
        )
    args = dict(data.template_args)
    return Tokenizer.for_model(data.tokenizer, vocab_size, args, data.date, data.chat_format)
