"""Settings whose value is an object of a class that a user can define.

`rl.objective`, `rl.advantage`, `rl.correction`, `rl.step_policy`, `rl.drafts` and
`model.moe.router` are such settings. Each has a base class derived from `Seam`. A subclass is a
frozen dataclass whose fields are its settings. The configuration names it by `name`: a short name
of this package (`espo`), or a user's class as `module:Class` or `path/to/file.py:Class`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from compass_jax.base.errors import CompassError
from compass_jax.config import named
from compass_jax.config.errors import ConfigError, first_line, line_in
from compass_jax.config.ranges import check_fields


class ComponentFailed(CompassError, RuntimeError):
    """A user's class raised an error or returned a value that cannot be used; the message names
    the class and the method.
    """


@dataclass(frozen=True)
class Seam:
    """A base class of user-defined components. Instances are hashable, because jit takes them as
    static arguments.

    A direct subclass sets `key`, the setting that holds an instance, `classes`, this package's
    classes by their short names, and `recipes`, functions by their names of (rl, the longest answer
    in tokens) that return all settings of RL that a paper changes with the class.
    """

    key: ClassVar[str] = ""
    classes: ClassVar[Mapping[str, str]] = {}
    recipes: ClassVar[Mapping[str, str]] = {}
    required: ClassVar[tuple[str, ...]] = ()  # methods that a subclass must define

    @property
    def name(self) -> str:
        """The name of this class in config.json and on the command line."""
        cls = type(self)
        place = f"{cls.__module__}:{cls.__qualname__}"
        for short, target in self.classes.items():
            if target == place:
                return short
        file = getattr(sys.modules[cls.__module__], "__file__", None)
        of_file = cls.__module__.startswith("compass_file_")  # config/named.py loaded that file
        return f"{file}:{cls.__qualname__}" if of_file else place

    def validate(self) -> None:
        """Raises ConfigError for a field of the wrong type or out of its range."""
        check_fields(self, self.key)

    @contextlib.contextmanager
    def calling(self, method: str) -> Iterator[None]:
        """Re-raises an error of a method as ComponentFailed, with the file and the line, if the
        class is a user's.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, CompassError) or ":" not in self.name:
                raise
            file = getattr(sys.modules[type(self).__module__], "__file__", None) or ""
            raise ComponentFailed(
                f"{self.key}.name = {self.name!r}{line_in(error, Path(file))}: {method} failed:"
                f" {type(error).__name__}: {first_line(error)}"
            ) from error


S = TypeVar("S", bound=Seam)


def seam_class(base: type[S], name: str) -> type[S]:
    """Returns the subclass of `base` that `name` names.

    Raises ConfigError for a missing class, a class that is not a frozen dataclass derived from
    `base`, and a class without a required method.
    """
    setting = f"{base.key}.name = {name!r:.200}"
    if ":" not in name and name not in base.classes:
        raise ConfigError(
            f"{setting}: no such {base.key.rpartition('.')[2].replace('_', ' ')}; take one of"
            f" {', '.join(base.classes)}, or name your own as module:Class or file.py:Class"
        )
    cls = named.load(named.absolute(base.classes.get(name, name)), f"{base.key}.name")
    if not (isinstance(cls, type) and issubclass(cls, base)):
        raise ConfigError(
            f"{setting} is no subclass of compass_jax.config.{base.__name__}; derive it from there"
        )
    params: Any = getattr(cls, "__dataclass_params__", None)
    # A class without a decorator of its own inherits its parent's, and its settings do not exist.
    is_decorated = "__dataclass_params__" in vars(cls) or not vars(cls).get("__annotations__")
    if params is None or not params.frozen or not is_decorated:
        raise ConfigError(
            f"{setting} is no frozen dataclass; write @dataclass(frozen=True) above it"
        )
    for method in base.required:
        if getattr(cls, method) is getattr(base, method):
            raise ConfigError(f"{setting} has no {method}(inputs); define it")
    return cls
