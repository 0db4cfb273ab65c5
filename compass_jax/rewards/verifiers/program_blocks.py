"""The program in a response."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence, Set
from typing import NamedTuple

from compass_jax.base.untrusted import fenced_blocks
from compass_jax.rewards.verifiers.extract import tagged_text
from compass_jax.rewards.verifiers.program_tests import (
    BUILTINS,
    compiles,
    defined_names,
    joined_program,
    read_names,
)

_LABELS = frozenset(("", "python", "python3", "py"))
_PYTHON = re.compile(
    r"^[ \t]*+(?:def|class|import|from|return|for|print|[A-Za-z_]\w*+[ \t]*+=)", re.MULTILINE
)
_DEFINED = re.compile(r"^(?:async[ \t]+)?(?:def|class)[ \t]+(\w+)|^(\w+)[ \t]*=", re.MULTILINE)
_ITEM = re.compile(r"[ \t]*+(?:[-*+]|\d{1,9}[.)])?[ \t]*+")  # before a block in a list


class _Block(NamedTuple):
    text: str
    is_labelled: bool
    names: Set[str]  # that it defines


def find_program(response: str, tag: str, needed: Set[str]) -> str | None:
    """Returns the program in a response without thoughts, or None.

    It is the fenced block that defines the most of the `needed` names; of several, one that is
    labelled as Python, and of these the last. Earlier blocks that it or the tests need are put
    before it. Without a block it is the text in the answer's tag, else the whole response.
    """
    blocks = [
        _block(response, match.start(), match[1], match[2])
        for match in fenced_blocks(response, _LABELS)
    ]
    if not blocks:
        text = (tagged_text(response, tag) if tag else None) or response
        return text if _PYTHON.search(text) else None
    ranks = [(len(block.names & needed), block.is_labelled) for block in blocks]
    last = max(range(len(blocks)), key=lambda number: (*ranks[number], number))
    return _with_helpers(blocks[: last + 1], needed)


def _block(response: str, start: int, label: str, content: str) -> _Block:
    before = response[response.rfind("\n", 0, start) + 1 : start]
    if _ITEM.fullmatch(before):
        margin = re.compile(rf"^[ \t]{{1,{len(before)}}}", re.MULTILINE) if before else None
        content = margin.sub("", content) if margin else content
    names = defined_names(content)
    if not names:  # it does not compile, or defines nothing
        definitions = _DEFINED.findall(textwrap.dedent(content))
        names = {name for pair in definitions for name in pair if name}
    return _Block(content, bool(label), names)


def _with_helpers(blocks: Sequence[_Block], needed: Set[str]) -> str:
    """Returns the last block, preceded by the earlier blocks that define names which it reads or
    the tests need. Of several blocks that define a name, the latest is used.
    """
    *earlier, last = blocks
    text, missing = last.text, _missing(last) | (needed - last.names)
    for block in reversed(earlier):
        if block.names & missing and compiles(block.text):
            text = joined_program(block.text, text)
            missing = (missing - block.names) | _missing(block)
    return text


def _missing(block: _Block) -> set[str]:
    return read_names(block.text) - BUILTINS if compiles(block.text) else set()
