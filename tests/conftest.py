"""The strict environment of all tests: 8 simulated CPU devices, strict dtype promotion, an error
for rank promotion and for warnings, and no network.

jaxtyping and beartype check the shapes in the signatures of the packages of arrays (`rl`, `masked`,
`model`) in every call.
"""

import atexit
import contextlib
import gc
import os
import shutil
import socket
import sys
import tempfile
from pathlib import Path

import quick_compile

# `make test-slow` sets full optimisation in the environment, as in a user's run.
os.environ.update(quick_compile.asked(os.environ, devices=8))
os.environ.setdefault("PJRT_NPROC", "64")  # as distributed.initialize sets it
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    # Tests, and the commands that they run, share the compiled programs of this test session. A
    # new folder for each session keeps tests independent of earlier sessions.
    _PROGRAMS = tempfile.mkdtemp(prefix="compass_programs_")
    atexit.register(shutil.rmtree, _PROGRAMS, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jaxtyping
import pytest
from dear import LIST, dear_tests
from hypothesis import HealthCheck, settings
from slow_parts import part_of

DEAR = dear_tests(LIST.read_text().splitlines()).keys()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# A slow example on a busy machine is not an error of the code.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# The hook rewrites these modules when they are imported, so it must come before their imports.
jaxtyping.install_import_hook(
    ["compass_jax.rl", "compass_jax.base.masked", "compass_jax.model"], "beartype.beartype"
)


def pytest_addoption(parser):
    parser.addoption("--slow-part", metavar="K/N", help="of the slow tests the K-th of N parts")
    parser.addoption("--faults", type=int, default=6, help="number of random faults a test")
    parser.addoption("--fault-seed", type=int, default=1, help="seed of the random faults")


@pytest.hookimpl(tryfirst=True)  # before -m reads the marks
def pytest_collection_modifyitems(config, items):
    """Marks the dear tests as slow. Deselects the slow tests of other parts. Puts the most
    expensive folder first: at the end, one of two workers would run its last file alone.
    """
    for item in items:
        if item.nodeid in DEAR:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: "tests/training/" not in item.nodeid)
    part = config.getoption("--slow-part")
    if not part:
        return
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    try:
        left = slow - part_of(slow, part)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


def pytest_collection_finish():
    """Freezes the objects that the imports made and makes garbage collections rarer: they took an
    eighth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_LOCAL = ("127.", "::1", "localhost")
_connect = socket.socket.connect


class NetworkBlocked(OSError):
    """The error of a test that tries to reach another machine."""


def _guarded_connect(self, address):
    """Connects to this machine alone. Sockets of families other than IP (pipes, Unix) are always
    local.
    """
    if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOCAL):
        raise NetworkBlocked(f"tests run without network; this one connected to {address[0]}")
    return _connect(self, address)


socket.socket.connect = _guarded_connect


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """Restores `sys.path` after each test, so that a module `mine` of one test's configuration or
    reward is not imported by the next test.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))


MOST_MAPPINGS = 30_000  # the kernel allows a process 65,530


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops compiled programs after a file once the process nears the kernel's limit of memory
    mappings. Until then, later files reuse them.
    """
    yield
    if len(Path("/proc/self/maps").read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()  # later collections skip the objects that exist now


@pytest.fixture
def x64():
    """Enables float64 within one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """Disables the checks of signatures within one test, so that it sees the errors that our own
    checks raise for wrong shapes.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@contextlib.contextmanager
def optimised():
    """Compiles programs as a user's run does, except for `quick_compile.FLAG`. Drops programs that
    were compiled with other settings.
    """
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    if before:
        jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    if before:
        jax.clear_caches()


@pytest.fixture(scope="module")
def fully_optimised():
    """Applies `optimised` to all tests of a file."""
    with optimised():
        yield


@pytest.fixture
def optimised_alike():
    """Applies `optimised` to one test. Two programs of which one has an additional input agree bit
    for bit only if XLA optimises both in the same way.
    """
    with optimised():
        yield
