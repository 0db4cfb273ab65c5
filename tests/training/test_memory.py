"""The estimate of a run's memory, and the memory of this machine."""

import dataclasses
import itertools
import platform
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from replaying import GroupReplay
from tiny_run import tiny_run

from compass_jax.config import (
    ConfigError,
    MeshConfig,
    MoEConfig,
    SamplersConfig,
)
from compass_jax.devices.machine import FREE_SHARE, available_bytes, peak_bytes, usable_bytes
from compass_jax.devices.sharding import placements
from compass_jax.model.moe import empty_routes
from compass_jax.model.params import in_layout, place, training_layout
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rollout.engine import Engine
from compass_jax.training import step
from compass_jax.training.from_files import _free_bytes
from compass_jax.training.memory import (
    MICRO_BATCHES_AT_ONCE,
    PROCESS_BYTES,
    _residual_bytes,
    cache_bytes,
    check_held_groups,
    estimate,
    fitting_rows,
    memory_line,
    process_bytes,
    route_bytes,
    tree_bytes,
)
from compass_jax.weights.sync import sync_to_samplers, sync_weights


def estimate_of(config, *args, **options):
    """Calls `estimate` with what it reads of a run's settings."""
    return estimate(config.policy, *args, **options)


GIB = 2**30


def config_of(moe=False, scan=True):
    base = tiny_run()
    mixture = MoEConfig(experts=4, top_k=2, ffn=16) if moe else None
    compute = dataclasses.replace(base.compute, scan_layers=scan)
    model = dataclasses.replace(base.model, moe=mixture, layers=3)
    rl = dataclasses.replace(base.rl, buckets=(64,), micro_batch_tokens=256)
    return dataclasses.replace(base, model=model, compute=compute, rl=rl)


@pytest.mark.parametrize(("moe", "scan"), [(False, True), (True, True), (True, False)])
def test_activations_are_those_that_the_training_step_keeps(moe, scan):
    config = config_of(moe, scan)
    model, compute = config.model, config.compute
    layout = training_layout(compute)
    network = Transformer(model, compute, layout)
    params = jax.eval_shape(
        lambda: in_layout(init_params(model, compute, jax.random.key(0)), layout)
    )
    routes = jax.eval_shape(lambda: empty_routes(model, 4, 64)) if moe else None
    tokens = jax.ShapeDtypeStruct((4, 64), jnp.int32)
    lengths = jax.ShapeDtypeStruct((4,), jnp.int32)
    results, pullback = jax.eval_shape(
        lambda p, t, n, r: step.forward_and_pullback(network, p, t, n, r, 1.0),
        *(params, tokens, lengths, routes),
    )
    saved_bytes = tree_bytes(pullback)
    estimated = estimate(config.policy, config.rl).activations / MICRO_BATCHES_AT_ONCE
    assert estimated == pytest.approx(saved_bytes, rel=0.02) and tree_bytes(results) < saved_bytes


@pytest.mark.parametrize(
    ("mesh", "rollout_mesh"),
    [
        (MeshConfig(fsdp=8), None),
        (MeshConfig(fsdp=2, expert=2, tensor=2), None),
        (MeshConfig(replica=2, fsdp=2, context=2), MeshConfig(expert=4, tensor=2)),
    ],
)
def test_weights_are_those_that_a_device_holds(mesh, rollout_mesh, monkeypatch):
    base = config_of(moe=True)
    config = dataclasses.replace(base, mesh=mesh, rollout_mesh=rollout_mesh)
    model, compute = config.model, config.compute
    training, rollout = placements(mesh, rollout_mesh, False)
    params = place(init_params(model, compute, jax.random.key(0)), model, training)
    dtype = config.policy.rollout_compute.dtype
    decode, _ = sync_weights(params, model, dtype, "off", False, placement=rollout, layout="decode")
    beside = cache_bytes(model, config.rollout, config.policy.rollout_compute, rollout_mesh or mesh)
    beside += route_bytes(model, config.rollout, config.rl, rollout_mesh or mesh)
    need = estimate(config.policy, config.rl)
    assert need.weights == bytes_on_first_device(params)
    assert need.optimizer == 2 * bytes_on_first_device(params)
    decode_bytes = bytes_on_first_device(decode)
    assert need.rollout - beside == pytest.approx(decode_bytes)
    if mesh.fsdp == mesh.devices:  # as the settings chosen from files do
        fixed = need.weights + need.optimizer + need.gradients + decode_bytes
        monkeypatch.setattr("compass_jax.training.from_files.usable_bytes", lambda: 1e10)
        free = _free_bytes(config.model, config.compute, config.mesh)
        assert 1e10 - process_bytes() - free == pytest.approx(fixed, rel=0.1)


