"""What is learnt: prompts, how an answer is judged, labels."""

from compass_jax.tasks.task import Task

__all__ = ["Task"]
