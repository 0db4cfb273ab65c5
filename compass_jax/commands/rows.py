"""The check of rows without a response, for commands that do not train."""

from __future__ import annotations

from collections.abc import Sequence

from compass_jax.config import ScoredConfig
from compass_jax.records import Prompt
from compass_jax.rewards.rows import check_rows, sources_of
from compass_jax.session import open_scorer


def try_rows(config: ScoredConfig, prompts: Sequence[Prompt]) -> None:
    """Runs the setup or tests of the rows whose verifiers can check a row without a response.
    Raises VerifierError, with file and row, if they cannot run.
    """
    if sources_of(config.data):
        with open_scorer(config) as scorer:
            check_rows(scorer, config.data, prompts)
