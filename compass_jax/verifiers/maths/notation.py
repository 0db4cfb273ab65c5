"""One notation for the many ways in which an answer is written.

`normalised` removes what has no meaning (delimiters, colours, fonts, thin spaces, a closing full
stop) and writes what has a meaning in one way: Unicode powers, roots and fractions, plain-text
operators and LaTeX synonyms become the same LaTeX.
"""

from __future__ import annotations

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni"))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎", "0123456789+-()"))
_CHARACTERS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "·": r"\cdot ",
    "⋅": r"\cdot ", "∙": r"\cdot ", "∗": "*", "÷": r"\div ", "⁄": "/", "∕": "/", "±": r"\pm ",
    "∓": r"\mp ", "≤": r"\leq ", "⩽": r"\leq ", "≥": r"\geq ", "⩾": r"\geq ", "≠": r"\neq ",
    "≈": r"\approx ", "≅": r"\approx ", "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ",
    "∖": r"\setminus ", "∅": r"\emptyset ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3] ",
    "π": r"\pi ", "°": r"\degree ", "º": r"\degree ", "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}",
    "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "∀": r"\forall ", "∃": r"\exists ", "∧": r"\land ",
    "∨": r"\lor ", "⟨": r"\langle ", "⟩": r"\rangle ", "∠": r"\angle ", "…": r"\ldots ",
    "′": "'", "’": "'", "“": '"', "”": '"', "€": r"\text{ euro}", "£": r"\text{ pound}",
    "¥": r"\text{ yen}", "₹": r"\text{ rupee}", "Ω": r"\text{ ohm}", "→": r"\to ",
    "⇒": r"\implies ", "⇔": r"\iff ", "∣": "|", "∥": r"\parallel ", "≡": r"\equiv ",
    "∑": r"\sum ", "∫": r"\int ", "％": "%", "﹪": "%", "，": ", ", "；": "; ", "：": ":",
    "（": "(", "）": ")", "【": "[", "】": "]",
}  # fmt: skip
_GREEK = dict(
    zip(
        "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΦΨΩ",
        str.split(
            "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma"
            " tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega"
        ),
    )
)
_COMMANDS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom",
    "ne": "neq", "le": "leq", "ge": "geq", "leqslant": "leq", "geqslant": "geq", "leqq": "leq",
    "geqq": "geq", "lt": "<", "gt": ">", "lbrace": r"\{", "rbrace": r"\}", "lbrack": "[",
    "rbrack": "]", "lvert": "|", "rvert": "|", "vert": "|", "mid": "|", "lparen": "(",
    "rparen": ")", "wedge": "land", "vee": "lor", "varnothing": "emptyset", "dots": "ldots",
    "cdots": "ldots", "dotsc": "ldots", "dotsb": "ldots", "ast": "*", "colon": ":", "deg": "degree",
    "arcsec": "arcsec", "varphi": "phi", "varepsilon": "epsilon", "vartheta": "theta",
    "simeq": "approx", "thickapprox": "approx", "doteq": "approx", "smallsetminus": "setminus",
    "backslash": "setminus", "tg": "tan", "ctg": "cot", "arctg": "arctan", "textdollar": r"\$",
    "pounds": r"\text{ pound}", "euro": r"\text{ euro}", "percent": "%", "iff": "iff",
    "Leftrightarrow": "iff", "Rightarrow": "implies", "rightarrow": "to", "prime": "'",
    "middle": "", "cr": r"\\",
}  # fmt: skip
_DROPPED = frozenset(
    str.split(
        "left right big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr"
        " displaystyle textstyle scriptstyle limits nolimits quad qquad enspace thinspace"
        " medspace thickspace negthinspace space hfill break newline therefore because large"
        " Large LARGE huge Huge small normalsize boldmath nonumber centering rm bf it sf tt"
    )
)
_TEXTS = frozenset(
    str.split(
        "text textbf textit textrm textnormal textsf texttt textup textmd mbox hbox mathrm"
        " operatorname operatorname* mathit mathsf mathtt mathnormal emph textsc"
    )
)
_UNWRAPPED = frozenset(
    str.split(
        "boxed fbox framebox mathbf boldsymbol bm pmb underline bold cancel mathstrut smash"
        " mathop mathord mathinner ensuremath underbrace overbrace"
    )
)
_COLOURS = frozenset(("color", "textcolor", "colorbox"))
_MATH_WORDS = frozenset(
    str.split(
        "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log lg exp max min"
        " gcd lcm det tr rank mod Re Im arg deg dim ker sgn sign"
    )
)
_LEADS = re.compile(
    r"^(?:[\s*:>-]|so|thus|hence|therefore|final|the|our|my|correct|answer|result|solution|is|are|"
    r"be|approximately|about|roughly|around|\\approx)*?"
    r"(?:\b(?:answer|result|solution)\b(?:\s*(?:is|are|:|=))+|\b(?:approximately|about|roughly|"
    r"around)\b|\\approx|:)\s*",
    re.IGNORECASE,
)
_SPACES = re.compile(
    r"(?<!\\)\\[,;:! >]|~|&nbsp;|[\u00a0\u2009\u202f\u200a\u2002\u2003\u2005\u2006]"
)
_OVERLINED = re.compile(r"(?<!\d)(\d{0,20})\.(\d{0,20})\s*\\(?:overline|bar)\s*\{(\d{1,40})\}")
_ELLIPSIS = re.compile(r"(?<!\d)(\d{0,20})\.(\d{0,12}?)(\d{1,8}?)\3{2,12} ?\\ldots")
_CHOOSE = re.compile(r"\{\s*([^{}\\]+?)\s*\\choose\s*([^{}\\]+?)\s*\}")
_ENTITY = re.compile(r"&(?:lt|gt|amp);")


