"""How the answers of each data source are judged: the one door for built-in and own verifiers.

A verifier is a function of what its parameters name (called.py): `score(prompt, response, **row)`
for instance. It returns

    a number
    a mapping       the number under "reward", and numbers with other names, whose means are logged
                    as reward/<name>/mean; "extracted": False where no answer was found to judge
    None            it can judge no answer here: the sample is left out, and counted

Where it has an attribute `range = (low, high)`, a reward outside is an error. What is no finite
number is one as well; the sample is then unknown, never 0. Several verifiers of a source are added
up by their weights; the reward of each is a component, and where one gives none there is none.

Imported by reward workers: nothing here may import jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from compass_jax.config import ConfigError, DataConfig, FileSource, ProceduralSource, TaskSource
from compass_jax.config.named import load, load_module
from compass_jax.config.verifiers import JUDGE, pairs
from compass_jax.rewards.called import Called, Case, Row, called
from compass_jax.rewards.reasoning import (
    READERS,
    can_be_read,
    dataset_of,
    evaluates,
    reasoning_gym_score,
    take_over,
)
from compass_jax.rewards.registered import place_of
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
    """How the answers of one data source are checked by one verifier, as workers are told."""

    kind: str  # of verifiers/, "reasoning_gym", "function" or "task"
    name: str = ""  # the dataset; "module:function"; "module:task"
    options: tuple[tuple[str, Any], ...] = ()  # of the dataset
    key: str = ""  # the setting that names it
    args: Args = ()  # the source's verifier_args
    weight: float = 1.0
    module: str = ""  # registers the dataset, where reasoning-gym does not

    @property
    def own(self) -> bool:
        """Whether a person wrote it."""
        return self.kind in ("function", "task") or bool(self.module)


class Response(NamedTuple):
    """One response to judge."""

    source: int  # index into the list of checks
    text: str  # the model's
    row: str  # of its prompt, as tasks/rows.py writes it
    prompt: str = ""  # what was asked
    rows: tuple[str, ...] = ()  # in the place of a response: rows to try without one


class Graded(NamedTuple):
    """A verifier's number, None where it could judge no answer, and what it named beside it."""

    reward: float | None
    components: dict[str, float]
    extracted: bool = True  # there was an answer in the response
    says: str = ""  # an environment's messages, a list of JSON


class _Undecided:
    """In the place of a value: the function itself must say, in a child."""


UNDECIDED = _Undecided()


def _never(case: Case) -> Any:
    return UNDECIDED


class Part(NamedTuple):
    """One of the verifiers that judge a source."""

    name: str
    call: Called
    weight: float = 1.0
    # what it returns for a response, here and without evaluating; UNDECIDED: `call` must say
    decide: Callable[[Case], Any] = _never
    limits: tuple[float, float] | None = None
    runs_programs: bool = False
    row_faults: Callable[[Sequence[Row]], list[str]] | None = None


class Verifier(NamedTuple):
    """What judges a source's responses."""

    parts: tuple[Part, ...]

    @property
    def batch(self) -> bool:
        """Whether one of them takes many responses in one call."""
        return any(part.call.batch for part in self.parts)

    def __call__(self, row: Row, response: str, prompt: str = "") -> Graded:
        """The verdict, here and now. Raises TypeError or ValueError where there is none."""
        case = Case(row, response, prompt)
        return self.graded([_value(part, part.call([case])[0]) for part in self.parts])

    def decided(self, case: Case) -> list[Any]:
        """What each part says of a response without evaluating it, or UNDECIDED."""
        return [part.decide(case) for part in self.parts]

    def judged(self, cases: Sequence[Case], which: Sequence[int]) -> list[list[Any]]:
        """What the parts `which` say of each case, looked at: None, or a mapping of JSON."""
        chosen = [self.parts[i] for i in which]
        found = [[_value(part, value) for value in part.call(cases)] for part in chosen]
        return [list(values) for values in zip(*found, strict=True)]

    def row_faults(self, rows: Sequence[Row]) -> list[str]:
        """Returns what is wrong with each row, tried without a response; empty: nothing."""
        found = [""] * len(rows)
        for part in self.parts:
            if part.row_faults:
                given = [{**part.call.given, **row} for row in rows]
                found = [a or b for a, b in zip(found, part.row_faults(given), strict=True)]
        return found

    def graded(self, values: Sequence[Any]) -> Graded:
        """The verdict that the parts' values make. Raises TypeError or ValueError for anything but
        numbers in their range.
        """
        found = [_graded(part, value) for part, value in zip(self.parts, values, strict=True)]
        if len(found) == 1 and self.parts[0].weight == 1:
            return found[0]
        components: dict[str, float] = {}
        terms = []
        for part, one in zip(self.parts, found):
            if one.reward is None:
                return Graded(None, {}, False)
            terms.append(part.weight * one.reward)
            components[part.name] = one.reward
            components |= {f"{part.name}_{name}": x for name, x in one.components.items()}
        total = round(math.fsum(terms), DECIMALS)
        return Graded(total, components, all(one.extracted for one in found))


