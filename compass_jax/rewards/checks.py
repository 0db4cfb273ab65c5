"""How the answers of each data source are judged: the one door for built-in and own verifiers.

A verifier is a function `verify(row, response)`, called with these names:

    row         the prompt's row with all its columns, as a dict: a file's row, a task's row, or the
                entry of a reasoning-gym dataset (question, answer, metadata)
    response    the model's text

It returns a number, or a mapping with the number under "reward" and numbers with other names, whose
means are logged as reward/<name>/mean. Where it has an attribute `range = (low, high)`, a reward
outside is an error. What is no finite number is one as well; the sample is then unknown, never 0.

Imported by reward workers: nothing here may import jax.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from compass_jax.config import ConfigError, DataConfig, FileSource, ProceduralSource, TaskSource
from compass_jax.config.named import load
from compass_jax.rewards.verifiers import (
    READERS,
    WARM,
    can_be_read,
    dataset_of,
    evaluates,
    extract_answer,
    math_decided,
    math_verify_score,
    number,
    reasoning_gym_score,
    take_over,
)
from compass_jax.tasks.task import load_task

Row = Mapping[str, Any]

MOST_COMPONENTS = 16
COMPONENT = re.compile(r"[A-Za-z]\w{0,39}")
# reward/<name>/mean is what shaping makes of the reward (rl/prepare.py)
TAKEN = ("verifier", "length", "repetition", "overlong")
_REMEDY = "define it as `def {}(row, response)`, and return a number"


class Check(NamedTuple):
    """How the answers of one data source are checked, as workers are told."""

    kind: str  # "math", "reasoning_gym", "function" or "task"
    name: str = ""  # the answer's field; the dataset; "module:function"; "module:task"
    options: tuple[tuple[str, Any], ...] = ()  # of the dataset
    key: str = ""  # the setting that names it

    @property
    def own(self) -> bool:
        """Whether a person wrote it."""
        return self.kind in ("function", "task")


class Response(NamedTuple):
    """One response to judge."""

    source: int  # index into the list of checks
    text: str  # the model's
    row: str  # of its prompt, as tasks/rows.py writes it


class Graded(NamedTuple):
    """A verifier's number, and what it named beside it."""

    reward: float
    components: dict[str, float]


class Verifier(NamedTuple):
    """What judges a source's responses."""

    verify: Callable[..., Any]  # of row and response
    decide: Callable[[Row, str], float | None]  # without evaluating; None: `verify` must say
    forked: bool  # `verify` runs in a child of its own
    limits: tuple[float, float] | None = None

    def __call__(self, row: Row, response: str) -> Graded:
        """The verdict, here and now. Raises TypeError or ValueError where there is none."""
        decided = self.decide(row, response)
        return self.judged(row, response) if decided is None else self.graded(decided)

    def judged(self, row: Row, response: str) -> Graded:
        """What `verify` says, looked at by `graded`."""
        return self.graded(self.verify(row=row, response=response))

    def graded(self, value: Any) -> Graded:
        """What `verify` returned. Raises TypeError or ValueError for anything but numbers in their
        range.
        """
        parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
        if "reward" not in parts:
            raise ValueError(f"the mapping {value!r:.100} has no 'reward'")
        reward = number(parts.pop("reward"))
        if self.limits and not self.limits[0] <= reward <= self.limits[1]:
            raise ValueError(f"the reward {reward:g} is outside its range {list(self.limits)}")
        if len(parts) > MOST_COMPONENTS:
            raise ValueError(f"{len(parts)} components, more than {MOST_COMPONENTS}")
        for name in parts:
            if not (isinstance(name, str) and COMPONENT.fullmatch(name)) or name in TAKEN:
                raise ValueError(
                    f"a component cannot be called {name!r:.80}: letters, digits and _, and none of"
                    f" {', '.join(TAKEN)}"
                )
        return Graded(reward, {name: number(part) for name, part in parts.items()})


def checks_of(data: DataConfig) -> list[Check]:
    """The check of each of `data.keyed_sources()`."""
    return [_check_of(source, key) for key, source in data.keyed_sources()]


def _check_of(source: ProceduralSource | FileSource | TaskSource, key: str) -> Check:
    if isinstance(source, TaskSource):
        return Check("task", source.task, key=f"{key}.task")
    if isinstance(source, ProceduralSource) and source.verifier == "reasoning_gym":
        return Check("reasoning_gym", source.dataset, source.options)
    if source.verifier == "math":
        return Check("math", "answer")
    return Check("function", source.verifier, key=f"{key}.verifier")


def build(check: Check, tag: str) -> Verifier:
    """What judges a source's responses, with all that it needs imported. Built-in checks read the
    text in the last `<tag>`, and where there is none score 0.

    Raises ConfigError, with the setting, where a person's own verifier cannot be used.
    """
    if check.kind == "function":
        return _own(load(check.name, check.key), check)
    if check.kind == "task":
        verify = load_task(check.name, check.key).verify
        if verify != "math":
            return _own(verify, check)
        check = Check("math", "answer")
    return _math(check.name, tag) if check.kind == "math" else _reasoning_gym(check, tag)


def _own(verify: Any, check: Check) -> Verifier:
    where = f"{check.key} = {check.name!r}"
    called = getattr(verify, "__name__", "score")
    if not callable(verify):
        raise ConfigError(
            f"{where}: a {type(verify).__name__}, and no function; {_REMEDY.format('score')}"
        )
    try:
        signature = inspect.signature(verify)
        signature.bind(row={}, response="")
    except (TypeError, ValueError) as error:
        found = signature if isinstance(error, TypeError) else "(...)"
        raise ConfigError(
            f"{where}: {called}{found} cannot be called with row and response ({error});"
            f" {_REMEDY.format(called)}"
        ) from error
    return Verifier(verify, lambda row, response: None, True, _limits(verify, where))


def _limits(verify: Any, where: str) -> tuple[float, float] | None:
    limits = getattr(verify, "range", None)
    if limits is None:
        return None
    try:
        low, high = map(number, limits)
        if low < high:
            return low, high
    except (TypeError, ValueError):
        pass
    raise ConfigError(
        f"{where}: its range is {limits!r:.80}; it must be two numbers, the lower one first"
    )


def _math(field: str, tag: str) -> Verifier:
    for left, right in WARM:
        math_verify_score(left, right)

    def decide(row: Row, response: str) -> float | None:
        answer = extract_answer(response, tag)
        return 0.0 if answer is None else math_decided(answer, str(row[field]))

    def verify(row: Row, response: str) -> float:
        return math_verify_score(extract_answer(response, tag) or "", str(row[field]))

    return Verifier(verify, decide, True)


def _reasoning_gym(check: Check, tag: str) -> Verifier:
    dataset_of(check.name, check.options)
    if check.name in READERS:
        take_over(check.name)

    def decide(row: Row, response: str) -> float | None:
        answer = extract_answer(response, tag)
        return None if answer is not None and can_be_read(check.name, answer) else 0.0

    def verify(row: Row, response: str) -> float:
        answer = extract_answer(response, tag) or ""
        return reasoning_gym_score(check.name, dict(row), answer, check.options)

    return Verifier(verify, decide, evaluates(check.name))
