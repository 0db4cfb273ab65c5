"""What is learnt: prompts, how an answer is judged, labels."""

from compass_jax.tasks.environment import Environment, Turn
from compass_jax.tasks.task import Task

__all__ = ["Environment", "Task", "Turn"]
