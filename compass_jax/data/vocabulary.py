"""The vocabulary of a Hugging Face tokenizer folder: text to ids and back, with `tokenizers` only.

`encode` adds no special tokens. The chat template writes everything that a model sees, so a prompt
has the same tokens in SFT, in the rollout and in the exported model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import UserError
from compass_jax.base.token_ids import TOKENIZER_CONFIG, end_ids, tokenizer_config
from compass_jax.base.untrusted import read_text
from compass_jax.data.added_tokens import add_tokens
from compass_jax.data.control_tokens import SENTINEL, ControlTokenError, ControlTokens, ids_of
from compass_jax.data.files import validation_problem

_CONTEXT = 64  # characters of a text on which the tokens of its continuation depend
_BREAKS = ("\n", "1")  # texts with which a following word forms no token
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
_NAMED = ("bos_token", "eos_token", "pad_token", "unk_token")
_Token = Annotated[
    str,
    BeforeValidator(lambda token: token.get("content") if isinstance(token, dict) else token),
    Field(min_length=1),
]

TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}


class TokenizerError(UserError):
    """A tokenizer folder or chat template cannot be used; the message gives the reason."""


class NamedTemplate(BaseModel):
    """One of several chat templates."""

    name: str
    template: str


class TokenizerConfig(BaseModel):
    """The part of tokenizer_config.json that is read. A token is a text or {"content": ...}."""

    bos_token: _Token | None = None
    eos_token: _Token | None = None
    pad_token: _Token | None = None
    unk_token: _Token | None = None
    additional_special_tokens: list[_Token] | None = None
    chat_template: str | list[NamedTemplate] | None = None


def folder_templates(folder: Path, named: str | list[NamedTemplate] | None) -> dict[str, str]:
    """Returns the chat templates of a folder by name: of its files, else of its configuration."""
    files = {name: folder / path for name, path in TEMPLATE_FILES.items()}
    templates = {
        name: read_text(file, error=TokenizerError)
        for name, file in files.items()
        if file.is_file()
    }
    if templates or named is None:
        return templates
    return {"default": named} if isinstance(named, str) else {x.name: x.template for x in named}


class Vocabulary:
    """`tokenizer.json` and `tokenizer_config.json` of a folder.

    Each of `end_ids` ends a turn: the tokenizer's `eos_id`, and those of the model's
    generation_config.json, or else config.json. `pad_id` fills batches; it is `eos_id` if the
    folder names no pad token. A response's text lacks `hidden_ids`. `vocab_size` is the largest
    id + 1; ids may have gaps.

    Raises TokenizerError, which names the file, for a file that is missing, unreadable or
    inconsistent.
    """

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise TokenizerError(
                    f"{folder / name} does not exist: data.tokenizer must be a folder with"
                    " tokenizer.json and tokenizer_config.json"
                )
        self._folder = str(folder)
        self._backend = backend = _backend(folder / "tokenizer.json")
        raw = tokenizer_config(folder, TokenizerError)
        self._config = config = _config(raw, folder / TOKENIZER_CONFIG)
        named = add_tokens(backend, folder, raw, TokenizerError)
        self._specials = special_tokens(config)
        ends, added = end_ids(folder, TokenizerError), backend.get_added_tokens_decoder()
        named += [added[i].content for i in ends if i in added]
        backend.add_tokens(_made_special(backend, named))
        ids = {name: backend.token_to_id(token) for name, token in self._specials.items()}
        known = {name: self._specials[name] for name, i in ids.items() if i is not None}
        self._control = ControlTokens(backend, known)
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = 1 + max(vocabulary.values(), default=-1)
        self.eos_id = self._special_id("eos_token")
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *ends)))
        self.pad_id = self._special_id("pad_token") if config.pad_token else self.eos_id
        begin = [ids["bos_token"]] if "bos_token" in known else []
        self.hidden_ids = {*self.end_ids, self.pad_id, *begin}

    def _special_id(self, name: str) -> int:
        token, file = self._specials.get(name), f"{self._folder}/tokenizer_config.json"
        if token is None:
            raise TokenizerError(f"{file} names no {name}: generation could not end; add one")
        if (index := self._backend.token_to_id(token)) is None:
            raise TokenizerError(f"{file} names {name} {token!r}, which is not in tokenizer.json")
        return index

    def encode(self, text: str, trusted: bool = True) -> list[int]:
        """Returns the ids of a text, without added special tokens.

        Spellings of special tokens are encoded as special tokens if the text is `trusted`, else as
        text. Raises TokenizerError for a text that cannot be encoded, such as half a character.
        """
        return self._encoded(text, ids_of) if trusted else self.ids(self._control.hide(text))

    def ids(self, text: str) -> list[int]:
        """Returns the ids of a text rendered from hidden messages, or of a part of one."""
        if SENTINEL in text:
            return self._encoded(text, lambda _, hidden: self._control.encode(hidden))
        return self._encoded(text, ids_of)

    def ids_after(self, before: str, text: str) -> list[int]:
        """Returns the ids of a text that continues `before`: as `ids`, without the space that
        SentencePiece's vocabularies put before the first word of a text.
        """
        if not before or not self._prefixes_texts:
            return self.ids(text)
        # Where a token would span the boundary, another text stands for `before`.
        for context in (before[-_CONTEXT:], *_BREAKS):
            ids = self.ids(context)
            if (joint := self.ids(context + text))[: len(ids)] == ids:
                return joint[len(ids) :]
        return self.ids(text)

    @cached_property
    def _prefixes_texts(self) -> bool:
        """Whether the first word of a text is encoded differently than a later one."""
        return any(self.ids(x + "a") != self.ids(x) + self.ids("a") for x in _BREAKS)

    def _encoded(self, text: str, encode: Callable[[Any, str], list[int]]) -> list[int]:
        try:
            return encode(self._backend, text)
        except ControlTokenError as error:
            raise TokenizerError(
                f"the tokenizer {self._folder} refuses these messages: {error}"
            ) from error
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerError(
                f"the tokenizer {self._folder} cannot encode {text[:80]!r}: {error}"
            ) from error

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """Returns the text of ids, without special tokens unless `special`.

        Ids outside the vocabulary (the padded columns of an LM head) are dropped; bytes that are
        not UTF-8 become U+FFFD.
        """
        valid = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self._backend.decode(valid, skip_special_tokens=not special)

    def decode_response(self, ids: Iterable[int]) -> str:
        """Returns a response's text, without tokens that end, begin or pad it."""
        return self.decode([i for i in map(int, ids) if i not in self.hidden_ids], special=True)

    @cached_property
    def longest(self) -> int:
        """Number of characters of the longest token, the most text that a token can represent."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def byte_of(self, token: int) -> int | None:
        """Returns the byte of a one-byte token, else None."""
        data = self.bytes_of(token)
        return data[0] if len(data) == 1 else None

    def text_of(self, token: int) -> str:
        """Returns the text of a token that follows others: decoders drop the space before the first
        word of a text.
        """
        letter, text = self._letter
        return self.decode([*letter, token], True)[len(text) :]

    @cached_property
    def _letter(self) -> tuple[list[int], str]:
        """The token of a letter, and its text."""
        ids = self.ids("a")[-1:]
        return ids, self.decode(ids, True)

    def is_byte_token(self, token: int) -> bool:
        """Returns whether a token is spelt by its byte (<0xE4>), as in SentencePiece's models."""
        spelling = self._backend.id_to_token(int(token)) or ""
        return bool(_BYTE_TOKEN.fullmatch(spelling)) and self.text_of(token) != spelling

    def bytes_of(self, token: int) -> bytes:
        """Returns the bytes of a token, which may be part of a character; for a special token those
        of its spelling, and empty for an id without a token.
        """
        spelling, text = self._backend.id_to_token(int(token)) or "", self.text_of(token)
        if text.isascii():
            return text.encode()
        if (part := _BYTE_TOKEN.fullmatch(spelling)) is not None:
            return bytes.fromhex(part[1])
        data = bytes(BYTES.get(character, 0) for character in spelling)
        # vocabularies that are not byte-level spell a token by its text
        return data if data.decode(errors="replace") == text else text.encode()


