"""Verifiers of each data source's responses: built-in ones and a user's.

A verifier is a function whose parameters name its arguments (called.py), for instance
`score(prompt, response, **row)`. It returns

    a number
    a mapping       the number under "reward", and numbers with other names, whose means are logged
                    as reward/<name>/mean; "extracted": False where no answer was found to judge
    None            it can judge no answer here: the sample is left out, and counted

Where it has an attribute `range = (low, high)`, a reward outside is an error, and so is anything
but a finite number; the sample is then unknown, never 0. Several verifiers of a source are added up
by their weights; the reward of each is a component. The sum is unknown where one of them is.

Imported by reward workers: nothing here may import jax.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from compass_jax.config import ConfigError, DataConfig, FileSource, ProceduralSource, TaskSource
from compass_jax.config.named import load, load_module
from compass_jax.config.verifiers import JUDGE, pairs
from compass_jax.rewards.called import Called, Case, Row, called
from compass_jax.rewards.reasoning import (
    can_be_read,
    dataset_of,
    evaluates,
    module_of,
    reasoning_gym_score,
    take_over,
)
from compass_jax.tasks.task import load_task
from compass_jax.verifiers.base import NOTHING, Kind
from compass_jax.verifiers.extract import extract_answer, number
from compass_jax.verifiers.find import kinds

MOST_COMPONENTS = 16
COMPONENT = re.compile(r"[A-Za-z]\w{0,39}")
# reward/<name>/mean is what shaping makes of the reward (rl/prepare.py)
TAKEN = ("verifier", "length", "repetition", "overlong")
Source = ProceduralSource | FileSource | TaskSource
Args = tuple[tuple[str, Any], ...]
DECIMALS = 9  # of a sum of weights: 0.7 + 0.2 + 0.1 counts as right


class Check(NamedTuple):
    """How the answers of one data source are checked by one verifier, as workers receive it."""

    kind: str  # of verifiers/, "reasoning_gym", "function" or "task"
    name: str = ""  # the dataset; "module:function"; "module:task"
    options: tuple[tuple[str, Any], ...] = ()  # of the dataset
    key: str = ""  # the setting that names it
    args: Args = ()  # the source's verifier_args
    weight: float = 1.0
    module: str = ""  # registers the dataset, where reasoning-gym does not

    @property
    def own(self) -> bool:
        """Whether the user wrote it."""
        return self.kind in ("function", "task") or bool(self.module)


class Response(NamedTuple):
    """One response to judge."""

    source: int  # index into the list of checks
    text: str  # the model's
    row: str  # of its prompt, as tasks/rows.py writes it
    prompt: str = ""  # the question
    rows: tuple[str, ...] = ()  # instead of a response: rows to try without one


class Graded(NamedTuple):
    """A verifier's reward, None where it could judge no answer, and its components."""

    reward: float | None
    components: dict[str, float]
    extracted: bool = True  # there was an answer in the response
    says: str = ""  # an environment's messages, a list of JSON


UNDECIDED = object()  # instead of a value: only the function can say, in a child


class Part(NamedTuple):
    """One of the verifiers that judge a source.

    Args:
        decide: returns the value for a response without evaluating it, or UNDECIDED.
        limits: of its rewards.
    """

    name: str
    call: Called
    weight: float = 1.0
    decide: Callable[[Case], Any] = lambda case: UNDECIDED
    limits: tuple[float, float] | None = None
    runs_programs: bool = False
    row_faults: Callable[[Sequence[Row]], list[str]] | None = None


class Verifier(NamedTuple):
    """The verifiers of a source's responses."""

    parts: tuple[Part, ...]

    @property
    def batch(self) -> bool:
        """Whether one of them takes many responses in one call."""
        return any(part.call.batch for part in self.parts)

    def __call__(self, row: Row, response: str, prompt: str = "") -> Graded:
        """Returns the verdict, judged in this process. Raises TypeError or ValueError where there
        is none.
        """
        return self.graded([part.call([Case(row, response, prompt)])[0] for part in self.parts])

    def decided(self, case: Case) -> list[Any]:
        """Returns the value of each part for a response, or UNDECIDED."""
        return [part.decide(case) for part in self.parts]

    def judged(self, cases: Sequence[Case], which: Sequence[int]) -> list[list[Any]]:
        """Returns the values of the parts `which` for each case: None, or a mapping of JSON."""
        values = [
            [_plain(_graded(part, value)) for value in part.call(cases)]
            for part in (self.parts[i] for i in which)
        ]
        return [list(of_case) for of_case in zip(*values, strict=True)]

    def row_faults(self, rows: Sequence[Row]) -> list[str]:
        """Returns the fault of each row, tried without a response; empty: there is none."""
        faults = [""] * len(rows)
        for part in self.parts:
            if part.row_faults:
                given = [{**part.call.given, **row} for row in rows]
                faults = [a or b for a, b in zip(faults, part.row_faults(given), strict=True)]
        return faults

    def graded(self, values: Sequence[Any]) -> Graded:
        """Returns the verdict that the parts' values make. Raises TypeError or ValueError for
        anything but numbers in their range.
        """
        grades = [_graded(part, value) for part, value in zip(self.parts, values, strict=True)]
        if len(grades) == 1 and self.parts[0].weight == 1:
            return grades[0]
        components: dict[str, float] = {}
        terms = []
        for part, grade in zip(self.parts, grades):
            if grade.reward is None:
                return Graded(None, {}, False)
            terms.append(part.weight * grade.reward)
            components[part.name] = grade.reward
            components |= {f"{part.name}_{name}": x for name, x in grade.components.items()}
        total = round(math.fsum(terms), DECIMALS)
        return Graded(total, components, all(grade.extracted for grade in grades))


