"""Prediction from the prompt's text."""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

import numpy as np
from jaxtyping import Float

from compass_jax.base.records import Prompt
from compass_jax.config import Predictor
from compass_jax.config.ranges import Range
from compass_jax.data.difficulty import label_of
from compass_jax.data.predictors.inputs import Prediction, PredictorInputs
from compass_jax.data.predictors.regression import ByRegression

SAMPLE = 1024  # prompts from which the frequencies of n-grams are counted
SHORT = 512  # characters of a text whose n-grams of characters count
CHARACTERS = range(1, 6)  # lengths of these n-grams
SIZES = 4  # numbers beside the n-grams, the constant 1 included
GRAMS = 65536  # n-grams whose features are kept
LABELS = 32  # features of labels, which more labels share


@dataclass(frozen=True)
class Text(Predictor):
    """Predicts a prompt by Bayesian logistic regression on its text: n-grams of words and of
    characters (digits alike), weighted by log(1 + count) x inverse document frequency and hashed
    into `features` numbers of unit length, and the logarithms of its characters, numbers and
    longest number; where prompts have several labels, the label too.
    """

    features: Annotated[int, Range(16, 8192)] = 256
    """Number of hashed features; up to 512 with a full covariance, beyond with its diagonal."""
    std: Annotated[float, Range(0, 100, above=True)] = 4.0
    """Prior standard deviation of a weight (a number), in logits."""

    def start(self, inputs: PredictorInputs) -> Prediction:
        """Returns the predictions."""
        count = self.features + LABELS + SIZES
        variance = np.full(count, self.std**2)
        return ByRegression(TextFeatures(inputs.prompts, self.features), variance)


class TextFeatures:
    """Features of prompts by their questions, kept once computed."""

    def __init__(self, prompts: Sequence[Prompt], count: int):
        self._count = count
        every = max(1, len(prompts) // SAMPLE)
        sample = [prompt.question for prompt in prompts[::every]][:SAMPLE]
        self._documents = max(1, len(sample))
        self._frequency = Counter(gram for text in sample for gram in grams(text))
        sizes = np.array([_sizes(text) for text in sample or ("",)])
        self._middle, self._scale = sizes.mean(0), sizes.std(0)
        labels = sorted({label_of(prompt) for prompt in prompts})
        self._labels = {x: i % LABELS for i, x in enumerate(labels) if len(labels) > 1}
        self._known: dict[int, Float[np.ndarray, " d"]] = {}
        self._place = lru_cache(GRAMS)(self._hash)

    def __call__(self, prompts: Sequence[Prompt]) -> Float[np.ndarray, "n d"]:
        """Returns the features [n d], the last of them 1."""
        for prompt in prompts:
            if prompt.id not in self._known:
                self._known[prompt.id] = self._of(prompt.question, label_of(prompt))
        return np.array([self._known[prompt.id] for prompt in prompts])

    def _of(self, text: str, label: str) -> Float[np.ndarray, " d"]:
        hashed, labels = np.zeros(self._count), np.zeros(LABELS)
        if label in self._labels:
            labels[self._labels[label]] = 1.0
        for gram, number in grams(text).items():
            place, weight = self._place(gram)
            hashed[place] += weight * math.log1p(number)
        length = float(np.linalg.norm(hashed)) or 1.0
        sizes = (_sizes(text) - self._middle) / np.where(self._scale > 0, self._scale, 1)
        return np.concatenate([hashed / length, labels, np.clip(sizes, -3, 3) / 3, [1.0]])

    def _hash(self, gram: str) -> tuple[int, float]:
        """Returns an n-gram's feature, and its signed weight there."""
        # crc32 is the same in every process and version, unlike hash()
        code = zlib.crc32(gram.encode())
        rarity = math.log((1 + self._documents) / (1 + self._frequency[gram]))
        return (code >> 1) % self._count, rarity if code & 1 else -rarity


def grams(text: str) -> Counter[str]:
    """Returns the counts of a text's words and pairs of words, and of the n-grams of its first
    characters, with digits alike.
    """
    text = re.sub(r"\d", "0", " ".join(text.lower().split()))
    words = text.split()
    ngrams = Counter(f"w {word}" for word in words)
    ngrams.update(f"p {first} {second}" for first, second in pairwise(words))
    short = text[:SHORT]
    for n in CHARACTERS:
        ngrams.update(f"c {short[i : i + n]}" for i in range(len(short) - n + 1))
    return ngrams


def _sizes(text: str) -> Float[np.ndarray, " 3"]:
    numbers = re.findall(r"\d+", text)
    longest = max(map(len, numbers), default=0)
    return np.log1p([len(text), len(numbers), longest])
