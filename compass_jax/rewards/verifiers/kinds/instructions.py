"""The verifiable instructions of IFEval (arXiv 2311.07911, table 1), under the names of its rows.

The verdicts match Google's checker (google-research, instruction_following_eval), with two
approximations. Sentences are split by Punkt's rules, with a short list of abbreviations instead of
a trained model. Words in capitals are counted with the relevant Treebank rules only. Each function
takes linear time for any response.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence

from compass_jax.base.aliases import JsonMapping
from compass_jax.base.chat.base import AUTO
from compass_jax.config.kinds import UNKNOWN_STEPS, Example, Kind, complaints, one_of
from compass_jax.rewards.verifiers.extract import visible

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


def _compare_count(count: int, target: int, relation: str) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"relation {relation!r:.60}: it must be one of {', '.join(RELATIONS)}")
    return RELATIONS[relation](count, int(target))


def _count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text, re.IGNORECASE))


def _language(text: str) -> str | None:
    """Returns the language that langdetect detects, or None if the text has no letters."""
    try:
        from langdetect import DetectorFactory, LangDetectException, detect
    except ImportError as error:
        raise LookupError(
            "IFEval's languages and cases need the package langdetect: pip install langdetect"
        ) from error
    DetectorFactory.seed = 0  # langdetect is random otherwise
    try:
        return str(detect(text))
    except LangDetectException:
        return None


def count_sentences(text: str) -> int:
    """Returns the number of sentences, by Punkt's rules (Kiss and Strunk, 2006)."""
    text = text.strip()
    last = len(text.rstrip("\"')]”’» \n\t"))  # closing marks alone are not a sentence
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


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Returns whether *** separates the text into this number of nonempty paragraphs."""
    parts = [part.strip() for part in _DIVIDER.split(text)]
    parts = parts[not parts[0] : len(parts) - (not parts[-1])]
    return len(parts) == num_paragraphs and all(parts)


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Returns whether the text has this number of paragraphs, and the n-th begins with the word."""
    parts = [part.strip() for part in text.split("\n\n")]
    count = sum(bool(part) for part in parts)
    if count != num_paragraphs or not 1 <= nth_paragraph <= count or not parts[nth_paragraph - 1]:
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    """Returns whether the text has at least this number of [placeholders], each on one line."""
    count = 0
    for line in text.split("\n"):
        closing = 0
        while closing >= 0 and (start := line.find("[", closing)) >= 0:
            closing = line.find("]", start)
            count += closing >= 0
    return count >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    """Returns whether the text has the marker, with optional blanks between its letters."""
    marker = postscript_marker.strip()
    pattern = _POSTSCRIPTS.get(marker, re.escape(marker.lower()))
    return re.search(pattern, text.lower()) is not None


def _highlights(text: str, num_highlights: int) -> bool:
    """Returns whether the text has at least n *highlighted* or **highlighted** parts."""
    parts = [*_HIGHLIGHT.findall(text), *_DOUBLE_HIGHLIGHT.findall(text)]
    return sum(bool(part.strip()) for part in parts) >= num_highlights


