"""Verifiers of each data source: built-in and user-defined ones.

A verifier is a function whose parameter names select its arguments (called.py), for instance
`score(prompt, response, **row)`. It returns one of

    a number
    a mapping       the reward under "reward", and components with other names, whose means are
                    logged as reward/<name>/mean; "extracted": False if no answer was found
    None            no answer can be judged: the sample is excluded and counted

If the function has an attribute `range = (low, high)`, a reward outside the range is an error. A
reward that is not a finite number is an error, too. The reward of such a sample is unknown, never
0. If a source has several verifiers, its reward is their weighted sum, and each reward is a
component. The sum is unknown if any of the rewards is.

Reward workers import this module, so it must not import jax.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO
from compass_jax.config import ConfigError, DataConfig, ProceduralSource, TaskSource
from compass_jax.config.chat import find_format
from compass_jax.config.data import Source
from compass_jax.config.kinds import NOTHING, Kind, kinds
from compass_jax.config.named import file_of, is_name, load, load_module
from compass_jax.config.rewards import NO_FILE
from compass_jax.config.verifiers import JUDGE, pairs
from compass_jax.rewards.called import Called, Case, Row, called
from compass_jax.rewards.reasoning import (
    can_be_scored,
    dataset_of,
    evaluates,
    module_of,
    reasoning_gym_score,
)
from compass_jax.rewards.tasks.rows import decode_row
from compass_jax.rewards.tasks.task import load_task
from compass_jax.rewards.verifiers.answers import canonical
from compass_jax.rewards.verifiers.extract import extract_answer, number

MOST_COMPONENTS = 16
COMPONENT = re.compile(r"[A-Za-z]\w{0,39}")
# names of reward/<name>/mean that reward shaping uses (rl/prepare.py)
TAKEN = ("verifier", "length", "repetition", "overlong")
Args = tuple[tuple[str, Json], ...]
Code = tuple[tuple[str, str], ...]  # (name in a setting, hash of its file)
Vote = Callable[[Any, str], str | None]  # of a prompt and a response
HASH_DIGITS = 16  # hexadecimal digits of SHA-256 that are stored
DECIMALS = 9  # a weighted sum is rounded, so that 0.7 + 0.2 + 0.1 equals 1


class Check(NamedTuple):
    """A verifier of a data source, in the form that is sent to workers."""

    kind: str  # a verifier's name, "reasoning_gym", "function" or "task"
    name: str = ""  # data set, "module:function" or "module:task"
    options: tuple[tuple[str, Json], ...] = ()  # options of the data set
    key: str = ""  # the setting that names it
    args: Args = ()  # the source's verifier_args
    weight: float = 1.0
    module: str = ""  # module that registers the data set, if not reasoning-gym

    @property
    def is_users(self) -> bool:
        """Whether the user wrote the verifier."""
        return self.kind in ("function", "task") or bool(self.module)


class Response(NamedTuple):
    """A response to score."""

    source: int  # index into the list of checks
    text: Json  # the model's response; a function that returns it until a worker is free
    row: str  # the prompt's row, encoded by rewards/tasks/rows.py
    prompt: str = ""  # the question
    rows: tuple[str, ...] = ()  # instead of a response: rows to validate


class Graded(NamedTuple):
    """A verifier's reward (None if no answer could be judged) and its components."""

    reward: float | None
    components: dict[str, float]
    extracted: bool = True  # whether the response has an answer
    says: str = ""  # an environment's messages, as a JSON list

    def as_json(self) -> JsonObject:
        """Returns the mapping from which `_grade` reads this grade."""
        rest = {"reward": self.reward, "extracted": self.extracted, "says": self.says}
        return {**self.components, **rest}


UNJUDGED = Graded(None, {}, False)
UNDECIDED = object()  # placeholder: the function must run in a child process


