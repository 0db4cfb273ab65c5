"""The verifiable instructions of IFEval (arXiv 2311.07911, table 1): each a function of a response
and the arguments that IFEval's rows give, under the names of its rows.

Sentences are split at the marks that end them, where IFEval asks a trained splitter; everything
else follows the paper's words. Each function reads the text once or a few times, however it is
made.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

from compass_jax.untrusted import UntrustedError, parse_json

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "exactly": operator.eq,
    "more than": operator.gt,
}
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_SENTENCE_END = re.compile(r"[.!?\u3002\uff01\uff1f\u0964](?=[\s\"')\]\u201d]|$)")
_BULLET = re.compile(r"^\s{0,20}(?:\*(?!\*)|-)\s?\S", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*{1,2}([^\n*]{1,2000})\*{1,2}")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]{1,2000}\]")
_TITLE = re.compile(r"<<([^\n<>]{1,2000})>>")
_FENCE = re.compile(r"^```(?:json)?\s*|\s*```$", re.IGNORECASE)


def _related(count: int, wanted: int, relation: str) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r:.60}: it must be one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, int(wanted))


def _words(text: str) -> list[str]:
    return _WORD.findall(text)


def _times(word: str, text: str) -> int:
    """How often a word or phrase stands in a text by itself, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _parts(text: str, mark: str) -> list[str]:
    return [part.strip() for part in text.split(mark)]


def existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword stands in it."""
    return all(_times(word, text) for word in keywords)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words stands in it."""
    return not any(_times(word, text) for word in forbidden_words)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword stands in it so many times."""
    return _related(_times(keyword, text), frequency, relation)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter, in any case, stands in it so many times."""
    return _related(text.lower().count(letter.lower()), let_frequency, let_relation)


def response_language(text: str, language: str) -> bool:
    """It is written in the language of this ISO 639-1 code, by langdetect."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as error:
        raise LookupError(
            "language:response_language needs the package langdetect: pip install langdetect"
        ) from error
    DetectorFactory.seed = 0  # its choice is drawn otherwise
    try:
        return bool(detect(text) == language)
    except LangDetectException:  # no letters
        return False


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """It has so many sentences; a text without an end mark is one."""
    ends = list(_SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return _related(len(ends) + bool(_words(rest)), num_sentences, relation)


def number_words(text: str, num_words: int, relation: str) -> bool:
    """It has so many words."""
    return _related(len(_words(text)), num_words, relation)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """It has exactly so many paragraphs, parted by ***, and none of them is empty."""
    parts = _parts(text, "***")
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(parts) == num_paragraphs and all(parts)


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """It has so many paragraphs, parted by an empty line, and the n-th begins with the word."""
    parts = [part for part in _parts(text, "\n\n") if part]
    if len(parts) != num_paragraphs or not 1 <= nth_paragraph <= len(parts):
        return False
    words = _words(parts[nth_paragraph - 1])
    return bool(words) and words[0].lower() == first_word.strip().lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """It has at least so many [placeholders]."""
    return len(_PLACEHOLDER.findall(text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """A line begins with the marker ("P.S." with or without the dots), and something follows it."""
    letters = r"\.?\s?".join(map(re.escape, re.sub(r"[.\s]", "", postscript_marker)))
    mark = rf"^\s{{0,20}}{letters}\.?:?\s*\w"
    return re.search(mark, text, re.IGNORECASE | re.MULTILINE) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """It has exactly so many lines that begin with * or -."""
    return len(_BULLET.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    """One of CHOICES stands in it."""
    return any(choice in text for choice in CHOICES)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """It has at least so many *highlighted* or **highlighted** parts."""
    return sum(bool(part.strip()) for part in _HIGHLIGHT.findall(text)) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections begin with the word and a number ("Section 1")."""
    mark = rf"(?<!\w){re.escape(section_spliter.strip())}\s?\d+"
    return len(re.findall(mark, text, re.IGNORECASE)) >= num_sections


def json_format(text: str) -> bool:
    """All of it is JSON, ``` marks around it left out."""
    try:
        parse_json(_FENCE.sub("", text.strip()), "the response")
    except UntrustedError:
        return False
    return True


def title(text: str) -> bool:
    """It has a <<title>>."""
    return any(found.strip() for found in _TITLE.findall(text))


def two_responses(text: str) -> bool:
    """Two different responses are parted by ******."""
    parts = [part for part in _parts(text, "******") if part]
    return len(parts) == 2 and parts[0] != parts[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    """It begins with the prompt."""
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    """It ends with the phrase."""
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    """All of it stands between double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """So many words are in capital letters."""
    return _related(
        sum(word.isupper() for word in _words(text)), capital_frequency, capital_relation
    )


def english_capital(text: str) -> bool:
    """Its letters are capitals."""
    return text.isupper()


def english_lowercase(text: str) -> bool:
    """Its letters are lower case."""
    return text.islower()


def no_comma(text: str) -> bool:
    """It has no comma."""
    return not re.search(r"[,\uff0c\u060c]", text)


CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": existence,
    "keywords:frequency": keyword_frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}
