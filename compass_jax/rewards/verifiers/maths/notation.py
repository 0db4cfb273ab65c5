"""Normalisation of the notation of answers.

`normalised` removes marks without meaning (delimiters, colours, fonts, thin spaces, a final full
stop). It converts Unicode powers, roots and fractions, plain-text operators and LaTeX synonyms to
one form of LaTeX.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from functools import lru_cache

from compass_jax.base.aliases import Value
from compass_jax.rewards.verifiers.maths.expressions import FUNCTIONS


def _table(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


_SCRIPTS = {
    "^": dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni")),
    "_": dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()")),
}
_CHARACTERS = _table(r"""
    − - – - ‐ - ‑ - ﹣ - ∗ * ⁄ / ∕ / ′ ' ’ ' “ " ” " ∣ | 【 [ 】 ] × \times · \cdot ⋅ \cdot ∙ \cdot
    ÷ \div ± \pm ∓ \mp ≤ \leq ⩽ \leq ≥ \geq ⩾ \geq ≠ \neq ≈ \approx ≅ \approx ∈ \in ∪ \cup ∩ \cap
    ∖ \setminus ∅ \emptyset ∞ \infty √ \sqrt ∛ \sqrt[3] ° \degree º \degree ℝ \mathbb{R}
    ℤ \mathbb{Z} ℕ \mathbb{N} ℚ \mathbb{Q} ∀ \forall ∃ \exists ∧ \land ∨ \lor ⟨ \langle ⟩ \rangle
    ∠ \angle … \ldots € \text{~euro} £ \text{~pound} ¥ \text{~yen} ₹ \text{~rupee} Ω \text{~ohm}
    → \to ⇒ \implies ⇔ \iff ∥ \parallel ≡ \equiv ∑ \sum ∫ \int ， ,~ ； ;~
""")
_COMMANDS = _table(r"""
    dfrac frac tfrac frac cfrac frac dbinom binom tbinom binom ne neq le leq ge geq leqslant leq
    geqslant geq leqq leq geqq geq lt < gt > lbrace \{ rbrace \} lbrack [ rbrack ] lvert | rvert |
    vert | mid | lparen ( rparen ) wedge land vee lor varnothing emptyset dots ldots cdots ldots
    dotsc ldots dotsb ldots ast * colon : deg degree circ degree varphi phi varepsilon epsilon
    vartheta theta simeq approx thickapprox approx doteq approx smallsetminus setminus
    backslash setminus tg tan ctg cot arctg arctan textdollar \$ pounds \text{~pound}
    euro \text{~euro} percent % Leftrightarrow iff Rightarrow implies rightarrow to prime ' cr \\
