"""The verifiable instructions of IFEval (arXiv 2311.07911, table 1): each a function of a response
and the arguments that IFEval's rows give, under the names of its rows.

The verdicts are those of Google's checker (google-research, instruction_following_eval), with two
approximations: sentences are split by Punkt's rules with a short list of abbreviations in place of
a trained model, and words in capitals are counted by the Treebank rules that matter for them.
Each function reads the text once or a few times, however it is made.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence

RELATIONS: Mapping[str, Callable[[int, int], bool]] = {
    "at least": operator.ge,
    "less than": operator.lt,
    "at most": operator.le,
    "exactly": operator.eq,
    "more than": operator.gt,
}
CHOICES = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_SENTENCE_END = re.compile(r"[.?!]+(?=[)\";}\]*:@'({\[‘’“”«»]|\s)[\"')\]”’»]*\s*(?=(\S{1,40}))")
_ABBREVIATIONS = frozenset(
    str.split(
        "a.m p.m u.s u.k u.n u.s.a d.c n.y n.j n.c l.a ph.d m.b.a adm aug ave bros calif co"
        " colo conn corp dec dr feb fla fri ft gen ill inc jan jr lt ltd maj messrs mich minn"
        " mr mrs ms nov oct ok pa prof rep reps sen sep sept sr st tenn tues va vs wash wed"
        " wis yr"
    )
)
_STARTERS = frozenset(
    str.split(
        "although among both but despite even he however i if in indeed instead it many"
        " meanwhile moreover most nevertheless nonetheless nor separately similarly since so"
        " some the there these they this though thus under when while yet"
    )
)
_STAR_BULLET = re.compile(r"^[^\S\n]{0,200}\*[^*].*$", re.MULTILINE)
_DASH_BULLET = re.compile(r"^[^\S\n]{0,200}-.*$", re.MULTILINE)
_HIGHLIGHT = re.compile(r"\*([^\n*]*)\*")
_DOUBLE_HIGHLIGHT = re.compile(r"\*\*([^\n*]*)\*\*")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_FENCES = ("```json", "```Json", "```JSON", "```")
_MARK = re.compile(r"[\s\[\](){}<>\"“”«»;@#$%&?!*]+|,(?!\d)|:(?!\d)|--+|\.\.+|(?=['’])|['’](?=\s)")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}


def _related(count: int, wanted: int, relation: str) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r:.60}: it must be one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, int(wanted))


def _found(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def existence(text: str, keywords: Sequence[str]) -> bool:
    """Every keyword stands in it, perhaps within a longer word."""
    return all(re.search(re.escape(word), text, re.IGNORECASE) for word in keywords)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    """None of the words stands in it as a word."""
    return not any(_found(rf"\b{re.escape(word)}\b", text) for word in forbidden_words)


def keyword_frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    """The keyword stands in it so many times, perhaps within longer words."""
    return _related(_found(re.escape(keyword.strip()), text), frequency, relation)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    """The letter, in any case, stands in it so many times."""
    return _related(text.lower().count(letter.lower()), let_frequency, let_relation)


def response_language(text: str, language: str) -> bool:
    """It is written in the language of this ISO 639-1 code, or langdetect finds no language."""
    return _language(text) in (language, None)


def _language(text: str) -> str | None:
    """Returns the language that langdetect finds, None where the text has no letters."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as error:
        raise LookupError(
            "IFEval's languages and cases need the package langdetect: pip install langdetect"
        ) from error
    DetectorFactory.seed = 0  # its choice is drawn otherwise
    try:
        return str(detect(text))
    except LangDetectException:
        return None


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    """It has so many sentences."""
    return _related(count_sentences(text), num_sentences, relation)


def count_sentences(text: str) -> int:
    """Returns the number of sentences, by Punkt's rules (Kiss and Strunk, 2006)."""
    text = text.strip()
    last = len(text.rstrip("\"')]”’» \n\t"))  # closing marks alone are no sentence
    marks = (mark for mark in _SENTENCE_END.finditer(text) if mark.start() < last - 1)
    return sum(_is_break(text, mark) for mark in marks) + bool(text)


