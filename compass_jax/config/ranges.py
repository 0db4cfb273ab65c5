"""Types and ranges of the fields of a configuration.

A field has a type and, in its annotation, a rule such as `Range`. `check_fields` checks them, and
`Section` is the base class of the parts of a configuration.

    slots: Annotated[int, Range(1, 65_536)] = 64

An upper bound is not a recommendation: it is far beyond any use, but below a size that would hang a
run or exhaust the memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, get_args, get_origin

from compass_jax.base.aliases import Hint, Json, JsonObject, Settings
from compass_jax.base.untrusted import whole_text
from compass_jax.config.errors import ConfigError, check
from compass_jax.config.named import absolute

MOST_ENTRIES = 10_000  # maximum entries of a tuple
MOST_DEPTH = 16  # nesting depth of tuples, in a field of any type


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included.

    Attributes:
        above: exclude `low`.
        note: end of the message: the meaning of a special value, or the reason for a bound.
        or_zero: allow 0 below `low`.
    """

    low: float
    high: float
    above: bool = False
    note: str = ""
    or_zero: bool = False

    def refusal(self, value: Json) -> str:
        """Returns the rule that `value` breaks, as a message; empty for a value inside the
        range.
        """
        if isinstance(value, float) and not math.isfinite(value):
            return "must be a finite number"
        if self.or_zero and value == 0:
            return ""
        if value < self.low or (self.above and value == self.low):
            if (self.low == 0 and self.above) or (self.low == 1 and isinstance(value, int)):
                message = "must be positive"
            elif self.low == 0:
                message = "must be >= 0"
            else:
                zero = "0 or " if self.or_zero and value > 0 else ""
                message = f"must be {zero}{'above' if self.above else 'at least'} {self.low}"
        elif value > self.high:
            message = f"must be at most {self.high}"
        else:
            return ""
        return message + (f" ({self.note})" if self.note else "")


@dataclass(frozen=True)
class Characters:
    """Texts of a limited number of characters."""

    most: int
    least: int = 0


@dataclass(frozen=True)
class Increasing:
    """Non-empty tuples that increase strictly from above `above`."""

    above: int = 0

    def refusal(self, value: tuple) -> str:
        """Returns the rule that `value` breaks, as a message; empty for an increasing tuple."""
        if value and value[0] > self.above and list(value) == sorted(set(value)):
            return ""
        return f"must increase and be {f'above {self.above}' if self.above else 'positive'}"


