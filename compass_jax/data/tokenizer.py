"""Text to ids and back: a Hugging Face tokenizer folder, read with `tokenizers` and `jinja2` alone.

`encode` never adds special tokens by itself: what a model sees is what the chat template writes, so
that a prompt's tokens are the same in SFT, in the rollout and in the exported model. A folder is
what somebody else wrote: it is tried before it is used (tokenizer_probe.py), its template is
rendered elsewhere (templates.py), and what messages hold is never a control token
(control_tokens.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compass_jax.data.control_tokens import ControlTokenError, ControlTokens, ids_of
from compass_jax.data.templates import Job, TemplateFailure, renderer
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

Messages = Sequence[dict[str, Any]]
Tools = Sequence[dict[str, Any]]


class Chat(NamedTuple):
    """A conversation, and the tools that the chat template is told of."""

    messages: Messages
    tools: Tools = ()


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
        more_end_ids: Sequence[int] = (),
    ):
        self._backend = backend
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
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *more_end_ids)))
        self.pad_id = self._special_id("pad_token") if "pad_token" in specials else self.eos_id

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads a folder. Raises TokenizerError where a file is missing, cannot be read, or cannot
        be right; the message names it.
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
        return cls(backend, specials, chat_template(folder, config), str(folder), ends)

    @classmethod
    def for_model(cls, folder: str | Path, vocab_size: int) -> Tokenizer:
        """`load`, for a model with `vocab_size` rows. Raises TokenizerError where the folder has
        ids beyond them, too.
        """
        tokenizer = cls.load(folder)
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
            return self.encode(text) if hidden is text else self._ids(_Hidden(hidden))
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

    def _rendered(
        self,
        chats: Sequence[Chat],
        jobs: Sequence[tuple[int, int, bool]],
        trusted: bool,
    ) -> list[Any]:
        """The text of each job (conversation, messages of it, add_generation_prompt), or the
        TokenizerError that it ends in.

        A text is a str, or a `_Hidden` one where the messages spell control tokens and are not
        `trusted`.
        """
        if self._chat_template is None:
            raise TokenizerError(f"{self._folder} has no chat template: add chat_template.jinja")
        shown = [chat if trusted else self._hidden(chat) for chat in chats]
        sound = [Chat([]) if isinstance(chat, TokenizerError) else chat for chat in shown]
        made = [_job(sound[c], n, add) for c, n, add in jobs]
        found: list[Any] = renderer().render(self._chat_template, self._specials, made)
        for i, (c, _, _) in enumerate(jobs):
            if isinstance(shown[c], TokenizerError):
                found[i] = shown[c]
            elif isinstance(found[i], TemplateFailure):
                found[i] = TokenizerError(
                    f"the chat template of {self._folder} refuses these messages: {found[i]}"
                )
            elif unread := renderer().unread(
                self._chat_template, self._specials, made[i], found[i]
            ):
                found[i] = TokenizerError(
                    f"the chat template of {self._folder} does not show the {unread} of these"
                    " messages: use a model whose template does, or write them into the content"
                )
            elif not trusted and shown[c] is not chats[c]:
                found[i] = _Hidden(found[i])
        return found

    def _hidden(self, chat: Chat) -> Chat | TokenizerError:
        messages = self._hide(chat.messages)
        tools = self._hide(chat.tools)
        refused = [part for part in (messages, tools) if isinstance(part, TokenizerError)]
        same = messages is chat.messages and tools is chat.tools
        return refused[0] if refused else chat if same else Chat(messages, tools)

    def _hide(self, messages: Any) -> Any:
        try:
            return self._control.hide(messages)
        except ControlTokenError as error:
            return TokenizerError(f"the tokenizer {self._folder} refuses these messages: {error}")

    def _ids(self, text: str) -> list[int]:
        """Ids of a rendered text, or of a part of one."""
        if isinstance(text, _Hidden):
            return self._encoded(text, lambda: self._control.encode(text))
        return self.encode(text)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool, trusted: bool = False
    ) -> str:
        """The conversation as text; with the opening of the assistant's turn if
        `add_generation_prompt`.

        Raises TokenizerError with the template's own words if it refuses the messages, and where it
        fails or takes too long. `trusted`: see `encode_chat`.
        """
        jobs = [(0, len(_list(messages)), add_generation_prompt)]
        text = _good(self._rendered([Chat(messages)], jobs, trusted)[0])
        return ControlTokens.shown(text) if isinstance(text, _Hidden) else text

    def encode_chat(
        self, messages: Messages, add_generation_prompt: bool, trusted: bool = False
    ) -> list[int]:
        """Ids of `apply_chat_template`. What the messages hold is text, whatever it spells; only
        the template's own markers are control tokens. `trusted`: spellings in the messages are
        control tokens, too."""
        return self.encode_chats([messages], add_generation_prompt, trusted)[0]

    def encode_prompt(
        self, messages: Messages, tools: Tools | None = None, **template_args: Any
    ) -> list[int]:
        """Returns the ids of a prompt: the conversation, and the opening of the assistant's turn.
        The template is told of `tools`.
        """
        if template_args:
            raise TokenizerError(f"the template takes no variables: {sorted(template_args)}")
        return self.encode_chats([messages], True, tools=[tools or ()])[0]

    def encode_chats(
        self,
        conversations: Sequence[Messages],
        add_generation_prompt: bool,
        trusted: bool = False,
        tools: Sequence[Tools] | None = None,
    ) -> list[list[int]]:
        """`encode_chat` of many conversations, rendered together: faster than one by one.

        tools: those of each conversation, which the template is told of; None: of none. A template
            that shows nothing of tools, or of a message's tool_calls, refuses the conversation.
        """
        chats = _chats(conversations, tools)
        jobs = [(i, len(chat.messages), add_generation_prompt) for i, chat in enumerate(chats)]
        found = []
        for messages, text in zip(conversations, self._rendered(chats, jobs, trusted), strict=True):
            try:
                found.append(self._ids(_good(text)))
                if messages and not found[-1]:
                    raise TokenizerError(
                        f"the chat template of {self._folder} makes nothing of these messages: no"
                        " token is left"
                    )
            except TokenizerError as error:
                if len(conversations) == 1:
                    raise
                raise TokenizerError(f"{error}; they are {str(list(messages))[:200]}") from error
        return found

    def encode_example(
        self, messages: Messages, trusted: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [t], mask bool [t]): a conversation, and which tokens the assistant wrote.

        The mask covers each assistant message's content and its end token, nothing else. What
        precedes an assistant message is encoded on its own, so it has the ids that the rollout's
        prompt has. Nothing follows the last end token. `trusted`: see `encode_chat`.

        Raises:
            TokenizerError: there is no assistant message; the template rewrites earlier turns or
                does not close an
                assistant message with the end token (the message's index is named).
        """
        return next(self.encode_examples([messages], trusted))

    def encode_examples(
        self,
        conversations: Sequence[Messages],
        trusted: bool = False,
        tools: Sequence[Tools] | None = None,
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """`encode_example` of many conversations, rendered together; what is wrong with one is
        raised when it is reached. `tools`: see `encode_chats`.
        """
        chats = _chats(conversations, tools)
        turns = [
            [i for i, m in enumerate(chat.messages) if m.get("role") == "assistant"]
            for chat in chats
        ]
        jobs = [
            (c, i + answered, not answered)
            for c, found in enumerate(turns)
            for i in found
            for answered in (False, True)
        ]
        texts = iter(self._rendered(chats, jobs, trusted) if jobs else ())
        for found in turns:
            yield self._example([(i, _good(next(texts)), _good(next(texts))) for i in found])

    def _example(self, turns: Sequence[tuple[int, str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """An example of its assistant messages: the index of each, and the text before and after
        it.
        """
        ids: list[int] = []
        mask: list[bool] = []
        done = ""  # rendered text that is already encoded
        for i, before, after in turns:
            if not (before.startswith(done) and after.startswith(before)):
                raise TokenizerError(
                    f"messages[{i}]: the chat template of {self._folder} renders what precedes it"
                    " differently once it is there"
                )
            context, answer = self._ids(before[len(done) :]), self._ids(after[len(before) :])
            ends = [j + 1 for j, token in enumerate(answer) if token in self.end_ids]
            if not ends:
                end_token = self._specials["eos_token"]
                raise TokenizerError(
                    f"messages[{i}]: the chat template of {self._folder} does not end it with the"
                    f" end token {end_token!r}, or another one of generation_config.json"
                )
            end = ends[-1]
            ids += context + answer
            mask += [False] * len(context) + [j < end for j in range(len(answer))]
            done = after
        if not any(mask):
            raise TokenizerError(
                "no message has the role 'assistant': there is nothing to learn from"
            )
        last = len(mask) - mask[::-1].index(True)
        return np.asarray(ids[:last], np.int32), np.asarray(mask[:last], bool)


class _Hidden(str):
    """A text, or a part of one, that was rendered from hidden messages (ControlTokens.hide)."""

    def __getitem__(self, key: Any) -> _Hidden:
        return _Hidden(super().__getitem__(key))


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


def _job(chat: Chat, count: int, add_generation_prompt: bool) -> Job:
    return Job(chat.messages, count, add_generation_prompt, chat.tools)


def _good(text: str | TokenizerError) -> str:
    if isinstance(text, TokenizerError):
        raise text
    return text
