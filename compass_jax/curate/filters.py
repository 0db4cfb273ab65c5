"""The filters that look at one row alone. Each gives the reason why a row is taken out, and an
empty text where it stays.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial

from compass_jax.config import ConfigError
from compass_jax.config.prepare import PrepareConfig
from compass_jax.curate.sample import Sample
from compass_jax.curate.words import hashed, repeated_share, runs, words
from compass_jax.extras import how_to_install

_THINK = re.compile("</?think>")
REPEATED_WORDS = 8  # of a run: shorter ones come again in any long chain of thought
MOST_READ = 2000  # characters that the language is told by
LEAST_LETTERS = 20  # fewer tell no language
LEAST_SURE = 0.9  # probability of the language


def switched_on(config: PrepareConfig) -> dict[str, Callable[[Sample], str]]:
    """The filters of one row alone that the settings switch on, by the name that reports have."""
    every = {
        "unfinished": (config.unfinished, partial(unfinished, tag=config.answer_tag)),
        "too_short": (config.least_characters, partial(too_short, least=config.least_characters)),
        "repetition": (config.most_repeated < 1, partial(repetition, most=config.most_repeated)),
        "language": (config.languages, partial(other_language, languages=config.languages)),
    }
    return {name: check for name, (on, check) in every.items() if on}


def unfinished(sample: Sample, tag: str) -> str:
    """Why an answer is no whole one: nothing is said, or what opens does not close.

    A chain of thought stands between <think> and </think>; `tag` and a box are looked for after it.
    A conversation has one answer at least, and none is empty.
    """
    answers = [message for message in sample.messages if message["role"] == "assistant"]
    if not answers:
        return "there is no answer"
    for message in answers:
        reason = _unclosed(message["content"], tag)
        if reason:
            return reason
        after = message["content"].rpartition("</think>")[2]
        if not after.strip() and "tool_calls" not in message:
            return (
                "nothing comes after the chain of thought"
                if after != message["content"]
                else ("the answer is empty")
            )
    return ""


def _unclosed(text: str, tag: str) -> str:
    inside = False
    for mark in _THINK.findall(text):
        if mark == "<think>" and inside:
            return "<think> is opened inside <think>"
        if mark == "</think>" and not inside:
            return "</think> closes nothing"
        inside = not inside
    if inside:
        return "<think> is never closed"
    after = text.rpartition("</think>")[2]
    if tag and after.count(f"<{tag}>") > after.count(f"</{tag}>"):
        return f"<{tag}> is never closed"
    box = after.rfind("\\boxed{")
    if box >= 0 and after.count("{", box) > after.count("}", box):
        return "\\boxed{ is never closed"
    return ""


def too_short(sample: Sample, least: int) -> str:
    """Why a conversation is too short; `least` is a count of characters without white space."""
    count = sum(map(len, sample.said.split()))
    return f"{count} characters, fewer than {least}" if count < least else ""


def too_long(tokens: int, most: int) -> str:
    """Why a conversation is too long, in tokens; `most` = 0: none is."""
    return f"{tokens} tokens, more than {most}" if 0 < most < tokens else ""


def repetition(sample: Sample, most: float) -> str:
    """Why an answer repeats itself: more than the share `most` of its lines, blank ones left out,
    or of its runs of 8 words, equals an earlier one (arXiv 2112.11446v2, table A1, has the two
    measures for documents).
    """
    for text in sample.of("assistant"):
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        repeated = runs(hashed(words(text)), REPEATED_WORDS).tolist()
        shares = {
            "lines": repeated_share(lines),
            f"runs of {REPEATED_WORDS} words": repeated_share(repeated),
        }
        for name, share in shares.items():
            if share > most:
                return f"{share:.0%} of its {name} repeat an earlier one"
    return ""


def check_languages(languages: Sequence[str]) -> None:
    """Raises ConfigError where langdetect is not installed, or does not know one of these codes."""
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY
    except ImportError as error:
        raise ConfigError(
            f"prepare.languages needs langdetect: {how_to_install('gym', 'langdetect')}"
        ) from error
    known = os.listdir(PROFILES_DIRECTORY)  # a file for each
    for code in languages:
        if code not in known:
            raise ConfigError(
                f"prepare.languages names {code!r:.80}; langdetect knows {', '.join(sorted(known))}"
            )


def other_language(sample: Sample, languages: Sequence[str]) -> str:
    """Why an answer is in none of these languages (ISO 639-1), by langdetect; it stays where the
    language cannot be told: few letters, or no language is likely.
    """
    from langdetect import DetectorFactory, LangDetectException, detect_langs

    DetectorFactory.seed = 0  # its choice is drawn otherwise
    text = sample.answer[:MOST_READ]
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return ""
    try:
        found = detect_langs(text)[0]
    except LangDetectException:  # nothing that it knows
        return ""
    if found.lang in languages or found.prob < LEAST_SURE:
        return ""
    return f"the answer is in {found.lang}"