class Part(NamedTuple):
    """One of the verifiers of a source."""

    name: str
    call: Called
    weight: float = 1.0
    # returns the result without evaluating the response, or UNDECIDED
    decide: Callable[[Case], Any] = lambda case: UNDECIDED
    limits: tuple[float, float] | None = None  # the range of its rewards
    runs_programs: bool = False
    row_faults: Callable[[Sequence[Row]], list[str]] | None = None


class Verifier(NamedTuple):
    """The verifiers of a source's responses."""

    parts: tuple[Part, ...]

    @property
    def batch(self) -> bool:
        """Whether any of the verifiers takes a batch of responses."""
        return any(part.call.batch for part in self.parts)

    def __call__(self, row: Row, response: str, prompt: str = "") -> Graded:
        """Returns the verdict, computed in this process. Raises TypeError or ValueError."""
        return self.graded([part.call([Case(row, response, prompt)])[0] for part in self.parts])

    def decided(self, case: Case) -> list[Json]:
        """Returns the result of each part, or UNDECIDED for parts that need a child process."""
        return [part.decide(case) for part in self.parts]

    def judged(self, cases: Sequence[Case]) -> list[list[Json]]:
        """Returns the results of the parts for each case, as JSON mappings."""
        values = [[_grade(part, x).as_json() for x in part.call(cases)] for part in self.parts]
        return [list(of_case) for of_case in zip(*values, strict=True)]

    def row_faults(self, rows: Sequence[Row]) -> list[str]:
        """Returns the fault of each row, tried without a response; empty for a valid row."""
        faults = [""] * len(rows)
        for part in self.parts:
            if part.row_faults:
                arguments = [{**part.call.verifier_args, **row} for row in rows]
                faults = [a or b for a, b in zip(faults, part.row_faults(arguments), strict=True)]
        return faults

    def graded(self, values: Sequence[Json]) -> Graded:
        """Returns the verdict from the results of the parts. Raises TypeError or ValueError for
        results that are not numbers within their range.
        """
        grades = [_grade(part, value) for part, value in zip(self.parts, values, strict=True)]
        if len(grades) == 1 and self.parts[0].weight == 1:
            return grades[0]
        components: dict[str, float] = {}
        terms = []
        for part, grade in zip(self.parts, grades):
            if grade.reward is None:
                return UNJUDGED
            terms.append(part.weight * grade.reward)
            components[part.name] = grade.reward
            components |= {f"{part.name}_{name}": x for name, x in grade.components.items()}
        total = round(math.fsum(terms), DECIMALS)
        return Graded(total, components, all(grade.extracted for grade in grades))


def _grade(part: Part, value: Json) -> Graded:
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    if "reward" not in parts:
        raise ValueError(f"the mapping {value!r:.100} has no 'reward'")
    if (reward := parts.pop("reward")) is None:
        return UNJUDGED
    reward = number(reward)
    extracted, says = parts.pop("extracted", True), parts.pop("says", "")
    for name, one, kind in (("extracted", extracted, bool), ("says", says, str)):
        if not isinstance(one, kind):
            raise TypeError(f"{name!r} is {one!r:.80}: it must be a {kind.__name__}")
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
    """Returns the checks of each of `data.keyed_sources()`, followed by the checks of the gold
    labels of each source that has them.
    """
    sources = data.keyed_sources()
    of_gold = [_checks_of(source, key, "gold") for key, source in sources if source.gold]
    return [_checks_of(source, key, "verifier") for key, source in sources] + of_gold


def _checks_of(source: Source, key: str, setting: str) -> tuple[Check, ...]:
    """Returns the checks that a setting of a source lists."""
    if isinstance(source, TaskSource) and setting == "verifier":
        return (Check("task", source.task, key=f"{key}.task"),)
    args = () if isinstance(source, TaskSource) or setting == "gold" else source.verifier_args
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


