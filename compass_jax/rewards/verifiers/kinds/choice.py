"""Multiple choice."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.chat.base import AUTO
from compass_jax.config.kinds import CHOICE_FORM, IN_ANSWER, NOTHING, Example, Kind
from compass_jax.rewards.verifiers.extract import final_answer, hashed, visible
from compass_jax.rewards.verifiers.mentions import asserted, concluded, negates
from compass_jax.rewards.verifiers.references import scalars

LETTERS = "ABCDEFGHIJ"
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SEVERAL = ""  # result if more than one option is chosen
_WRAPPING = re.compile(r"\\(?:text|math)[a-z]{0,4}\{|\\boxed\{|[{}$*_`]")
_LEADING = re.compile(
    r"\W*(?:(?:the\s+)?(?:correct\s+|final\s+|best\s+)*(?:answer|choice|option)\s*(?:is)?\W*)?"
    r"([A-Za-z0-9])(?=[\W_]|$)",
    re.IGNORECASE,
)
_NEXT = re.compile(r"\W*(?:(?:and|or|&)\W+)?(?:(?:option|choice|answer)\s+)?([A-Za-z0-9])(?=\W|$)")
# An option whose text begins with an article or a numeral: "B. A cell", "C. I and II".
_LABELLED = re.compile(
    r"\s*[).:]+\s+[AI]\s+(?!(?:(?:and|or)\s+|&\s*)?[A-Z]\b|(?:is|are|too|also|or|as|vs|but|nor"
    r"|then|well|because|since|like)\b)\w{2}"
)
_NAMED = re.compile(r"\b(?:choice|option)\W{1,10}(?:is\W{1,10})?([A-Z])\b", re.IGNORECASE)
_CALLED = re.compile(
    r"(?<![\w'])([A-Z])\W{0,4}\s(?:is|as)\s+(?:the\s+)?(?:correct|right|best|answer)"
)
_BARE = re.compile(r"\W*([A-Za-z0-9])(?:[\s).:\]*_}]*|[).:]\s(?!\s*(?:and|or)\b)[^\n]{1,200})")


def judge(
    response: str,
    answer: Json,
    answer_tag: str,
    choices: Json = LETTERS,
    options: Sequence[str] | Mapping[str, str] = (),
    chat_format: str = AUTO,
) -> float | JsonMapping:
    """Returns 1 if the chosen option is the reference: a letter, its number from 0, or its text.

    A final answer that equals an option's text chooses this option. Choosing several options is
    wrong. `choices` are the options' letters, or the options themselves, as in MMLU and ARC.
    """
    letter = chosen(response, answer_tag, choices, options, chat_format)
    if letter is None:
        return NOTHING
    letters, texts = _letters_and_texts(choices, options)
    right = [_letter_of_reference(form, letters, texts) for form in scalars(answer)]
    return float(letter in right and letter != SEVERAL)


def _letter_of_reference(answer: Json, letters: str, texts: Mapping[str, str]) -> str:
    """Returns the letter that a reference names; another text for none."""
    if isinstance(answer, int):
        return letters[answer] if 0 <= answer < len(letters) else str(answer)
    text = hashed(str(answer)) or str(answer)
    bare = _BARE.fullmatch(_WRAPPING.sub("", text).strip())  # B, (B), "B. iron"
    return _letter_of_text(text, texts) or (bare[1] if bare else text.strip()).upper()


def _answer_letter(arguments: JsonMapping) -> str:
    """Returns the reference's letter. Raises ValueError if it names no option."""
    answer, choices = arguments.get("answer"), arguments.get("choices") or LETTERS
    letters, texts = _letters_and_texts(choices, arguments.get("options") or ())
    for form in scalars(answer):
        letter = _letter_of_reference(form, letters, texts)
        if letter in letters and (not texts or letter in texts):
            return letter
    names = ", ".join(texts or letters)
    raise ValueError(
        f"the reference {answer!r:.80} names none of the options {names:.80}: write a letter, a"
        " number from 0 or an option's text"
    )


def chosen(
    response: str,
    tag: str,
    choices: Json = LETTERS,
    options: Sequence[str] | Mapping[str, str] = (),
    chat_format: str = AUTO,
) -> str | None:
    """Returns the letter of the chosen option, None for no choice, SEVERAL for several.

    The arguments are those of `judge`.
    """
    letters, texts = _letters_and_texts(choices, options)
    answer = final_answer(response, tag, chat_format)
    if answer is None:
        return _unmarked_letter(visible(response, chat_format), letters)
    if (letter := _letter_of_text(answer, texts)) is not None:
        return letter
    plain = _WRAPPING.sub("", answer)
    if negates(plain):
        return _only(asserted(plain, letters))
    letter = _first_letter(plain, letters, texts)
    return _named_letter(answer, letters) if letter is None else letter


