"""Settings in the words of a command line."""

from __future__ import annotations

from compass_jax.config import apply
from compass_jax.config.words import read_arguments


def override(config, words):
    """Returns `config` with the settings of a command line (`--rl.steps 3`)."""
    return apply(config, read_arguments(words))
