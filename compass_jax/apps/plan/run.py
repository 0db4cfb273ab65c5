"""The plan of a step: every program compiled for a topology, and whether it fits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from compass_jax.apps.plan.bound import (
    Bound,
    answer_lengths,
    bound_of,
    kernel_seconds,
    read_share,
    runs_per_step,
)
from compass_jax.apps.plan.collectives import Sent, collectives, total_bytes
from compass_jax.apps.plan.cycles import cycles_per_token, estimated_cycles
from compass_jax.apps.plan.memory import (
    USABLE,
    Change,
    Memory,
    advice,
    bytes_beside,
    memory_of,
    refused_bytes,
    resident,
)
from compass_jax.apps.plan.programs import ROLLOUT, Step
from compass_jax.base.aliases import JsonObject
from compass_jax.base.programs import Program
from compass_jax.config import RunConfig
from compass_jax.devices.chips import Chip
from compass_jax.devices.tpu_versions import installed
from compass_jax.training.memory import bytes_per_device, cache_bytes

GIB = 2**30


class CompiledProgram(NamedTuple):
    """One program; if refused for lack of memory, `memory` is None and `needs` is reported."""

    name: str
    memory: Memory | None
    needs: int  # bytes per device, with other live arrays; -1: more than the compiler can place
    sent: dict[str, Sent]
    bound: Bound | None
    compile_s: float
    cycles: float = 0.0  # estimated by the compiler; decode: of one token
    kernels_s: float = 0.0  # of kernels at the chip's peaks

    def estimated_s(self, chip: Chip) -> float | None:
        """Returns the compiler's estimate of one run in seconds; None without one, or if the
        chip's clock is not known.
        """
        return self.cycles / (chip.clock_ghz * 1e9) if self.cycles and chip.clock_ghz else None

    def modelled_s(self, chip: Chip) -> float:
        """Returns the seconds of one run if nothing overlaps: the compiler's estimate, its kernels
        at the chip's peaks and its collectives at the links' rate; NaN without an estimate.
        """
        estimated = self.estimated_s(chip)
        if estimated is None or self.bound is None:
            return math.nan
        return estimated + self.kernels_s + self.bound.ici_s


class Plan(NamedTuple):
    """The result of `compass plan`."""

    topology: str
    chip: Chip
    devices: int
    config: RunConfig
    parts: dict[str, int]  # bytes per device of arrays that live from program to program
    programs: list[CompiledProgram]
    changes: list[Change]
    samplers: int = 0  # the plan is of one of these; 0: of the run, or of its training
    answer_tokens: int = 0  # mean tokens of an answer in `shorter_s`

    @property
    def title(self) -> str:
        """The processes that are planned, by the name of their run."""
        name = self.config.name
        if self.samplers:
            return f"a sampler of {name}"
        return f"the training of {name}" if self.config.samplers.acts else name

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
    def runs(self) -> dict[str, float]:
        """How often each program runs in a step whose answers have the largest length."""
        return self._runs(None)

    def _runs(self, answers: np.ndarray | None) -> dict[str, float]:
        config, mesh = self.config, self.config.mesh
        rows = mesh.replica * mesh.fsdp * mesh.expert
        return runs_per_step(config.rl, config.rollout, rows, self.samplers or 1, answers)

    @property
    def step_s(self) -> float:
        """The bound on an RL step in which all answers have the largest length; NaN where a program
        did not compile.
        """
        return self._step(lambda x: x.bound.seconds if x.bound else math.nan)

    @property
    def modelled_s(self) -> float:
        """The same step if nothing overlaps within a program; NaN where a program has no estimate
        (CompiledProgram.modelled_s).
        """
        return self._step(lambda x: x.modelled_s(self.chip))

    @property
    def shorter_s(self) -> float:
        """`modelled_s` of a step whose answers have `answer_tokens` on average; NaN for 0."""
        if not self.answer_tokens:
            return math.nan
        policy, rollout = self.config.policy, self.config.rollout
        answers = answer_lengths(self.config.rl, rollout, self.answer_tokens)
        mesh, compute = policy.sampling_mesh, policy.rollout_compute
        cache = cache_bytes(policy.model, rollout, compute, mesh)
        unread = read_share(rollout) - read_share(rollout, answers)
        rate = self.chip.hbm_gb_s * 1e9 / self.chip.devices
        spared = cache * unread / rate

        def seconds(x: CompiledProgram) -> float:
            return x.modelled_s(self.chip) - (spared if x.name == "decode" else 0.0)

        return self._step(seconds, answers)

    def _step(
        self, seconds: Callable[[CompiledProgram], float], answers: np.ndarray | None = None
    ) -> float:
        """Returns the seconds of a step whose programs take `seconds` each; NaN if one was refused,
        which ends the plan. One step off, rollout and training run at the same time: the longer of
        the two counts, with weight sync between them.
        """
        if any(x.bound is None for x in self.programs):
            return math.nan
        runs = self._runs(answers)
        took = {x.name: runs[x.name] * seconds(x) for x in self.programs if x.name in runs}
        rollout = sum(s for name, s in took.items() if name.split()[0] in ROLLOUT)
        between = took.get("hand-over", 0.0)
        training = sum(took.values()) - rollout - between
        overlaps = self.config.rl.one_step_off
        return between + (max(rollout, training) if overlaps else rollout + training)

    def summary(self) -> JsonObject:
        """Returns what `--json` prints."""
        per_chip = self.chip.devices
        worst = self.worst
        return {
            "versions": installed(),
            "fits": self.fits,
            "hbm_gib_per_chip": None if worst.needs < 0 else round(worst.needs * per_chip / GIB, 2),
            "hbm_limit_gib": round(self.limit * per_chip / GIB, 2),
            "worst": worst.name,
            "planned": self.title,
            "topology": self.topology,
            "devices": self.devices,
            "devices_per_chip": per_chip,
            "parts_gib_per_chip": {
                name: round(size * per_chip / GIB, 3) for name, size in self.parts.items()
            },
            "programs": {x.name: _row(x, self.chip) for x in self.programs},
            "step_bound_s": None if math.isnan(self.step_s) else round(self.step_s, 2),
            "step_modelled_s": None if math.isnan(self.modelled_s) else round(self.modelled_s, 2),
            "answer_tokens": self.answer_tokens or None,
            "step_shorter_s": None if math.isnan(self.shorter_s) else round(self.shorter_s, 2),
            "compile_s": round(sum(x.compile_s for x in self.programs), 1),
            "changes": [str(x) for x in self.changes],
        }


def _row(x: CompiledProgram, chip: Chip) -> JsonObject:
    def gib(size: float, digits: int = 3) -> float:
        return round(size * chip.devices / GIB, digits)

    return {
        "gib_per_chip": None if x.needs < 0 else gib(x.needs),
        "memory_gib_per_chip": x.memory and {k: gib(v) for k, v in x.memory._asdict().items()},
        "collectives": {
            kind: {
                "count": sent.count,
                "asynchronous": sent.asynchronous,
                "gib_per_chip": gib(sent.bytes, 4),
            }
            for kind, sent in x.sent.items()
        },
        "estimated_cycles": x.cycles,
        "estimated_s": x.estimated_s(chip),
        "kernels_s": x.kernels_s,
        "bound_s": x.bound and {"seconds": x.bound.seconds, "by": x.bound.by, **x.bound._asdict()},
        "compile_s": round(x.compile_s, 1),
    }


def make_plan(
    step: Step,
    topology: str,
    tell: Callable[[str], None] = lambda text: None,
    samplers: int = 0,
    answer_tokens: int = 0,
) -> Plan:
    """Compiles the programs of `step` for `topology` in order, and reports each through `tell`.
    They are those of one sampler if `samplers` share a step's rollouts.

    The first program that the compiler refuses for lack of memory ends the plan, since later ones
    need its results.
    """
    results: list[tuple[Program, Any, int, float]] = []
    for program in step.programs:
        started = time.perf_counter()
        tell(f"compiling {program.name}")
        compiled, needs = None, 0
        try:
            compiled = program.lower(step.results).compile()
        except Exception as error:
            if (refused := refused_bytes(error)) is None:
                raise
            needs = refused
        results.append((program, compiled, needs, time.perf_counter() - started))
        if compiled is None:
            break
        step.done(program, compiled)
    parts = resident(step)
    rows = [_compiled_program(step, parts, *result) for result in results]
    plan = Plan(
        topology, step.chip, step.devices, step.config, parts, rows, [], samplers, answer_tokens
    )
    if plan.fits:
        return plan
    settings = step.policy, step.config.rl
    return plan._replace(changes=advice(*settings, plan.worst.name, plan.worst.memory, parts))


def _compiled_program(
    step: Step, parts: dict[str, int], program: Program, compiled: Any, needs: int, seconds: float
) -> CompiledProgram:
    if compiled is None:
        needs = needs + bytes_beside(step, program, parts) if needs > 0 else -1
        return CompiledProgram(program.name, None, needs, {}, None, seconds)
    memory = memory_of(step, program, compiled, parts)
    hlo, config, name = compiled.as_text() or "", step.config, program.name
    sent, cycles = collectives(hlo), estimated_cycles(hlo)
    # Decode is planned by the token; one call of its program decodes several.
    if name == "decode":
        cycles = cycles_per_token(hlo, config.rollout.tokens_per_call)
    slots = step.result("slots")
    cache = 0.0 if slots is None else float(bytes_per_device(slots.cache))
    work, bytes_sent = (step.policy, step.chip, name, program.tokens), total_bytes(sent.values())
    bound, kernels = bound_of(*work, memory, bytes_sent, cache), kernel_seconds(*work, cache)
    return CompiledProgram(name, memory, memory.total, sent, bound, seconds, cycles, kernels)