def _plain(grade: Graded) -> dict[str, Any] | None:
    """Returns a grade as JSON can carry it."""
    if grade.reward is None:
        return None
    says = {"says": grade.says} if grade.says else {}
    return {**grade.components, "reward": grade.reward, "extracted": grade.extracted, **says}


def _graded(part: Part, value: Any) -> Graded:
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise ValueError(f"the mapping {value!r:.100} has no 'reward'")
    if (reward := parts.pop("reward")) is None:
        return Graded(None, {}, False)
    reward = number(reward)
    extracted, says = parts.pop("extracted", True), parts.pop("says", "")
    if not isinstance(extracted, bool):
        raise TypeError(f"'extracted' is {extracted!r:.80}: it must be True or False")
    if not isinstance(says, str):
        raise TypeError(f"'says' is {says!r:.80}: it must be a text")
    if part.limits and not part.limits[0] <= reward <= part.limits[1]:
        raise ValueError(f"the reward {reward:g} is outside its range {list(part.limits)}")
    if len(parts) > MOST_COMPONENTS:
        raise ValueError(f"{len(parts)} components, more than {MOST_COMPONENTS}")
    for name in parts:
        if not (isinstance(name, str) and COMPONENT.fullmatch(name)) or name in TAKEN:
            raise ValueError(
                f"a component cannot be called {name!r:.80}: letters, digits and _, and none of"
                f" {', '.join(TAKEN)}"
            )
    return Graded(reward, {name: number(x) for name, x in parts.items()}, extracted, says)


def checks_of(data: DataConfig) -> list[tuple[Check, ...]]:
    """Returns the checks of each of `data.keyed_sources()`; then those of the gold labels of each
    that has them.
    """
    sources = data.keyed_sources()
    of_gold = [_listed(source, key, "gold") for key, source in sources if source.gold]
    return [_checks_of(source, key) for key, source in sources] + of_gold


def weighted_verifiers(source: Source, key: str) -> dict[Any, float]:
    """Returns the verifiers of a source, names or functions, with their weights."""
    if not isinstance(source, TaskSource):
        return dict(pairs(source.verifier))
    verify = load_task(source.task, f"{key}.task").verify
    return dict(verify) if isinstance(verify, Mapping) else {verify: 1.0}


class Judged(NamedTuple):
    """The judge's part in a source's reward. Workers know nothing of it."""

    weight: float
    alone: bool  # no worker's verifier is added


def judged_sources(data: DataConfig) -> dict[int, Judged]:
    """Returns the sources that the judge judges, by their index."""
    weighted = [weighted_verifiers(source, key) for key, source in data.keyed_sources()]
    return {
        i: Judged(number(verifiers[JUDGE]), len(verifiers) == 1)
        for i, verifiers in enumerate(weighted)
        if JUDGE in verifiers
    }


def sources_with(data: DataConfig, wanted: Callable[[Kind], Any]) -> dict[int, str]:
    """Returns the settings of the sources that have a usual verifier of a kind that is wanted, by
    their index.
    """
    return {
        i: key
        for i, (key, source) in enumerate(data.keyed_sources())
        if any(_is_usual(x) and wanted(kinds()[x]) for x in weighted_verifiers(source, key))
    }


def _is_usual(verifier: Any) -> bool:
    return isinstance(verifier, str) and verifier in kinds()


def gold_places(data: DataConfig) -> dict[int, int]:
    """Returns where `checks_of` has the gold labels of a source: {index of the source: index}."""
    sources = data.keyed_sources()
    labelled = [i for i, (_, source) in enumerate(sources) if source.gold]
    return {i: len(sources) + n for n, i in enumerate(labelled)}


