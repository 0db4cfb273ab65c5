"""Preferences: two answers to a question and a human verdict: which is better, or a tie.

    {"prompt": ..., "candidate": ..., "anchor": ..., "verdict": "Better" | "Tie" | "Worse"}
    {"prompt": ..., "chosen": ..., "rejected": ...}            TRL's form; "tie": true marks a tie
    {"chosen": [messages], "rejected": [messages]}             the prompt is their common beginning

Values are texts or chat messages (a list or its JSON text), in which case the answer is the last
message. A row may give the reason in `reasoning`.

A pair makes two questions to a judge, one in each order, with opposite verdicts. Both belong to the
pair's question, so they are held out together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.data.files import DataError, files_of, read_rows
from compass_jax.data.message_text import messages_in
from compass_jax.data.messages import check_messages
from compass_jax.rewards.verifiers.judge import messages

VERDICTS = {"better": 1, "tie": 0, "worse": -1}
SAID = {1: "Better", 0: "Tie", -1: "Worse"}
ORDERS = ("first", "swapped")
PAIRS = (("candidate", "anchor"), ("chosen", "rejected"))


class Preference(NamedTuple):
    """Two answers to a question.

    `gold` is 1 if the candidate is better, 0 for a tie, and -1 if it is worse. `where` names the
    row. `reasoning` is the reason for the verdict, or empty.
    """

    question: str
    candidate: str
    anchor: str
    gold: int
    where: str
    reasoning: str = ""


class Asked(NamedTuple):
    """A question to a judge about a pair in one order, with the expected verdict."""

    pair: Preference
    order: str  # one of ORDERS
    messages: list[dict[str, str]]
    verdict: str  # one of SAID

    @property
    def taught(self) -> str:
        """The training target for a judge: the pair's reasoning, then the verdict."""
        reasoning = self.pair.reasoning
        reasoning = reasoning if self.order == ORDERS[0] else _exchanged(reasoning)
        before, _, last = reasoning.rstrip().rpartition("\n")
        if last.strip().strip("*.").lower() in VERDICTS:  # it ends with the verdict
            reasoning = before
        return f"{reasoning.rstrip()}\n{self.verdict}".lstrip()


Choice = Callable[[str], list[str]]  # folder or pattern -> the files to read


def read_preferences(pattern: str, choose: Choice = files_of) -> Iterator[Preference]:
    """Yields the pairs of a file, or of the files of a folder or pattern.

    Raises DataError, which names file and line, for a row in another form.
    """
    for path in choose(pattern):
        for where, row in read_rows(path, {}, None):
            yield _preference(row, where)


def asked_in_both_orders(pattern: str, choose: Choice = files_of) -> Iterator[Asked]:
    """Yields two questions to a judge for each pair of `read_preferences`."""
    for pair in read_preferences(pattern, choose):
        question, candidate, anchor, gold = pair[:4]
        yield Asked(pair, ORDERS[0], messages(question, candidate, anchor), SAID[gold])
        yield Asked(pair, ORDERS[1], messages(question, anchor, candidate), SAID[-gold])


def _exchanged(text: str) -> str:
    """Returns the reasoning with the words candidate and anchor exchanged."""

    def exchange(match: re.Match[str]) -> str:
        word = "anchor" if match[0].lower() == "candidate" else "candidate"
        return word.capitalize() if match[0][0].isupper() else word

    return re.sub(r"\b(?:candidate|anchor)\b", exchange, text, flags=re.IGNORECASE)


def _preference(row: JsonMapping, where: str) -> Preference:
    names = next((pair for pair in PAIRS if all(row.get(x) is not None for x in pair)), None)
    if names is None:
        raise DataError(
            f"{where}: a preference has candidate, anchor and verdict, or chosen and rejected;"
            f" this row has {', '.join(row) or 'nothing'}"
        )
    prompt = messages_in(row.get("prompt", row.get("question")), f"{where}: prompt")
    first, second = (messages_in(row[name], f"{where}: {name}") for name in names)
    if prompt is None:
        prompt = _beginning(first, second, where)
    candidate = _text(first, f"{where}: {names[0]}", last=True)
    anchor = _text(second, f"{where}: {names[1]}", last=True)
    question, gold = _text(prompt, f"{where}: prompt"), _gold(row, names[0], where)
    if not question.strip():
        raise DataError(f"{where}: prompt is empty; delete the row or write the question")
    reasoning = row.get("reasoning") or ""
    if not isinstance(reasoning, str):
        raise DataError(f"{where}: reasoning is {reasoning!r:.40}; write a text, or leave it out")
    return Preference(question, candidate, anchor, gold, where, reasoning)


def _gold(row: JsonMapping, name: str, where: str) -> int:
    verdict, tie = row.get("verdict"), row.get("tie", False)
    if verdict is None and name == "chosen":
        if not isinstance(tie, bool):
            raise DataError(f"{where}: tie is {tie!r:.40}; write true or false")
        return 0 if tie else 1
    gold = VERDICTS.get(verdict.strip().lower()) if isinstance(verdict, str) else None
    if gold is None:
        raise DataError(f"{where}: verdict is {verdict!r:.40}; write Better, Tie or Worse")
    return gold


def _beginning(first: Json, second: Json, where: str) -> Sequence[Json]:
    """Returns the messages before the answer, which both conversations share."""
    if isinstance(first, list) and isinstance(second, list) and len(first) > 1:
        if first[:-1] == second[:-1]:
            return first[:-1]
        raise DataError(f"{where}: chosen and rejected begin with other messages")
    raise DataError(f"{where}: no prompt: write one, or messages that begin with it")


def _text(value: Json, where: str, last: bool = False) -> str:
    """Returns a text, or the contents of messages; the last one's if `last`."""
    if isinstance(value, str):
        return value
    messages = check_messages(value, where)
    if last or len(messages) == 1:
        return messages[-1]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)
