"""The description of a verifier with a name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOTHING = {"reward": 0.0, "extracted": False}  # the response has no answer: wrong, and counted
IN_ANSWER = "{answer}"  # `looks_for` of those that read the final answer (verifiers/extract.py)
UNKNOWN_STEPS = 0
# packages that programs import by default, with Python's standard library, where installed
USUAL_PACKAGES = ("numpy", "scipy", "sympy", "pandas", "networkx", "sortedcontainers")


@dataclass(frozen=True)
class Example:
    """A row with a response that is right and one that is wrong; tests judge both."""

    row: Mapping[str, Any]
    right: str
    wrong: str


@dataclass(frozen=True)
class Kind:
    """A verifier with a name. Its rewards lie in [0, 1].

    Args:
        judge: a function whose parameters name its arguments (rewards/called.py); it returns the
            reward, a mapping with "reward" and components, or NOTHING for no answer.
        about: the condition of reward 1, as a sentence.
        example: a row and two responses.
        answer: it compares with the row's reference.
        takes: the arguments that it reads, of `verifier_args` or of the row's columns.
        looks_for: the place of the answer, for warnings; {answer}, {last} and {tag} are filled in.
            Empty: it judges the form alone.
        steps: the number of equal steps between its rewards 0 and 1 with these arguments: two
            rewards differ by at least 1/steps; UNKNOWN_STEPS where it depends on the row.
        may_hang: a response can make it run for ever, or it evaluates text: it runs in a child
            process that can be killed.
        runs_programs: it runs programs of the model: the machine must have every guard, or the user
            switches them off by name (`rewards.sandbox = "off"`).
        at_once: returns the result of `judge` without evaluating, or None where only `judge` can.
        warm: called once in a worker, before it forks children.
        complaint: returns the fault of arguments, as "name = value: why"; empty: they are valid.
        why: returns the fault of a response, with the parameters of `judge`; empty: it is right.
        row_faults: returns the fault of each row, tried without a response; empty: it is valid.
            A row is a mapping of the arguments that `takes` names. It runs in a child process.
    """

    judge: Callable[..., Any]
    about: str
    example: Example
    answer: bool = True
    takes: tuple[str, ...] = ()
    looks_for: str = IN_ANSWER
    steps: Callable[[Mapping[str, Any]], int] = lambda given: 1
    may_hang: bool = False
    runs_programs: bool = False
    at_once: Callable[..., Any] | None = None
    warm: Callable[[], None] = field(default=lambda: None)
    complaint: Callable[[Mapping[str, Any]], str] = lambda given: ""
    why: Callable[..., str] | None = None
    row_faults: Callable[[Sequence[Mapping[str, Any]]], list[str]] | None = None


# returns the fault of a value, as the rest of "name = value"; empty: it is valid
Rule = Callable[[Any], str]


def complaints(**rules: Rule) -> Callable[[Mapping[str, Any]], str]:
    """Returns a Kind's `complaint` out of a rule for each argument."""

    def complaint(given: Mapping[str, Any]) -> str:
        for name, rule in rules.items():
            if name in given and (fault := rule(given[name])):
                return f"{name} = {given[name]!r:.100}{fault}"
        return ""

    return complaint


def one_of(*values: Any) -> Rule:
    """Returns the rule that a value is one of these."""
    words = " or ".join(str(value).lower() for value in values)

    def rule(value: Any) -> str:
        good = any(type(value) is type(x) and value == x for x in values)
        return "" if good else f" must be {words}"

    return rule


def number_in(low: float, high: float, words: str, above: bool = False) -> Rule:
    """Returns the rule that a value is a number of a range, `above` its lower bound; `words` names
    the range.
    """

    def rule(value: Any) -> str:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and low <= value <= high and not (above and value == low)
        return "" if good else f" must be a number{words}"

    return rule
