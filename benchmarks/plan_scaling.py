"""Plans of growing models and pods: compile seconds, memory per chip, bytes of collectives.

    python -m benchmarks.plan_scaling [--out benchmarks/results] [--smoke] [--draw]

Qwen3-30B-A3B's layers on v5p, forward and backward of rows of 8,192 tokens: with more layers, more
experts, and on more chips at one row a chip (weak scaling, 16 to 512). Nothing runs on a TPU: these
are the compiler's numbers. Writes plan_scaling.json and plan_scaling.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

from compass_jax.devices.tpu_flags import COMPILER_ALONE

LENGTH = 8192
LAYERS, EXPERTS = (24, 48, 96), (64, 128, 256)
CHIPS = {16: "v5p:2x2x4", 64: "v5p:4x4x4", 256: "v5p:4x8x8", 512: "v5p:8x8x8"}


def configured(chips: int, layers: int, experts: int) -> Any:
    """Returns the 30B model's RunConfig with these layers and experts, experts over 8 devices, the
    rest of the chips for fsdp.
    """
    from compass_jax.config import MeshConfig
    from compass_jax.config.pods import QWEN3_30B_A3B, pod_run

    moe = dataclasses.replace(QWEN3_30B_A3B.moe, experts=experts)
    model = dataclasses.replace(QWEN3_30B_A3B, layers=layers, moe=moe)
    mesh = MeshConfig(fsdp=chips // 8, expert=8)
    run = pod_run(
        "scaling",
        model,
        "",
        mesh,
        MeshConfig(replica=chips // 32, expert=8, tensor=4) if chips >= 32 else mesh,
        slots=64,
    )
    return dataclasses.replace(
        run,
        rl=dataclasses.replace(run.rl, buckets=(LENGTH, 32_768), micro_batch_tokens=chips * LENGTH),
    )


def measure(chips: int, layers: int, experts: int) -> dict[str, Any]:
    """Compiles forward and backward of one row of LENGTH tokens a chip; returns their numbers."""
    from compass_jax.apps.plan.collectives import collectives
    from compass_jax.apps.plan.memory import memory_of, resident
    from compass_jax.apps.plan.programs import Step, topology_devices

    step = Step(configured(chips, layers, experts), topology_devices(CHIPS[chips]))
    row: dict[str, Any] = {
        "chips": chips,
        "layers": layers,
        "experts": experts,
        "gib": {},
        "sent_gib": {},
    }
    row["state_gib"] = resident(step)["state"] / 2**30
    seconds = 0.0
    for program in step.training():
        if program.name.split()[-1] not in ("prepare", str(LENGTH)):
            continue
        started = time.perf_counter()
        compiled = program.lower(step.results).compile()
        seconds += time.perf_counter() - started
        step.done(program, compiled)
        memory = memory_of(step, program, compiled, {})
        row["gib"][program.name.split()[0]] = (
            memory.arguments + memory.results + memory.temporary
        ) / 2**30
        for kind, sent in collectives(compiled.as_text()).items():
            row["sent_gib"][kind] = row["sent_gib"].get(kind, 0.0) + sent.bytes / 2**30
    return row | {"compile_s": seconds}


def draw(rows: list[dict[str, Any]], png: Path) -> None:
    """Draws seconds and memory against each number that grows, and the collectives of weak
    scaling.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplot_mosaic(
        [["s layers", "s experts", "s chips", "sent"], ["layers", "experts", "chips", "sent"]]
    )
    lines = {
        "backward": ("s-", "#d98c3f", lambda r: r["gib"]["backward"]),
        "forward": ("o-", "#3b6ea5", lambda r: r["gib"]["forward"]),
    }
    lines["parameters and moments"] = ("^-", "#6fb07f", lambda r: r["state_gib"])
    for name in ("layers", "experts", "chips"):
        some, above, below = (
            [row for row in rows if row["varied"] == name],
            panels[f"s {name}"],
            panels[name],
        )
        above.plot([r[name] for r in some], [r["compile_s"] for r in some], "o-", color="#555555")
        for label, (style, colour, value) in lines.items():
            below.plot(
                [r[name] for r in some], [value(r) for r in some], style, color=colour, label=label
            )
        for axes in (above, below):
            axes.set_xscale("log", base=2)
            axes.set_xticks([r[name] for r in some], [str(r[name]) for r in some])
            axes.set_ylim(bottom=0)
            axes.minorticks_off()
        below.set_xlabel(name)
    panels["s layers"].set_ylabel("seconds of compilation")
    panels["layers"].set_ylabel("GiB per chip")
    panels["layers"].legend(fontsize=8, frameon=False)
    _draw_sent(panels["sent"], [row for row in rows if row["varied"] == "chips"])
    for axes in panels.values():
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=120)


def _draw_sent(axes: Any, rows: list[dict[str, Any]]) -> None:
    """Draws bars of the bytes that a chip sends."""
    bottom = [0.0] * len(rows)
    for kind, colour in (
        ("all-gather", "#3b6ea5"),
        ("reduce-scatter", "#6fb07f"),
        ("all-reduce", "#d98c3f"),
    ):
        sizes = [r["sent_gib"].get(kind, 0.0) for r in rows]
        axes.bar(range(len(rows)), sizes, bottom=bottom, color=colour, label=kind, width=0.6)
        bottom = [a + b for a, b in zip(bottom, sizes, strict=True)]
    axes.set_xticks(range(len(rows)), [str(r["chips"]) for r in rows])
    axes.set_xlabel("chips, one row each")
    axes.set_ylabel("GiB that a chip sends in forward and backward")
    axes.set_ylim(0, 1.3 * max(bottom))
    axes.legend(fontsize=8, frameon=False, loc="upper left")


def main() -> None:
    """Measures, writes, draws."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", default="benchmarks/results", help="folder of the results (default: %(default)s)"
    )
    parser.add_argument(
        "--smoke", action="store_true", help="a few layers and chips: it shows that everything runs"
    )
    parser.add_argument(
        "--draw",
        action="store_true",
        help="only the picture, of the plan_scaling.json that is there",
    )
    args = parser.parse_args()
    out = Path(args.out)
    if args.draw:
        return draw(json.loads((out / "plan_scaling.json").read_text()), out / "plan_scaling.png")
    os.environ.update(COMPILER_ALONE)
    cases = (
        [("layers", 64, n, 128) for n in LAYERS]
        + [("experts", 64, 48, n) for n in EXPERTS]
        + [("chips", n, 48, 128) for n in CHIPS]
    )
    if args.smoke:
        cases = [
            ("layers", 16, 2, 32),
            ("layers", 16, 4, 32),
            ("experts", 16, 2, 32),
            ("chips", 16, 2, 32),
        ]
    rows, known = [], {}
    for varied, *shape in cases:
        if tuple(shape) not in known:
            known[tuple(shape)] = measure(*shape)
        rows.append({"varied": varied, **known[tuple(shape)]})
        print(json.dumps(rows[-1]), flush=True)
    out.mkdir(parents=True, exist_ok=True)
    (out / "plan_scaling.json").write_text(json.dumps(rows, indent=1) + "\n")
    draw(rows, out / "plan_scaling.png")


if __name__ == "__main__":
    main()
