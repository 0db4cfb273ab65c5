"""A save on a full or failing disk: the error is one line, and earlier checkpoints are intact."""

import contextlib
import errno
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import textwrap
import threading
import types
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from abstract import abstract_like

from compass_jax.config import ModelConfig
from compass_jax.weights import checkpoint, disk
from compass_jax.weights.checkpoint import CheckpointError

MODEL = ModelConfig("qwen3", 100, 32, 2, 2, 1, 16, 64)
SMALL = {"x": jnp.arange(12.0)}
SAVE_TWICE = """
    import sys
    import numpy as np
    import jax.numpy as jnp
    from compass_jax.config import ModelConfig
    from compass_jax.weights import checkpoint

    draw = np.random.default_rng(0)
    model = ModelConfig("qwen3", 100, 32, 2, 2, 1, 16, 64)
    arrays = {str(i): jnp.asarray(draw.normal(size=(256, 256)), jnp.float32) for i in range(64)}
    checkpoint.save(sys.argv[1], 1, {"x": jnp.arange(12.0)}, {}, model=model)
    try:
        checkpoint.save(sys.argv[1], 2, arrays, {}, model=model)
    except checkpoint.CheckpointError as error:
        print(error)
"""


@contextlib.contextmanager
def mounted(folder, options):
    """Mounts a file system in memory at `folder`. Skips the test if this user may not mount."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def save(run, step, arrays=SMALL):
    return checkpoint.save(run, step, arrays, {"at": step}, model=MODEL)


@pytest.fixture
def no_thread_waits():
    """Joins orbax's threads, which would delay the interpreter's exit."""
    yield
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax"):
            thread.join(timeout=20)
            assert not thread.is_alive(), thread


def test_a_full_disk_is_one_line_and_nothing_else(tmp_path):
    """The save runs in a separate process whose stderr must be empty, so that orbax's threads print
    nothing.
    """
    with mounted(tmp_path / "disk", "size=4m") as disk_root:
        command = [sys.executable, "-c", textwrap.dedent(SAVE_TWICE), str(disk_root / "run")]
        environment = os.environ | {"JAX_PLATFORMS": "cpu"}
        completed = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120
        )
        assert completed.returncode == 0 and not completed.stderr  # no diff of a long stderr
        (line,) = completed.stdout.splitlines()
        where = f"{disk_root}/run/checkpoints/step_00000002"
        assert line.startswith(f"checkpoint of step 2 could not be written to {where} (")
        free = int(line.split("step_00000002 (")[1].split(" bytes free there)")[0].replace(",", ""))
        assert 3 * 2**20 < free < 4 * 2**20  # the free space that a retry would have
        assert "): No space left on device; its arrays have 16,777,216 bytes, " in line
        assert line.endswith(
            "free some space there, or lower keep_checkpoints, then start the same command again"
        )
        assert os.listdir(disk_root / "run" / "checkpoints") == ["step_00000001"]
        assert checkpoint.restore(disk_root / "run", abstract_like(SMALL))[0] == 1


@pytest.mark.usefixtures("no_thread_waits")
def test_a_read_only_disk_is_one_line(tmp_path):
    with mounted(tmp_path / "disk", "size=4m") as disk_root:
        save(disk_root / "run", 1)
        subprocess.run(["mount", "-o", "remount,ro", str(disk_root)], check=True)
        with pytest.raises(CheckpointError) as exc_info:
            save(disk_root / "run", 2)
        assert "Read-only file system" in str(exc_info.value) and "\n" not in str(exc_info.value)
        assert "mount it for writing, or choose another directory" in str(exc_info.value)
        assert checkpoint.restore(disk_root / "run", abstract_like(SMALL))[0] == 1
        with pytest.raises(CheckpointError, match="Read-only file system"):
            save(disk_root / "another", 1)


@pytest.mark.usefixtures("no_thread_waits")
def test_a_limit_on_files_met_by_orbax_is_one_line(tmp_path, capfd):
    save(tmp_path, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    noise = jnp.asarray(np.random.default_rng(0).integers(0, 256, 1_000_000), jnp.uint8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(CheckpointError) as exc_info:
            save(tmp_path, 2, {"x": noise})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in str(exc_info.value) and "ulimit -f" in str(exc_info.value)
    assert capfd.readouterr().err == ""
    assert checkpoint.restore(tmp_path, abstract_like(SMALL))[0] == 1


@pytest.mark.parametrize(
    "code,message",
    [
        (errno.ENOSPC, r"No space left on device; .*lower keep_checkpoints"),
        (errno.EACCES, r"Permission denied; .*make it writable for this user"),
        (errno.EIO, r"Input/output error; .*look at the disk"),
        (0, r"lost; .*were: start the same command again"),
    ],
)
def test_an_error_is_told_with_a_remedy(tmp_path, code, message):
    cause = OSError(code, os.strerror(code)) if code else ValueError("lost")
    error = RuntimeError("a thread failed")
    error.__cause__ = cause
    text = disk.failure(2, tmp_path / "x", error if code else cause, 7, 9)
    assert re.fullmatch(rf"checkpoint of step 2 .*x \(9 bytes free there\): {message}.*", text)


def test_what_orbax_and_tensorstore_repeat_is_dropped(monkeypatch, caplog):
    messages = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: messages.append(str(args.exc_value)))
    absl = logging.getLogger("absl")
    monkeypatch.setattr(absl, "propagate", True)
    task = "Task exception was never retrieved\nfuture: <Task defined at /%s/serialization.py:126>"
    future = (
        "Future exception was never retrieved\nfuture: <Future finished exception=ValueError(%r)>"
    )
    temporary = "step_00000002.orbax-checkpoint-tmp/arrays: No space left on device"
    with disk.told_once():
        for text in ("Event loop is closed", "something else"):
            sys.unraisablehook(types.SimpleNamespace(exc_value=RuntimeError(text)))
        for path in ("/site-packages/orbax/checkpoint/x.py", "/site-packages/other/x.py"):
            absl.handle(absl.makeRecord("absl", logging.ERROR, path, 1, path, (), None))
        logging.getLogger("asyncio").error("slow callback in /orbax/x.py")
        for package in ("orbax", "other"):
            logging.getLogger("asyncio").error(task % package)
        for text in (temporary, "another error"):
            logging.getLogger("asyncio").error(future % text)
    assert messages == ["something else"]
    assert caplog.messages == [
        "/site-packages/other/x.py",
        "slow callback in /orbax/x.py",
        task % "other",
        future % "another error",
    ]


def test_a_coroutine_that_orbax_never_awaits_is_not_told():
    with pytest.warns(RuntimeWarning) as recorded, disk.told_once():
        for name in ("async_serialize_from_host.<locals>.write_fragment", "other"):
            warnings.warn(f"coroutine '{name}' was never awaited", RuntimeWarning, stacklevel=1)
    assert [str(each.message) for each in recorded] == ["coroutine 'other' was never awaited"]
