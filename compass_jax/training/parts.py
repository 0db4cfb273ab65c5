"""The parts of a trainer, which training/building.py makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from compass_jax.data.prompts import PromptSet
from compass_jax.data.selection import PromptSelector
from compass_jax.data.stream import PromptStream
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.collect import Collector
from compass_jax.experience.history import PromptHistory
from compass_jax.rollout.collect import Collection
from compass_jax.training.hand_over import RolloutWeights
from compass_jax.training.hooks.base import Hooks
from compass_jax.training.learner import Learner
from compass_jax.training.saved import SavedRun


@dataclass
class Prompts:
    """The prompts of a run: the stream and the selector from which steps draw, and those that are
    evaluated.
    """

    stream: PromptStream
    selector: PromptSelector
    evaluated: list[PromptSet]
    labels: set[str]
    filter_tokens: int  # that a filter of the prompts generated before the run


@dataclass
class Parts:
    """What a trainer's steps are made of."""

    prompts: Prompts
    tokenizer: Tokenizer
    history: PromptHistory
    collect: Collector
    buffer: ExperienceBuffer
    learner: Learner
    weights: RolloutWeights
    saved: SavedRun
    hooks: Hooks
    collection: Callable[..., Collection] = Collection  # runs the requests of an evaluation
