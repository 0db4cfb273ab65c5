"""Compiled programs that outlive the process, without a change in the results."""

import json
import os
import subprocess
import sys

import jax
import pytest

from compass_jax.runs import compiled

SCRIPT = """
import json, sys
import jax, jax.numpy as jnp
from compass_jax.runs.compiled import keep_programs
seen = []
jax.monitoring.register_event_listener(lambda name, **_: seen.append(name.rsplit("/", 1)[-1]))
told = keep_programs(*sys.argv[1:])
x = jnp.linspace(0.1, 0.9, 64, dtype=jnp.float32).reshape(8, 8)
y = jax.jit(lambda x: jnp.tanh(x @ x).sum())(x)
folder = jax.config.jax_compilation_cache_dir
hits, misses = seen.count("cache_hits"), seen.count("cache_misses")
print(json.dumps([told, float(y).hex(), hits, misses, folder]))
"""


def process(home, *arguments, **environment):
    """Runs a new process; returns (notice, result, programs loaded, programs compiled, folder)."""
    env = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    env |= {"XDG_CACHE_HOME": str(home), **environment}
    completed = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], env=env, capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    return json.loads(completed.stdout.splitlines()[-1])


def test_the_second_process_compiles_nothing_and_has_the_same_numbers(tmp_path):
    notice, first, _, compiled_first, folder = process(tmp_path)
    second = process(tmp_path)
    assert notice == "" and compiled_first > 0
    assert second == ["", first, compiled_first, 0, folder]
    assert folder.startswith(str(tmp_path / "compass_jax" / "programs"))


def test_off_keeps_nothing_and_a_folder_of_jax_stays(tmp_path):
    assert process(tmp_path, "off")[2:4] == [0, 0] and not list(tmp_path.iterdir())
    jax_folder = str(tmp_path / "own")
    assert process(tmp_path, JAX_COMPILATION_CACHE_DIR=jax_folder)[4] == jax_folder


def test_where_nothing_can_be_kept_the_run_says_so_and_goes_on(tmp_path):
    (tmp_path / "file").write_text("")
    notice, _, loaded, _, _ = process(tmp_path, str(tmp_path / "file"))
    assert "compiled programs are not kept" in notice and str(tmp_path / "file") in notice
    assert loaded == 0


def test_what_was_used_longest_ago_makes_room_at_the_next_start(tmp_path, monkeypatch):
    folder = process(tmp_path)[4]
    entries = sorted(name for name in os.listdir(folder) if name.endswith("-cache"))
    for day, name in enumerate(entries):
        os.utime(os.path.join(folder, name), (1e9 + day * 1e5, 1e9))
    sizes = [os.path.getsize(os.path.join(folder, name)) for name in entries]
    assert len(entries) >= 2
    monkeypatch.setattr(compiled, "MOST_BYTES", sum(sizes[1:]))
    compiled._trim(compiled.Path(folder))
    assert sorted(name for name in os.listdir(folder) if name.endswith("-cache")) == entries[1:]
    assert process(tmp_path)[2:4] == [len(entries) - 1, 1]


def test_programs_of_another_processor_lie_elsewhere(monkeypatch):
    this_processor = compiled._processor()
    monkeypatch.setattr(compiled.platform, "machine", lambda: "riscv64")
    assert compiled._processor() != this_processor == this_processor.strip("/")


@pytest.fixture(autouse=True)
def as_before():
    before = jax.config.jax_compilation_cache_dir
    yield
    assert jax.config.jax_compilation_cache_dir == before
