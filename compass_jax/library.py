"""The functions behind `import compass_jax`."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from compass_jax.aliases import Json, JsonMapping, JsonObject
from compass_jax.config import ConfigError
from compass_jax.config.foreign import foreign_name
from compass_jax.config.ranges import Section
from compass_jax.from_files import SIZED_BY, rl_config
from compass_jax.presets import SEAMS, with_class
from compass_jax.runs.compiled import keep_programs
from compass_jax.runs.rundir import staged, with_recorded_sizes
from compass_jax.runs.signals import prepare_streams
from compass_jax.training.rl import run_rl

S = TypeVar("S", bound=Section)


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
    settings = {key.replace("-", "_"): value for key, value in settings.items()}
    sizing = {key: x for key, x in settings.items() if key.partition(".")[0] in SIZED_BY}
    answer = _answer_tokens(settings)
    config = rl_config(
        model,
        data,
        name,
        evaluation,
        method,
        answer,
        change=lambda config: with_settings(config, sizing),
    )
    config = with_settings(dataclasses.replace(config, run_dir=run_dir), settings)
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


def with_settings(config: S, settings: JsonMapping) -> S:
    """Returns `config` with settings by their names on the command line, with "-" or "_":
    {"rl.objective": "dapo", "data.sources.0.repeat": 2}. Classes are applied first.

    Raises ConfigError for unknown ones.
    """
    settings = {name.replace("-", "_"): value for name, value in settings.items()}
    run: Any
    for base in SEAMS:
        if isinstance(settings.get(base.key), str):
            run = config
            answer = _answer_tokens(settings) or run.rollout.max_new_tokens
            config = with_class(run, base, settings.pop(base.key), answer)
    for name, value in settings.items():
        if name.startswith("rollout_mesh."):
            run = config
            config = run.with_rollout_mesh()
        config = _replaced(config, name.split("."), value, name)
    return config


def _answer_tokens(settings: JsonMapping) -> int | None:
    """Returns the longest answer, None if it is not set; validation reports another value."""
    answer = settings.get("rollout.max_new_tokens")
    return answer if isinstance(answer, int) and answer > 0 else None


def _replaced(part: Any, path: list[str], value: Any, name: str) -> Json:
    if isinstance(part, tuple) and path[0].isdecimal() and int(path[0]) < len(part):
        i = int(path[0])
        value = _replaced(part[i], path[1:], value, name) if len(path) > 1 else value
        return (*part[:i], value, *part[i + 1 :])
    names = [f.name for f in dataclasses.fields(part)] if dataclasses.is_dataclass(part) else []
    if path[0] not in names:
        similar = difflib.get_close_matches(path[0], names, n=1)
        hint = foreign_name(name) or (f"did you mean {similar[0]}?" if similar else "")
        hint = f"; {hint}" if hint else ""
        raise ConfigError(f"settings: there is no {name}{hint}")
    if len(path) > 1:
        value = _replaced(getattr(part, path[0]), path[1:], value, name)
    return dataclasses.replace(part, **{path[0]: value})
