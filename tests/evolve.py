"""Changed copies of configurations."""

import dataclasses
from typing import Any, TypeVar

from compass_jax.config import DataConfig

T = TypeVar("T")


def evolve(config: T, **changes: Any) -> T:
    """Returns a copy of a frozen dataclass; a dict changes fields of a part: rl={"steps": 3}."""
    parts = {
        name: evolve(getattr(config, name), **value)
        if isinstance(value, dict) and dataclasses.is_dataclass(getattr(config, name))
        else value
        for name, value in changes.items()
    }
    return dataclasses.replace(config, **parts)


def with_size(data: DataConfig, size: int) -> DataConfig:
    """Returns the data with `size` prompts of each source, some of which may be held out."""
    sources = tuple(dataclasses.replace(x, size=size) for x in data.sources)
    return dataclasses.replace(data, sources=sources)
