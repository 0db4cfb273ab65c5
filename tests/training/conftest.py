"""Undisturbed runs that several files compare with."""

from functools import cache

import pytest
from variants import configured, limit_lengths

from compass_jax.training.rl import run_rl


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The directory and the result of a variant's run that nothing disturbs, run once."""

    @cache
    def run(variant):
        directory = tmp_path_factory.mktemp("undisturbed")
        with pytest.MonkeyPatch.context() as patch:
            if variant.startswith("partial"):
                limit_lengths(patch)
            return directory, run_rl(configured(variant, directory))

    return run
