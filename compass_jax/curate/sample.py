"""A row of a file as the filters see it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from compass_jax.curate.words import Numbers, hashed, numbers_in, runs, words
from compass_jax.data.files import INSTRUCTIONS
from compass_jax.data.procedural import normalised

Messages = Sequence[dict[str, Any]]


class Sample:
    """A conversation, and what is computed of it once.

    Args:
        where: its file and line.
        messages, tools: what SFT would learn, as data/sft.py reads it.
        shingle_words: the words of a shingle.
    """

    def __init__(self, where: str, messages: Messages, tools: Sequence[Any], shingle_words: int):
        self.where = where
        self.messages = messages
        self.tools = tools
        self._shingle_words = shingle_words

    def of(self, role: str) -> list[str]:
        """What the messages of a role say."""
        return [message["content"] for message in self.messages if message["role"] == role]

    @property
    def asked(self) -> str:
        """All that the user says."""
        return "\n".join(self.of("user"))

    @property
    def answer(self) -> str:
        """The assistant's last message; empty where there is none."""
        return (self.of("assistant") or [""])[-1]

    @cached_property
    def said(self) -> str:
        """All that is said but by the system, calls of tools included."""
        parts = []
        for message in self.messages:
            if message["role"] not in INSTRUCTIONS:
                parts.append(message["content"])
                if calls := message.get("tool_calls"):
                    parts.append(json.dumps(calls, ensure_ascii=False))
        return "\n".join(parts)

    @cached_property
    def words(self) -> Numbers:
        """uint64 [words]: the words of `said`."""
        return hashed(words(self.said))

    @cached_property
    def shingles(self) -> Numbers:
        """uint64: the distinct shingles of `said`, sorted."""
        return np.unique(runs(self.words, self._shingle_words))

    @cached_property
    def numbers(self) -> int:
        """A 64-bit number for the numbers in its questions, whatever their order."""
        text = " ".join(numbers_in(words(self.asked)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")

    @cached_property
    def key(self) -> bytes:
        """The same for conversations that differ in white space alone."""
        told = [
            [normalised(value) if isinstance(value, str) else value for value in message.values()]
            for message in self.messages
        ]
        text = json.dumps([told, list(self.tools)], default=str)
        return hashlib.blake2b(text.encode(), digest_size=16).digest()