def _letters_and_texts(choices: Json, options: Json) -> tuple[str, dict[str, str]]:
    """Returns the options' letters, and the options' texts by letter."""
    if isinstance(choices, Mapping):
        if {"text", "label"} <= set(choices):
            choices = dict(zip(map(str, choices["label"]), choices["text"]))
        choices, options = LETTERS, options or choices
    elif not isinstance(choices, str):
        if not all(isinstance(one, str) for one in choices):
            raise ValueError(f"choices = {choices!r:.80}: it must be letters, or a list of texts")
        labels = "".join(choices).upper() == ALPHABET[: len(choices)]
        choices, options = ("".join(choices), options) if labels else (LETTERS, options or choices)
    letters = choices.upper()
    if isinstance(options, Mapping):
        pairs = [(str(name).upper(), text) for name, text in options.items()]
        if all(len(name) == 1 for name, _ in pairs) and not set(dict(pairs)) <= set(letters):
            letters = "".join(name for name, _ in pairs)
    else:
        listed = options if isinstance(options, list | tuple) else ()
        if len(listed) > len(letters):
            letters = ALPHABET
        pairs = list(zip(letters, listed))
    return letters, {letter: _plain(text) for letter, text in pairs if isinstance(text, str)}


def _letter_of_text(text: str, texts: Mapping[str, str]) -> str | None:
    """Returns the letter of the only option with this text; None for a letter or no option."""
    for plain in (_plain(text), _plain(_WRAPPING.sub("", text))):
        matches = [letter for letter, option in texts.items() if option == plain]
        if len(matches) == 1 and plain.upper() not in texts:
            return matches[0]
    return None


def _first_letter(text: str, letters: str, texts: Mapping[str, str]) -> str | None:
    """Returns the letter that an answer begins with, None or SEVERAL."""
    mark = _LEADING.match(text)
    if mark is None or mark[1].upper() not in letters:
        return None
    letter, rest = mark[1].upper(), text[mark.end() :]
    if re.match(r"\s+\w", rest):  # may be an article or a pronoun
        if mark[1] in ("a", "i", "I"):
            return None
        if letter == "A" and (other := _letter_of_text(rest, texts)) is not None:
            return other
    if _LABELLED.match(rest) or _plain(re.sub(r"^[\W_]+", "", rest)) == texts.get(letter):
        return letter
    following = _NEXT.match(rest)
    if following and following[1].isupper() and following[1] in letters and following[1] != letter:
        return SEVERAL
    return letter


def _only(names: Iterable[str]) -> str | None:
    """Returns the only letter, None for none, SEVERAL for several."""
    known = set(names)
    return None if not known else known.pop() if len(known) == 1 else SEVERAL


def _named_letter(text: str, letters: str) -> str | None:
    """Returns the letter after "option" or that is called correct; None or SEVERAL."""
    called = [mark[1] for mark in _CALLED.finditer(text)]
    named = called or [mark[1].upper() for mark in _NAMED.finditer(text)]
    return _only(letter for letter in named if letter in letters)


def _unmarked_letter(text: str, letters: str) -> str | None:
    """Returns the letter of a response without a marked answer."""
    text = _WRAPPING.sub("", text).strip()
    bare = _BARE.fullmatch(text)
    if bare and bare[1].upper() in letters:
        return bare[1].upper()
    letter = _only(concluded(text, letters))
    return _named_letter(text, letters) if letter is None else letter


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold().strip(".")


def _vote(
    response: str,
    answer_tag: str,
    choices: Json = None,
    options: Json = None,
    chat_format: str = AUTO,
) -> str | None:
    return chosen(response, answer_tag, choices or LETTERS, options or (), chat_format) or None


KIND = Kind(
    judge,
    "the chosen option is the reference: its letter, number or text",
    Example({"answer": "B", "options": ["iron", "gold"]}, r"\boxed{Gold}", "The answer is (A)."),
    takes=("choices", "options"),
    form=CHOICE_FORM,
    vote=_vote,
    answer_text=_answer_letter,
    looks_for=IN_ANSWER + "; else a letter by itself or after 'option'",
)
