"""Undisturbed runs with which the tests of several files compare."""

from functools import cache

import pytest
from variants import configured, limit_lengths

from compass_jax.training.rl import run_rl


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """Returns a function that runs a variant, once, and returns the run's directory and result."""

    @cache
    def run(variant):
        directory = tmp_path_factory.mktemp("undisturbed")
        with pytest.MonkeyPatch.context() as patch:
            if variant.startswith("partial"):
                limit_lengths(patch)
            return directory, run_rl(configured(variant, directory))

    return run