@pytest.mark.parametrize("rollout_mesh", [MeshConfig(expert=2, tensor=2), MeshConfig(expert=3)])
def test_a_training_with_samplers_keeps_a_copy_of_the_weights_for_them(rollout_mesh):
    """It is split like those of a sampler where the number of devices allows."""
    samplers = SamplersConfig("127.0.0.1:7070")
    base = dataclasses.replace(config_of(moe=True), mesh=MeshConfig(fsdp=8), samplers=samplers)
    config = dataclasses.replace(base, rollout_mesh=rollout_mesh)
    placement = placements(config.mesh, None, False)[0]
    params = init_params(config.model, config.compute, jax.random.key(0))
    params = place(params, config.model, placement)
    dtype = config.policy.rollout_compute.dtype
    options = {"mesh": rollout_mesh, "layout": "decode"}
    decode, _ = sync_to_samplers(params, config.model, dtype, "off", False, **options)
    assert estimate(config.policy, config.rl).rollout == bytes_on_first_device(decode) > 0


@pytest.mark.parametrize("slots", [8, 6, 5])
@pytest.mark.parametrize(
    "mesh", [MeshConfig(replica=2, fsdp=2, context=2), MeshConfig(expert=4, tensor=2)]
)
def test_the_rollout_s_memory_is_what_a_device_holds(mesh, slots):
    base = config_of(moe=True)
    rollout = dataclasses.replace(base.rollout, slots=slots)
    config = dataclasses.replace(base, mesh=mesh, rollout=rollout)
    placement = placements(mesh, None, False)[1]
    engine = Engine(config.model, config.compute, rollout, 1, placement)
    state = engine.init_decode_state()
    held = bytes_on_first_device(state.cache)
    assert cache_bytes(config.model, rollout, config.compute, mesh) == held
    rows = config.rl.routed_groups * config.rl.capacity
    routes = bytes_on_first_device((state.routes, engine.new_routes(rows)))
    assert route_bytes(config.model, rollout, config.rl, mesh) == routes


def test_devices_that_do_not_sample_hold_no_rollout():
    config = dataclasses.replace(config_of(moe=True), mesh=MeshConfig(fsdp=2))
    apart = dataclasses.replace(config, rollout_apart=True, rollout_mesh=MeshConfig(tensor=2))
    need, without = (estimate(x.policy, x.rl) for x in (config, apart))
    assert need.rollout > 0 and without == need._replace(rollout=0.0)
    samples = config.rl.prompts_per_step * config.rl.capacity
    assert without.replay == samples * 56 * 3 * 2 / 2  # tokens, layers, experts; over two devices


def test_a_device_of_context_stores_its_tokens_alone():
    config = config_of()
    whole, parts = (
        estimate_of(dataclasses.replace(config, mesh=MeshConfig(context=n)), config.rl)
        for n in (1, 4)
    )
    assert parts.activations == whole.activations / 4


def bytes_on_first_device(tree):
    shards = [x.addressable_shards for x in jax.tree.leaves(tree)]
    return sum(x.data.nbytes for x in itertools.chain(*shards) if x.device == jax.devices()[0])


def test_rows_fit_into_what_is_usable(monkeypatch):
    config = config_of()
    need = estimate(config.policy, config.rl)
    for share, rows in ((1.0, 4), (0.5, 1)):
        other_bytes = need.total - need.activations - need.logits
        room = other_bytes + share * (need.activations + need.logits)
        monkeypatch.setattr("compass_jax.training.memory.usable_bytes", lambda room=room: room + 1)
        assert fitting_rows(config.policy, config.rl, 64) in (rows, 2 * rows)
    monkeypatch.setattr("compass_jax.training.memory.usable_bytes", lambda: 0.0)
    assert fitting_rows(config.policy, config.rl, 64) == 1
    monkeypatch.setattr("compass_jax.training.memory.usable_bytes", lambda: 1e12)
    assert fitting_rows(config.policy, config.rl, 64) == 64


def replaying(max_route_age, groups=6):
    """Returns a run with MoE layers whose hook holds groups."""
    base = config_of(moe=True)
    hook = GroupReplay(groups=groups, max_age=3, max_route_age=max_route_age)
    return dataclasses.replace(base, rl=dataclasses.replace(base.rl, hooks=(hook,)))


def check(config):
    check_held_groups(config.model, config.rollout, config.rl, config.mesh)


