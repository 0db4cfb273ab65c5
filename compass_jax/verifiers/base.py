"""The interface of named verifiers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOTHING = {
    "reward": 0.0,
    "extracted": False,
}  # the response has no answer: it is wrong, and counted
IN_ANSWER = "{answer}"  # `looks_for` of verifiers that read the final answer (extract.py)
UNKNOWN_STEPS = 0
# packages that programs may import by default, if installed
USUAL_PACKAGES = ("numpy", "scipy", "sympy", "pandas", "networkx", "sortedcontainers")


@dataclass(frozen=True)
class Example:
    """A row with a right and a wrong response. Tests judge both."""

    row: Mapping[str, Any]
    right: str
    wrong: str


@dataclass(frozen=True)
class Kind:
    """A named verifier with rewards in [0, 1].

    Args:
        judge: a function whose parameter names select its arguments (rewards/called.py). Returns
            the reward, a mapping with "reward" and components, or NOTHING if there is no answer.
        about: the condition of reward 1, as a sentence.
        example: a row with two responses.
        answer: whether it compares with the row's reference.
        takes: the names of its arguments, from `verifier_args` or the row's columns.
        looks_for: the place of the answer, for warnings; {answer}, {last} and {tag} are filled in.
            Empty if the verifier checks the whole response.
        steps: maps arguments to the number of equal steps between the rewards 0 and 1. Different
            rewards differ by at least 1/steps; UNKNOWN_STEPS if the number depends on the row.
        may_hang: whether it evaluates text or may run forever; it then runs in a child process.
        runs_programs: whether it runs the model's programs. The machine must then support every
            guard, unless the user sets `rewards.sandbox = "off"`.
        at_once: returns the result of `judge` without evaluation, or None if only `judge` can.
        warm: called once in a worker, before it forks children.
        complaint: returns the fault of the arguments as "name = value: reason"; empty: valid.
        why: returns the fault of a response, with the parameters of `judge`; empty: it is right.
        row_faults: returns the fault of each row, tried without a response; empty: valid. A row is
            a mapping of the arguments in `takes`. It runs in a child process.
    """

    judge: Callable[..., Any]
    about: str
    example: Example
    answer: bool = True
    takes: tuple[str, ...] = ()
    looks_for: str = IN_ANSWER
    steps: Callable[[Mapping[str, Any]], int] = lambda arguments: 1
    may_hang: bool = False
    runs_programs: bool = False
    at_once: Callable[..., Any] | None = None
    warm: Callable[[], None] = field(default=lambda: None)
    complaint: Callable[[Mapping[str, Any]], str] = lambda arguments: ""
    why: Callable[..., str] | None = None
    row_faults: Callable[[Sequence[Mapping[str, Any]]], list[str]] | None = None


# returns the fault of a value, to be appended to "name = value"; empty: it is valid
Rule = Callable[[Any], str]


def complaints(**rules: Rule) -> Callable[[Mapping[str, Any]], str]:
    """Returns a Kind's `complaint`, built from one rule per argument."""

    def complaint(arguments: Mapping[str, Any]) -> str:
        for name, rule in rules.items():
            if name in arguments and (fault := rule(arguments[name])):
                return f"{name} = {arguments[name]!r:.100}{fault}"
        return ""

    return complaint


def one_of(*values: Any) -> Rule:
    """Returns a rule that accepts only these values."""
    words = " or ".join(str(value).lower() for value in values)

    def rule(value: Any) -> str:
        good = any(type(value) is type(x) and value == x for x in values)
        return "" if good else f" must be {words}"

    return rule


def number_in(low: float, high: float, words: str, above: bool = False) -> Rule:
    """Returns a rule that accepts numbers from `low` to `high`, with `above` excluding `low`.
    `words` describes the range.
    """

    def rule(value: Any) -> str:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and low <= value <= high and not (above and value == low)
        return "" if good else f" must be a number{words}"

    return rule
