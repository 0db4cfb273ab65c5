"""Filters that decide on one row alone. Each returns the reason to drop the row, or an empty string
to keep it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from functools import partial

from compass_jax.apps.curate.sample import Sample
from compass_jax.apps.curate.words import hashed, runs, words
from compass_jax.base.chat.base import any_format
from compass_jax.base.extras import how_to_install
from compass_jax.config import ConfigError
from compass_jax.config.prepare import PrepareConfig

_ESCAPED = re.compile(r"\\[\\{}]")  # in TeX, a printed brace closes nothing
REPEATED_WORDS = 8  # length of a run: shorter runs recur in any long chain of thought
MOST_READ = 2000  # characters passed to language detection
LEAST_LETTERS = 20  # below this, no language is detected
LEAST_SURE = 0.9  # minimum probability of the detected language


def switched_on(config: PrepareConfig) -> dict[str, Callable[[Sample], str]]:
    """Returns the single-row filters that the settings enable, keyed by their name in reports."""
    checks = {
        "unfinished": (config.unfinished, partial(unfinished, tag=config.answer_tag)),
        "too_short": (config.least_characters, partial(too_short, least=config.least_characters)),
        "repetition": (config.most_repeated < 1, partial(repetition, most=config.most_repeated)),
        "language": (config.languages, partial(other_language, languages=config.languages)),
    }
    return {name: check for name, (on, check) in checks.items() if on}


def unfinished(sample: Sample, tag: str) -> str:
    r"""Returns why an answer is incomplete: it is missing or empty, or a tag is not closed.

    Chains of thought are found by the marks of every chat format. `tag` and \boxed{} are checked in
    the text outside them.
    A conversation needs at least one answer, and none may be empty.
    """
    answers = [message for message in sample.messages if message["role"] == "assistant"]
    if not answers:
        return "there is no answer"
    for message in answers:
        if reason := _unclosed(message["content"], tag):
            return reason
        read = any_format().read(message["content"])
        if not read.text.strip() and "tool_calls" not in message:
            after = "nothing comes after the chain of thought"
            return after if read.thought else "the answer is empty"
    return ""


def _unclosed(text: str, tag: str) -> str:
    if reason := any_format().unclosed(text):
        return reason
    answer = any_format().read(text).text
    if tag and answer.count(f"<{tag}>") > answer.count(f"</{tag}>"):
        return f"<{tag}> is never closed"
    box = answer.rfind("\\boxed{")
    braces = _ESCAPED.sub("", answer[box:])
    if box >= 0 and braces.count("{") > braces.count("}"):
        return "\\boxed{ is never closed"
    return ""


def too_short(sample: Sample, least: int) -> str:
    """Returns why a conversation is too short; `least` excludes white space."""
    count = sum(map(len, sample.text.split()))
    return f"{count} characters, fewer than {least}" if count < least else ""


def repetition(sample: Sample, most: float) -> str:
    """Returns why an answer is repetitive.

    It is if more than the share `most` of its non-blank lines, or of its runs of 8 words, equals an
    earlier one (the measures for documents in arXiv 2112.11446v2, table A1).
    """
    for text in sample.of("assistant"):
        parts: dict[str, list] = {
            "lines": [line.strip() for line in text.splitlines() if line.strip()],
            f"runs of {REPEATED_WORDS} words": runs(hashed(words(text)), REPEATED_WORDS).tolist(),
        }
        for name, part in parts.items():
            share = 1 - len(set(part)) / max(1, len(part))
            if part and share > most:
                return f"{share:.0%} of its {name} repeat an earlier one"
    return ""


def check_languages(languages: Sequence[str]) -> None:
    """Raises ConfigError if langdetect is not installed or does not support one of the codes."""
    try:
        from langdetect.detector_factory import PROFILES_DIRECTORY
    except ImportError as error:
        raise ConfigError(
            f"prepare.languages needs langdetect: {how_to_install('gym', 'langdetect')}"
        ) from error
    codes = os.listdir(PROFILES_DIRECTORY)  # one file per language
    for code in languages:
        if code not in codes:
            raise ConfigError(
                f"prepare.languages names {code!r:.80}; langdetect knows {', '.join(sorted(codes))}"
            )


def other_language(sample: Sample, languages: Sequence[str]) -> str:
    """Returns why an answer is in none of the languages (ISO 639-1 codes), by langdetect.

    The row stays if the language cannot be detected: too few letters, or no language is likely
    enough.
    """
    from langdetect import DetectorFactory, LangDetectException, detect_langs

    DetectorFactory.seed = 0  # detection is random otherwise
    text = sample.answer[:MOST_READ]
    if sum(map(str.isalpha, text)) < LEAST_LETTERS:
        return ""
    try:
        guess = detect_langs(text)[0]
    except LangDetectException:  # no known language
        return ""
    if guess.lang in languages or guess.prob < LEAST_SURE:
        return ""
    return f"the answer is in {guess.lang}"