def test_groups_that_are_held_count_and_must_fit(monkeypatch):
    samples, tokens = 6 * 4, 40 + 16  # tokens of a prompt and its answer
    of_tokens = samples * tokens * 4 * 4 / jax.local_device_count()
    of_routes = samples * tokens * 3 * 2  # three layers, two experts, one byte each
    assert estimate_of(config_of(), config_of().rl).replay == 0
    for age, expected in ((0, of_tokens), (1, of_tokens + of_routes)):
        config = replaying(age)
        step_routes = config.rl.prompts_per_step * config.rl.capacity * tokens * 3 * 2
        assert estimate(config.policy, config.rl).replay == expected + step_routes
        check(config)
    monkeypatch.setattr("compass_jax.training.memory.on_cpu", lambda: False)
    assert estimate(config.policy, config.rl).replay == of_routes + step_routes
    monkeypatch.setattr("compass_jax.training.memory.usable_bytes", lambda: of_routes - 1)
    check(replaying(0))
    with pytest.raises(ConfigError, match="hold 6 groups: the routes of so many groups need"):
        check(config)
    monkeypatch.setattr(
        "compass_jax.training.memory.available_bytes", lambda: samples * tokens * 16 - 1
    )
    with pytest.raises(ConfigError, match=r"the tokens of so many groups need .*; lower it$"):
        check(replaying(0))


def test_a_configuration_and_its_estimate_trace_a_micro_batch_once(monkeypatch):
    config = config_of()
    monkeypatch.setattr("compass_jax.training.memory.usable_bytes", lambda: 1e12)
    _residual_bytes.cache_clear()
    rows = fitting_rows(config.policy, config.rl, 4)
    assert rows == 4 == config.rl.micro_batch_tokens // config.rl.buckets[-1]
    memory_line(config.policy, config.rl)
    assert _residual_bytes.cache_info().misses == 1


def test_the_line_names_the_parts_and_what_is_missing(monkeypatch):
    config = config_of()
    line = memory_line(config.policy, config.rl)
    assert line.startswith("about ") and f"process {PROCESS_BYTES / GIB:.2f}" in line
    assert "are free" not in line
    monkeypatch.setattr("compass_jax.training.memory.available_bytes", lambda: 0.5 * GIB)
    monkeypatch.setattr("compass_jax.training.memory.peak_bytes", lambda: 0.0)
    assert "; 0.5 GiB are free: lower rl.micro_batch_tokens" in memory_line(
        config.policy, config.rl
    )
    assert "lower sft.micro_batch_tokens" in memory_line(config.policy, config.sft)


def machine(root, available, groups=(), cgroup="0::/a/b\n"):
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {available} kB\n")
    (root / "proc" / "self" / "cgroup").write_text(cgroup)
    for path, files in groups:
        folder = root / "sys" / "fs" / "cgroup" / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    return root


MIB = 2**20


@pytest.mark.parametrize(
    ("groups", "cgroup", "left"),
    [
        ((), "0::/\n", 800),
        ([("", {"memory.max": "max", "memory.current": "1"})], "0::/\n", 800),
        ([("a", {"memory.max": f"{500 * MIB}", "memory.current": f"{100 * MIB}"})], None, 400),
        ([("a/b", {"memory.max": f"{300 * MIB}", "memory.current": f"{400 * MIB}"})], None, 0),
        (
            [
                (
                    "",
                    {
                        "memory.max": f"{600 * MIB}",
                        "memory.current": f"{500 * MIB}",
                        "memory.stat": f"anon 1\ninactive_file {200 * MIB}\n",
                    },
                )
            ],
            "0::/elsewhere\n",
            300,
        ),
        (
            [
                (
                    "memory/a",
                    {
                        "memory.limit_in_bytes": f"{200 * MIB}",
                        "memory.usage_in_bytes": f"{50 * MIB}",
                    },
                )
            ],
            "4:memory:/a\n5:cpu:/x\n",
            150,
        ),
    ],
)
def test_a_container_s_limit_counts(tmp_path, groups, cgroup, left):
    root = machine(tmp_path, 800 * 1024, groups, cgroup or "0::/a/b\n")
    assert available_bytes(root) == left * MIB


def test_this_machine_has_memory_and_the_process_uses_some():
    assert usable_bytes() * jax.local_device_count() / FREE_SHARE > 0
    assert peak_bytes() > 50 * MIB


FREED = """
import os
from compass_jax.devices.machine import return_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

blocks = [b"x" * 2**16 for _ in range(1600)]  # 100 MiB, each below the size that has its own pages
top = b"x" * 2**16  # the allocator returns the end of its memory anyway
before = resident()
del blocks
freed = resident()
return_freed_memory()
print(before - freed, freed - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_returned_to_the_system():
    """The allocator would keep 100 MiB of freed blocks below a block that is still used."""
    output = subprocess.check_output([sys.executable, "-c", FREED], text=True)
    by_itself, returned = map(int, output.split())
    assert by_itself < 10 * 2**20 and returned > 80 * 2**20
