"""Checkpoints that are imported and exported in parts, by one process or several."""

import asyncio
import dataclasses
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_folders import MOE, TIED, random_params, tensors_of
from safetensors.numpy import save_file

from compass_jax.model.families.raw import WeightsError
from compass_jax.model.params import abstract_params
from compass_jax.weights import checkpoint, lazy, writer
from compass_jax.weights.convert import export_hf, import_hf
from compass_jax.weights.hf import load_params, save_params
from compass_jax.weights.start import open_params
from compass_jax.weights.stored import StoredArray

TESTS = Path(__file__).parent.parent
MODELS = {"experts": MOE, "tied": TIED}
LARGE = """
import sys
import jax, jax.numpy as jnp, numpy as np
from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.model.params import abstract_params
from compass_jax.weights import checkpoint

model = ModelConfig(
    family="qwen3_moe", vocab_size=32000, hidden=1024, layers=20, heads=8, kv_heads=4, head_dim=128,
    ffn=1024, moe=MoEConfig(experts=16, top_k=2, ffn=1024),
)
draws = np.random.default_rng(0)
params = jax.tree.map(
    lambda x: jnp.asarray(draws.integers(0, 2**14, x.shape, np.uint16)).view(jnp.bfloat16),
    abstract_params(model, "bfloat16"),
)
checkpoint.save(sys.argv[1], 0, {"params": params}, {}, model=model)
"""
# the kernel's ru_maxrss would also count the memory of this process
COMMAND = """
import sys
from compass_jax.commands.cli import main

status = main(sys.argv[1:])
print(open("/proc/self/status").read())
sys.exit(status)
"""


@pytest.fixture
def in_small_chunks(monkeypatch):
    monkeypatch.setattr(writer, "_LARGE_BYTES", 64)
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 64)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_export_in_parts_has_the_bits_of_the_parameters(tmp_path, in_small_chunks, model):
    params = random_params(model)
    checkpoint.save(tmp_path / "run", 1, {"state": {"params": params}}, {}, model=model)
    opened = jax.tree.leaves(open_params(tmp_path / "run")[0])
    # stacks of matrices are stored layer by layer
    assert {x.entries_read for x in opened if len(x.shape) >= 3} == {1}
    out = tensors_of(export_hf(tmp_path / "run", tmp_path / "out"))
    expected = tensors_of(save_params(params, model, tmp_path / "whole", "float32"))
    assert out.keys() == expected.keys()
    for name, tensor in expected.items():
        assert out[name].tobytes() == tensor.tobytes(), name


def test_layers_in_one_chunk_are_read_once(tmp_path, monkeypatch):
    params = random_params(MOE)
    checkpoint.save(tmp_path / "run", 1, {"params": params}, {}, model=MOE)
    read = StoredArray.__array__
    shapes = []
    monkeypatch.setattr(
        StoredArray, "__array__", lambda x, *args, **kw: (shapes.append(x.shape), read(x))[1]
    )
    export_hf(tmp_path / "run", tmp_path / "out")
    total = sum(int(np.prod(shape)) for shape in shapes)
    assert total == sum(x.size for x in jax.tree.leaves(params))
    assert len(shapes) == len(jax.tree.leaves(params))


def test_an_array_of_zeros_is_exported_and_a_removed_one_is_an_error(tmp_path):
    params = jax.tree.map(jnp.zeros_like, random_params(MOE))
    path = checkpoint.save(tmp_path / "run", 1, {"params": params}, {}, model=MOE)
    out = tensors_of(export_hf(tmp_path / "run", tmp_path / "out"))
    assert out and not any(tensor.any() for tensor in out.values())
    opened = open_params(tmp_path / "run")[0]
    shutil.rmtree(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"array params/embed cannot be read"):
        np.asarray(opened["embed"])


def test_a_run_directory_of_any_name(tmp_path):
    run = tmp_path / "a run%20 of #3?"
    checkpoint.save(run, 1, {"params": random_params(TIED)}, {}, model=TIED)
    assert tensors_of(export_hf(run, tmp_path / "out"))


