"""The flags of the TPU compiler: the flags that a run sets, and that libtpu knows them."""

import importlib.util
import os
import subprocess
import sys

import pytest

from compass_jax.devices.tpu_flags import (
    COMPILER_ALONE,
    FLAGS,
    VARIABLE,
    attached_generation,
    set_flags,
)

# Compiles the gradient through four layers whose weights are gathered from four chips.
PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
devices = topologies.get_topology_desc(sys.argv[1], platform="tpu").devices
mesh = Mesh(np.array(devices), ("x",))
def struct(spec, *shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
def loss(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].astype(jnp.float32).sum()
arguments = struct(P(None, "x"), 4, 2048, 2048), struct(P("x"), 4096, 2048)
text = jax.jit(jax.grad(loss)).lower(*arguments).compile().as_text()
print("sparse core:", text.count("sparsecore"))
"""


def compiled(topology, flags):
    """Compiles PROGRAM with `flags` in LIBTPU_INIT_ARGS; returns (exit status, output)."""
    variables = {**os.environ, **COMPILER_ALONE, VARIABLE: flags}
    command = [sys.executable, "-c", PROGRAM, topology]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_libtpu_knows_the_flags_and_sends_beside_the_tensor_core(monkeypatch):
    uses_sparse_core = {}
    for generation, topology in (("v5p", "v5p:2x2x1"), ("v6e", "v6e:2x2"), ("v5e", "v5e:2x2")):
        monkeypatch.delenv(VARIABLE, raising=False)
        set_flags(generation)
        status, text = compiled(topology, os.environ[VARIABLE])
        assert status == 0, text
        uses_sparse_core[generation] = "sparse core: 0" not in text
    assert uses_sparse_core == {"v5p": True, "v6e": True, "v5e": False}
    assert "sparse core: 0" in compiled("v5p:2x2x1", "")[1]
    status, text = compiled("v5p:2x2x1", "--xla_no_such_flag=true")
    assert status != 0 and "xla_no_such_flag" in text


def test_the_flags_are_those_of_the_generation_unless_the_user_has_set_some(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    set_flags("v5p")
    assert os.environ[VARIABLE].split() == [f"--{flag}=true" for flag in FLAGS["v5p"]]
    for text in ("--xla_of_mine=1", ""):
        monkeypatch.setenv(VARIABLE, text)
        set_flags("v6e")
        assert os.environ[VARIABLE] == text
    monkeypatch.delenv(VARIABLE)
    set_flags("v4")
    assert VARIABLE not in os.environ


@pytest.mark.parametrize(
    "vendor, device, generation",
    [("0x1ae0", "0x0062", "v5p"), ("0x1ae0", "0x0076", "tpu7x"), ("0x1ae0", "0x0042", ""),
     ("0x8086", "0x0062", "")],
)  # fmt: skip
def test_the_generation_is_that_of_the_attached_chips(vendor, device, generation, tmp_path):
    for name, entry in (("0000:00:00.0", ("0x8086", "0x1237")), ("0000:00:04.0", (vendor, device))):
        (tmp_path / name).mkdir()
        for file, text in zip(("vendor", "device"), entry, strict=True):
            (tmp_path / name / file).write_text(f"{text}\n")
    (tmp_path / "0000:00:05.0").mkdir()  # a device without the two files
    assert attached_generation(tmp_path) == generation
    assert attached_generation(tmp_path / "none") == ""


def test_a_plan_on_a_tpu_vm_compiles_on_the_cpu_with_the_flags_of_a_run(tmp_path):
    """There jax writes both variables itself when it is imported."""
    program = """
import os, sys
from compass_jax.commands import cli
def run(name, options, settings, wants_help):
    import jax
    print(jax.config.jax_platforms, os.environ["LIBTPU_INIT_ARGS"])
    return 0
cli._run_reporting_errors = run
cli.main(["plan", "config.py", "--topology", "v5p:2x2x1"])
"""
    variables = {k: v for k, v in os.environ.items() if k not in (*COMPILER_ALONE, VARIABLE)}
    variables |= {"JAX_FORCE_TPU_INIT": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)
    platforms, *flags = done.stdout.split()
    assert platforms == "cpu" and flags[: len(FLAGS["v5p"])] == [
        f"--{flag}=true" for flag in FLAGS["v5p"]
    ]
