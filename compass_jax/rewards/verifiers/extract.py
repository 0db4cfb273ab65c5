r"""Extraction of the answer from a response, and validation of a verifier's numbers.

All kinds that compare an answer extract it here. The chat format (base/chat/base.py) removes
thoughts and tool calls, which are not answers. The answer is the text in the last closed tag; else
in the last \boxed{...}; else after the last ####; else after "the answer is" or "Answer:". Each
function takes linear time for any text.
"""

from __future__ import annotations

import math
import numbers
import re

from compass_jax.base.aliases import Json
from compass_jax.base.chat.base import AUTO
from compass_jax.base.untrusted import fenced_blocks
from compass_jax.config.chat import find_format

_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s{0,8}(?:(\{)|(?<=\s)(-?\d[\d.,]*\d|-?\d|\w)(?!\w))")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINED = re.compile(
    r"(?:[^\w.!?\n]|\\q?quad|\\text)*(?:(?:[^.!?\n{}]{0,30}?[^\w.!?\n])?(?:and|or)(?![A-Za-z])"
    r"[^.!?\n{}]{0,20}?)?(?:[^\w.!?\n]|\\q?quad)*"
)
_STATED = re.compile(
    r"\banswer\b(?:[ \t]+(?:to|for|of)\b[^.:\n]{0,80}?)?[ \t*_]*(?:\bis\b|\bare\b|:|=)[ \t*_:]*",
    re.IGNORECASE,
)
# a heading in Markdown: a step, or a title without an answer on its line
_HEADING = re.compile(
    r"[\s#*_]*+(?:(?:step|part|method|approach)\s+\w{1,8}[\s*_]*(?:[:.]|$)|(?:(?:final|the)\s+)?"
    r"(?:answer|result|solution|explanation|conclusion|summary|verification|check)[\s:*_]*$)",
    re.IGNORECASE,
)
_ANNOUNCED = re.compile(
    r"[\s#*_]*+(?:(?:final|the)\s+)?(?:answer|result|solution|conclusion)[\s:*_]*$", re.IGNORECASE
)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$|<)|\n|<\|")
_FORMULA = re.compile(
    r"\$\$([^$]+)\$\$|\$((?:\\.|[^$\n\\])+)\$(?!\d)|\\\(([^\n]*?)\\\)|\\\[([^$]*?)\\\]|"
    r"((?<![\w\\^_{.,$])-?(?:\d+(?:,\d{3})*(?:[.,/]\d+)?|\.\d+)(?:\s?%)?(?!\d|\s*(?:\$|\\\))\s*$))",
    re.DOTALL,
)
_LABELS = frozenset(("", "json"))


def visible(response: str, chat_format: str = AUTO) -> str:
    """Returns the response without thoughts and without tool calls between marks."""
    return find_format(chat_format).read(response).content


def extract_answer(response: str, tag: str, chat_format: str = AUTO) -> str | None:
    """Returns the text between the last closed `<tag>` and its `</tag>`, stripped, or None.

    An empty `tag` selects the whole response. A tag that opens after the last closed answer and
    never closes is ignored.
    """
    return tagged_text(visible(response, chat_format), tag)


def tagged_text(text: str, tag: str) -> str | None:
    """Returns the text between the last closed `<tag>` and its `</tag>`, as `extract_answer`."""
    if not tag:
        return text.strip()
    end = text.rfind(f"</{tag}>")
    start = text.rfind(f"<{tag}>", 0, max(end, 0))
    return None if start < 0 else text[start + len(tag) + 2 : end].strip()


