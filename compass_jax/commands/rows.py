"""Rows tried without a response, by the commands that train nothing."""

from __future__ import annotations

from collections.abc import Sequence

from compass_jax.config import RunConfig
from compass_jax.records import Prompt
from compass_jax.rewards.rows import check_rows, sources_of
from compass_jax.session import open_scorer


def try_rows(config: RunConfig, prompts: Sequence[Prompt]) -> None:
    """Tries the rows that verifiers can try without a response. Raises VerifierError, naming file
    and row, where setup or tests cannot run.
    """
    if sources_of(config.data):
        with open_scorer(config) as scorer:
            check_rows(scorer, config.data, prompts)