def _value(part: Part, value: Any) -> dict[str, Any] | None:
    """What a verifier returned, looked at, as JSON can carry it."""
    found = _graded(part, value)
    if found.reward is None:
        return None
    said = {"says": found.says} if found.says else {}
    return {**found.components, "reward": found.reward, "extracted": found.extracted, **said}


def _graded(part: Part, value: Any) -> Graded:
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise ValueError(f"the mapping {value!r:.100} has no 'reward'")
    reward = parts.pop("reward")
    if reward is None:
        return Graded(None, {}, False)
    reward = number(reward)
    extracted = parts.pop("extracted", True)
    if not isinstance(extracted, bool):
        raise TypeError(f"'extracted' is {extracted!r:.80}: it must be True or False")
    says = parts.pop("says", "")
    if not isinstance(says, str):
        raise TypeError(f"'says' is {says!r:.80}: it must be a text")
    limits = part.limits
    if limits and not limits[0] <= reward <= limits[1]:
        raise ValueError(f"the reward {reward:g} is outside its range {list(limits)}")
    if len(parts) > MOST_COMPONENTS:
        raise ValueError(f"{len(parts)} components, more than {MOST_COMPONENTS}")
    for name in parts:
        if not (isinstance(name, str) and COMPONENT.fullmatch(name)) or name in TAKEN:
            raise ValueError(
                f"a component cannot be called {name!r:.80}: letters, digits and _, and none of"
                f" {', '.join(TAKEN)}"
            )
    return Graded(reward, {name: number(part) for name, part in parts.items()}, extracted, says)


def checks_of(data: DataConfig) -> list[tuple[Check, ...]]:
    """The checks of each of `data.keyed_sources()`; then those of the gold labels of each that has
    them.
    """
    sources = data.keyed_sources()
    of_gold = [_listed(source, key, "gold") for key, source in sources if source.gold]
    return [_checks_of(source, key) for key, source in sources] + of_gold


class Judged(NamedTuple):
    """The judge's part in a source's reward. Workers know nothing of it."""

    weight: float
    alone: bool  # no worker's verifier is added


def judged_sources(data: DataConfig) -> dict[int, Judged]:
    """The sources that the judge judges, by their index."""
    found = {}
    for i, (key, source) in enumerate(data.keyed_sources()):
        if isinstance(source, TaskSource):
            weighted = _weighted(load_task(source.task, f"{key}.task").verify)
        else:
            weighted = dict(pairs(source.verifier))
        if JUDGE in weighted:
            found[i] = Judged(number(weighted[JUDGE]), len(weighted) == 1)
    return found


def sources_with(data: DataConfig, wanted: Callable[[Kind], Any]) -> dict[int, str]:
    """Returns the sources that have a usual verifier of a kind that is wanted: what their settings
    are called, by their index.
    """
    found = {}
    for i, (key, source) in enumerate(data.keyed_sources()):
        if isinstance(source, TaskSource):
            names = _weighted(load_task(source.task, f"{key}.task").verify)
        else:
            names = dict(pairs(source.verifier))
        if any(
            name in kinds() and wanted(kinds()[name]) for name in names if isinstance(name, str)
        ):
            found[i] = key
    return found


