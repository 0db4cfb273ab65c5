"""The fields of a parsed `config.json`, checked when they are read; an error names its field."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import UserError
from compass_jax.config.ranges import describe_value

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
REQUIRED = object()
T = TypeVar("T")


class WeightsError(UserError):
    """A model folder that cannot be read or written; the message names the file or tensor and the
    problem.
    """


class UnsupportedModel(WeightsError):
    """A model that this package would compute wrongly; the message names the field, its value and
    the supported ones.
    """


class Raw(NamedTuple):
    """A parsed `config.json`; `where` begins every error message."""

    values: JsonObject
    where: str

    def get(self, field: str) -> Json:
        """Returns the value of a field; None if it is absent or null."""
        return self.values.get(field)

    def typed(self, field: str, kinds: tuple[type, ...], default: object) -> Json:
        """Returns the value of a field, one of `kinds`; `default` if it is absent. Raises
        WeightsError for another type.
        """
        value = self.get(field)
        if value is None:
            if default is REQUIRED:
                raise WeightsError(f"{self.where} has no {field}")
            return default
        if type(value) not in kinds:
            raise WeightsError(
                f"{self.where}: {field} = {describe_value(value)}, expected"
                f" {' or '.join(kind.__name__ for kind in kinds)}"
            )
        return value

    def integer(self, field: str, default: object = REQUIRED) -> int:
        """Returns an integer. Raises WeightsError if it is absent and has no default."""
        return self.typed(field, (int,), default)

    def number(self, field: str, default: object = REQUIRED) -> float:
        """Returns a float; infinity for a number beyond float's range."""
        value = self.typed(field, (float, int), default)
        return float(value) if abs(value) < 1e300 else float("inf")

    def flag(self, field: str, default: object = REQUIRED) -> bool:
        """Returns a boolean."""
        return self.typed(field, (bool,), default)

    def token_ids(self, vocab: int = 2**31) -> JsonObject:
        """Returns the fields of `TOKEN_IDS` that are present, each an id below `vocab`; there may
        be several end tokens.
        """
        ids_by_name = {name: self.values[name] for name in TOKEN_IDS if self.get(name) is not None}
        for name, value in ids_by_name.items():
            ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
            if not all(type(i) is int and 0 <= i < vocab for i in ids):
                raise WeightsError(
                    f"{self.where}: {name} = {describe_value(value)}, a token id from 0 to"
                    f" {vocab - 1} is expected"
                )
        return ids_by_name


def unsupported(field: str, value: object, supported: str) -> str:
    """Returns the message about a field whose value changes the maths."""
    return f"{field} = {describe_value(value)} is not supported (supported: {supported})"


def refuse(where: str, problems: list[str]) -> None:
    """Raises UnsupportedModel, with all problems of a config.json, if there are any."""
    if len(problems) == 1:
        raise UnsupportedModel(f"{where}: {problems[0]}")
    if problems:
        raise UnsupportedModel("\n  ".join([f"{where} is not supported:", *problems]))


def agreed(values: Iterable[T], default: T, problem: str) -> T:
    """Returns the value that several keys give, `default` if none gives one. Raises WeightsError,
    saying `problem`, for different values.
    """
    different = set(values)
    if len(different) > 1:
        raise WeightsError(problem)
    return next(iter(different), default)
