"""Bytes on each device while each program runs, and settings to change if it is too many."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from compass_jax.apps.plan.programs import ROLLOUT, Step, live_parts, model_params
from compass_jax.base.programs import Program
from compass_jax.config import (
    ComputeConfig,
    MeshConfig,
    ModelConfig,
    PolicyConfig,
    RLConfig,
    RolloutConfig,
    UpdatesConfig,
)
from compass_jax.model.kernels import whole_heads
from compass_jax.training.memory import bytes_per_device
from compass_jax.training.programs import summed

USABLE = 0.97  # share of the published memory; the runtime reserves the remainder


class Memory(NamedTuple):
    """Bytes per device in one program."""

    arguments: int
    results: int  # outside donated arguments
    temporary: int
    live: int  # live arrays of other programs
    code: int = 0

    @property
    def total(self) -> int:
        """Peak bytes."""
        return sum(self)


def memory_of(step: Step, program: Program, compiled: Any, parts: dict[str, int]) -> Memory:
    """Returns the compiler's memory analysis, with live arrays of other programs (`parts`)."""
    analysis = compiled.memory_analysis()
    return Memory(
        analysis.argument_size_in_bytes,
        # Donated arguments are counted among the arguments already.
        analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        analysis.temp_size_in_bytes,
        bytes_beside(step, program, parts),
        analysis.generated_code_size_in_bytes,
    )


def bytes_beside(step: Step, program: Program, parts: dict[str, int]) -> int:
    """Returns the bytes per device of live arrays that do not belong to `program`."""
    config = step.config
    disaggregated = config.rollout_apart or config.samplers.acts
    names = live_parts(program, config.rl, disaggregated, step.role)
    return sum(parts.get(name, 0) for name in names)


def resident(step: Step) -> dict[str, int]:
    """Returns the bytes per device of arrays that live from program to program, by the names in
    `live_parts`; programs that are not compiled yet are missing.
    """
    sizes = {} if step.role == "sampler" else _of_state(step)
    longest = step.config.rl.longest_row
    sources = {
        "store": "store",
        "decode": "hand-over",
        "slots": "slots",
        "sum": f"backward {longest}",
    }
    for part, name in sources.items():
        if (result := step.result(name)) is not None:
            sizes[part] = bytes_per_device(summed(result) if part == "sum" else result)
    for program in step.programs:
        if program.name == f"replayed {longest}":
            sizes["replayed"] = bytes_per_device(program.arguments[0])
    if step.role == "sampler" and not step.config.samplers.lockstep:
        sizes["next"] = sizes["decode"]  # weights that came while it samples with others
    return sizes


def _of_state(step: Step) -> dict[str, int]:
    params = bytes_per_device(model_params(step.config.lora, step.model, step.state))
    trained = bytes_per_device(step.state.params)
    moments = bytes_per_device(step.state) - trained
    sizes = {"state": params + moments, "moments": moments}
    if step.config.rl.uses_reference and not step.config.lora.acts:
        sizes["reference"] = params
    return sizes