def _checks_of(source: Source, key: str) -> tuple[Check, ...]:
    if isinstance(source, TaskSource):
        return (Check("task", source.task, key=f"{key}.task"),)
    return _listed(source, key, "verifier", source.verifier_args)


def _listed(source: Source, key: str, setting: str, args: Args = ()) -> tuple[Check, ...]:
    """Returns the checks that a setting of a source names."""
    checks = []
    for name, weight in pairs(getattr(source, setting)):
        if name == JUDGE:
            continue
        check = Check("function", name, (), f"{key}.{setting}", args, weight)
        if isinstance(source, ProceduralSource) and name == "reasoning_gym":
            check = check._replace(kind=name, name=source.dataset, options=source.options)
            check = check._replace(key=f"{key}.dataset", module=module_of(source.dataset))
        elif name in kinds():
            check = check._replace(kind=name, name="")
        checks.append(check)
    return tuple(checks)


def build(checks: Check | Sequence[Check], tag: str) -> Verifier:
    """Returns the verifier of a source's responses, with all that it needs imported. Built-in
    checks read the text in the last `<tag>`, and score 0 where there is none.

    Raises ConfigError, with the setting, where a user's verifier cannot be used.
    """
    checks = [checks] if isinstance(checks, Check) else checks
    parts = [part for check in checks for part in _parts(check, tag)]
    takers = [part.call for part in parts]
    for name in sorted({name for check in checks for name, _ in check.args}):
        if not any(one.rest or name in (*one.wanted, *one.offered) for one in takers):
            where = checks[0].key.rpartition(".")[0]
            raise ConfigError(
                f"{where}.verifier_args: no verifier takes {name!r}; leave it out, or add a"
                " parameter of this name"
            )
    return Verifier(tuple(_distinct(parts)))


def _parts(check: Check, tag: str) -> list[Part]:
    if check.kind == "function":
        return [_own(load(check.name, check.key), check, tag)]
    if check.kind == "reasoning_gym":
        return [_reasoning_gym(check, tag)]
    if check.kind != "task":
        return [_usual(check.kind, check, tag)]
    source, key = TaskSource(check.name), check.key.removesuffix(".task")
    return [
        (_usual if _is_usual(one) else _own)(one, check._replace(weight=number(weight)), tag)
        for one, weight in weighted_verifiers(source, key).items()
        if one != JUDGE
    ]


def _distinct(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with different names that components may have."""
    named: list[Part] = []
    for part in parts:
        name = re.sub(r"\W", "", part.name)[:30].lstrip("_0123456789") or "own"
        name = f"{name}_reward" if name in (*TAKEN, "reward", "extracted") else name
        used = {one.name for one in named}
        names = (name, *(f"{name}_{n}" for n in range(2, len(parts) + 2)))
        named.append(part._replace(name=next(other for other in names if other not in used)))
    return named


def _own(verify: Any, check: Check, tag: str) -> Part:
    where = f"{check.key} = {check.name!r}"
    call = called(verify, where, dict(check.args), tag)
    return Part(call.name, call, check.weight, limits=_limits(verify, where))


def _limits(verify: Any, where: str) -> tuple[float, float] | None:
    limits = getattr(verify, "range", None)
    if limits is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        low, high = map(number, limits)
        if low < high:
            return low, high
    raise ConfigError(
        f"{where}: its range is {limits!r:.80}; it must be two numbers, the lower one first"
    )


def _usual(name: str, check: Check, tag: str) -> Part:
    kind = kinds()[name]
    call = called(kind.judge, check.key, dict(check.args), tag)._replace(name=name)
    kind.warm()
    at_once = kind.at_once or (None if kind.may_hang else kind.judge)

    def decide(case: Case) -> Any:
        value = None if at_once is None else call._replace(function=at_once)([case])[0]
        return UNDECIDED if value is None else value

    return Part(name, call, check.weight, decide, (0.0, 1.0), kind.runs_programs, kind.row_faults)


def _reasoning_gym(check: Check, tag: str) -> Part:
    if check.module:
        load_module(check.module, check.key)
    dataset_of(check.name, check.options)
    take_over(check.name)
    forked = check.own or evaluates(check.name)

    def verify(row: Row, response: str) -> float | Mapping[str, Any]:
        answer = extract_answer(response, tag)
        if answer is None:
            return NOTHING
        score = 0.0
        if can_be_read(check.name, answer):
            score = reasoning_gym_score(check.name, dict(row), answer, check.options)
        return score if answer or score else NOTHING

    def decide(case: Case) -> Any:
        answer = extract_answer(case.response, tag)
        if forked and answer is not None and can_be_read(check.name, answer):
            return UNDECIDED
        return verify(case.row, case.response)

    return Part("reasoning_gym", called(verify, check.key, {}, tag), check.weight, decide)
