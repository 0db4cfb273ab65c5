"""Strict test environment: 8 simulated CPU devices, strict dtype promotion, rank promotion raises,
warnings are errors, no network.

Shapes in the signatures of the rooms of arrays (`rl`, `masked`, `model`) are checked in every call,
by jaxtyping and beartype.
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

# `make test-slow` compiles as a user's run does.
os.environ.update(quick_compile.asked(os.environ, devices=8))
os.environ.setdefault("PJRT_NPROC", "64")  # as distributed.initialize sets it
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # workers have it from the process that started them
    # What one process of this session compiled, all others load: tests, and commands that they run.
    # It is of this session, so that no test depends on an earlier one's.
    _PROGRAMS = tempfile.mkdtemp(prefix="compass_programs_")
    atexit.register(shutil.rmtree, _PROGRAMS, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _PROGRAMS
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

import jax
import jaxtyping
import pytest
from hypothesis import HealthCheck, settings
from slow_parts import part_of

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# a busy machine is no fault of the code
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

# Before the first import of these modules: the hook rewrites them as they are loaded.
jaxtyping.install_import_hook(
    ["compass_jax.rl", "compass_jax.masked", "compass_jax.model"], "beartype.beartype"
)


def pytest_addoption(parser):
    parser.addoption("--slow-part", metavar="K/N", help="of the slow tests the K-th of N parts")
    parser.addoption("--faults", type=int, default=6, help="number of random faults a test")
    parser.addoption("--fault-seed", type=int, default=1, help="seed of the random faults")


def pytest_collection_modifyitems(config, items):
    """Leaves out the slow tests of other parts. The dearest folder comes first: with two workers
    the last file would be left to one of them.
    """
    items.sort(key=lambda item: "tests/training/" not in item.nodeid)
    asked = config.getoption("--slow-part")
    if not asked:
        return
    slow = {item.nodeid for item in items if item.get_closest_marker("slow")}
    try:
        left = slow - part_of(slow, asked)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
    items[:] = [item for item in items if item.nodeid not in left]


def pytest_collection_finish():
    """The collector of garbage passes over what the imports left, and comes more rarely: it took an
    eighth of the time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_LOCAL = ("127.", "::1", "localhost")
_connect = socket.socket.connect


class NetworkBlocked(OSError):
    """A test tried to reach another machine."""


def _guarded_connect(self, address):
    """Connects to this machine alone; sockets of other families than IP (pipes, Unix) are local by
    nature.
    """
    if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOCAL):
        raise NetworkBlocked(f"tests run without network; this one connected to {address[0]}")
    return _connect(self, address)


socket.socket.connect = _guarded_connect


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """A folder that a test's configuration or reward was read from leaves the path of imports with
    the test: the next one's `mine` is another file.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))


MOST_MAPPINGS = 30_000  # the kernel allows a process 65,530


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """What was traced and compiled serves the files after it, until thousands of programs come near
    the kernel's limit of mappings.
    """
    yield
    if len(Path("/proc/self/maps").read_bytes().splitlines()) > MOST_MAPPINGS:
        jax.clear_caches()
        gc.unfreeze()
    gc.collect()
    gc.freeze()  # what stays is not looked through again


@pytest.fixture
def x64():
    """float64 within one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def unchecked():
    """Signatures are not checked within one test: for tests of the errors that our own checks raise
    on wrong shapes.
    """
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@contextlib.contextmanager
def optimised():
    """Programs are compiled as in a user's run, but for `quick_compile.FLAG`; what was compiled
    otherwise is dropped.
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
    """`optimised` for all tests of a file."""
    with optimised():
        yield


@pytest.fixture
def optimised_alike():
    """`optimised` for one test: two programs that must agree bit for bit, of which one has an input
    more, do so as they are optimised alike.
    """
    with optimised():
        yield