def boxed(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, or None if the last one is not closed.

    Boxes that are separated only by "and", "or" or a comma are one answer with several parts.
    """
    boxes = _boxes(text)
    if not boxes or boxes[-1][1] < 0:
        return None
    parts = [boxes[-1]]
    for box in reversed(boxes[:-1]):
        between = text[box[1] : parts[0][0]]
        if box[1] < 0 or len(between) > 80 or not _JOINED.fullmatch(between):
            break
        parts.insert(0, box)
    return ", ".join(dict.fromkeys(part[2] for part in parts))


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Returns (start, end, content) of each outermost box; the end of an unclosed box is -1."""
    closing = _closing(text)
    boxes: list[tuple[int, int, str]] = []
    last = 0
    for mark in _BOX.finditer(text):
        if mark.start() < last:
            continue
        if not mark[1]:
            last = mark.end()
            boxes.append((mark.start(), last, mark[2].rstrip(".,")))
            continue
        end = closing.get(mark.end() - 1, -1)
        boxes.append((mark.start(), end, text[mark.end() : end - 1].strip() if end > 0 else ""))
        last = end if end > 0 else mark.end()
    return boxes


def _closing(text: str) -> dict[int, int]:
    """Returns, for each closed `{`, the position after its `}`."""
    opened: list[int] = []
    closing = {}
    for mark in _BRACES.finditer(text):
        if mark[0] == "{":
            opened.append(mark.start())
        elif mark[0] == "}" and opened:
            closing[opened.pop()] = mark.end()
    return closing


def hashed(text: str) -> str | None:
    """Returns the text after the last #### on its line, stripped, or None."""
    _, mark, rest = text.rpartition("####")
    return rest.partition("\n")[0].strip() or None if mark else None


def _last_hashed(text: str) -> str | None:
    """Returns the text after the last #### of a response that begins no heading, such as
    "#### Step 1", or None. A heading that announces the answer ends the search: it comes later.
    """
    for line in reversed(text.split("\n")):
        _, mark, rest = line.rpartition("####")
        if mark and _ANNOUNCED.match(rest):
            return None
        if mark and not _HEADING.match(rest):
            return rest.strip() or None
    return None


def stated(text: str) -> str | None:
    """Returns the text after the last "the answer is" or "Answer:" in its sentence, or None."""
    marks = list(_STATED.finditer(text))
    if not marks:
        return None
    rest = text[marks[-1].end() :].lstrip()
    end = _SENTENCE_END.search(rest)
    return rest[: end.start() if end else len(rest)].strip(" *_\t") or None


def last_formula(text: str) -> str | None:
    """Returns the last delimited formula or number outside of formulas, or None."""
    last = None
    for mark in _FORMULA.finditer(text):
        last = mark
    return None if last is None else next(x for x in last.groups() if x is not None).strip()


def final_answer(response: str, tag: str, chat_format: str = AUTO) -> str | None:
    r"""Returns the answer of a response, or None.

    A \boxed{...} inside the tag is the answer. A tag without text is ignored. An empty `tag`
    selects the whole response.
    """
    text = visible(response, chat_format)
    tagged = tagged_text(text, tag)
    if not tag:
        return tagged or None
    if not tagged:
        text = text.rstrip()
        box = boxed(text)
        if box is None and _boxes(text):
            return None
        return (
            next((x for x in (box, _last_hashed(text), stated(text)) if x is not None), None)
            or None
        )
    if "\\" in tagged and _boxes(tagged):
        return boxed(tagged) or None
    return tagged


def json_text(response: str, tag: str, chat_format: str = AUTO) -> str:
    """Returns the text in the last closed `<tag>`, else the last fenced block, else all."""
    text = visible(response, chat_format)
    if (tagged := tagged_text(text, tag)) is not None:
        return tagged
    blocks = fenced_blocks(text, _LABELS)
    return (blocks[-1][2] if blocks else text).strip()


def number(value: Json) -> float:
    """Returns `value` as a float. Raises TypeError for a value that is not a number (such as "1"),
    and ValueError for NaN and infinity.
    """
    if not isinstance(value, numbers.Real) and type(value).__module__ != "numpy":
        raise TypeError(f"the check returned {value!r:.100}: it must be a number")
    if not math.isfinite(result := float(value)):
        raise ValueError(f"the check returned {result}")
    return result
