"""Tasks: prompts, labels and the verifiers that score the answers."""

from compass_jax.rewards.tasks.environment import Environment, Turn
from compass_jax.rewards.tasks.task import Task

__all__ = ["Environment", "Task", "Turn"]
