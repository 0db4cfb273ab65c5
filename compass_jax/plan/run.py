"""The plan of a step: every program compiled for a topology, and whether it fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from compass_jax.chips import Chip
from compass_jax.config import MeshConfig, RLRunConfig
from compass_jax.plan.bound import Bound, bound_of, runs_per_step
from compass_jax.plan.collectives import Sent, collectives, total_bytes
from compass_jax.plan.memory import (
    USABLE,
    Change,
    Memory,
    advice,
    bytes_beside,
    memory_of,
    refused_bytes,
    resident,
)
from compass_jax.plan.programs import ROLLOUT, Step, topology_devices
from compass_jax.programs import Program
from compass_jax.tpu_versions import installed

GIB = 2**30


class CompiledProgram(NamedTuple):
    """One program: compiled, or refused for lack of memory (`memory` is None), with the bytes that
    the compiler reported in `needs`.
    """

    name: str
    memory: Memory | None
    needs: int  # bytes per device, with other live arrays; -1: more than the compiler can place
    sent: dict[str, Sent]
    bound: Bound | None
    compile_s: float


class Plan(NamedTuple):
    """The result of `compass plan`."""

    topology: str
    chip: Chip
    devices: int
    config: RLRunConfig
    parts: dict[str, int]  # bytes per device of arrays that live from program to program
    programs: list[CompiledProgram]
    changes: list[Change]

    @property
    def limit(self) -> float:
        """Usable bytes per device."""
        return USABLE * self.chip.hbm_gib * GIB / self.chip.devices

    @property
    def worst(self) -> CompiledProgram:
        """The program that needs the most memory."""
        return max(self.programs, key=lambda x: math.inf if x.needs < 0 else x.needs)

    @property
    def fits(self) -> bool:
        """Whether every program fits."""
        return all(x.memory is not None and x.needs <= self.limit for x in self.programs)

    @property
    def step_s(self) -> float:
        """The bound on an RL step in which all answers have the largest length; NaN where a program
        did not compile.

        One step off, the rollout runs beside training: the longer of the two counts, with weight
        sync between them.
        """
        runs = runs_per_step(self.config, _rows_multiple(self.config.mesh))
        took = {
            x.name: runs.get(x.name, 0) * (x.bound.seconds if x.bound else math.nan)
            for x in self.programs
        }
        rollout, between = (
            sum(s for name, s in took.items() if name.split()[0] in ROLLOUT),
            took.get("hand-over", math.nan),
        )
        training = sum(took.values()) - rollout - between
        return between + (
            max(rollout, training) if self.config.rl.one_step_off else rollout + training
        )

    def summary(self) -> dict[str, Any]:
        """Returns what `--json` prints."""
        per_chip = self.chip.devices
        worst = self.worst
        return {
            "versions": installed(),
            "fits": self.fits,
            "hbm_gib_per_chip": None if worst.needs < 0 else round(worst.needs * per_chip / GIB, 2),
            "hbm_limit_gib": round(self.limit * per_chip / GIB, 2),
            "worst": worst.name,
            "topology": self.topology,
            "devices": self.devices,
            "devices_per_chip": per_chip,
            "parts_gib_per_chip": {
                name: round(size * per_chip / GIB, 3) for name, size in self.parts.items()
            },
            "programs": {x.name: _row(x, per_chip) for x in self.programs},
            "step_bound_s": None if math.isnan(self.step_s) else round(self.step_s, 2),
            "compile_s": round(sum(x.compile_s for x in self.programs), 1),
            "changes": [str(x) for x in self.changes],
        }


def _rows_multiple(mesh: MeshConfig) -> int:
    return mesh.replica * mesh.fsdp * mesh.expert


def _row(x: CompiledProgram, per_chip: int) -> dict[str, Any]:
    memory = (
        None
        if x.memory is None
        else {name: round(size * per_chip / GIB, 3) for name, size in x.memory._asdict().items()}
    )
    return {
        "gib_per_chip": None if x.needs < 0 else round(x.needs * per_chip / GIB, 3),
        "memory_gib_per_chip": memory,
        "collectives": {
            kind: {"count": sent.count, "gib_per_chip": round(sent.bytes * per_chip / GIB, 4)}
            for kind, sent in x.sent.items()
        },
        "bound_s": None
        if x.bound is None
        else {"seconds": x.bound.seconds, "by": x.bound.by, **x.bound._asdict()},
        "compile_s": round(x.compile_s, 1),
    }


def make_plan(
    config: RLRunConfig, topology: str, tell: Callable[[str], None] = lambda text: None
) -> Plan:
    """Compiles the programs of `config` for `topology` in order, and reports each through `tell`.

    The first program that the compiler refuses for lack of memory ends the plan, since later ones
    need its results. Raises ConfigError for an unknown topology or chip, and for a mesh that does
    not divide the topology or the model.
    """
    devices = topology_devices(topology)
    step = Step(config, devices)
    compiled_programs: list[tuple[Program, Any, dict[str, Sent], int, float]] = []
    for program in step.programs:
        started = time.perf_counter()
        tell(f"compiling {program.name}")
        try:
            compiled = program.lower(step.results).compile()
        except Exception as error:
            needs = refused_bytes(error)
            if needs is None:
                raise
            compiled_programs.append((program, None, {}, needs, time.perf_counter() - started))
            break
        step.done(program, compiled)
        compiled_programs.append(
            (
                program,
                compiled,
                collectives(compiled.as_text() or ""),
                0,
                time.perf_counter() - started,
            )
        )
    return _judge(step, topology, len(devices), compiled_programs)


def _judge(
    step: Step,
    topology: str,
    devices: int,
    compiled_programs: list[tuple[Program, Any, dict[str, Sent], int, float]],
) -> Plan:
    parts, rows = resident(step), []
    for program, compiled, sent, needs, seconds in compiled_programs:
        if compiled is None:
            rows.append(
                CompiledProgram(
                    program.name,
                    None,
                    needs + bytes_beside(step.config, program, parts) if needs > 0 else -1,
                    {},
                    None,
                    seconds,
                )
            )
            continue
        memory = memory_of(step.config, program, compiled, parts)
        bound = bound_of(
            step.config, step.chip, program.name, program.tokens, memory, total_bytes(sent.values())
        )
        rows.append(CompiledProgram(program.name, memory, memory.total, sent, bound, seconds))
    plan = Plan(topology, step.chip, devices, step.config, parts, rows, [])
    if plan.fits:
        return plan
    return plan._replace(changes=advice(step.config, plan.worst.name, plan.worst.memory, parts))