def weighted_verifiers(source: Source, key: str) -> dict[Any, float]:
    """Returns the verifiers of a source (names or functions) with their weights."""
    if not isinstance(source, TaskSource):
        return dict(pairs(source.verifier))
    verify = load_task(source.task, f"{key}.task").verify
    return dict(verify) if isinstance(verify, Mapping) else {verify: 1.0}


class Judged(NamedTuple):
    """The judge's part of a source's reward. Workers do not see it."""

    weight: float
    alone: bool  # whether the judge is the only verifier


def judged_sources(data: DataConfig) -> dict[int, Judged]:
    """Returns the sources with a judge, by index."""
    weighted = [weighted_verifiers(source, key) for key, source in data.keyed_sources()]
    return {
        i: Judged(number(verifiers[JUDGE]), len(verifiers) == 1)
        for i, verifiers in enumerate(weighted)
        if JUDGE in verifiers
    }


def sources_with(data: DataConfig, condition: Callable[[Kind], Any]) -> dict[int, str]:
    """Returns {index: setting} of the sources with a built-in verifier that meets `condition`."""
    return {
        i: key
        for i, (key, source) in enumerate(data.keyed_sources())
        if any(_is_builtin(x) and condition(kinds()[x]) for x in weighted_verifiers(source, key))
    }


def _is_builtin(verifier: Any) -> bool:
    return isinstance(verifier, str) and verifier in kinds()


def gold_places(data: DataConfig) -> dict[int, int]:
    """Returns {index of a source: index of its gold label's checks in `checks_of`}."""
    sources = data.keyed_sources()
    labelled = [i for i, (_, source) in enumerate(sources) if source.gold]
    return {i: len(sources) + n for n, i in enumerate(labelled)}


class Reading(NamedTuple):
    """How answers are read: rewards.answer_tag and data.chat_format."""

    tag: str
    chat_format: str


def build(checks: Check | Sequence[Check], tag: str, chat_format: str = AUTO) -> Verifier:
    """Returns the verifier of a source, with all its imports done.

    Built-in checks read the text in the last `<tag>`, in answers of the form `chat_format`, and
    score 0 if there is no such tag. Raises
    ConfigError, naming the setting, if a user's verifier cannot be used.
    """
    checks = [checks] if isinstance(checks, Check) else checks
    find_format(chat_format)  # a sandboxed worker could not read a user's file later
    parts = [part for check in checks for part in _parts(check, Reading(tag, chat_format))]
    takers = [part.call for part in parts]
    for name in sorted({name for check in checks for name, _ in check.args}):
        if not any(one.rest or name in (*one.required, *one.offered) for one in takers):
            where = checks[0].key.rpartition(".")[0]
            raise ConfigError(
                f"{where}.verifier_args: no verifier takes {name!r}; leave it out, or add a"
                " parameter of this name"
            )
    return Verifier(tuple(_with_distinct_names(parts)))


def _parts(check: Check, reading: Reading) -> list[Part]:
    if check.kind == "function":
        return [_user_part(load(check.name, check.key), check, reading)]
    if check.kind == "reasoning_gym":
        return [_reasoning_gym(check, reading)]
    if check.kind != "task":
        return [_builtin_part(check.kind, check, reading)]
    source, key = TaskSource(check.name), check.key.removesuffix(".task")
    return [
        (_builtin_part if _is_builtin(one) else _user_part)(
            one, check._replace(weight=number(weight)), reading
        )
        for one, weight in weighted_verifiers(source, key).items()
        if one != JUDGE
    ]


def _with_distinct_names(parts: Sequence[Part]) -> list[Part]:
    """Returns the parts with distinct names that are valid names of components."""
    named: list[Part] = []
    for part in parts:
        name = re.sub(r"\W", "", part.name)[:30].lstrip("_0123456789") or "own"
        name = f"{name}_reward" if name in (*TAKEN, "reward", "extracted") else name
        used = {one.name for one in named}
        names = (name, *(f"{name}_{n}" for n in range(2, len(parts) + 2)))
        named.append(part._replace(name=next(other for other in names if other not in used)))
    return named