def gold_places(data: DataConfig) -> dict[int, int]:
    """Where `checks_of` has the gold labels of a source: {index of the source: index}."""
    sources = data.keyed_sources()
    labelled = [i for i, (_, source) in enumerate(sources) if source.gold]
    return {i: len(sources) + n for n, i in enumerate(labelled)}


def _checks_of(source: Source, key: str) -> tuple[Check, ...]:
    if isinstance(source, TaskSource):
        return (Check("task", source.task, key=f"{key}.task"),)
    return _listed(source, key, "verifier", source.verifier_args)


def _listed(source: Source, key: str, setting: str, args: Args = ()) -> tuple[Check, ...]:
    """The checks that a setting of a source names."""
    found = []
    for name, weight in pairs(getattr(source, setting)):
        if name == JUDGE:
            continue
        check = Check("function", name, (), f"{key}.{setting}", args, weight)
        if isinstance(source, ProceduralSource) and name == "reasoning_gym":
            check = check._replace(kind=name, name=source.dataset, options=source.options)
            check = check._replace(key=f"{key}.dataset", module=place_of(source.dataset))
        elif name in kinds():
            check = check._replace(kind=name, name="")
        found.append(check)
    return tuple(found)


def build(checks: Check | Sequence[Check], tag: str) -> Verifier:
    """What judges a source's responses, with all that it needs imported. Built-in checks read the
    text in the last `<tag>`, and where there is none score 0.

    Raises ConfigError, with the setting, where a person's own verifier cannot be used.
    """
    checks = [checks] if isinstance(checks, Check) else checks
    parts = [part for check in checks for part in _parts(check, tag)]
    args = {name for check in checks for name, _ in check.args}
    takers = [part.call for part in parts]
    for name in sorted(args):
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
        return [_named(check.kind, check, tag)]
    found = []
    for one, weight in _weighted(load_task(check.name, check.key).verify).items():
        if one == JUDGE:
            continue
        mine = check._replace(weight=number(weight))
        found.append(
            _named(one, mine, tag)
            if isinstance(one, str) and one in kinds()
            else _own(one, mine, tag)
        )
    return found


def _weighted(verify: Any) -> Mapping[Any, float]:
    """What a task is judged by, with weights."""
    return verify if isinstance(verify, Mapping) else {verify: 1.0}


def _distinct(parts: Sequence[Part]) -> list[Part]:
    """Parts with names that components may have, each its own."""
    found: list[Part] = []
    for part in parts:
        name = re.sub(r"\W", "", part.name)[:30].lstrip("_0123456789") or "own"
        name = f"{name}_reward" if name in (*TAKEN, "reward", "extracted") else name
        used = {one.name for one in found}
        number_of = (f"{name}_{n}" for n in range(2, len(parts) + 2))
        if name in used:
            name = next(other for other in number_of if other not in used)
        found.append(part._replace(name=name))
    return found


def _own(verify: Any, check: Check, tag: str) -> Part:
    where = f"{check.key} = {check.name!r}"
    call = called(verify, where, dict(check.args), tag)
    return Part(call.name, call, check.weight, limits=_limits(verify, where))


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


def _named(name: str, check: Check, tag: str) -> Part:
    kind = kinds()[name]
    call = called(kind.judge, check.key, dict(check.args), tag)
    call = call._replace(name=name)
    kind.warm()
    decide: Callable[[Case], Any] = partial(_at_once, call)
    if kind.at_once:
        decide = partial(_at_once, call._replace(function=kind.at_once))
    elif kind.may_hang:
        decide = _never
    limits = (0.0, 1.0)
    return Part(name, call, check.weight, decide, limits, kind.runs_programs, kind.row_faults)


def _at_once(call: Called, case: Case) -> Any:
    found = call([case])[0]
    return UNDECIDED if found is None else found


def _reasoning_gym(check: Check, tag: str) -> Part:
    if check.module:
        load_module(check.module, check.key)
    dataset_of(check.name, check.options)
    if check.name in READERS:
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

    call = called(verify, check.key, {}, tag)
    return Part("reasoning_gym", call, check.weight, decide)