P = TypeVar("P", bound="Section")
ANY_NUMBER = Range(-(2**63), 2**63 - 1)
ANY_TEXT = Characters(4096)  # most texts are names of files or objects
AUTO = "auto"  # column name: detect it from the file's columns (data/formats.py)
Name = Annotated[str, Characters(4096, least=1)]
Text = Annotated[str, Characters(1_000_000)]  # text in prompts
Count = Annotated[int, Range(1, 10**9)]
CountOrOff = Annotated[int, Range(0, 10**9)]
Tokens = Annotated[int, Range(1, 2**27)]
Buckets = Annotated[tuple[Tokens, ...], Increasing()]
LongBuckets = Annotated[tuple[Tokens, ...], Increasing(1)]
Fraction = Annotated[float, Range(0, 1)]
Share = Annotated[float, Range(0, 1, above=True)]
Repeat = Annotated[int, Range(1, 1000)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Processes = Annotated[int, Range(1, 1024)]
Requests = Annotated[int, Range(1, 4096)]
Slots = Annotated[int, Range(1, 2**20)]
Seconds = Annotated[float, Range(0, 86_400, above=True)]
Temperature = Annotated[float, Range(0.001, 100, or_zero=True, note="0 is greedy")]
SamplingTemperature = Annotated[float, Range(0.001, 100, note="greedy answers are always added")]
Coefficient = Annotated[float, Range(0, 1000)]
Bound = Annotated[float, Range(0, 1e6)]  # a bound of a ratio of probabilities, or a penalty
Clip = Annotated[float, Range(0, 1e6)]
DualClip = Annotated[float, Range(1, 1e6, above=True, or_zero=True)]
FromZero = Annotated[float, Range(0, 1e6, above=True)]


def describe_value(value: Json) -> str:
    """Returns `value` as text of bounded length, for messages."""
    try:
        text = repr(value[:200] if isinstance(value, str | tuple | list) else value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        text = f"a number of {value.bit_length()} bits" if isinstance(value, int) else "a value"
    return text if len(text) <= 200 else f"{text[:200]}..."


def check_fields(config: Settings, key: str) -> None:
    """Raises ConfigError, naming `key.field`, for the first field, also of a nested section, whose
    value violates its declared type or range. Runs before `_check`, whose comparisons rely on it.
    """
    cls: Settings = type(config)
    for name, hint in field_hints(cls).items():
        _check(getattr(config, name), hint, f"{key}.{name}" if key else name)


def check_options(options: Settings) -> None:
    """Raises ConfigError, naming the option, for a number outside the range that the class of a
    command's options declares.
    """
    cls: Settings = type(options)
    for name, hint in field_hints(cls).items():
        value, (_, rule) = getattr(options, name), _rule(hint)
        if isinstance(rule, Range) and (refusal := rule.refusal(value)):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {refusal}")


def lists_of(cls: Any, excluded: Any) -> set[str]:
    """Returns the fields of a dataclass, also of nested ones, that hold several values, except
    those whose type is annotated with `excluded`.
    """
    names: set[str] = set()
    for name, hint in field_hints(cls).items():
        base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
        if dataclasses.is_dataclass(base):
            names |= lists_of(base, excluded)
        elif get_origin(base) is tuple and excluded not in get_args(hint):
            names.add(name)
    return names


class Section:
    """A part of a configuration, a frozen dataclass. `KEY` is its setting in a run.

    `CODE` lists the fields that name user code. Their paths become absolute, so that a
    configuration names the same file wherever it is read. Mappings become pairs, which are
    hashable.
    """

    KEY: ClassVar[str] = ""
    CODE: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        for name, value in list(vars(self).items()):
            value = tuple(value.items()) if isinstance(value, Mapping) else value
            object.__setattr__(self, name, own_code(value) if name in self.CODE else value)

    def validate(self, key: str | None = None) -> Self:
        """Returns self. Raises ConfigError, naming the setting, for the first unusable value. `key`
        replaces KEY.
        """
        key = self.KEY if key is None else key
        check_fields(self, key)
        self._check(key)
        return self

    def part(self, cls: type[P]) -> P:
        """Returns an instance of `cls`, all of whose settings this section has, too. A setting that
        is itself a section of a larger class is reduced alike. The result does not change where
        another setting does.
        """
        values, fields = {}, field_hints(typing.cast(Any, cls))
        for name, hint in fields.items():
            value = getattr(self, name)
            narrower = isinstance(hint, type) and issubclass(hint, Section)
            values[name] = value.part(hint) if narrower and type(value) is not hint else value
        return cls(**values)

    def _check(self, key: str) -> None:
        """Raises ConfigError for values that contradict each other. By default checks the sections
        inside this one.
        """
        for name, value in vars(self).items():
            inner = f"{key}.{name}" if key else name
            if isinstance(value, Section):
                value.validate(inner)
            for i, part in enumerate(value if isinstance(value, tuple) else ()):
                if isinstance(part, Section):
                    part.validate(f"{inner}[{i}]")


def own_code(value: Json) -> Json:
    """Returns a name of user code, names, or names with weights (pairs or a mapping), as pairs,
    with absolute paths.
    """
    value = tuple(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(value, list | tuple):
        return absolute(value)
    return tuple(
        (absolute(x[0]), *x[1:]) if isinstance(x, tuple) and x else absolute(x) for x in value
    )


@functools.cache
def field_hints(cls: type) -> JsonObject:
    """Returns the type of each field of a dataclass, with its rule."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def options(hint: Hint) -> tuple[Hint, ...]:
    """Returns the members of a union, or the hint alone."""
    return get_args(hint) if get_origin(hint) in (types.UnionType, Union) else (hint,)


def tuples(value: Json, depth: int = 0) -> Json:
    """Returns `value` with its lists converted to tuples. Raises ConfigError for lists nested
    deeper than a setting may be.
    """
    if depth > MOST_DEPTH:
        raise ConfigError(f"lists in lists, deeper than {MOST_DEPTH} levels")
    return tuple(tuples(x, depth + 1) for x in value) if isinstance(value, list) else value


def type_name(hint: Hint) -> str:
    """Returns a type as messages write it."""
    if get_origin(hint) is Annotated:
        return type_name(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return f"tuple[{', '.join(map(type_name, get_args(hint)))}]"
    if hint is Ellipsis:
        return "..."
    if len(options(hint)) > 1:
        return " | ".join(map(type_name, options(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _check(value: Json, hint: Hint, key: str) -> None:
    choices = [option for option in options(hint) if _is_a(value, option)]
    if not choices:
        expected = type_name(hint)
        raise ConfigError(f"{key} = {describe_value(value)}: the wrong type, it must be {expected}")
    hint, rule = _rule(choices[0])
    if dataclasses.is_dataclass(value):
        check_fields(value, key)
    elif isinstance(value, tuple):
        _check_tuple(value, get_args(hint), key)
        refusal = rule.refusal(value) if isinstance(rule, Increasing) else ""
        check(not refusal, f"{key} = {describe_value(value)}: {refusal}")
    elif isinstance(value, str) and get_origin(hint) is not Literal:
        text = rule if isinstance(rule, Characters) else ANY_TEXT
        check(len(value) >= text.least, f"{key} is empty")
        check(
            len(value) <= text.most,
            f"{key}: {len(value)} characters, at most {text.most} are allowed",
        )
        check("\0" not in value, f"{key} holds a NUL character; remove it")
        whole_text(value, key, error=ConfigError)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        refusal = (rule if isinstance(rule, Range) else ANY_NUMBER).refusal(value)
        check(not refusal, f"{key} = {describe_value(value)}: {refusal}")


def _rule(hint: Hint) -> tuple[Hint, Range | Characters | Increasing | None]:
    if get_origin(hint) is Annotated:
        base, *rules = get_args(hint)
        return base, rules[0]
    return hint, None


def _is_a(value: Json, hint: Hint) -> bool:
    """Returns whether `value` has the outer type of a hint that is no union."""
    hint, _ = _rule(hint)
    if get_origin(hint) is Literal:
        return isinstance(value, str) and value in get_args(hint)
    kind: Hint = get_origin(hint) or hint
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float) if kind is float else isinstance(value, kind)


def _check_tuple(value: tuple, inner: tuple[Hint, ...], key: str, depth: int = 1) -> None:
    check(
        len(value) <= MOST_ENTRIES,
        f"{key}: {len(value)} entries, at most {MOST_ENTRIES} are allowed",
    )
    check(depth <= MOST_DEPTH, f"{key}: nested deeper than {MOST_DEPTH} levels")
    if not inner:  # any scalars, and nested tuples of them
        for i, entry in enumerate(value):
            if isinstance(entry, tuple):
                _check_tuple(entry, (), f"{key}[{i}]", depth + 1)
            else:
                _check(entry, bool | int | float | Text, f"{key}[{i}]")
        return
    hints = (inner[0],) * len(value) if inner[-1] is Ellipsis else inner
    if len(hints) != len(value):
        raise ConfigError(f"{key} = {describe_value(value)}: must have {len(hints)} values")
    for i, (entry, hint) in enumerate(zip(value, hints)):
        _check(entry, hint, f"{key}[{i}]")
