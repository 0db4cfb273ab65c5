"""Families by name: every file in this folder with a FAMILY, and a user's own by
`path/file.py:FAMILY` or `module:FAMILY`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from compass_jax.config import ConfigError, ModelConfig
from compass_jax.config.named import load
from compass_jax.model import families
from compass_jax.model.families.base import Family
from compass_jax.model.families.raw import UnsupportedModel


@cache
def built_in() -> dict[str, Family]:
    """Returns the families of this package, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(families.__path__))
    modules = {name: importlib.import_module(f"{families.__name__}.{name}") for name in names}
    return {name: module.FAMILY for name, module in modules.items() if hasattr(module, "FAMILY")}


def find(name: str) -> Family:
    """Returns the family that `model.family` names. Raises ConfigError for an unknown name."""
    if name in built_in():
        return built_in()[name]
    if ":" not in name:
        raise ConfigError(
            f"model.family = {name[:200]!r}: no such family; there are {', '.join(built_in())},"
            " and your own as path/file.py:FAMILY"
        )
    family = load(name, "model.family")
    if not isinstance(family, Family):
        raise ConfigError(
            f"model.family = {name!r} is a {type(family).__name__}, a Family is expected"
            " (compass_jax.model.families.base)"
        )
    return family


def check(model: ModelConfig) -> None:
    """Raises ConfigError for a model whose family is unknown or cannot express it."""
    try:
        find(model.family).check(model)
    except UnsupportedModel as error:
        raise ConfigError(str(error)) from error
