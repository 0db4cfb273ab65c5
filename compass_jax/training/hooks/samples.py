"""The log of a step's samples: groups in rollouts.jsonl, the numbers of their tokens in
tokens.jsonl, a few of them on the screen.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial

from compass_jax.base.records import Group
from compass_jax.config import LogConfig, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.evaluate import turns_of
from compass_jax.experience.metrics import sample_rows
from compass_jax.experience.token_rows import evenly_spaced, token_rows
from compass_jax.rollout.serving.text import text_pieces
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.hooks.base import Hook, StepRecord
from compass_jax.training.trace import TokenTrace


class SampleLog(Hook):
    """Writes samples according to `log` and `show_samples_every`."""

    name = "samples"

    def __init__(
        self,
        config: LogConfig,
        capacity: int,
        show_every: int,
        rollout: RolloutConfig,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
    ):
        """Creates a log for groups of up to `capacity` samples, shown every `show_every` steps."""
        self._log, self._capacity = config, capacity
        self._every, self._tokenizer = show_every, tokenizer
        self._text_of = turns_of(tokenizer, rollout).response
        self._telemetry = telemetry

    def on_arrays(self, step: StepRecord) -> None:
        """Creates the recorder of the logged groups' tokens."""
        step.trace = self.trace(len(step.groups))

    def on_metrics(self, step: StepRecord) -> None:
        """Writes the step's samples."""
        self.write(step.number, step.groups, step.trace, step.earlier)

    def trace(self, groups: int) -> TokenTrace | None:
        """Returns the recorder of the logged groups' tokens; None if tokens are not logged."""
        size, logged = self._capacity, evenly_spaced(groups, self._log.groups)
        if not logged or not self._log.tokens:
            return None
        return TokenTrace([g * size + i for g in logged for i in range(size)])

    def write(
        self,
        step: int,
        groups: list[Group],
        trace: TokenTrace | None,
        replaced: Container[int] = (),
    ) -> None:
        """Writes the groups that a finished step sampled with the numbers in `trace`, which has
        none of the groups at the places `replaced`.
        """
        telemetry = self._telemetry
        places = evenly_spaced(len(groups), self._log.groups)
        logged = [groups[place] for place in places]
        rows = sample_rows(logged, self._text_of)
        telemetry.log_rollouts(step, rows)
        if trace is not None and telemetry.writes:
            pieces, most = partial(text_pieces, self._tokenizer), self._log.tokens
            untraced = {g for g, place in enumerate(places) if place in replaced}
            tokens = token_rows(logged, trace.values, self._capacity, pieces, most, untraced)
            telemetry.log_tokens(step, tokens)
        if self._every and (step == 1 or step % self._every == 0):
            telemetry.show_samples(step, rows)
