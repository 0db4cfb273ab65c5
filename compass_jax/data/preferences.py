"""Preferences: two answers to a question, and which one a person called better, or a tie.

    {"prompt": ..., "candidate": ..., "anchor": ..., "verdict": "Better" | "Tie" | "Worse"}
    {"prompt": ..., "chosen": ..., "rejected": ...}            as TRL has them; "tie": true of a tie
    {"chosen": [messages], "rejected": [messages]}             the prompt is what both begin with

Texts, or chat messages: an answer is then the last message.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from compass_jax.data.files import DataError, files_of, read_rows

VERDICTS = {"better": 1, "tie": 0, "worse": -1}
PAIRS = (("candidate", "anchor"), ("chosen", "rejected"))


class Preference(NamedTuple):
    """Two answers to a question; `gold` is 1 where the candidate is better, 0 of a tie, -1 where it
    is worse. `where` names the row.
    """

    question: str
    candidate: str
    anchor: str
    gold: int
    where: str


def read_preferences(pattern: str) -> Iterator[Preference]:
    """The pairs of a .jsonl or .parquet file, or of those that a pattern fits.

    Raises DataError, naming file and line, for a row that is none of the forms above.
    """
    for path in files_of(pattern):
        for where, row in read_rows(path, {}, None):
            yield _preference(row, where)


def _preference(row: Mapping[str, Any], where: str) -> Preference:
    names = next((pair for pair in PAIRS if all(row.get(x) is not None for x in pair)), None)
    if names is None:
        raise DataError(
            f"{where}: a preference has candidate, anchor and verdict, or chosen and rejected;"
            f" this row has {', '.join(row) or 'nothing'}"
        )
    asked = row.get("prompt", row.get("question"))
    first, second = (row[name] for name in names)
    if asked is None:
        asked = _beginning(first, second, where)
    candidate, anchor = (_text(row[name], f"{where}: {name}", last=True) for name in names)
    return Preference(
        _text(asked, f"{where}: prompt"), candidate, anchor, _gold(row, names[0], where), where
    )


def _gold(row: Mapping[str, Any], name: str, where: str) -> int:
    said, tie = row.get("verdict"), row.get("tie", False)
    if said is None and name == "chosen":
        if not isinstance(tie, bool):
            raise DataError(f"{where}: tie is {tie!r:.40}; write true or false")
        return 0 if tie else 1
    gold = VERDICTS.get(said.strip().lower()) if isinstance(said, str) else None
    if gold is None:
        raise DataError(f"{where}: verdict is {said!r:.40}; write Better, Tie or Worse")
    return gold


def _beginning(first: Any, second: Any, where: str) -> Sequence[Any]:
    """The messages before the answer, which must be the same for both."""
    if isinstance(first, list) and isinstance(second, list) and len(first) > 1:
        if first[:-1] == second[:-1]:
            return first[:-1]
        raise DataError(f"{where}: chosen and rejected begin with other messages")
    raise DataError(f"{where}: no prompt: write one, or messages that begin with it")


def _text(value: Any, where: str, last: bool = False) -> str:
    """A text, or the contents of messages: the last one's, else all, with their roles where there
    are several.
    """
    if isinstance(value, str):
        return value
    said: list[tuple[str, str]] = []
    for one in value if isinstance(value, list) else ():
        pair = [one.get(x) if isinstance(one, Mapping) else None for x in ("role", "content")]
        if not all(isinstance(x, str) for x in pair):
            said = []
            break
        said.append((str(pair[0]), str(pair[1])))
    if not said:
        raise DataError(f"{where} is neither a text nor messages with role and content")
    if last or len(said) == 1:
        return said[-1][1]
    return "\n".join(f"{role}: {content}" for role, content in said)