def refused_bytes(error: BaseException) -> int | None:
    """Returns the bytes in the compiler's out-of-memory error; None for another error."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text and "Ran out of memory" not in text:
        return None
    # Such as "Used 120.50G of 95.74G hbm."
    if used := re.search(r"Used ([\d.]+)([KMG]?) of", text):
        return int(float(used[1]) * {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}[used[2]])
    return -1


class Change(NamedTuple):
    """One setting to change, as on the command line, and the reason."""

    setting: str
    value: str
    why: str

    def __str__(self) -> str:
        return f"--{self.setting} {self.value}: {self.why}"


def advice(
    policy: PolicyConfig, rl: RLConfig, program: str, memory: Memory | None, parts: dict[str, int]
) -> list[Change]:
    """Returns changes that lower the memory of the worst program, the most effective first."""
    changes: list[tuple[float, Change]] = []
    sizes = {**parts, "temporary": 0 if memory is None else memory.temporary + memory.results}
    if program.split()[0] in (*ROLLOUT, "hand-over"):
        mesh = policy.sampling_mesh
        changes += _of_rollout(policy.rollout, policy.mesh, mesh, sizes, program)
    else:
        changes += _of_training(policy.model, policy.compute, rl, policy.mesh, sizes)
    if "state" not in parts:  # of a sampler
        return [change for _, change in sorted(changes, key=lambda x: -x[0])]
    halves, mesh = "parameters and moments in parts of half the size", policy.mesh
    state = Change("mesh.fsdp", str(2 * mesh.fsdp), f"{halves}, on twice the chips")
    if mesh.replica % 2 == 0:
        state = Change("mesh.fsdp", f"{2 * mesh.fsdp} --mesh.replica {mesh.replica // 2}", halves)
    changes.append((sizes.get("state", 0) / 2, state))
    return [change for _, change in sorted(changes, key=lambda x: -x[0])]


def _of_rollout(
    rollout: RolloutConfig,
    mesh: MeshConfig,
    rollout_mesh: MeshConfig,
    sizes: dict[str, int],
    program: str,
) -> list[tuple[float, Change]]:
    slots = sizes.get("slots", 0)
    if (
        program == "hand-over"
        and rollout_mesh.expert != mesh.expert
        and (rollout_mesh.replica * rollout_mesh.expert) % mesh.expert == 0
    ):
        replica = rollout_mesh.replica * rollout_mesh.expert // mesh.expert
        value = f"{mesh.expert} --rollout-mesh.replica {replica}"
        why = "with the same split of experts in training and rollout, weight sync gathers none"
        return [(float("inf"), Change("rollout-mesh.expert", value, why))]
    # A refused "slots" program has no size yet; it is the cache itself.
    gain = float("inf") if program == "slots" else slots / 2 + sizes["temporary"] / 4
    changes = [(gain, Change("rollout.slots", str(rollout.slots // 2), "half the KV cache"))]
    if rollout.quantize == "off":
        changes.append(
            (
                sizes.get("decode", 0) / 2,
                Change("rollout.quantize", "auto", "the sampler's weights in 8 bits"),
            )
        )
    return changes


def keeps_attention(compute: ComputeConfig, model: ModelConfig) -> bool:
    """Returns whether, with remat on TPUs, a backward pass has attention's output: the kernel's,
    which takes heads of whole lanes, and rows of whole lanes, as those of pods are.
    """
    is_kernel = compute.attention in ("auto", "splash") and whole_heads(model.value_dim)
    return compute.remat and not compute.remat_attention and is_kernel


def _of_training(
    model: ModelConfig,
    compute: ComputeConfig,
    updates: UpdatesConfig,
    mesh: MeshConfig,
    sizes: dict[str, int],
) -> list[tuple[float, Change]]:
    changes, temporary = [], sizes["temporary"]
    if not compute.remat:
        why = "layers are computed again in the backward pass, not kept"
        changes.append((0.9, Change("compute.remat", "True", why)))
    elif keeps_attention(compute, model):
        why = "attention is computed again in the backward pass, not kept"
        changes.append((0.4, Change("compute.remat_attention", "True", why)))
    if shorter := _fewer_tokens(updates, mesh):
        changes.append((0.5, shorter))
    if model.moe is not None and (not compute.moe_chunk or compute.moe_chunk >= 1024):
        share, chunk = (0.6, compute.moe_chunk // 4) if compute.moe_chunk else (0.8, 4096)
        why = "fewer tokens go through the experts at once"
        changes.append((share, Change("compute.moe_chunk", str(chunk), why)))
    if not compute.scan_layers:
        why = "one layer's working memory for all"
        changes.append((0.25, Change("compute.scan_layers", "True", why)))
    return [(temporary * share, change) for share, change in changes]


def _fewer_tokens(rl: UpdatesConfig, mesh: MeshConfig) -> Change | None:
    """Returns the change that halves a device's tokens: fewer rows, or a part of each row."""
    half = str(rl.micro_batch_tokens // 2)
    if rl.micro_batch_tokens >= 2 * mesh.replica * mesh.fsdp * mesh.expert * rl.longest_row:
        return Change("rl.micro_batch_tokens", half, "half the tokens of a micro-batch")
    lower = next((axis for axis in ("replica", "fsdp") if getattr(mesh, axis) % 2 == 0), None)
    if lower is None or rl.packed_row_tokens:  # packed rows are not split
        return None
    value = f"{2 * mesh.context} --mesh.{lower} {getattr(mesh, lower) // 2}"
    value += f" --rl.micro_batch_tokens {half}"
    return Change("mesh.context", value, "half the tokens of a row on each device")
