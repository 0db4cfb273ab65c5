"""Options that a sentence asserts, in the commonest languages.

Wordings cannot be listed, but the words that change the meaning of a letter are few: negations,
which reject an option, copulas and colons, which assert it, and conjunctions, which end a clause.
`asserted` reads every letter of a sentence by the negations of its clause. `concluded` reads only
the last line that is a letter, or that has a clause with a copula or colon and a letter at its end:
"Réponse : B", "it's C".
"""

from __future__ import annotations

import re

_NEGATIONS = re.compile(
    r"n['’]t\b|\b(?:not|no|nor|neither|never|cannot|without|wrong|incorrect|false|rather\s+than"
    r"|instead\s+of|except|ne|n['’](?=\w)|pas|ni|faux|fausse|incorrecte|plutôt\s+que|nicht"
    r"|kein\w{0,2}|weder|falsch|statt|falsa?|falso|incorrect[ao]|incorreto|en\s+lugar\s+de|não|nem"
    r"|errad[ao]|non|né|sbagliat[ao]|niet|geen|fout|nie|değil|yanlış|не|нет|ни|неверн\w{1,3}"
    r"|неправильн\w{1,3})\b|[不非没沒错錯误誤違]|ない|ません|아니|않|틀|ليس|خطأ|नहीं|गलत",
    re.IGNORECASE,
)
_COPULA = r"is|are|'s|’s|was|be|ist|sind|est|sont|es|son|é|è|são|sono|to|это|jest"
_COPULA_END = re.compile(
    rf"(?:\b(?:{_COPULA})(?:\s+(?:la|le|el|die|der|a|o))?|[=:：是为為选選선는은は—–])\s*$",
    re.IGNORECASE,
)
_END = re.compile(
    r"(?:[\n;.!?()\[\]\"“”「」。；！？]|\s[-–—]\s|—|[:：](?=\s*[^\s\w]*\w{2})|(?<=[A-Z])(?:です|だ|입니다)"
    r"|\b(?:but|because|since|as|while|however|aber|sondern|weil|da|mais|car|parce|sino|pero|porque"
    r"|mas|ma|perché|maar|want|но|а|потому)\b|而是|但|因为|因為)+",
    re.IGNORECASE,
)
_COMMA = re.compile(r"(?:[,，、]|\b(?:and|und|et|y|en|и)\b)+", re.IGNORECASE)
# a letter in brackets, and what of a text follows it
_BRACKETED = re.compile(
    rf"[(\[（【「\"“']([A-Za-z])[)\]）】」\"”'](?!\s*(?:(?:{_COPULA})\b|[,.;]|$))|"
    r"[(\[（【「\"“']([A-Za-z])[)\]）】」\"”']"
)
_LABEL = re.compile(r"(?<![A-Za-z0-9'’_])([A-Z])(?![A-Za-z0-9_'’])")
# A and I before a word are an article and a pronoun, unless the word is a copula or a negation.
_ARTICLE = re.compile(rf"\s+(?!(?:{_COPULA})\b)[a-z]{{2}}")
MAX_CHARS = 2_000  # of a sentence


def negates(text: str) -> bool:
    """Returns whether a text has a negation."""
    return _NEGATIONS.search(text) is not None


def asserted(text: str, letters: str) -> set[str]:
    """Returns the letters that a text names without rejecting them."""
    accepted: set[str] = set()
    for part in _END.split(_without_brackets(text[-MAX_CHARS:])):
        clauses = _COMMA.split(part)
        while clauses:
            clause = clauses.pop()
            if clauses and _is_listed(clauses[-1], clause):  # "A and B are wrong": one clause
                clauses[-1] += clause
            else:
                accepted |= _accepted_in(clause, letters)
    return accepted


def _without_brackets(text: str) -> str:
    return _BRACKETED.sub(lambda mark: f"{mark[1]}; " if mark[1] else mark[2], text)


def _is_listed(before: str, clause: str) -> bool:
    """Returns whether two clauses are parts of one list of letters, such as "A" and "B are wrong".
    The first has no copula and no negation.
    """
    is_list = re.search(rf"(?:^|\s){_LABEL.pattern}\s*$", before) and _LABEL.match(clause.strip())
    has_verb = re.search(rf"\b(?:{_COPULA})\b", before, re.IGNORECASE)
    return bool(is_list) and not has_verb and not negates(before)


def _is_label(mark: re.Match[str], clause: str, letters: str) -> bool:
    is_word = mark[1] in "AI" and _ARTICLE.match(clause, mark.end())
    return mark[1] in letters and (not is_word or negates(clause[mark.end() :][:12]))


def _accepted_in(clause: str, letters: str) -> set[str]:
    """Returns the letters of a clause that its first negation does not reject: those before it if
    any letter follows it, else none.
    """
    labels = [mark for mark in _LABEL.finditer(clause) if _is_label(mark, clause, letters)]
    negation = _NEGATIONS.search(clause)
    before = [mark for mark in labels if negation is None or mark.start() < negation.start()]
    if negation and len(before) == len(labels):
        return set()
    return {mark[1] for mark in before}


def concluded(text: str, letters: str) -> set[str]:
    """Returns the asserted letters of the last line that is a letter, or that has a clause with a
    copula or colon and a letter at its end.
    """
    for line in reversed(text.rstrip().split("\n")):
        line = _without_brackets(line[-MAX_CHARS:])
        accepted = asserted(line, letters) if _LABEL.search(line) else set()
        ends = [mark for mark in _LABEL.finditer(line) if _ends_clause(line, mark)]
        if accepted & {mark[1] for mark in ends}:
            return accepted
    return set()


def _ends_clause(line: str, mark: re.Match[str]) -> bool:
    """Returns whether a letter ends a clause after a copula or colon, or is alone on its line."""
    before, after = line[: mark.start()], line[mark.end() :]
    says = not before.strip(" \t#>") or _COPULA_END.search(before[-20:])
    ends = not after.strip(" .") or (before.strip() and (_END.match(after) or _COMMA.match(after)))
    return bool(says and ends)
