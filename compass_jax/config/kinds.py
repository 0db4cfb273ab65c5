"""The interface of named verifiers, and their registry: built-in ones, and those that installed
packages register as entry points.

    [project.entry-points."compass_jax.verifiers"]
    chess = "my_package.chess:KIND"
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import NamedTuple

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.errors import UserError

GROUP = "compass_jax.verifiers"
FOLDER = "compass_jax.rewards.verifiers.kinds"  # of the built-in verifiers
NOTHING = {"reward": 0.0, "extracted": False}  # no answer: the response is wrong, and counted
IN_ANSWER = "{answer}"  # `looks_for` of verifiers that read the final answer (extract.py)
UNKNOWN_STEPS = 0
# packages that programs may import by default, if installed
USUAL_PACKAGES = ("numpy", "scipy", "sympy", "pandas", "networkx", "sortedcontainers")


@dataclass(frozen=True)
class Example:
    """A row with a right and a wrong response. Tests judge both."""

    row: JsonMapping
    right: str
    wrong: str


class Form(NamedTuple):
    """An answer format. {tag} is rewards.answer_tag."""

    pattern: str  # regular expression of prompts that request the format
    request: str  # a system prompt that requests it


_REQUEST = "Think step by step, then write {} alone between <{{tag}}> and </{{tag}}>."
TAG_FORM = Form("<{tag}>", _REQUEST.format("the final answer"))
FINAL_FORM = TAG_FORM._replace(pattern=r"<{tag}>|\\boxed|\\fbox|####")
CHOICE_FORM = Form(
    FINAL_FORM.pattern + "|answer is|answer:", _REQUEST.format("the letter of your choice")
)


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
        form: the format of the answer that prompts should request; None: any response is read.
        vote: maps a response, with the parameters of `judge`, to its answer as a text that equal
            answers share, for majority voting; None: responses cannot be compared so.
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
        answer_text: returns the text of a right answer, given the row's reference as `answer` and
            the arguments in `takes`. Raises ValueError, which names the form and the remedy, for a
            reference that no answer can equal. None: the reference has no such text.
        row_faults: returns the fault of each row, tried without a response; empty: valid. A row is
            a mapping of the arguments in `takes`. It runs in a child process.
    """

    judge: Callable[..., Json]
    about: str
    example: Example
    answer: bool = True
    takes: tuple[str, ...] = ()
    form: Form | None = None
    vote: Callable[..., str | None] | None = None
    looks_for: str = IN_ANSWER
    steps: Callable[[JsonMapping], int] = lambda arguments: 1
    may_hang: bool = False
    runs_programs: bool = False
    at_once: Callable[..., Json] | None = None
    warm: Callable[[], None] = field(default=lambda: None)
    complaint: Callable[[JsonMapping], str] = lambda arguments: ""
    why: Callable[..., str] | None = None
    answer_text: Callable[[JsonMapping], str] | None = None
    row_faults: Callable[[Sequence[JsonMapping]], list[str]] | None = None


@cache
def kinds() -> dict[str, Kind]:
    """Returns all verifiers by name. Raises UserError for an unusable installed one."""
    folder = importlib.import_module(FOLDER)
    names = sorted(module.name for module in pkgutil.iter_modules(folder.__path__))
    modules = {name: importlib.import_module(f"{FOLDER}.{name}") for name in names}
    by_name = {name: module.KIND for name, module in modules.items() if hasattr(module, "KIND")}
    for module in modules.values():
        by_name |= getattr(module, "KINDS", {})
    for point in entry_points(group=GROUP):
        where = f"the verifier {point.name!r} of {point.dist.name if point.dist else point.value}"
        if point.name in by_name:
            raise UserError(f"{where}: there is a verifier of this name; give it another one")
        try:
            kind = point.load()
        except Exception as error:
            raise UserError(
                f"{where} ({point.value}) cannot be imported: {type(error).__name__}: {error};"
                " mend or remove the package"
            ) from error
        if not isinstance(kind, Kind):
            raise UserError(
                f"{where} ({point.value}) is a {type(kind).__name__}; make it a"
                " compass_jax.config.kinds.Kind"
            )
        by_name[point.name] = kind
    return by_name


# returns the fault of a value, to be appended to "name = value"; empty: it is valid
Rule = Callable[[Json], str]


def complaints(**rules: Rule) -> Callable[[JsonMapping], str]:
    """Returns a Kind's `complaint`, built from one rule per argument."""

    def complaint(arguments: JsonMapping) -> str:
        for name, rule in rules.items():
            if name in arguments and (fault := rule(arguments[name])):
                return f"{name} = {arguments[name]!r:.100}{fault}"
        return ""

    return complaint


def one_of(*values: Json) -> Rule:
    """Returns a rule that accepts only these values."""
    words = " or ".join(str(value).lower() for value in values)

    def rule(value: Json) -> str:
        good = any(type(value) is type(x) and value == x for x in values)
        return "" if good else f" must be {words}"

    return rule


def number_in(high: float, words: str, above: bool = False) -> Rule:
    """Returns a rule that accepts numbers from 0, with `above` excluding it, to `high`. `words`
    describes the range.
    """

    def rule(value: Json) -> str:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        good = good and 0 <= value <= high and not (above and value == 0)
        return "" if good else f" must be a number{words}"

    return rule
