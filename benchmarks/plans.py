"""The plans of the pod configurations: a process, a JSON file and a picture for each, and one table
of all.

    python -m benchmarks.plans [--out benchmarks/results/plans] [--only NAME ...] [--table]

Needs the extra `plan` and no TPU; minutes and at most a few GiB each. `--table` prints the table of
the plans in the folder and compiles nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PLANS = {
    "qwen3_30b_a3b_v5p_4x4x4": "v5p:4x4x4",  # the second phase has the same programs
    "compass_thinker_7b_v5p_4x4x4": "v5p:4x4x4",
    "qwen3_235b_a22b_v5p_4x8x8": "v5p:4x8x8",
    "compass_245b_a71b_v5p_8x8x8": "v5p:8x8x8",
    "qwen3_30b_a3b_v6e_16x16": "v6e:16x16",
    "qwen3_235b_a22b_tpu7x_4x4x4": "tpu7x:4x4x4",
}
COLOURS = {  # of the parts of a program's memory
    "live": "#9aa5b1",
    "arguments": "#3b6ea5",
    "results": "#6fb07f",
    "temporary": "#d98c3f",
    "code": "#8d6cab",
}


def make(name: str, out: Path) -> None:
    """Makes one plan, with its wall time and peak memory."""
    command = [
        sys.executable,
        "-m",
        "compass_jax",
        "plan",
        f"configs/{name}.py",
        "--topology",
        PLANS[name],
    ]
    command.append("--json")
    started = time.perf_counter()
    completed = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    plan = json.loads(completed.stdout.splitlines()[-1])
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ).stdout.strip()
    plan |= {"wall_s": round(time.perf_counter() - started, 1), "commit": commit}
    plan["peak_gib_so_far"] = round(
        resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20, 2
    )
    (out / f"{name}.json").write_text(json.dumps(plan, indent=1) + "\n")
    draw(plan, out / f"{name}.png")


def draw(plan: dict[str, Any], png: Path) -> None:
    """Draws a bar for each program against the chip's memory, in GiB per chip. A program that the
    compiler refused has no parts.
    """
    from matplotlib.figure import Figure

    programs, limit = plan["programs"], plan["hbm_limit_gib"]
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(programs)), layout="constrained")
    axes = figure.subplots()
    compiled = {name: x["memory_gib_per_chip"] for name, x in programs.items()}
    compiled = {name: memory for name, memory in compiled.items() if memory}
    starts = [0.0] * len(compiled)
    for part, colour in COLOURS.items():
        sizes = [memory[part] for memory in compiled.values()]
        axes.barh(list(compiled), sizes, left=starts, color=colour, label=part, height=0.7)
        starts = [a + b for a, b in zip(starts, sizes, strict=True)]
    for name in [x for x in programs if x not in compiled]:
        size, style = programs[name]["gib_per_chip"] or 0, {"edgecolor": "#b03a3a", "hatch": "//"}
        axes.barh([name], [size], color="none", height=0.7, **style)
    axes.axvline(limit, color="#b03a3a", linewidth=1.2)
    axes.annotate(" usable", (limit, -0.6), color="#b03a3a", fontsize=8, annotation_clip=False)
    axes.invert_yaxis()
    axes.set_xlabel("GiB per chip")
    axes.set_title(f"{plan['planned']} on {plan['topology']}", loc="left", fontsize=11)
    anchor = (0.5, -0.12 - 0.6 / (len(programs) + 4))
    place = {"loc": "upper center", "bbox_to_anchor": anchor}
    axes.legend(ncols=len(COLOURS), fontsize=8, frameon=False, **place)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(png, dpi=130)


def _sent(program: dict[str, Any]) -> float:
    return sum(kind["gib_per_chip"] for kind in program["collectives"].values())


def _needs(plan: dict[str, Any]) -> str:
    """Returns the GiB per chip of the fullest program; the compiler does not always report them for
    a program that fails.
    """
    size = plan["hbm_gib_per_chip"]
    return "more than there is" if size is None else f"{size:.1f}"


def table(out: Path) -> str:
    """Returns a table in Markdown: memory per chip of each part and of the fullest program, the
    bytes that a chip sends, and the bound.
    """
    lines = [
        (
            "| configuration | fits | GiB per chip: fullest program (usable) | training state |"
            " sampler's weights | KV cache and slots | sent per chip, GiB: hand-over; a token of"
            " every slot; forward and backward of 32k | bound on a step, s | compiled in, s |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, topology in PLANS.items():
        if not (out / f"{name}.json").exists():
            continue
        x = json.loads((out / f"{name}.json").read_text())
        parts, programs = x["parts_gib_per_chip"], x["programs"]
        training = [_sent(program) for key, program in programs.items() if key.endswith(" 32768")]
        sent = (
            f"{_sent(programs['hand-over']):.1f}; {_sent(programs['decode']):.2f};"
            f" {sum(training):.0f}"
            if x["fits"]
            else ""
        )
        bound = f"{x['step_bound_s']:,.0f}" if x["fits"] else ""
        chips = f"{x['devices'] // x['devices_per_chip']} chips" + (
            f", {x['devices']} devices" if x["devices_per_chip"] > 1 else ""
        )
        lines.append(
            f"| `{name}` ({topology}, {chips}) | {'yes' if x['fits'] else 'no'} |"
            f" {_needs(x)} in {x['worst']} ({x['hbm_limit_gib']:.1f}) |"
            f" {parts['state']:.1f} | {parts['decode']:.1f} | {parts['slots']:.1f} | {sent} |"
            f" {bound} | {x['compile_s']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Makes the plans, then prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out",
        default="benchmarks/results/plans",
        help="folder of JSON and pictures (default: %(default)s)",
    )
    parser.add_argument("--only", nargs="*", choices=PLANS, default=list(PLANS), help="these alone")
    parser.add_argument("--table", action="store_true", help="print the table of what is there")
    args = parser.parse_args()
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    for name in () if args.table else args.only:
        make(name, out)
    print(table(out))


if __name__ == "__main__":
    main()