# the byte of each character of byte-level BPE: printable bytes are spelt as themselves, the others
# as the characters from 256 on
_PRINTABLE = [b for b in range(256) if chr(b).isprintable() and chr(b) != " "]
_OTHERS = [b for b in range(256) if b not in _PRINTABLE]
BYTES = {chr(b): b for b in _PRINTABLE} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def special_tokens(config: TokenizerConfig) -> dict[str, str]:
    """Returns the special tokens of a configuration by their names in chat templates."""
    return {name: x for name in _NAMED if (x := getattr(config, name)) is not None}


def _made_special(backend: Any, named: Iterable[str]) -> list[Any]:
    """Returns the named tokens that the vocabulary has as plain ones, as special tokens."""
    from tokenizers import AddedToken

    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = []
    for content in named:
        token = known.get(content, AddedToken(content, special=True))
        if backend.token_to_id(content) is not None and (content not in known or not token.special):
            token.special = True
            tokens.append(token)
    return tokens


def read_config(folder: str | Path) -> TokenizerConfig:
    """Returns the content of a folder's tokenizer_config.json. Raises TokenizerError, naming the
    file.
    """
    return _config(tokenizer_config(folder, TokenizerError), Path(folder) / TOKENIZER_CONFIG)


def _config(raw: JsonObject, file: Path) -> TokenizerConfig:
    try:
        return TokenizerConfig.model_validate(raw)
    except ValidationError as error:
        raise TokenizerError(f"{file}: {validation_problem(error)}") from error


def _backend(file: Path) -> Json:
    from tokenizers import Tokenizer as Backend

    try:
        backend = Backend.from_str(read_text(file, error=TokenizerError))
    except TokenizerError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise TokenizerError(
            f"{file} cannot be read: {error}; use the one that the model was published with"
        ) from error
    backend.no_truncation()  # as transformers does: a file may have been saved with either
    backend.no_padding()
    return backend