""")
_DROPPED = re.compile(
    r"left|right|middle|[bB]igg?[lr]?|(?:display|text|script)style|(?:no)?limits|q?quad|hfill"
    r"|(?:en|thin|med|thick|negthin)?space|break|newline|therefore|because|[lL]arge|LARGE|[hH]uge"
    r"|small|normalsize|boldmath|nonumber|centering|rm|bf|it|sf|tt"
)
_WITHOUT_ARGUMENT = re.compile("tag|label|phantom|[hv]space")
_TEXTS = re.compile(
    r"text(?:bf|it|rm|normal|sf|tt|up|md|sc)?|[mh]box|math(?:rm|it|sf|tt|normal)"
    r"|operatorname\*?|emph"
)
_UNWRAPPED = re.compile(
    r"boxed|f(?:rame)?box|bold(?:symbol)?|[bp]mb?|underline|cancel|smash|ensuremath"
    r"|math(?:bf|strut|op|ord|inner)|(?:under|over)brace"
)
_COLOURS = re.compile("(?:text)?color(?:box)?")
_MATH_WORDS = FUNCTIONS | set(str.split("det tr rank mod Re Im arg deg dim ker sign"))
# what follows min and sec as units; as functions they have an argument
_AFTER_UNIT = re.compile(
    r"(?:\s*\^\s*\{?\s*-?\d\s*\}?)?\s*(?:$|[^\s(\[{|_^A-Za-z\d\\]|(?:and|or)\b"
    r"|\\(?:text|mathrm|cdot|times|[)\]}\\])|[\d.]+\s*\\(?:text|mathrm)\b)"
)
_MAX_NESTED = 8
_OPERATORS = {
    "<=>": r"\iff ", "<=": r"\leq ", ">=": r"\geq ", "!=": r"\neq ", "=/=": r"\neq ", "==": "=",
    "~=": r"\approx ", "**": "^", "+/-": r"\pm ", "+-": r"\pm ", "...": r"\ldots ", "->": r"\to ",
}  # fmt: skip
_AMOUNT = r"\d[\d,]*(?:\.\d+)?(?:\s*(?:thousand|[mb]illion|trillion)\b)?|\.\d+"
_LEADS = re.compile(
    r"^(?:[\s*:>-]|so|thus|hence|therefore|final|the|our|my|correct|answer|result|solution|is|are|"
    r"be|approximately|about|roughly|around|\\approx)*?"
    r"(?:\b(?:answer|result|solution)\b(?:\s*(?:is|are|:|=))+|\b(?:approximately|about|roughly|"
    r"around)\b|\\approx|:)\s*",
    re.IGNORECASE,
)

_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
Rewrite = tuple[str, str | Callable[[re.Match], str]]


def _compile(*rewrites: Rewrite) -> list[tuple[re.Pattern, Value]]:
    return [(re.compile(pattern), replacement) for pattern, replacement in rewrites]


def _remove_dollars(mark: re.Match) -> str:
    """Removes dollar signs around formulas. Those of amounts are replaced by a placeholder."""
    text = mark[0]
    marks = [one.end() for one in re.finditer(r"\$", text)]
    pairs = zip(marks[::2], marks[1::2])
    amounts = any(text[i : i + 1].isdigit() and text[j : j + 1].isdigit() for i, j in pairs)
    return text.replace("$", "\0" if len(marks) % 2 or amounts else " ")


def _repeating_fraction(mark: re.Match) -> str:
    """Returns a repeating decimal as a fraction."""
    units, fixed, repeated = mark[1] or "0", mark[2], mark[3]
    nines = "9" * len(repeated) + "0" * len(fixed)
    return rf"(\frac{{{int(units + fixed + repeated) - int(units + fixed)}}}{{{nines}}})"


# applied before commands are parsed: delimiters of formulas, and blanks in numbers
_BEFORE = _compile(
    (r"&lt;", "<"), (r"&gt;", ">"), (r"&amp;", "&"),
    # Separators of thousands: 1{,}000 and 1,\!000.
    (r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\!\s*,)\s*(?=\d{3})", ""),
    (r"(\\\\)\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]", r"\1"),  # the space after a row
    (r"(?<!\\)\\[()\[\]]|\\q?quad(?=[a-z])|\$\$", " "),
    # NUL stands for the dollar sign of an amount until a later rule replaces it.
    (r"\\\$", "\0"),
    (r"(?s)^.*\$.*$", _remove_dollars),
    (rf"\x00\s*({_AMOUNT})", r" \1\\text{ dollar}"),
    (r"\x00", r"\\text{ dollar}"),
    (r"(?s)^\s*(\*\*|__|`{1,3})(.*?)\1\s*([.!]?)\s*$", r"\2"),
    (r"(?s)^\s*(\*\*|__|`{1,3})(.*?)\1\s*([.!]?)\s*$", r"\2"),
    (r"^([^*]*)\*\*([^*]+)\*\*(?!\s*[\d(])([^*]*)$", r"\1 \2 \3"),
    (r"^\s*\*([^*\s][^*]*)\*\s*$", r"\1"),
    (r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d)", ","),
    (r"(?<=\d)\\!\s*(?=\d)", ""),
    (r"(?<!\\)\\[,;:! >]|~|&nbsp;|[\u00a0\u2009\u202f\u200a\u2002\u2003\u2005\u2006]", " "),
)  # fmt: skip
_AFTER = _compile(
    (r"\^\s*(?:\{\s*\\degree\s*\}|\\degree)", r"\\degree "),
    ("|".join(map(re.escape, _OPERATORS)), lambda mark: _OPERATORS[mark[0]]),
    (r"(?i)(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
    (r"\bnot equal to\b", r"\\neq "),
    (r"(?i)\bplus[\s/-]+(?:or[\s-]+)?minus\b", r"\\pm "),
    (r"(?i)(?:\\text\{\s*(?:minus|negative)\s*\}|\b(?:minus|negative)\b)\s*"
     r"(?=\.?\d|\\(?!text\{))", "-"),
    (r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\+?(-?)0*(\d+)(?![\w.])", r"\1\\times 10^{\2\3}"),
    (r"(?<=\d)\s*[xX]\s*10\s*\^", r"\\times 10^"),
    (r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d/])", lambda mark: mark[0].replace(" ", "")),
    # Dots over the first and the last of the repeated digits.
    (r"\\dot\s*\{?\s*(\d)\s*\}?(?:\s*(\d*)\s*\\dot\s*\{?\s*(\d)\s*\}?)?",
     r"\\overline{\1\2\3}"),
    (r"(?<!\d)(\d{0,20})\.(\d{0,20})\s*\\(?:overline|bar)\s*\{(\d{1,40})\}", _repeating_fraction),
    (r"(?<!\d)(\d{0,20})\.(\d{0,12}?)(\d{1,8}?)\3{2,12} ?\\ldots", _repeating_fraction),
    (r"\\mathbb\s*(?:\{\s*([A-Z])\s*\}|([A-Z]))", r"\\mathbb{\1\2}"),
    (r"\\bigcup(?!\s*[_^])|(?<=[)\]])\s*U\s*(?=[(\[])", r"\\cup "),
    (r"\s+", " "),
    (r"\{\s*([^{}\\]+?)\s*\\choose\s*([^{}\\]+?)\s*\}", r"\\binom{\1}{\2}"),
    (r"\\(begin|end) \{", r"\\\1{"),
)  # fmt: skip


def normalised(text: str) -> str:
    """Returns the text in the notation that `values.readings` parses."""
    text = (
        text.replace("\f", "\\f").replace("\b", "\\b").replace("\a", "\\a")
    )  # characters from bad escapes
    text = _latex_characters(text.strip())
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z(\[{}%$,])", r"\\", text)  # escaped once too often
    for pattern, replacement in _BEFORE:
        text = pattern.sub(replacement, text)
    text = _commands(text)
    for pattern, replacement in _AFTER:
        text = pattern.sub(replacement, text)
    for _ in range(3):
        text = re.sub(r"^\\text\{([^{}]*(?:answer|:)[^{}]*)\}", r"\1", text.strip())
        text = _LEADS.sub("", text).strip()
        if not text.endswith("..."):
            text = re.sub(r"(?<!\\)[\s.,;]+$", "", text)
        while text.startswith("{") and group_end(text, 0) == len(text):
            text = text[1:-1].strip()
    return text


def _latex_characters(text: str) -> str:
    for mark, table in _SCRIPTS.items():
        if not text.isascii():
            runs = re.split(f"([{re.escape(''.join(table))}]+)", text)
            runs[1::2] = [f"{mark}{{{''.join(map(table.__getitem__, run))}}}" for run in runs[1::2]]
            text = "".join(runs)
    return re.sub(r"\\sqrt(\[3\])? +(?=[\d({])", r"\\sqrt\1", "".join(map(_latex_character, text)))


@lru_cache(maxsize=1024)
def _latex_character(character: str) -> str:
    if (latex := _CHARACTERS.get(character)) is not None:
        return latex.replace("~", " ") + " " * latex.startswith("\\")
    if greek := re.fullmatch(r"GREEK (\w+) LETTER (\w+)", unicodedata.name(character, "")):
        name = greek[2].lower().replace("lamda", "lambda")
        return f"\\{name.capitalize() if greek[1] == 'CAPITAL' else name} "
    if unicodedata.category(character) in ("Cf", "Cc") and character not in "\n\t\r":
        return ""
    over, slash, under = unicodedata.normalize("NFKC", character).partition("\u2044")
    return rf"\frac{{{over}}}{{{under}}}" if slash else over


def group_end(text: str, start: int) -> int:
    """Returns the index after the `}` that closes the `{` at `start`, or -1."""
    depth = 0
    for mark in _BRACES.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(mark[0], 0)
        if depth == 0:
            return mark.end()
    return -1


def _argument(text: str, i: int) -> tuple[str, int] | None:
    """Returns (content, end) of the braced group that begins at `i` after blanks, or None."""
    while text[i : i + 1] == " ":
        i += 1
    end = group_end(text, i) if text[i : i + 1] == "{" else -1
    return (text[i + 1 : end - 1], end) if end > 0 else None


def _commands(text: str, depth: int = 0) -> str:
    """Rewrites LaTeX commands: synonyms, fonts, colours and texts."""
    pieces: list[str] = []
    i = 0
    for mark in re.finditer(r"\\([A-Za-z]+\*?)|\\(.)", text, re.DOTALL):
        if mark.start() < i:
            continue
        pieces.append(text[i : mark.start()])
        piece, i = mark[0], mark.end()
        if mark[2]:
            piece = mark[2] if mark[2] in "%#&_" else piece
        elif depth <= _MAX_NESTED:
            piece, i = _command(mark[1], text, i, depth)
        pieces.append(piece)
    return "".join([*pieces, text[i:]])


def _command(name: str, text: str, i: int, depth: int) -> tuple[str, int]:
    """Returns the replacement of `\\name` whose arguments begin at `i`, and their end."""
    if argument := _argument(text, i):
        inner, end = argument
        if _COLOURS.fullmatch(name):
            inner, end = _argument(text, end) or ("", end)
            return _commands(inner, depth + 1), end
        if _UNWRAPPED.fullmatch(name):
            return "{" + _commands(inner, depth + 1) + "}", end
        if _TEXTS.fullmatch(name):
            is_unit = inner.strip() in ("min", "sec") and _AFTER_UNIT.match(text, end)
            is_index = re.search(r"_\s*\{?\s*$", text[: i - len(name) - 1])
            if is_unit and not is_index and name[:8] != "operator":
                return rf"\text{{{inner}}}", end
            return _text(inner, depth), end
        if _WITHOUT_ARGUMENT.fullmatch(name):
            return " ", end
    if name in ("boxed", "fbox") and (digit := re.compile(r" *(\d+|\w)").match(text, i)):
        return digit[1], digit.end()
    if _DROPPED.fullmatch(name):
        return " ", i + (name in ("left", "right") and text[i : i + 1] == ".")
    known = _COMMANDS.get(name, name).replace("~", " ")
    return (f"\\{known} " if known[0].isalpha() else known), i


def _text(inner: str, depth: int) -> str:
    inner = _commands(inner, depth + 1).replace("\\&", "and")
    inner = re.sub(r"\\text\{([^{}]*)\}", r"\1", inner)
    word = inner.strip()
    if word in _MATH_WORDS:
        return f"\\{word} "
    if re.fullmatch(r"\(?[A-Za-z]\)?|[\d\s.,:/()%+*^=-]+", word):
        return f" {word} " if word[0] != "^" else word
    return rf"\text{{{inner}}}"


def plain_words(text: str) -> str:
    """Returns the words of a text without notation, case and punctuation."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\([A-Za-z]+)", r" \1 ", text)
    text = re.sub(r"[^\w\s%]", " ", text).casefold()
    return re.sub(r"^(?:the|a|an) (?=\w{2})", "", " ".join(text.replace("_", " ").split()))
