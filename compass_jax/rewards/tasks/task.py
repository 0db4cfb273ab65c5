"""User-defined tasks: Python files that `data.sources` names.

    from compass_jax.rewards.tasks import Task

    def prompts(seed):
        for n in range(100):
            yield {"prompt": f"Write a word of {n % 9 + 2} letters.", "letters": n % 9 + 2}

    def score(response, letters):
        return float(len(response.strip()) == letters)

    task = Task(prompts, score)                 TaskSource("my_tasks.py:task")

Reward workers import the same file in a sandbox, without jax. Put slow work into `prompts`, which
workers do not call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from compass_jax.base.aliases import JsonMapping
from compass_jax.config.data import DataConfig, EpisodeSource, TaskSource
from compass_jax.config.errors import ConfigError
from compass_jax.config.named import load
from compass_jax.rewards.tasks.environment import Environment

Row = JsonMapping
Verify = Callable[..., Any] | str


@dataclass(frozen=True)
class Task:
    """Prompts and the verifier of their answers.

    Args:
        prompts: maps the run's seed to an iterable of rows. It must give the same rows in the same
            order every time, since every process of a run calls it, and so does a resumed run. A
            row has "prompt" (text or chat messages). It may have "tools" for the chat template,
            "answer" (the reference that logs show), the labels "domain", "language" and
            "difficulty", and any columns that the verifier reads. Values are JSON values, tuples
            and sets.
        verify: a function that receives the arguments named by its parameters and returns the
            reward, or a mapping with "reward" and components (docs/rewards.md); the name of a
            built-in verifier, such as "math", which compares with the row's "answer"; or several
            with weights, {"math": 1.0, score: 0.2}.
    """

    prompts: Callable[[int], Iterable[Row]]
    verify: Verify | Mapping[Verify, float] = "math"

    @property
    def turns(self) -> int:
        """Maximum number of model turns in a conversation; 0 if only the first answer is scored."""
        return self.verify.turns if isinstance(self.verify, Environment) else 0


def load_task(name: str, key: str) -> Task:
    """Returns the task that the setting `key` names. Raises ConfigError for anything else."""
    task = load(name, key)
    if not isinstance(task, Task):
        raise ConfigError(
            f"{key} = {name!r}: it is a {type(task).__name__}; make it a"
            " compass_jax.rewards.tasks.Task"
        )
    if not callable(task.prompts):
        raise ConfigError(
            f"{key} = {name!r}: prompts is a {type(task.prompts).__name__}; make it a function of"
            " the seed that gives rows"
        )
    if isinstance(task.verify, Mapping) and any(isinstance(x, Environment) for x in task.verify):
        raise ConfigError(
            f"{key} = {name!r}: an Environment judges whole conversations, and other verifiers one"
            " answer; let its steps give all parts of the reward"
        )
    return task


def talks(data: DataConfig) -> bool:
    """Returns whether the samples of any source have several turns."""
    if plays(data):
        return True
    named = [(key, one) for key, one in data.keyed_sources() if isinstance(one, TaskSource)]
    return any(load_task(source.task, f"{key}.task").turns for key, source in named)


def plays(data: DataConfig) -> bool:
    """Returns whether any source has episodes."""
    return any(isinstance(source, EpisodeSource) for _, source in data.keyed_sources())