def normalised(text: str) -> str:
    """Returns the text in the one notation that `readings` reads."""
    text = text.replace("\f", "\\f").replace("\b", "\\b").replace("\a", "\\a")  # of a bad escape
    text = _unicode(text.strip())
    if "\\begin" not in text:
        text = re.sub(r"\\\\(?=[A-Za-z(\[{}%$,])", r"\\", text)  # escaped once too often
    text = re.sub(r"(?<=\d)\s*(?:\{\s*,\s*\}|,\s*\\!|\\!\s*,)\s*(?=\d{3})", "", text)
    text = _markdown(_undelimited(text))
    text = re.sub(r"(?<=\d)(?:\{,\}|,\\!)\s*(?=\d)", ",", text)
    text = re.sub(r"(?<=\d)\\!\s*(?=\d)", "", text)
    text = _SPACES.sub(" ", text)
    text = _commands(text)
    text = _plain_operators(text)
    text = re.sub(r"\s+", " ", text).strip()
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = text.replace(r"\begin {", r"\begin{").replace(r"\end {", r"\end{")
    for _ in range(3):
        text = re.sub(r"^\\text\{([^{}]*(?:answer|:)[^{}]*)\}", r"\1", text)
        text = _LEADS.sub("", text).strip()
        text = re.sub(r"(?<!\\)[\s.,;]+$", "", text) if not text.endswith("...") else text
        text = _outer_group(text)
    return text


