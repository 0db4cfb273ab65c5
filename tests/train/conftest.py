"""Runs of this folder compile the same few programs again and again: they are kept on disk for the session."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The folder of the persistent compilation cache."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def compile_once(compiled):
    """Within one test file, a program that some run compiled is loaded instead."""
    values = {
        "jax_compilation_cache_dir": str(compiled),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_disable_most_optimizations": True,  # compiles three times faster; test_step has the same proofs fully optimised
    }
    before = {name: jax.config.values[name] for name in values}
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