def _json_format(text: str) -> bool:
    """Returns whether the whole text is JSON, apart from ``` marks around it."""
    text = text.strip()
    for fence in _FENCES:
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    """Returns whether the text has a <<title>> on one line."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if start >= 0 and end > start + 2 and line[start:end].lstrip("<").rstrip(">").strip():
            return True
    return False


def _two_responses(text: str) -> bool:
    """Returns whether the text is two different responses, separated by ******."""
    parts = [part.strip() for part in text.split("******")]
    if not all(parts[1:-1]):
        return False
    parts = [part for part in parts if part]
    return len(parts) == 2 and parts[0] != parts[1]


def _quotation(text: str) -> bool:
    """Returns whether the whole text is enclosed in double quotation marks."""
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


# name -> function of a response and the arguments of IFEval's rows
CONSTRAINTS: Mapping[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(
        _count(re.escape(word), text) for word in keywords
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare_count(
        _count(re.escape(keyword.strip()), text), frequency, relation
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(_count(rf"\b{re.escape(word)}\b", text) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare_count(
        text.lower().count(letter.lower()), let_frequency, let_relation
    ),
    "language:response_language": lambda text, language: _language(text) in (language, None),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare_count(
        count_sentences(text), num_sentences, relation
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _compare_count(
        _count(r"\w+", text), num_words, relation
    ),
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(_STAR_BULLET.findall(text)) + len(_DASH_BULLET.findall(text)) == num_bullets
    ),
    "detectable_format:constrained_response": lambda text: any(x in text for x in CHOICES),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _json_format,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _quotation,
    # a word with hyphens is one word
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: (
        _compare_count(
            sum(map(str.isupper, _MARK.split(text))), capital_frequency, capital_relation
        )
    ),
    "change_case:english_capital": lambda text: text.isupper() and _language(text) in ("en", None),
    "change_case:english_lowercase": lambda text: (
        text.islower() and _language(text) in ("en", None)
    ),
    "punctuation:no_comma": lambda text: "," not in text,
}


def variants(text: str) -> list[str]:
    """Returns the texts of IFEval's loose evaluation.

    They are the response, and the response without its first line, its last line or both; each with
    and without asterisks.
    """
    lines = text.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = [text, *cut]
    return list(dict.fromkeys([*texts, *(part.replace("*", "") for part in texts)]))


def judge(
    response: str,
    instruction_id_list: Sequence[str],
    kwargs: Sequence[JsonMapping | None],
    credit: str = "all",
    chat_format: str = AUTO,
) -> Mapping[str, float]:
    """Returns 1 if the response follows every instruction; an empty response follows none.

    With credit "share", the reward is the share of followed instructions, which is the component
    "followed" in both cases. "loose" is 1 if every instruction is followed in IFEval's loose
    evaluation. Thoughts are ignored.

    Raises ValueError, which excludes the sample, for an unknown instruction or unknown arguments.
    """
    if len(instruction_id_list) != len(kwargs) or not instruction_id_list:
        raise ValueError(
            f"{len(instruction_id_list)} instructions and {len(kwargs)} kwargs: one for each"
        )
    text = visible(response, chat_format)
    pairs = list(zip(instruction_id_list, kwargs))
    followed = [_follows(*pair, text) for pair in pairs]
    loose = all(
        strict or any(_follows(*pair, other) for other in variants(text)[1:])
        for pair, strict in zip(pairs, followed)
    )
    share = sum(followed) / len(followed)
    reward = share if credit == "share" else float(all(followed))
    return {"reward": reward, "followed": share, "loose": float(loose)}


def _follows(name: str, arguments: JsonMapping | None, response: str) -> bool:
    if name not in CONSTRAINTS:
        raise ValueError(f"no instruction {name!r:.80}; there are {', '.join(CONSTRAINTS)}")
    # a file with all rows in one table has nulls for other instructions' arguments
    options = {key: value for key, value in (arguments or {}).items() if value is not None}
    try:
        return bool(response.strip()) and CONSTRAINTS[name](response, **options)
    except TypeError as error:
        raise ValueError(f"{name} with {options!r:.200}: {error}") from error


KIND = Kind(
    judge,
    "the response follows each instruction of IFEval's kinds, or the share with credit=share",
    Example(
        {
            "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
            "kwargs": [{}, {"num_words": 3, "relation": "at least"}],
        },
        "no comma here",
        "yes, a comma",
    ),
    answer=False,
    takes=("instruction_id_list", "kwargs", "credit"),
    looks_for="",
    steps=lambda arguments: UNKNOWN_STEPS if arguments.get("credit") == "share" else 1,
    may_hang=True,  # words of a row become patterns
    complaint=complaints(credit=one_of("all", "share")),
)
