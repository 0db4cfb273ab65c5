"""A judge's training pairs and held-out ones; and in tokens, as a scalar reward model reads them:
a question with each of its two answers.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from compass_jax.config import ConfigError, DataConfig, FileSource
from compass_jax.config.verifiers import VERDICT, pairs
from compass_jax.data.files import DataError
from compass_jax.data.preferences import Preference, read_preferences
from compass_jax.data.procedural import normalised
from compass_jax.data.questions import Tell, is_heldout
from compass_jax.data.splits import evaluation_files, split_files, training_files
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError


@dataclass(frozen=True)
class Pair:
    """The tokens of a candidate's and an anchor's conversation, int32 [t] each; `gold` is 1 where
    the candidate is better, 0 of a tie, -1 where it is worse.
    """

    candidate: np.ndarray
    anchor: np.ndarray
    gold: int

    @property
    def size(self) -> int:
        """Tokens of both."""
        return len(self.candidate) + len(self.anchor)

    @property
    def longest(self) -> int:
        """Tokens of the longer one."""
        return max(len(self.candidate), len(self.anchor))

    @property
    def key(self) -> str:
        """The same for equal pairs and verdicts only."""
        digest = hashlib.blake2b(digest_size=16)
        for ids in (self.candidate, self.anchor):
            digest.update(len(ids).to_bytes(8, "little") + ids.tobytes())
        return f"{digest.hexdigest()}{self.gold}"


def split_pairs(data: DataConfig) -> tuple[list[Preference], list[Preference]]:
    """(training, held-out) pairs, on the sides on which RL has their questions.

    Raises ConfigError where no source has preferences, DataError for rows that cannot be used.
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
            held = by_hash and is_heldout(pair.question, data.heldout_frac)
            (heldout if held else training).append(pair)
    if not paths:
        raise ConfigError(
            f"data.sources: no file of preferences; a judge learns from FileSource(path,"
            f" verifier={VERDICT!r})"
        )
    asked = {normalised(pair.question) for pair in heldout}
    return [pair for pair in training if normalised(pair.question) not in asked], heldout


def _paths(data: DataConfig, key: str) -> Iterator[str]:
    for source in getattr(data, key):
        if isinstance(source, FileSource) and VERDICT in dict(pairs(source.verifier)):
            yield source.path


def conversation(question: str, answer: str) -> list[dict[str, str]]:
    """What a scalar reward model reads: the question and one answer, without instructions."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def encode_pairs(
    found: Sequence[Preference], tokenizer: Tokenizer, longest: int, tell: Tell
) -> tuple[list[Pair], dict[str, int]]:
    """The pairs in tokens, and the counts examples, tokens, duplicates and too_long; the last two
    are left out. Equal answers are kept: their margin is 0 whatever is learnt, and so is their
    gradient.

    Raises DataError where a row cannot be rendered, or nothing is left.
    """
    counts: Counter[str] = Counter(duplicates=0, too_long=0)
    kept: dict[str, Pair] = {}
    for one in found:
        try:
            candidate, anchor = (
                tokenizer.encode_example(conversation(one.question, answer))[0]
                for answer in (one.candidate, one.anchor)
            )
        except TokenizerError as error:
            raise DataError(f"{one.where}: {error}") from error
        pair = Pair(candidate, anchor, one.gold)
        if pair.longest > longest:
            counts["too_long"] += 1
        elif pair.key in kept:
            counts["duplicates"] += 1
        else:
            kept[pair.key] = pair
    if not kept:
        raise DataError(
            f"no pairs are left: {counts['too_long']} are longer than sft.buckets[-1] = {longest}"
            " tokens"
        )
    why = {"duplicates": "repeat an earlier one", "too_long": f"exceed {longest} tokens"}
    for name, said in why.items():
        if counts[name]:
            tell(f"{counts[name]} pairs {said}; they are left out")
    counts.update(examples=len(kept), tokens=sum(x.size for x in kept.values()))
    return list(kept.values()), dict(counts)
