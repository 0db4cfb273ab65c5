"""Opens the episodes of a training run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax

from compass_jax.config import ConfigError, DataConfig, RLConfig, RolloutConfig
from compass_jax.data.tokenizer import load_tokenizer
from compass_jax.devices.distributed import require_single_process
from compass_jax.experience.episodes.played import LOGS, Episodes
from compass_jax.rewards.tasks.task import plays
from compass_jax.rollout.serving.door import TrainingDoor


@contextlib.contextmanager
def open_episodes(
    data: DataConfig, rollout: RolloutConfig, vocab_size: int, seed: int, directory: str
) -> Iterator[Episodes | None]:
    """Yields the episodes of a run's sources; None without such a source. The drivers' logs are in
    the run's directory. `rollout`: of the stage with the longest answers.
    """
    if not plays(data):
        yield None
        return
    arguments = {
        "folder": str(Path(data.tokenizer).absolute()),
        "template_args": dict(data.template_args),
        "date": data.date,
        "chat_format": data.chat_format,
    }
    most = rollout.prompt_buckets[-1] + rollout.max_new_tokens
    door = partial(TrainingDoor, load_tokenizer(data, vocab_size), most)
    episodes = Episodes(data, seed, arguments, Path(directory) / LOGS, door)
    try:
        yield episodes
    finally:
        episodes.close()


def episode_opener(
    data: DataConfig, rollout: RolloutConfig, vocab_size: int, seed: int
) -> Callable[[str], contextlib.AbstractContextManager[Episodes | None]]:
    """Returns what opens the episodes of an evaluation, with their logs in a folder."""
    if plays(data):
        require_single_process("compass eval of episodes")
    return partial(open_episodes, data, rollout, vocab_size, seed)


def check_episodes(
    data: DataConfig, rollout: RolloutConfig, rl: RLConfig, has_samplers: bool
) -> None:
    """Raises ConfigError for settings with which no episode can be played."""
    if not plays(data):
        if rollout.hold_sessions:
            raise ConfigError("rollout.hold_sessions acts on episodes, and data.sources has none")
        return
    reasons = {
        "samplers are other processes, which no driver reaches; leave them out": has_samplers,
        "rl.drafts begin answers, and an episode has none before its driver asks; leave them out": (
            rl.drafts is not None
        ),
        f"rl.step_policy = {type(rl.policy).__name__} carries unfinished samples into the next"
        " step, and an environment cannot wait; take one that ends its samples": rl.policy.carries,
        f"{jax.process_count()} processes: one alone can play episodes now": (
            jax.process_count() > 1
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigError(f"data.sources has episodes: {reason}")
