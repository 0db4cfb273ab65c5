"""Text to ids and back: a Hugging Face tokenizer folder, read with `tokenizers` and `jinja2` alone.

`encode` never adds special tokens by itself: what a model sees is what the chat template writes, so that a prompt's
tokens are the same in SFT, in the rollout and in the exported model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

PAD, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Messages = Sequence[dict[str, Any]]


class TokenizerError(ValueError):
    """A tokenizer folder or chat template that cannot be used; the message says why."""


class Tokenizer:
    """A Hugging Face tokenizer: `tokenizer.json`, `tokenizer_config.json` and a chat template.

    `eos_id` ends a turn, `pad_id` fills batches (the end token's id where the folder names no pad token). `vocab_size` is the
    largest id + 1: ids may have holes.
    """

    def __init__(self, backend: Any, specials: dict[str, str], chat_template: str | None, folder: str):
        self._backend = backend
        self._specials = specials
        self._chat_template = chat_template
        self._folder = folder
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.eos_id = self._special_id("eos_token")
        self.pad_id = self._special_id("pad_token") if "pad_token" in specials else self.eos_id

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads a folder. Raises TokenizerError naming the file that is missing or cannot be read."""
        from tokenizers import Tokenizer as Backend

        folder = Path(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (folder / name).is_file():
                raise TokenizerError(f"{folder / name} does not exist: data.tokenizer must be a folder with tokenizer.json and tokenizer_config.json")
        try:
            backend = Backend.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception
            raise TokenizerError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from error
        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except ValueError as error:
            raise TokenizerError(f"{folder / 'tokenizer_config.json'} is not JSON: {error}") from error
        return cls(backend, _special_tokens(config), _chat_template(folder, config), str(folder))

    @classmethod
    def for_model(cls, folder: str | Path, vocab_size: int) -> Tokenizer:
        """`load`, for a model with `vocab_size` rows. Raises TokenizerError where the folder has ids beyond them, too."""
        tokenizer = cls.load(folder)
        if tokenizer.vocab_size > vocab_size:
            raise TokenizerError(
                f"the tokenizer {folder} has ids up to {tokenizer.vocab_size - 1}, and the model has rows for {vocab_size} ids: "
                "name the tokenizer that belongs to the model, or raise model.vocab_size"
            )
        return tokenizer

    def _special_id(self, name: str) -> int:
        token = self._specials.get(name)
        if token is None:
            raise TokenizerError(f"{self._folder}/tokenizer_config.json names no {name}: generation could not end; add one")
        index = self._backend.token_to_id(token)
        if index is None:
            raise TokenizerError(f"{self._folder}/tokenizer_config.json names {name} {token!r}, which is not in tokenizer.json")
        return index

    def encode(self, text: str) -> list[int]:
        """Ids of a text. Special tokens are recognised where the text spells them, and never added."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special tokens left out. Never raises: ids outside the vocabulary (the padded columns of an
        LM head) are dropped, bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True)

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token, as the vocabulary spells it: no token stands for more of a text."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def byte_of(self, token: int) -> int | None:
        """The byte that a token of a byte-level vocabulary stands for, where it is one byte; None otherwise."""
        spelling = self._backend.id_to_token(int(token))
        return self._bytes.get(spelling) if spelling is not None else None

    @cached_property
    def _bytes(self) -> dict[str, int]:
        """Byte-level BPE spells a byte as its own character where that is printable, and by the characters from 256 on otherwise."""
        own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [b for b in range(256) if b not in set(own)]
        return {chr(b): b for b in own} | {chr(256 + i): b for i, b in enumerate(others)}

    @cached_property
    def _template(self) -> Any:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if self._chat_template is None:
            raise TokenizerError(f"{self._folder} has no chat template: add chat_template.jinja")

        def raise_exception(message: str) -> None:
            raise jinja2.exceptions.TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = raise_exception
        return environment.from_string(self._chat_template)

    def apply_chat_template(self, messages: Messages, add_generation_prompt: bool) -> str:
        """The conversation as text; with the opening of the assistant's turn if `add_generation_prompt`.

        Raises TokenizerError with the template's own words if it refuses the messages.
        """
        import jinja2

        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **self._specials)
        except jinja2.exceptions.TemplateError as error:
            raise TokenizerError(f"the chat template of {self._folder} refuses these messages: {error}") from error

    def encode_chat(self, messages: Messages, add_generation_prompt: bool) -> list[int]:
        """Ids of `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt))

    def encode_example(self, messages: Messages) -> tuple[np.ndarray, np.ndarray]:
        """(tokens int32 [t], mask bool [t]): a conversation, and which tokens the assistant wrote.

        The mask covers each assistant message's content and its end token, nothing else. What precedes an assistant
        message is encoded on its own, so it has the ids that the rollout's prompt has. Nothing follows the last end token.

        Raises:
            TokenizerError: there is no assistant message; the template rewrites earlier turns or does not close an
                assistant message with the end token (the message's index is named).
        """
        ids: list[int] = []
        mask: list[bool] = []
        done = ""  # rendered text that is already encoded
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self.apply_chat_template(messages[:i], add_generation_prompt=True)
            after = self.apply_chat_template(messages[: i + 1], add_generation_prompt=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise TokenizerError(f"messages[{i}]: the chat template of {self._folder} renders what precedes it differently once it is there")
            context, answer = self.encode(before[len(done) :]), self.encode(after[len(before) :])
            if self.eos_id not in answer:
                end_token = self._specials["eos_token"]
                raise TokenizerError(f"messages[{i}]: the chat template of {self._folder} does not end it with the end token {end_token!r}")
            end = len(answer) - answer[::-1].index(self.eos_id)
            ids += context + answer
            mask += [False] * len(context) + [j < end for j in range(len(answer))]
            done = after
        if not any(mask):
            raise TokenizerError("no message has the role 'assistant': there is nothing to learn from")
        last = len(mask) - mask[::-1].index(True)
        return np.asarray(ids[:last], np.int32), np.asarray(mask[:last], bool)


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos, eos, pad and unk as strings; a token is written as a string or as {"content": ...}."""
    found = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items() if token is not None}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The template file wins over the config's; of several named templates the default one is used."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return {entry["name"]: entry["template"] for entry in template}.get("default")
    return template


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: str | Path) -> Tokenizer:
    """Trains a byte-level BPE on `texts`, writes it to `folder` in Hugging Face format with a ChatML template, and loads it.

    Every digit is its own token, so numbers of any length are spelt alike; any text can be encoded. Ids 0, 1, 2 are
    `<|endoftext|>` (pad), `<|im_start|>` and `<|im_end|>` (end of turn). The vocabulary has at most `vocab_size` entries
    (fewer if the texts have fewer pairs to merge) and at least the 3 special tokens and 256 bytes.
    """
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = [PAD, TURN_START, TURN_END]
    smallest = len(alphabet) + len(specials)
    if vocab_size < smallest:
        raise TokenizerError(f"vocab_size = {vocab_size}: at least {smallest} are needed (256 bytes and {len(specials)} special tokens)")
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(texts, trainer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": TURN_END,
        "additional_special_tokens": [TURN_START],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
        "chat_template": CHATML,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return Tokenizer.load(folder)
