"""The base class of all errors that the package raises on purpose, which decides a command's exit
status."""

import pytest

from compass_jax.base.errors import CompassError
from compass_jax.commands.check import CheckError
from compass_jax.config import ConfigError
from compass_jax.data.files import DataError
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.devices import distributed
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
from compass_jax.rewards.faults import VerifierError
from compass_jax.runs import words
from compass_jax.runs.logfile import LogError
from compass_jax.runs.report import ReportError
from compass_jax.runs.rundir import ConfigMismatch, RunDirectoryGone, RunDirectoryInUse
from compass_jax.training.optim import TrainingDiverged
from compass_jax.weights.checkpoint import CheckpointMismatch
from compass_jax.weights.manifest import CheckpointError, NoCheckpoint

GIVEN = [ConfigError, ConfigMismatch, DataError, TokenizerError, VerifierError, WeightsError]
GIVEN += [UnsupportedModel, CheckError, ReportError, CheckpointMismatch, NoCheckpoint]
BEFALLEN = [CheckpointError, LogError, RunDirectoryGone, RunDirectoryInUse, TrainingDiverged]


@pytest.mark.parametrize("kind", GIVEN + BEFALLEN)
def test_the_exit_status_is_the_errors_own(kind, capsys):
    """It is the same for a command in one process (cli) and in several (distributed)."""
    assert issubclass(kind, CompassError)
    error = kind("what was wrong")
    status = 2 if kind in GIVEN else 1
    assert words.in_words(error) == "what was wrong" and error.exit_status == status
    assert distributed._report_error("process 1 of 2", error) == status
    assert capsys.readouterr().err == "compass: process 1 of 2: what was wrong\n"


def test_a_mistake_is_none_of_ours():
    class Mistake(ValueError):
        """An error as a library raises it."""

    assert words.in_words(Mistake("x")) is None and words.in_words(KeyError("x")) is None
