"""Text to ids and back: a Hugging Face tokenizer folder, read with `tokenizers` and `jinja2` alone.

`encode` never adds special tokens by itself: what a model sees is what the chat template writes, so
that a prompt's tokens are the same in SFT, in the rollout and in the exported model. A folder is
what somebody else wrote: it is tried before it is used (tokenizer_probe.py), and what messages hold
is never a control token (control_tokens.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compass_jax.data.control_tokens import ControlTokenError, ControlTokens, ids_of
from compass_jax.data.templates import TemplateFailure, ToolsNotShown, render_chat
from compass_jax.data.token_bytes import BYTES, bytes_of
from compass_jax.data.tokenizer_folder import (
    TokenizerError,
    additional_tokens,
    chat_template,
    special_tokens,
)
from compass_jax.data.tokenizer_probe import problem_of
from compass_jax.token_ids import end_ids
from compass_jax.untrusted import read_json, read_text

logger = logging.getLogger(__name__)

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]
Example = tuple[np.ndarray, np.ndarray]  # tokens int32 [t], mask bool [t]

MARK = "mark-of-a-turn"  # content of an assistant message in a probe of the template
THOUGHT_OPENED = re.compile(r"<think>\s*\Z")
_TAIL = 8  # tokens at a prompt's end that are searched for an opened thought


class Chat(NamedTuple):
    """A conversation with its tools; `hidden` if spellings of control tokens in it are hidden."""

    messages: Messages
    tools: Tools = ()
    hidden: bool = False


class Tokenizer:
    """A Hugging Face tokenizer: `tokenizer.json`, `tokenizer_config.json` and a chat template.

    Each of `end_ids` ends a turn: `eos_id`, the tokenizer's own, and those of the model's
    generation_config.json, else config.json. `pad_id` fills batches (`eos_id` where the folder
    names no pad token). `vocab_size` is the largest id + 1: ids may have holes.
    """

    def __init__(
        self,
        backend: Any,
        specials: dict[str, str],
        chat_template: str | None,
        folder: str,
        template_args: Mapping[str, Any] | None = None,
        end_ids: Iterable[int] = (),
    ):
        self._backend = backend
        self.template_args = dict(template_args or {})
        self._warned: set[str] = set()
        self._openings: dict[str, int | None] = {}
        self._specials = specials
        self._chat_template = chat_template
        self.has_template = chat_template is not None
        self._folder = folder
        self._control = ControlTokens(
            backend, {name: t for name, t in specials.items() if backend.token_to_id(t) is not None}
        )
        self.vocab_size: int = 1 + max(
            backend.get_vocab(with_added_tokens=True).values(), default=-1
        )
        self.eos_id = self._special_id("eos_token")
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *end_ids)))
        self.pad_id = self._special_id("pad_token") if "pad_token" in specials else self.eos_id
        begins = {backend.token_to_id(specials[n]) for n in ("bos_token",) if n in specials}
        self._unshown = {*self.end_ids, self.pad_id, *begins}

    @classmethod
    def load(cls, folder: str | Path, template_args: Mapping[str, Any] | None = None) -> Tokenizer:
        """Reads a folder. Raises TokenizerError where a file is missing, cannot be read, or cannot
        be right; the message names it. `template_args`: variables of the chat template.
        """
        from tokenizers import Tokenizer as Backend

        folder = Path(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise TokenizerError(
                    f"{folder / name} does not exist: data.tokenizer must be a folder with"
                    " tokenizer.json and tokenizer_config.json"
                )
        text = read_text(folder / "tokenizer.json", error=TokenizerError)
        if problem := problem_of(text):
            file = folder / "tokenizer.json"
            raise TokenizerError(
                f"{file} is not a tokenizer to rely on: {problem}; use the one that the model was"
                " published with"
            )
        # transformers writes model_max_length = int(1e30) where a length is not limited
        config = read_json(folder / "tokenizer_config.json", error=TokenizerError, most_digits=40)
        specials = special_tokens(folder, config)
        backend = Backend.from_str(text)
        backend.no_truncation()  # as transformers does: a file may have been saved with either
        backend.no_padding()
        known = backend.get_vocab(with_added_tokens=True).keys() - {
            token.content for token in backend.get_added_tokens_decoder().values() if token.special
        }
        ends, added = end_ids(folder, TokenizerError), backend.get_added_tokens_decoder()
        named = [*specials.values(), *additional_tokens(folder, config)]
        named += [added[i].content for i in ends if i in added]
        # they may be plain entries
        backend.add_special_tokens([token for token in named if token in known])
        template = chat_template(folder, config)
        return cls(backend, specials, template, str(folder), template_args, ends)

    @classmethod
    def for_model(
        cls,
        folder: str | Path,
        vocab_size: int,
        template_args: Mapping[str, Any] | None = None,
    ) -> Tokenizer:
        """`load`, for a model with `vocab_size` rows. Raises TokenizerError where the folder has
        ids beyond them, too.
        """
        tokenizer = cls.load(folder, template_args)
        if tokenizer.vocab_size > vocab_size:
            raise TokenizerError(
                f"the tokenizer {folder} has ids up to {tokenizer.vocab_size - 1}, and the model"
                f" has rows for {vocab_size} ids: name the tokenizer that belongs to the model, or"
                " raise model.vocab_size"
            )
        return tokenizer

    def _special_id(self, name: str) -> int:
        token = self._specials.get(name)
        if token is None:
            raise TokenizerError(
                f"{self._folder}/tokenizer_config.json names no {name}: generation could not end;"
                " add one"
            )
        index = self._backend.token_to_id(token)
        if index is None:
            raise TokenizerError(
                f"{self._folder}/tokenizer_config.json names {name} {token!r}, which is not in"
                " tokenizer.json"
            )
        return index

    def encode(self, text: str, trusted: bool = True) -> list[int]:
        """Ids of a text. Special tokens are recognised where the text spells them, and never added;
        not `trusted`: they are text, too.

        Raises TokenizerError for a text that cannot be encoded (half a character, say).
        """
        if not trusted:
            hidden = _good(self._hide(text))
            return self.encode(text) if hidden is text else self.ids(_Hidden(hidden))
        return self._encoded(text, lambda: ids_of(self._backend, text))

    def _encoded(self, text: str, encode: Any) -> list[int]:
        try:
            return encode()
        except ControlTokenError as error:
            raise TokenizerError(
                f"the tokenizer {self._folder} refuses these messages: {error}"
            ) from error
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # bare Exceptions, and panics, which are none
            raise TokenizerError(
                f"the tokenizer {self._folder} cannot encode {text[:80]!r}: {error}"
            ) from error

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Text of ids, special tokens left out unless `special`. Never raises: ids outside the
        vocabulary (the padded columns of an LM head) are dropped, bytes that are not UTF-8 become
        U+FFFD."""
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self._backend.decode(known, skip_special_tokens=not special)

    def decode_response(self, ids: Iterable[int]) -> str:
        """Returns the text of a response for rewards and logs: with special tokens such as <think>,
        without those that end, begin or pad a text.
        """
        return self.decode([i for i in map(int, ids) if i not in self._unshown], special=True)

    def opened_thought(self, prompt: Sequence[int]) -> str:
        """Returns the "<think>" at a prompt's end, with the white space after it; empty if the
        prompt opens no thought.
        """
        found = THOUGHT_OPENED.search(self.decode(prompt[-_TAIL:], special=True))
        return found[0] if found else ""

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, as the vocabulary spells it: no token stands for more of
        a text.
        """
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def template_names(self, role: str) -> bool:
        """Whether the chat template speaks of a role by its name; others it shows as they come,
        passes over or refuses.
        """
        return self._chat_template is not None and role in self._chat_template

    def byte_of(self, token: int) -> int | None:
        """The byte that a token of a byte-level vocabulary stands for, where it is one byte; None
        otherwise.
        """
        spelling = self._backend.id_to_token(int(token))
        return BYTES.get(spelling) if spelling is not None else None

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token stands for, be they part of a character; none for an id that is
        no token. A special token is spelt out.
        """
        return bytes_of(self._backend.id_to_token(int(token)) or "", self.decode([token], True))

    # ---- chat templates --------------------------------------------------------------------------

    def render(
        self,
        messages: Messages,
        tools: Tools | None = None,
        add_generation_prompt: bool = True,
        **template_args: Any,
    ) -> str:
        """Renders a conversation; `template_args` win over those of `data.template_args`.

        Raises TokenizerError with the template's own words where it refuses the messages, fails, or
        does not show the tools.
        """
        chat = self._prepared(Chat(_list(messages), tools or ()), trusted=False)
        text = self._render(chat, len(messages), add_generation_prompt, template_args, strict=True)
        return _plain(text)

    def encode_prompt(
        self, messages: Messages, tools: Tools | None = None, **template_args: Any
    ) -> list[int]:
        """Returns the ids of `render`'s text, with the opening of the assistant's turn. What the
        messages hold is text, whatever it spells.
        """
        chat = self._prepared(Chat(_list(messages), tools or ()), trusted=False)
        return self.ids(self._render(chat, len(messages), True, template_args, strict=True))

    def rendered(self, messages: Messages, add_generation_prompt: bool) -> str:
        """Returns the text of `ids`: that of `apply_chat_template`, in which the messages'
        spellings of control tokens are still hidden.
        """
        chat = self._prepared(Chat(_list(messages)), trusted=False)
        return self._render(chat, len(messages), add_generation_prompt)

    def _prepared(self, chat: Chat, trusted: bool) -> Chat:
        """Prepares a conversation for the template: hides spellings of control tokens unless
        `trusted`, and makes developers the system if the template does not name them.
        """
        messages = chat.messages
        if not self.template_names("developer"):
            messages = [
                {**m, "role": "system"} if m.get("role") == "developer" else m for m in messages
            ]
        if trusted:
            return Chat(messages, chat.tools)
        hidden = Chat(_good(self._hide(messages)), _good(self._hide(chat.tools)))
        same = hidden.messages is messages and hidden.tools is chat.tools
        return Chat(hidden.messages, hidden.tools, hidden=not same)

    def _render(
        self,
        chat: Chat,
        count: int,
        add_generation_prompt: bool,
        template_args: Mapping[str, Any] | None = None,
        strict: bool = False,
    ) -> str:
        """Renders the first `count` messages of a prepared conversation, as a `_Hidden` text where
        it hides control tokens. Tools that the template does not show are an error where `strict`,
        else a warning.
        """
        if self._chat_template is None:
            raise TokenizerError(f"{self._folder} has no chat template: add chat_template.jinja")
        variables = {**self._specials, **self.template_args, **(template_args or {})}
        messages, tools = chat.messages[:count], chat.tools or None
        where = f"the chat template of {self._folder}"
        try:
            try:
                text = render_chat(
                    self._chat_template, messages, tools, add_generation_prompt, variables
                )
            except ToolsNotShown as error:
                if strict:
                    raise
                self._warn_once(f"{where}: {error}. The rows are used without their tools")
                text = render_chat(
                    self._chat_template, messages, None, add_generation_prompt, variables
                )
        except TemplateFailure as error:
            raise TokenizerError(f"{where} refuses these messages: {error}") from error
        return _Hidden(text) if chat.hidden else text

    def _warn_once(self, line: str) -> None:
        if line not in self._warned:
            self._warned.add(line)
            logger.warning("%s", line)

    def _hide(self, messages: Any) -> Any:
        try:
            return self._control.hide(messages)
        except ControlTokenError as error:
            return TokenizerError(f"the tokenizer {self._folder} refuses these messages: {error}")

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a rendered text, or of a part of one."""
        if isinstance(text, _Hidden):
            return self._encoded(text, lambda: self._control.encode(text))
        return self.encode(text)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool, trusted: bool = False
    ) -> str:
        """The conversation as text; with the opening of the assistant's turn if
        `add_generation_prompt`.

        Raises TokenizerError with the template's own words if it refuses the messages, and where it
        fails. `trusted`: see `encode_chat`.
        """
        chat = self._prepared(Chat(_list(messages)), trusted)
        return _plain(self._render(chat, len(messages), add_generation_prompt))

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool, trusted: bool = False
    ) -> list[int]:
        """Ids of `apply_chat_template`. What the messages hold is text, whatever it spells; only
        the template's own markers are control tokens. `trusted`: spellings in the messages are
        control tokens, too."""
        return self.encode_chats([messages], add_generation_prompt, trusted)[0]

    def encode_chats(
        self,
        conversations: Sequence[Messages],
        add_generation_prompt: bool,
        trusted: bool = False,
        tools: Sequence[Tools] | None = None,
    ) -> list[list[int]]:
        """`encode_chat` of many conversations.

        tools: those of each conversation, which the template is told of; None: of none. A template
            that shows nothing of tools is told of in a warning; one that shows nothing of a
            message's tool_calls refuses the conversation.
        """
        found = []
        for chat in _chats(conversations, tools):
            try:
                prepared = self._prepared(chat, trusted)
                text = self._render(prepared, len(chat.messages), add_generation_prompt)
                found.append(self.ids(text))
                if chat.messages and not found[-1]:
                    raise TokenizerError(
                        f"the chat template of {self._folder} makes nothing of these messages: no"
                        " token is left"
                    )
            except TokenizerError as error:
                if len(conversations) == 1:
                    raise
                shown = str(list(chat.messages))[:200]
                raise TokenizerError(f"{error}; they are {shown}") from error
        return found

    # ---- what is learnt --------------------------------------------------------------------------

    def encode_example(self, messages: Messages, trusted: bool = False) -> Example:
        """(tokens int32 [t], mask bool [t]): a conversation, and which tokens the assistant wrote.

        The mask covers each assistant message's content and its end token, nothing else. What
        precedes an assistant message is encoded on its own, so it has the ids that the rollout's
        prompt has. Nothing follows the last end token. `trusted`: see `encode_chat`.

        Raises:
            TokenizerError: there is no assistant message; the template rewrites earlier turns, or
                ends them with another token than the end token (the message's index is named).
        """
        return next(self.encode_examples([messages], trusted))

    def encode_examples(
        self,
        conversations: Sequence[Messages],
        trusted: bool = False,
        tools: Sequence[Tools] | None = None,
    ) -> Iterator[Example]:
        """`encode_example` of many conversations; what is wrong with one is raised when it is
        reached. `tools`: see `encode_chats`.
        """
        for chat, parts in zip(
            conversations, self.encode_turns(conversations, trusted, tools), strict=True
        ):
            if len(parts) > 1:
                turns = [i for i, m in enumerate(chat) if m.get("role") == "assistant"]
                raise TokenizerError(
                    f"messages[{turns[1]}]: the chat template of {self._folder} renders what"
                    " precedes it differently once it is there"
                )
            yield parts[0]

    def encode_turns(
        self,
        conversations: Sequence[Messages],
        trusted: bool = False,
        tools: Sequence[Tools] | None = None,
    ) -> Iterator[list[Example]]:
        """Yields the examples of each conversation: one, or several if the template rewrites
        earlier turns, so that each assistant message is learnt in a rollout's context.
        """
        for chat in _chats(conversations, tools):
            yield self._examples(self._prepared(chat, trusted))

    def _examples(self, chat: Chat) -> list[Example]:
        parts: list[tuple[list[int], list[bool]]] = []
        done: str | None = None  # the text of the last part
        for i, message in enumerate(chat.messages):
            if message.get("role") != "assistant":
                continue
            before = self._render(chat, i, True)
            target = self._target(chat, i)
            continued = done is not None and before.startswith(done)
            context = self.ids(before[len(done or "") :] if continued else before)
            answer = self._answer(chat, i, target)
            if not continued:
                parts.append(([], []))
            ids, mask = parts[-1]
            if ids and context[:1] == ids[-1:] and ids[-1] != self.eos_id:
                context = context[1:]  # the token that ends a turn and opens the next message
            ids += context + answer.ids
            mask += [False] * len(context) + [j < answer.end for j in range(len(answer.ids))]
            done = before + target
            if isinstance(before, _Hidden):
                done = _Hidden(done)
        if not parts:
            raise TokenizerError(
                "no message has the role 'assistant': there is nothing to learn from"
            )
        return [_trimmed(ids, mask) for ids, mask in parts]

    def _target(self, chat: Chat, i: int) -> str:
        """Returns the text of assistant message `i` after the prompt of a rollout."""
        message, prompt = chat.messages[i], self._render(chat, i, True)
        opened = THOUGHT_OPENED.search(prompt) is not None
        for history in _histories(chat.messages[:i]):
            shorter, n = chat._replace(messages=[*history, message]), len(history)
            before, after = self._render(shorter, n, True), self._render(shorter, n + 1, False)
            thought = THOUGHT_OPENED.search(before)
            if after.startswith(before) and opened == bool(thought):
                return after[len(before) :]
            if thought and after.startswith(before[: thought.start()]):
                closed = _closed_thought(message.get("content") or "") if opened else ""
                text = closed + after[thought.start() :]
                return _Hidden(text) if chat.hidden else text
        raise TokenizerError(
            f"messages[{i}]: the chat template of {self._folder} opens the assistant's turn with"
            f" {_plain(prompt)[-40:]!r}, and the message that it writes does not begin so: use a"
            " template whose turns begin as its generation prompt does"
        )

    def _answer(self, chat: Chat, i: int, target: str) -> _Answer:
        """Returns the ids of assistant message `i`, and the number of them that is learnt."""
        ids = self.ids(target)
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
        """Returns the first token of a message of this role after an assistant's; None if the
        template refuses it.
        """
        if role not in self._openings:
            probe = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
            following = [{"role": role, "content": "?"}]
            try:
                texts = [self._render(Chat([*probe, *more]), 3, False) for more in ([], following)]
            except TokenizerError:
                texts = ["", ""]
            alone, longer = (text.rpartition(MARK)[2] for text in texts)
            ids = self.ids(longer[len(alone) :].lstrip()) if longer.startswith(alone) else []
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
        """Whether the template writes a control token after an assistant message; GLM's does not:
        the next message's opening ends it.
        """
        return bool(self._closing_ids)

    @property
    def _closes_with_end(self) -> bool:
        return any(token in self.end_ids for token in self._closing_ids)

    def control_spans(self, text: str) -> list[tuple[int, int]]:
        """Returns (start, end) of each control token that the template wrote into a text."""
        return self._control.spans(text)


class _Answer(NamedTuple):
    """The ids of an assistant message; the first `end` of them are learnt."""

    ids: list[int]
    end: int


def _trimmed(ids: list[int], mask: list[bool]) -> Example:
    """Returns the arrays of an example up to the last token that is learnt."""
    last = len(mask) - mask[::-1].index(True)
    return np.asarray(ids[:last], np.int32), np.asarray(mask[:last], bool)


def _histories(messages: Messages) -> Iterator[list[dict[str, Any]]]:
    """Yields the messages before an assistant message, then shorter histories that a template may
    not rewrite: without reasoning, without system messages, from the last question on, the last
    question alone.
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


def _closed_thought(content: str) -> str:
    """Returns the closed thought of a content, without its opening tag; an empty thought if the
    content has no thought.
    """
    thought, mark, _ = content.rpartition("</think>")
    if not mark:
        return "\n</think>\n\n"
    return re.sub(r"\A\s*<think>\n?", "", thought) + mark


class _Hidden(str):
    """A text, or a part of one, that was rendered from hidden messages (ControlTokens.hide)."""

    def __getitem__(self, key: Any) -> _Hidden:
        return _Hidden(super().__getitem__(key))


def _plain(text: str) -> str:
    return ControlTokens.shown(text) if isinstance(text, _Hidden) else text


def _list(messages: Any) -> Messages:
    if isinstance(messages, list | tuple) and all(
        isinstance(message, dict) for message in messages
    ):
        return messages
    raise TokenizerError(
        "a conversation must be a list of objects with role and content, not"
        f" {str(messages)[:80]!r}"
    )


def _chats(conversations: Sequence[Messages], tools: Sequence[Tools] | None) -> list[Chat]:
    told = [()] * len(conversations) if tools is None else tools
    return [Chat(_list(m), t) for m, t in zip(conversations, told, strict=True)]


def _good(found: Any) -> Any:
    if isinstance(found, TokenizerError):
        raise found
    return found