def _is_break(text: str, mark: re.Match) -> bool:
    """Returns whether a sentence ends at a mark."""
    if set(mark[0].rstrip()) & set("?!") or not mark[0].startswith("."):
        return True
    upper = re.sub(r"^\W+", "", mark[1])
    if mark[0].startswith(".."):
        return upper[:1].isupper()
    word = re.split(r"\s", text[max(0, mark.start() - 20) : mark.start()])[-1]
    word = word.lower().lstrip("(\"'[*_‘“")
    if word in _ABBREVIATIONS or (len(word) == 1 and word.isalpha()):
        return upper[:1].isupper() and re.split(r"\W", upper)[0].lower() in _STARTERS
    return not (re.fullmatch(r"[\d,.]+", word) and mark[1][0].islower())


def number_words(text: str, num_words: int, relation: str) -> bool:
    r"""It has so many words, runs of \w."""
    return _related(len(re.findall(r"\w+", text)), num_words, relation)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """It has exactly so many paragraphs, parted by ***, and none of them is empty."""
    parts = [part.strip() for part in _DIVIDER.split(text)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(parts) == num_paragraphs and all(parts)


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """It has so many paragraphs, parted by an empty line, and the n-th begins with the word."""
    parts = [part.strip() for part in text.split("\n\n")]
    count = sum(bool(part) for part in parts)
    if count != num_paragraphs or not 1 <= nth_paragraph <= count or not parts[nth_paragraph - 1]:
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def number_placeholders(text: str, num_placeholders: int) -> bool:
    """It has at least so many [placeholders]."""
    count = 0
    for line in text.split("\n"):
        closing = 0
        while closing >= 0 and (start := line.find("[", closing)) >= 0:
            closing = line.find("]", start)
            count += closing >= 0
    return count >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    """The marker stands in it, blanks between its letters allowed."""
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    """It has exactly so many lines that begin with * or -."""
    return len(_STAR_BULLET.findall(text)) + len(_DASH_BULLET.findall(text)) == num_bullets


def constrained_response(text: str) -> bool:
    """One of CHOICES stands in it."""
    return any(choice in text for choice in CHOICES)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """It has at least so many *highlighted* or **highlighted** parts."""
    parts = [*_HIGHLIGHT.findall(text), *_DOUBLE_HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in parts) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    """At least so many sections begin with the word and a number ("Section 1")."""
    mark = rf"{re.escape(section_spliter.strip())}\s?\d+"
    return len(re.findall(mark, text)) >= num_sections


def json_format(text: str) -> bool:
    """All of it is JSON, ``` marks around it left out."""
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """It has a <<title>> on one line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end > start + 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def two_responses(text: str) -> bool:
    """Two different responses are parted by ******."""
    parts = [part.strip() for part in text.split("******")]
    if not all(parts[1:-1]):
        return False
    parts = [part for part in parts if part]
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
    """So many words are in capital letters; a word with hyphens is one."""
    capitals = sum(word.isupper() for word in _MARK.split(text))
    return _related(capitals, capital_frequency, capital_relation)


def english_capital(text: str) -> bool:
    """It is English, in capitals."""
    return text.isupper() and _language(text) in ("en", None)


def english_lowercase(text: str) -> bool:
    """It is English, in lower case."""
    return text.islower() and _language(text) in ("en", None)


def no_comma(text: str) -> bool:
    """It has no comma."""
    return "," not in text


def variants(text: str) -> list[str]:
    """Returns the texts of IFEval's loose reading.

    They are the response, without its first line, its last line or both, each with and without
    asterisks.
    """
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    whole = [text, *cut]
    return list(dict.fromkeys([*whole, *(part.replace("*", "") for part in whole)]))


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