def _unicode(text: str) -> str:
    for table, mark in ((_SUPERSCRIPTS, "^"), (_SUBSCRIPTS, "_")):
        runs = re.compile("([" + "".join(map(re.escape, table)) + "]+)").split(text)
        runs[1::2] = [f"{mark}{{{''.join(map(table.__getitem__, run))}}}" for run in runs[1::2]]
        text = "".join(runs)
    found = []
    for character in text:
        if character in _CHARACTERS:
            found.append(_CHARACTERS[character])
        elif character in _GREEK:
            found.append(f"\\{_GREEK[character]} ")
        elif unicodedata.category(character) in ("Cf", "Cc") and character not in "\n\t\r":
            continue
        else:
            decomposed = unicodedata.normalize("NFKC", character)
            if "\u2044" in decomposed:  # a vulgar fraction
                over, _, under = decomposed.partition("\u2044")
                found.append(rf"\frac{{{over}}}{{{under}}}")
            else:
                found.append(decomposed)
    text = "".join(found)
    return re.sub(r"\\sqrt(\[3\])? +(?=[\d({])", r"\\sqrt\1", text)


def _undelimited(text: str) -> str:
    """Removes the marks around formulas; a dollar sign that marks none becomes a currency."""
    text = _ENTITY.sub(lambda m: {"&lt;": "<", "&gt;": ">", "&amp;": "&"}[m[0]], text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    text = re.sub(r"\\q?quad(?=[a-z])", " ", text)
    text = text.replace("$$", " ")
    text = text.replace("\\$", "\0")
    marks = [m.start() for m in re.finditer(r"\$", text)]
    pairs = list(zip(marks[::2], marks[1::2]))
    amounts = any(text[i + 1 : i + 2].isdigit() and text[j + 1 : j + 2].isdigit() for i, j in pairs)
    if len(marks) % 2 == 0 and not amounts:
        text = text.replace("$", " ")
    text = text.replace("$", "\0")
    amount = r"\d[\d,]*(?:\.\d+)?(?:\s*(?:thousand|[mb]illion|trillion)\b)?|\.\d+"
    text = re.sub(rf"\x00\s*({amount})", r" \1\\text{ dollar}", text)
    return text.replace("\0", r"\text{ dollar}")


def _markdown(text: str) -> str:
    text = text.strip()
    for _ in range(3):
        text = re.sub(r"^(\*\*|__|`{1,3})(.*?)\1\s*([.!]?)$", r"\2", text, flags=re.DOTALL).strip()
    text = re.sub(r"\*\*([^*]+)\*\*(?!\s*[\d(])", r" \1 ", text) if text.count("**") == 2 else text
    single = re.fullmatch(r"\*([^*\s][^*]*)\*", text)
    return single[1] if single else text


def group_end(text: str, start: int) -> int:
    """Returns the index after the `}` that closes the `{` at `start`, or -1."""
    depth = 0
    i = start
    while i < len(text):
        if text[i] == "\\":
            i += 2
            continue
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        i += 1
        if depth == 0:
            return i
    return -1


def _argument(text: str, i: int) -> tuple[str, int] | None:
    """Returns the braced group that begins at `i` after blanks, without braces, and its end."""
    while i < len(text) and text[i] == " ":
        i += 1
    if i >= len(text) or text[i] != "{":
        return None
    end = group_end(text, i)
    return (text[i + 1 : end - 1], end) if end > 0 else None


def _commands(text: str, depth: int = 0) -> str:
    """Rewrites LaTeX commands: synonyms, fonts, colours, texts."""
    found: list[str] = []
    i = 0
    for mark in re.finditer(r"\\([A-Za-z]+\*?)|\\(.)", text, re.DOTALL):
        if mark.start() < i:
            continue
        found.append(text[i : mark.start()])
        i = mark.end()
        name = mark[1]
        if name is None or depth > 8:
            found.append(mark[2] if mark[2] and mark[2] in "%#&_" else mark[0])
            continue
        piece, i = _command(name, text, i, depth)
        found.append(piece)
    return "".join([*found, text[i:]])


def _command(name: str, text: str, i: int, depth: int) -> tuple[str, int]:
    """Returns what stands for `\\name` whose arguments begin at `i`, and where they end."""
    argument = _argument(text, i)
    if name in _COLOURS and argument:
        inner = _argument(text, argument[1])
        return (_commands(inner[0], depth + 1), inner[1]) if inner else ("", argument[1])
    if name in _UNWRAPPED and argument:
        return "{" + _commands(argument[0], depth + 1) + "}", argument[1]
    if name in ("boxed", "fbox") and (digit := re.match(r" *(\d+|\w)", text[i:])):
        return digit[1], i + digit.end()
    if name in ("tag", "label", "phantom", "hspace", "vspace") and argument:
        return " ", argument[1]
    if name in _TEXTS and argument:
        return _text(argument[0], depth), argument[1]
    if name in _DROPPED:
        if name in ("left", "right") and text[i : i + 1] == ".":
            i += 1
        return " ", i
    if name in ("degree", "circ"):
        return r"\degree ", i
    known = _COMMANDS.get(name, name)
    return (known if not known or not known[0].isalpha() else f"\\{known} "), i


def _text(inner: str, depth: int) -> str:
    inner = _commands(inner, depth + 1).replace("\\&", "and")
    inner = re.sub(r"\\text\{([^{}]*)\}", r"\1", inner)
    word = inner.strip()
    if word in _MATH_WORDS:
        return f"\\{word} "
    if re.fullmatch(r"\(?[A-Za-z]\)?|[\d\s.,:/()%+*^=-]+", word) and word:
        return f" {word} " if word[0] != "^" else word
    return rf"\text{{{inner}}}"


def _plain_operators(text: str) -> str:
    text = re.sub(r"\^\s*(?:\{\s*\\degree\s*\}|\\degree)", r"\\degree ", text)
    for plain, latex in (
        ("<=>", r"\iff "), ("<=", r"\leq "), (">=", r"\geq "), ("!=", r"\neq "), ("=/=", r"\neq "),
        ("==", "="), ("~=", r"\approx "), ("**", "^"), ("+/-", r"\pm "), ("+-", r"\pm "),
        ("...", r"\ldots "), ("->", r"\to "),
    ):  # fmt: skip
        text = text.replace(plain, latex)
    text = re.sub(r"(?<![A-Za-z\\])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty ", text, flags=re.I)
    text = re.sub(r"\bnot equal to\b", r"\\neq ", text)
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]([-+]?\d+)(?![\w.])", _scientific, text)
    text = re.sub(r"(?<=\d)\s*[xX]\s*10\s*\^", r"\\times 10^", text)
    text = re.sub(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d/])", _joined, text)
    text = re.sub(r"\\d?ot\{(\d)\}", r"\\overline{\1}", text)
    text = _OVERLINED.sub(lambda m: _repeating(m[1], m[2], m[3]), text)
    return _ELLIPSIS.sub(lambda m: _repeating(m[1], m[2], m[3]), text)


def _scientific(mark: re.Match) -> str:
    exponent = int(mark[2]) if len(mark[2]) < 12 else mark[2]
    return rf"{mark[1]}\times 10^{{{exponent}}}"


def _joined(mark: re.Match) -> str:
    return mark[1] + mark[2].replace(" ", "")


def _repeating(whole: str, fixed: str, repeated: str) -> str:
    """Returns a repeating decimal as a fraction."""
    nines = "9" * len(repeated) + "0" * len(fixed)
    over = int((whole or "0") + fixed + repeated) - int((whole or "0") + fixed)
    return rf"(\frac{{{over}}}{{{nines}}})"


def _outer_group(text: str) -> str:
    """Removes braces around the whole text that group nothing."""
    while text.startswith("{") and group_end(text, 0) == len(text):
        text = text[1:-1].strip()
    return text


def plain_words(text: str) -> str:
    """Returns what a text says without notation, case and punctuation."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    text = re.sub(r"\\[A-Za-z]+", lambda m: " " + m[0][1:] + " ", text)
    text = re.sub(r"[^\w\s%]", " ", text).casefold()
    return re.sub(r"^(?:the|a|an) (?=\w{2})", "", " ".join(text.replace("_", " ").split()))