def test_a_parameter_that_the_checkpoint_lacks_is_named(tmp_path):
    params = random_params(TIED)
    del params["final_norm"]
    checkpoint.save(tmp_path / "run", 1, {"params": params}, {}, model=TIED)
    with pytest.raises(checkpoint.CheckpointError, match=r"params/final_norm is missing"):
        export_hf(tmp_path / "run", tmp_path / "out")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_an_import_in_parts_has_the_bits_of_the_folder(tmp_path, monkeypatch, model):
    monkeypatch.setattr(lazy, "_CHUNK_BYTES", 64)
    folder = save_params(random_params(model), model, tmp_path / "folder", "float32")
    import_hf(folder, tmp_path / "run")
    opened = open_params(tmp_path / "run")[0]
    for leaf in jax.tree.leaves(opened):
        assert np.prod(leaf.store.chunk_layout.write_chunk.shape) * 4 <= 64
    abstract = {"params": abstract_params(model, "float32")}
    restored = checkpoint.restore(tmp_path / "run", abstract, model=model)[1]["params"]
    expected = load_params(folder, model, "float32")
    for (path, value), other in zip(
        jax.tree.leaves_with_path(restored), jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(value).tobytes() == np.asarray(other).tobytes(), path


@pytest.mark.parametrize(
    ("shape", "axes", "chunk"),
    [
        ((32003, 4096), (0, 1), [8192, 4096]),  # a prime number of rows
        ((4096, 32003), (1, 0), [4096, 8192]),  # transposed on disk
        ((94, 128, 4096, 1536), (0, 1, 3, 2), [1, 5, 4096, 1536]),  # whole experts
        ((20, 1024, 512), (0, 2, 1), [20, 1024, 512]),  # 20 MiB
        ((50, 1024, 1024), (0, 2, 1), [1, 1024, 1024]),  # a layer
        ((2, 8192, 8192), (0, 2, 1), [1, 8192, 4096]),
        ((), (), []),
    ],
)
def test_a_chunk_is_a_part_of_the_file(shape, axes, chunk):
    array = lazy.LazyArray(shape, np.dtype(jnp.bfloat16), None, axes)
    assert lazy.chunk_shape(array) == chunk


def test_processes_agree_after_the_collectives_of_orbaxs_call():
    handler = lazy.LazyHandler()
    thread = threading.Thread(target=asyncio.run, args=(handler._write_all([]),))
    thread.start()
    thread.join(0.3)
    assert thread.is_alive()
    handler.saved.set()
    thread.join(20)
    assert not thread.is_alive()


def test_a_weight_that_is_not_finite_ends_an_import_without_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy, "_CHUNK_BYTES", 64)
    params = random_params(TIED)
    params["embed"] = params["embed"].at[-1, -1].set(jnp.nan)
    folder = save_params(params, TIED, tmp_path / "folder", "float32")
    with pytest.raises(WeightsError, match=r"embed_tokens.weight: .* 1 are NaN or infinite"):
        import_hf(folder, tmp_path / "run")
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def in_two_processes(command: str, source: Path, out: Path, limits=(None, None)):
    """Returns the processes' statuses, outputs and peak memory in bytes. `limits` are the largest
    files that they may write, in bytes.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes, results = [], []
    for number, limit in enumerate(limits):
        env = os.environ | {
            "COMPASS_COORDINATOR": address,
            "COMPASS_PROCESSES": "2",
            "COMPASS_PROCESS_ID": str(number),
            "JAX_PLATFORMS": "cpu",
        }
        env.pop("XLA_FLAGS", None)
        words = [sys.executable, "-c", COMMAND, command, str(source), str(out)]
        if limit is not None:
            words = ["prlimit", f"--fsize={limit}", *words]
        with open(out.with_name(f"log{number}"), "w") as log:
            processes.append(
                subprocess.Popen(words, env=env, stdout=log, stderr=log, cwd=TESTS.parent)
            )
    for number, process in enumerate(processes):
        status, text = process.wait(timeout=300), out.with_name(f"log{number}").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", text)
        results.append((status, text, int(peak[1]) * 1024 if peak else None))
    return results


@pytest.mark.slow
def test_two_processes_export_and_import_2_gib_each_under_1_gib_of_memory(tmp_path):
    run = tmp_path / "run"
    subprocess.run([sys.executable, "-c", LARGE, str(run)], check=True, cwd=TESTS.parent)
    for command, source, out in (
        ("export-hf", run, tmp_path / "two"),
        ("import-hf", tmp_path / "two", tmp_path / "imported"),
    ):
        results = in_two_processes(command, source, out)
        assert [status for status, _, _ in results] == [0, 0], results
        assert max(peak for _, _, peak in results) < 2**30
    one, two, round_trip = (
        tensors_of(x)
        for x in (
            export_hf(run, tmp_path / "one"),
            tmp_path / "two",
            export_hf(tmp_path / "imported", tmp_path / "again"),
        )
    )
    assert one.keys() == two.keys() == round_trip.keys()
    assert sum(x.nbytes for x in two.values()) > 2**31
    for name, tensor in one.items():
        assert two[name].tobytes() == round_trip[name].tobytes() == tensor.tobytes(), name


@pytest.mark.slow
@pytest.mark.parametrize("limits", [(2**12, None), (None, 2**12)])
def test_what_fails_in_one_process_ends_both_and_leaves_no_folder(tmp_path, limits):
    # two files: embedding and head have 256 MiB each
    model = dataclasses.replace(TIED, vocab_size=2**18, hidden=512, tie_embeddings=False)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract_params(model, "bfloat16"))
    checkpoint.save(tmp_path / "run", 1, {"params": params}, {}, model=model)
    results = in_two_processes("export-hf", tmp_path / "run", tmp_path / "out", limits)
    assert all(status != 0 for status, _, _ in results)
    assert all("File too large" in text for _, text, _ in results)
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out.partial*"))


@pytest.mark.slow
@pytest.mark.parametrize("spoilt", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_weight_that_one_process_cannot_use_ends_both_and_leaves_no_checkpoint(tmp_path, spoilt):
    model = dataclasses.replace(TIED, tie_embeddings=False)
    folder = save_params(random_params(model), model, tmp_path / "folder", "float32")
    tensors = tensors_of(folder)
    tensors[spoilt][0, 0] = np.inf
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    results = in_two_processes("import-hf", folder, tmp_path / "run")
    assert all(status != 0 for status, _, _ in results)
    for _, text, _ in results:
        assert f"tensor {spoilt}: " in text and "could not be written" not in text
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.locate(tmp_path / "run")
