"""Search for training layouts of a topology: layouts are ranked by an estimate; the best are
compiled and ranked by their bounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Console

from compass_jax.apps.plan.bound import bound_of
from compass_jax.apps.plan.collectives import collectives, total_bytes
from compass_jax.apps.plan.memory import USABLE, keeps_attention, memory_of, refused_bytes, resident
from compass_jax.apps.plan.programs import Step, known_chip, topology_devices
from compass_jax.base.aliases import JsonObject
from compass_jax.config import (
    ComputeConfig,
    ConfigError,
    MeshConfig,
    PolicyConfig,
    RLConfig,
    RunConfig,
)
from compass_jax.model.flops import active_params, attention_flops, forward_flops
from compass_jax.model.params import param_count
from compass_jax.runs.report import summary_table

GIB = 2**30


class Estimate(NamedTuple):
    """The estimated memory and time of one layout, before compilation."""

    policy: PolicyConfig
    rl: RLConfig
    gib: float  # per device: parameters, moments, summed gradients and a micro-batch's residuals
    # the greater of arithmetic and links for a million tokens of forward and backward
    s_per_mtoken: float


def layouts(
    policy: PolicyConfig, rl: RLConfig, devices: int
) -> Iterator[tuple[PolicyConfig, RLConfig]]:
    """Yields `policy` and `rl` on every training mesh of `devices` devices that divides the model
    and a row, with and without remat; one row of the longest bucket on each group of context
    devices. With rollout_apart the rollout has some of the devices.
    """
    if policy.rollout_apart:
        devices -= policy.sampling_mesh.devices
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    longest = rl.longest_row
    for replica, expert, tensor, context in itertools.product(sizes, sizes, sizes, sizes):
        if devices % (used := replica * expert * tensor * context) or longest % (128 * context):
            continue
        if context > 1 and rl.packed_row_tokens:
            continue
        mesh = MeshConfig(replica, devices // used, expert, tensor, context)
        try:
            mesh.validate("mesh", policy.model)
        except ConfigError:
            continue
        rows = mesh.replica * mesh.fsdp * mesh.expert
        if rows > rl.prompts_per_step * rl.group_size:
            continue
        for remat, attention in ((True, False), (True, True), (False, False)):
            compute = dataclasses.replace(policy.compute, remat=remat, remat_attention=attention)
            placed = dataclasses.replace(policy, mesh=mesh, compute=compute)
            yield placed, dataclasses.replace(rl, micro_batch_tokens=rows * longest)


def estimate(
    policy: PolicyConfig, rl: RLConfig, device_flops: float, ici_bytes_s: float
) -> Estimate:
    """Estimates memory and time of one layout, to decide which ones to compile."""
    model, mesh = policy.model, policy.mesh
    length, total = rl.longest_row, param_count(model)
    moe = model.moe
    experts = 0 if moe is None else len(model.moe_layers) * 3 * moe.experts * model.hidden * moe.ffn
    store, d, local = mesh.fsdp * mesh.context, model.hidden, length / mesh.context
    local_params = (experts / mesh.expert + (total - experts)) / (store * mesh.tensor)
    keeps = keeps_attention(policy.compute, model)
    # Values that a layer keeps per token: its input alone with remat, else about 18 times as many.
    per_token: float = d if policy.compute.remat else 18 * d
    if keeps:
        per_token += model.heads * model.value_dim / mesh.tensor
    residuals = model.layers * local * per_token * 2
    # Bytes per parameter: 14 of the bfloat16 value and float32 moments and master copy, 4 of the
    # average, 4 of the summed gradient, 2 of a micro-batch's gradient.
    average = 4 if rl.optim.average else 0
    gib = (local_params * (14 + average + 4 + 2) + residuals) / GIB
    # Bytes per device and pass, 2 per value: parameters gathered from their storage, tokens for the
    # experts, sums over tensor (attention and MLP of each layer), and attention's over context.
    gathered = (experts / mesh.expert + (total - experts)) / mesh.tensor * 2 * (1 - 1 / store)
    moved = 2 * local * d * (mesh.expert - 1) * len(model.moe_layers)
    summed = 4 * local * d * (1 - 1 / mesh.tensor) * 2 * model.layers
    keys = (
        2
        * (mesh.context - 1)
        * local
        * 2
        * (d + model.cache_width / mesh.tensor)
        * model.layers
        / 2
    )
    # A forward pass, a backward pass of twice its work, and with remat the forward pass again.
    passes = 4 if policy.compute.remat else 3
    all_reduced = local_params * 2 * 2 * (1 - 1 / mesh.replica)  # gradients, over replicas
    links = ((gathered + moved + summed + keys) * passes + all_reduced) / ici_bytes_s
    spared = attention_flops(model, [length]) if keeps else 0.0
    operations = forward_flops(model, [length]) * passes - spared
    arithmetic = operations / (mesh.context * mesh.tensor) / device_flops
    return Estimate(
        policy,
        rl,
        gib,
        max(links, arithmetic) / (length / mesh.context / mesh.tensor) * 1e6 / mesh.devices,
    )


def search(config: RunConfig, topology: str, count: int, console: Console) -> list[JsonObject]:
    """Compiles forward and backward of the `count` best layouts by estimate; prints and returns
    them, the fastest by its bound first.
    """
    devices = topology_devices(topology)
    chip = known_chip(devices)
    limit = USABLE * chip.hbm_gib / chip.devices
    all_ = [
        estimate(*layout, chip.device_flops, chip.ici_gb_s * 1e9 / chip.devices)
        for layout in layouts(config.policy, config.rl, len(devices))
    ]
    likely = sorted((x for x in all_ if x.gib <= limit), key=lambda x: x.s_per_mtoken)[:count]
    console.print(
        f"{len(all_)} layouts divide model and topology, {sum(x.gib <= limit for x in all_)} may"
        f" fit; compiling {len(likely)}"
    )
    rows = []
    for x in likely:
        mesh, compute = x.policy.mesh, x.policy.compute
        console.print(f"compiling {_named(mesh, compute)}")
        layout = dataclasses.replace(config, mesh=mesh, compute=compute, rl=x.rl)
        row: JsonObject = {"layout": _named(mesh, compute), **REFUSED}
        with contextlib.suppress(ConfigError):  # a mesh that the torus does not hold
            row |= _compiled(Step(layout, devices), x.rl.longest_row, limit)
        rows.append(row)
    rows.sort(key=lambda row: (row["fits"] != "yes", row["s / Mtoken"]))
    if rows:
        console.print(
            summary_table(
                rows,
                f"layouts of the training on {topology}, {active_params(config.model) / 1e9:.1f}B"
                " active parameters",
            )
        )
    return rows


def _named(mesh: MeshConfig, compute: ComputeConfig) -> str:
    sizes = " ".join(f"{name} {n}" for name, n in dataclasses.asdict(mesh).items() if n > 1)
    remat = "remat" if compute.remat else "no remat"
    return f"{sizes}, {remat}{' of attention, too' * compute.remat_attention}"


REFUSED = {"fits": "no", "GiB per device": math.inf, "s / Mtoken": math.inf, "by": ""}


def _compiled(step: Step, length: int, limit: float) -> JsonObject:
    worst, seconds, by = 0.0, 0.0, []
    for program in step.training():
        try:
            compiled = program.lower(step.results).compile()
        except Exception as error:
            if refused_bytes(error) is None:
                raise
            return REFUSED
        step.done(program, compiled)
        memory = memory_of(step, program, compiled, resident(step))
        sent = total_bytes(collectives(compiled.as_text() or "").values())
        bound = bound_of(step.policy, step.chip, program.name, program.tokens, memory, sent)
        worst, seconds = max(worst, memory.total / GIB), seconds + bound.seconds
        by.append(bound.by)
        if program.name == f"backward {length}":
            tokens = program.tokens
            break
    return {
        "fits": "yes" if worst <= limit else "no",
        "GiB per device": worst,
        "s / Mtoken": seconds / tokens * 1e6,
        "by": ", ".join(by),
    }
