"""What SFT and RL runs share: a stop signal, the tokenizer checked against the model, errors that end a run."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import FrameType

from compass_jax.config import ConfigError, RunConfig
from compass_jax.data.tokenizer import Tokenizer


class TrainingDiverged(RuntimeError):
    """Several updates in a row had a gradient with NaN or infinity."""


class StopSignal:
    """Turns SIGTERM into a flag that the loop reads where it can save and leave. A second SIGTERM ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def __enter__(self) -> StopSignal:
        self._before = signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise SystemExit(128 + number)
        self.requested = True


class RolloutStop:
    """What a rollout is told of a stop. One that runs ahead has weights that are gone after the step, and could not go on later: a stop waits for it.

    `abandoned` ends it: the training beside it has failed.
    """

    def __init__(self, stop: StopSignal):
        self.stop, self.ahead, self.abandoned = stop, False, False

    @property
    def requested(self) -> bool:
        """Whether the rollout has to end."""
        return self.abandoned or (self.stop.requested and not self.ahead)


def load_tokenizer(config: RunConfig) -> Tokenizer:
    """The run's tokenizer. ConfigError where none is named or it has ids that the model lacks."""
    if not config.data.tokenizer:
        raise ConfigError("data.tokenizer is empty: name a folder with tokenizer.json and tokenizer_config.json")
    tokenizer = Tokenizer.load(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"data.tokenizer {config.data.tokenizer} has {tokenizer.vocab_size} tokens, model.vocab_size is {config.model.vocab_size}: "
            "the model needs at least as many rows"
        )
    return tokenizer


def carry_tokenizer(config: RunConfig) -> None:
    """Copies the tokenizer into the run directory, from where an export takes it."""
    shutil.copytree(config.data.tokenizer, Path(config.directory) / "tokenizer", dirs_exist_ok=True)


def check_divergence(bad_steps: int, limit: int, where: str) -> None:
    """Raises TrainingDiverged after `limit` consecutive skipped updates."""
    if bad_steps >= limit:
        raise TrainingDiverged(
            f"{bad_steps} updates in a row had a non-finite gradient and were skipped; the last good weights are in {where}: "
            "lower the learning rate, or look for the first bad batch in metrics.jsonl (grad_norm)"
        )
