"""Data sets that a person registered with reasoning-gym: reward workers import their module too."""

from __future__ import annotations

import os
import sys
from types import FunctionType

from compass_jax.config import ConfigError


def place_of(dataset: str) -> str:
    """The module ("a.b", or the path of its file) that registered a data set in this process; empty
    where reasoning-gym did, or nobody.

    Raises ConfigError for one that is defined in the program that was started: a worker cannot
    import that without running it.
    """
    factory = sys.modules.get("reasoning_gym.factory")
    if factory is None or dataset not in factory.DATASETS:
        return ""
    cls = factory.DATASETS[dataset][0]
    if cls.__module__.split(".")[0] == "reasoning_gym":
        return ""
    codes = [x.__code__ for x in vars(cls).values() if isinstance(x, FunctionType)]
    file = next((code.co_filename for code in codes if os.path.isfile(code.co_filename)), "")
    if cls.__module__ == "__main__" or not (file or "." in cls.__module__):
        raise ConfigError(
            f"the reasoning-gym data set {dataset!r} is registered by {cls.__module__}, which"
            " reward workers cannot import; move it into a file of its own, and import that"
        )
    return cls.__module__ if "." in cls.__module__ else os.path.abspath(file)
