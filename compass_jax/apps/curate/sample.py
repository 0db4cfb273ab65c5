"""A row of a file in the form that the filters read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from compass_jax.apps.curate.words import Numbers, hashed, numbers_in, runs, words
from compass_jax.base.aliases import Json, JsonObject
from compass_jax.data.messages import INSTRUCTIONS
from compass_jax.data.procedural import normalised

Messages = Sequence[JsonObject]


class Sample:
    """A conversation with lazily computed features.

    Args:
        where: the row's file and line.
        messages, tools: the conversation that SFT would train on, as data/sft.py reads it.
        shingle_words: number of words in a shingle.
    """

    def __init__(self, where: str, messages: Messages, tools: Sequence[Json], shingle_words: int):
        self.where = where
        self.messages = messages
        self.tools = tools
        self._shingle_words = shingle_words

    def of(self, role: str) -> list[str]:
        """Returns the contents of the messages of a role."""
        return [message["content"] for message in self.messages if message["role"] == role]

    @property
    def user_text(self) -> str:
        """The user's messages, joined."""
        return "\n".join(self.of("user"))

    @property
    def answer(self) -> str:
        """The assistant's last message; empty if there is no such message."""
        return (self.of("assistant") or [""])[-1]

    @cached_property
    def text(self) -> str:
        """The messages except the system's, joined, with tool calls."""
        parts = []
        for message in self.messages:
            if message["role"] not in INSTRUCTIONS:
                parts.append(message["content"])
                if calls := message.get("tool_calls"):
                    parts.append(json.dumps(calls, ensure_ascii=False))
        return "\n".join(parts)

    @cached_property
    def words(self) -> Numbers:
        """The hashed words of `said`, uint64 [words]."""
        return hashed(words(self.text))

    @cached_property
    def shingles(self) -> Numbers:
        """The distinct shingles of `said`, sorted, uint64."""
        return np.unique(runs(self.words, self._shingle_words))

    @cached_property
    def numbers(self) -> int:
        """A 64-bit hash of the numbers in the user's messages, independent of their order."""
        text = " ".join(numbers_in(words(self.user_text)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    @cached_property
    def key(self) -> bytes:
        """A hash that is equal for conversations that differ only in white space."""
        messages = [
            [normalised(value) if isinstance(value, str) else value for value in message.values()]
            for message in self.messages
        ]
        text = json.dumps([messages, list(self.tools)], default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