def _user_part(verify: Any, check: Check, reading: Reading) -> Part:
    where = f"{check.key} = {check.name!r}"
    call = called(verify, where, dict(check.args), *reading)
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


def _builtin_part(name: str, check: Check, reading: Reading) -> Part:
    kind = kinds()[name]
    call = called(kind.judge, check.key, dict(check.args), *reading)._replace(name=name)
    kind.warm()
    at_once = kind.at_once or (None if kind.may_hang else kind.judge)

    def decide(case: Case) -> Json:
        value = None if at_once is None else call._replace(function=at_once)([case])[0]
        return UNDECIDED if value is None else value

    return Part(name, call, check.weight, decide, (0.0, 1.0), kind.runs_programs, kind.row_faults)


def _reasoning_gym(check: Check, reading: Reading) -> Part:
    if check.module:
        load_module(check.module, check.key)
    dataset_of(check.name, check.options)
    forked = check.is_users or evaluates(check.name)

    def verify(row: Row, response: str) -> float | JsonMapping:
        answer, entry, score = extract_answer(response, *reading), dict(row), 0.0
        if answer is None:
            return NOTHING
        if can_be_scored(check.name, answer, entry):
            score = reasoning_gym_score(check.name, entry, answer, check.options)
        return score if answer or score else NOTHING

    def decide(case: Case) -> Json:
        answer = extract_answer(case.response, *reading)
        if forked and answer is not None and can_be_scored(check.name, answer, dict(case.row)):
            return UNDECIDED
        return verify(case.row, case.response)

    return Part("reasoning_gym", called(verify, check.key, {}, *reading), check.weight, decide)


def votes(data: DataConfig, tag: str) -> list[Vote | None]:
    """Returns, for each of `data.keyed_sources()`, the function that extracts a response's answer,
    for majority voting, in a form in which equal answers are equal texts.

    The function returns None for a response without an answer. The entry itself is None for sources
    whose responses cannot be compared as texts (programs, conversations, a user's function).
    """

    form = data.chat_format

    def vote_of(key: str, source: Source) -> Vote | None:
        readers = {"reasoning_gym": _tagged_vote, **{x: kind.vote for x, kind in kinds().items()}}
        named = (readers.get(one) for one in weighted_verifiers(source, key))
        read = next(filter(None, named), None)
        if read is None:
            return None
        call = called(read, key, dict(getattr(source, "verifier_args", ())), tag, form)
        return lambda prompt, text: call([Case(decode_row(prompt.row), text)])[0]

    return [vote_of(key, source) for key, source in data.keyed_sources()]


def _tagged_vote(response: str, answer_tag: str, chat_format: str = AUTO) -> str | None:
    return canonical(extract_answer(response, answer_tag, chat_format))


def code_of(data: DataConfig) -> Code:
    """Returns (name, hash of the file) for each of the user's verifiers, tasks, registered data
    sets and chat format. Files that they import are not hashed. The hash is NO_FILE for a module
    without a file, such as a compiled one.
    """
    checks = [check for source in checks_of(data) for check in source if check.is_users]
    names, hashes = [check.module or check.name for check in checks], {}
    for name in names + [data.chat_format] * is_name(data.chat_format):
        file = file_of(name if ":" in name else f"{name}:")
        digits = file and hashlib.sha256(file.read_bytes()).hexdigest()[:HASH_DIGITS]
        hashes[name] = digits or NO_FILE
    return tuple(hashes.items())


def changed(before: Iterable[tuple[str, str]], now: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a message for each name whose file has a new hash."""
    then = dict(before)
    return [
        f"{name} was changed since this run was last started (its hash was {then[name]}, and is"
        f" {digest}): its rewards are the new file's from here on"
        for name, digest in now
        if name in then and then[name] != digest
    ]
