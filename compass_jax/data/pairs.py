"""A judge's training and held-out preference pairs, and their tokens for a scalar reward model,
which reads a question with each of its two answers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compass_jax.config import ConfigError, DataConfig, FileSource
from compass_jax.config.verifiers import VERDICT, pairs
from compass_jax.data.files import DataError
from compass_jax.data.preferences import Preference, read_preferences
from compass_jax.data.procedural import normalised
from compass_jax.data.questions import Tell, is_heldout, questions
from compass_jax.data.splits import evaluation_files, split_files, training_files
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError


@dataclass(frozen=True)
class Pair:
    """The tokens of a candidate's and an anchor's conversation, int32 [t] each.

    `gold` is 1 if the candidate is better, 0 for a tie, and -1 if it is worse.
    """

    candidate: np.ndarray
    anchor: np.ndarray
    gold: int

    @property
    def size(self) -> int:
        """Total number of tokens."""
        return len(self.candidate) + len(self.anchor)

    @property
    def longest(self) -> int:
        """Number of tokens of the longer conversation."""
        return max(len(self.candidate), len(self.anchor))

    @property
    def key(self) -> str:
        """A digest that identifies the pair and its verdict."""
        parts = (len(x).to_bytes(8, "little") + x.tobytes() for x in (self.candidate, self.anchor))
        return f"{hashlib.blake2b(b''.join(parts), digest_size=16).hexdigest()}{self.gold}"


def split_pairs(data: DataConfig, seed: int = 0) -> tuple[list[Preference], list[Preference]]:
    """Returns (training, held-out) pairs, split by question in the same way as for RL. Pairs about
    a question of `data.eval_sets` are in neither. `seed` is the run's.

    Raises ConfigError if no source has preferences; DataError for rows that cannot be used.
    """
    training: list[Preference] = []
    heldout = [
        x for path in _paths(data, "eval_sources") for x in read_preferences(path, evaluation_files)
    ]
    paths = list(_paths(data, "sources"))
    for path in paths:
        by_name = bool(split_files(path).split)
        if by_name and not data.eval_sources:
            heldout += read_preferences(path, lambda pattern: split_files(pattern).heldout)
        for pair in read_preferences(path, training_files):
            by_hash = not (by_name or data.eval_sources)
            is_held_out = by_hash and is_heldout(pair.question, data.heldout_frac)
            (heldout if is_held_out else training).append(pair)
    if not paths:
        raise ConfigError(
            f"data.sources: no file of preferences; a judge learns from FileSource(path,"
            f" verifier={VERDICT!r})"
        )
    sets = questions(replace(data, sources=(), eval_sources=()), seed, lambda line: None)
    evaluated = {normalised(x) for x in (*(p.question for p in heldout), *(q.asks for q in sets))}
    return [pair for pair in training if normalised(pair.question) not in evaluated], heldout


def _paths(data: DataConfig, key: str) -> Iterator[str]:
    for source in getattr(data, key):
        if isinstance(source, FileSource) and VERDICT in dict(pairs(source.verifier)):
            yield source.path


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """Returns the input of a scalar reward model: the question and one answer."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode_pairs(
    preferences: Sequence[Preference], tokenizer: Tokenizer, longest: int, tell: Tell
) -> tuple[list[Pair], dict[str, int]]:
    """Returns the tokenised pairs and the counts examples, tokens, duplicates and too_long.

    Duplicates and pairs that are too long are dropped. Pairs with equal answers stay: their margin
    and its gradient are always 0.

    Raises DataError if a row cannot be rendered or no pair remains.
    """
    counts: Counter[str] = Counter(duplicates=0, too_long=0)
    pairs_by_key: dict[str, Pair] = {}
    for one in preferences:
        talks = (conversation(one.question, answer) for answer in (one.candidate, one.anchor))
        try:
            candidate, anchor = (tokenizer.encode_example(talk)[0] for talk in talks)
        except TokenizerError as error:
            raise DataError(f"{one.where}: {error}") from error
        pair = Pair(candidate, anchor, one.gold)
        if pair.longest > longest:
            counts["too_long"] += 1
        elif pair.key in pairs_by_key:
            counts["duplicates"] += 1
        else:
            pairs_by_key[pair.key] = pair
    if not pairs_by_key:
        raise DataError(
            f"no pairs are left: {counts['too_long']} are longer than sft.buckets[-1] = {longest}"
            " tokens"
        )
    why = {"duplicates": "repeat an earlier one", "too_long": f"exceed {longest} tokens"}
    for name, reason in why.items():
        if counts[name]:
            tell(f"{counts[name]} pairs {reason}; they are left out")
    counts.update(examples=len(pairs_by_key), tokens=sum(x.size for x in pairs_by_key.values()))
    return list(pairs_by_key.values()), dict(counts)
