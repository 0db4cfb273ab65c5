"""A plan for people, in tables."""

from __future__ import annotations

import math
from collections.abc import Callable

from rich.console import Console

from compass_jax.apps.plan.bound import Bound
from compass_jax.apps.plan.run import GIB, CompiledProgram, Plan
from compass_jax.base.aliases import JsonObject
from compass_jax.devices.chips import Chip
from compass_jax.runs.report import summary_table

SLOWER = 1.5  # times the formula, above which a program's estimate is a warning
_KINDS = ("arguments", "results", "temporary", "live")


def print_plan(plan: Plan, console: Console) -> None:
    """Prints memory, collectives and bound of every program, then the verdict."""
    per_chip = plan.chip.devices

    def gib(size: float) -> str:
        return f"{size * per_chip / GIB:.2f}"

    what = f"{plan.devices} devices, {plan.devices // per_chip} chips"
    what += f" of {per_chip} devices each" if per_chip > 1 else ""
    rows = [_memory_row(x, gib) for x in plan.programs]
    console.print(summary_table(rows, f"GiB per chip, {plan.topology}: {what}"))
    if rows := [_work_row(x, x.bound, plan.chip) for x in plan.programs if x.bound]:
        title = "One run of each program (decode: one token of every slot); seconds from published"
        title += " peaks, and the compiler's estimate without kernels, scatters and collectives"
        console.print(summary_table(rows, title))
    for x in plan.programs:
        if warning := _slower(x, plan):
            console.print(warning)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in plan.parts.items())
    console.print(f"between programs, GiB per chip: {parts}")
    if not math.isnan(plan.step_s):
        part = "the rollout of " * bool(plan.samplers)
        if plan.config.samplers.acts and not plan.samplers:
            part = "the updates of "
        longest = "an RL step whose answers are all as long as they may be"
        console.print(f"bound on {part}{longest}: {plan.step_s:,.0f} s")
    if not math.isnan(plan.modelled_s):
        parts = "the compiler's estimates, kernels at the peaks and links at theirs"
        console.print(f"modelled, if nothing overlaps: {plan.modelled_s:,.0f} s ({parts})")
    if not math.isnan(plan.shorter_s):
        mean = f"answers of {plan.answer_tokens:,} tokens on average (log-normal)"
        console.print(f"the same with {mean}: {plan.shorter_s:,.0f} s")
    worst, limit = plan.worst, plan.limit * per_chip / GIB
    needs = f"{worst.needs * per_chip / GIB:.1f} GiB per chip"
    if worst.needs < 0:
        needs = "more than the compiler would place"
    verdict = f"{plan.title} {'fits' if plan.fits else 'does NOT fit'} {plan.topology}"
    console.print(f"{verdict}: {worst.name} needs {needs}; usable are {limit:.1f}")
    for change in plan.changes:
        console.print(f"  {change}")


def _memory_row(x: CompiledProgram, gib: Callable[[float], str]) -> JsonObject:
    if x.memory is None:
        refused = "refused" if x.needs < 0 else f"{gib(x.needs)} refused"
        return {"program": x.name, **dict.fromkeys(_KINDS, ""), "all": refused, "compiled in": ""}
    sizes = {name: gib(getattr(x.memory, name)) for name in _KINDS}
    return {"program": x.name, **sizes, "all": gib(x.needs), "compiled in": f"{x.compile_s:.0f} s"}


def _slower(x: CompiledProgram, plan: Plan) -> str:
    """Returns a warning if a program of the step takes much longer than the formula by the
    compiler's estimate, else "".
    """
    estimated = x.estimated_s(plan.chip)
    if not estimated or not x.bound or x.name not in plan.runs:
        return ""
    ratio = estimated / x.bound.seconds
    warning = f"warning: {x.name}: the compiler estimates {estimated:.3g} s, {ratio:.1f} times the"
    return f"{warning} {x.bound.seconds:.3g} s from published peaks" if ratio > SLOWER else ""


def _work_row(x: CompiledProgram, bound: Bound, chip: Chip) -> JsonObject:
    per_chip = chip.devices
    sent = ", ".join(
        f"{kind} {one.bytes * per_chip / GIB:.3g} GiB"
        f" ({one.count:.0f}, {one.asynchronous:.0f} asynchronous)"
        for kind, one in x.sent.items()
    )
    estimated = x.estimated_s(chip)
    seconds = dict(zip(("FLOPs s", "HBM s", "ICI s"), (f"{s:.3g}" for s in bound), strict=True))
    sent_per_chip = sent or "nothing"
    seconds |= {"limited by": bound.by, "compiler s": f"{estimated:.3g}" if estimated else ""}
    return {"program": x.name, "sent per chip": sent_per_chip, **seconds}
