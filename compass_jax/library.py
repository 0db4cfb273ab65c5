"""The functions behind `import compass_jax`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from compass_jax.aliases import JsonMapping, JsonObject
from compass_jax.config import ConfigError
from compass_jax.config.apply import flat_settings
from compass_jax.from_files import rl_config
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import staged, with_recorded_sizes
from compass_jax.runs.signals import prepare_streams
from compass_jax.training.rl import run_rl


def train(
    model: str,
    data: Sequence[str],
    reward: str | Callable[..., Any] | Mapping[str, float],
    evaluation: str,
    method: str,
    run_dir: str,
    settings: JsonMapping,
) -> JsonObject:
    """Trains like `compass train --model MODEL --data DATA ... --run-dir RUN_DIR` and returns the
    result of `run_rl`. `compass_jax.train` is this function with defaults.

    Args:
        model: a Hugging Face folder or a checkpoint.
        data: files of prompts, folders of them, or tasks.
        reward: a verifier's name, a function at the top of a file, or weights of several.
        evaluation: a file of held-out prompts; empty: a part of `data` is held out.
        method: one of presets.PRESETS.
        run_dir: the run's directory; an existing run is resumed.
        settings: values by their dotted names, such as {"rl.steps": 4}.

    Raises ConfigError, DataError, TokenizerError or WeightsError for arguments that cannot be used.
    """
    prepare_streams()
    name = reward_name(reward) if callable(reward) else reward
    settings = {"run_dir": run_dir, **flat_settings(settings)}
    config = rl_config(model, data, name, evaluation, method, settings)
    keep_programs()
    return run_rl(with_recorded_sizes(staged(config, "rl"), settings))


def reward_name(function: Callable[..., Any]) -> str:
    """Returns `module:function` or `file.py:function`, by which a worker imports a function. Raises
    ConfigError for a function without such a name, in a notebook or inside another function.
    """
    name, module = function.__qualname__, sys.modules.get(function.__module__)
    file = getattr(module, "__file__", None)
    if getattr(module, name, None) is not function or not (file or function.__module__):
        raise ConfigError(
            f"reward = {name}: a worker cannot import it; define it at the top of a file"
        )
    if function.__module__ != "__main__":
        return f"{function.__module__}:{name}"
    if not file:
        raise ConfigError(
            f"reward = {name}: it was typed in, and workers import files; write it to a file and"
            ' give its name, "my_rewards.py:score"'
        )
    return f"{file}:{name}"
