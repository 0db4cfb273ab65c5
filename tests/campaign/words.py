"""What is said of each fault, decided here and never by the code under test.

clear error   The command left with 1 or 2 (the server: a status from 400 to 499), and said in
              at most `MOST_LINES` lines of the project's own what was wrong, naming the thing:
              the path, the key, the line or the field that the fault is in.
harmless      It was accepted, and what came out is what an undisturbed command gives; or the
              fault is by construction another legal value, and what came out is what that
              value asks for.
traceback     A Python traceback, HTTP 500 or more, a connection closed without an answer, an
              end by a signal, another status, or an error that does not name the thing.
hang          Not over within its limit of time, or over the limit of CPU time (`fork.Limits`).
silent        Accepted although the fault changes what is computed, or lies outside the
              documented meaning.
lost          Something that was there before, and was sound, is gone or changed: a checkpoint,
              lines of a log, the score of another answer, the text of another client.

The outcome that is compared is what the command works with: the resolved configuration, the
prompts' token ids, the restored arrays' digest, the exported tensors, the greedy text, the scores.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

CLEAR, HARMLESS, TRACEBACK = "clear_error", "harmless", "traceback"
HANG, SILENT, LOST = "hang", "silent", "lost"
WORDS = (CLEAR, HARMLESS, TRACEBACK, HANG, SILENT, LOST)
GOOD = frozenset({CLEAR, HARMLESS})
MOST_LINES = 14  # an override's error is a box that names the nearest options
NOT_TAKEN = object()  # no outcome was recorded


@dataclass(frozen=True)
class Verdict:
    """A word of `WORDS`, and why."""

    word: str
    why: str = ""


@dataclass(frozen=True)
class Ended:
    """How a command ended: its status (negative: a signal), what it said, what it worked with."""

    status: int
    out: str
    err: str
    timed_out: bool = False
    outcome: Any = NOT_TAKEN
    seconds: float = 0.0


@dataclass
class Expected:
    """What may come of a fault.

    outcomes: those under which the command may accept it; none: it has to refuse.
    names: one of these must be in the error's text.
    """

    outcomes: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


_TRACE = re.compile(
    r"Traceback \(most recent call last\)|^Fatal Python error|^Exception in thread", re.M
)
_OWN = re.compile(r"^compass \S+: |^usage: compass|For full helptext, (see|run) compass", re.M)


def judge(ended: Ended, expected: Expected) -> Verdict:
    """The word for a command that ended, by what was expected of it."""
    if ended.timed_out:
        return Verdict(HANG, f"not over after {ended.seconds:.0f} s; {last(ended.err)}")
    if _TRACE.search(ended.err) or _TRACE.search(ended.out):
        return Verdict(TRACEBACK, last(ended.err) or last(ended.out))
    if ended.status in (1, 2):
        return unclear(ended, expected.names) or Verdict(CLEAR, first(ended.err))
    if ended.status != 0:
        return Verdict(TRACEBACK, f"status {ended.status}; {last(ended.err)}")
    if ended.outcome is NOT_TAKEN and expected.outcomes:
        raise AssertionError(
            f"the harness took no outcome; said: {last(ended.err)} {last(ended.out)}"
        )
    if any(ended.outcome == one for one in expected.outcomes):
        return Verdict(HARMLESS)
    if not expected.outcomes:
        return Verdict(SILENT, "accepted")
    return Verdict(SILENT, "accepted with " + difference(expected.outcomes[0], ended.outcome))


def unclear(ended: Ended, names: list[str]) -> Verdict | None:
    """TRACEBACK where an error with status 1 or 2 is not the project's, too long, or names
    nothing.
    """
    said = [line for line in ended.err.splitlines() if line.strip()]
    if not said or not _OWN.search(ended.err):
        return Verdict(
            TRACEBACK, f"status {ended.status} without words of the project: {last(ended.err)}"
        )
    if len(said) > MOST_LINES:
        return Verdict(TRACEBACK, f"an error of {len(said)} lines: {first(ended.err)}")
    flat = squeezed(ended.err)
    if names and not any(squeezed(name) in flat for name in names):
        return Verdict(TRACEBACK, f"the error names none of {names[:3]}: {first(ended.err)}")
    return None


def squeezed(text: str) -> str:
    """A text without what a box on the console puts into it; `-` and `_` count as one."""
    return re.sub(r"[\s│╭╮╰╯─]", "", text).replace("-", "_")


def difference(wanted: Any, found: Any, where: str = "") -> str:
    """The first place where two outcomes differ, in words."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key in [*wanted, *(k for k in found if k not in wanted)]:
            if wanted.get(key, NOT_TAKEN) != found.get(key, NOT_TAKEN):
                one, other = wanted.get(key, "nothing"), found.get(key, "nothing")
                return difference(one, other, f"{where}.{key}" if where else str(key))
    if isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        at = next((i for i, pair in enumerate(zip(wanted, found)) if pair[0] != pair[1]), 0)
        if wanted:
            return difference(wanted[at], found[at], f"{where}[{at}]")
    return f"{where or 'an outcome'}: {str(found)[:120]} and not {str(wanted)[:120]}"


def first(text: str) -> str:
    """The first line that says something."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


def last(text: str) -> str:
    """The last line that says something."""
    return first("\n".join(reversed(text.splitlines())))
