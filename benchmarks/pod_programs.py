"""Some programs of a configuration for pods, compiled: the compiler's estimate, memory and
collectives of each, as a line of JSON. `compass plan` compiles all of them.

    python -m benchmarks.pod_programs CONFIG TOPOLOGY [--programs "forward 32768" ...]
        [--change TEXT] [--out FILE] [-- --mesh.fsdp 32 ...]

Needs the extra `plan` and no TPU; minutes each. What follows `--` are settings. Programs whose
results they take are compiled first. The compiler's flags are those of a run
(compass_jax/devices/tpu_flags.py), or those in LIBTPU_INIT_ARGS; empty: none.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from compass_jax.commands.configured import load_config
from compass_jax.config import apply
from compass_jax.config.words import read_arguments
from compass_jax.devices.tpu_flags import VARIABLE, compile_alone

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
BEFORE = {
    "decode": ("hand-over", "slots"),
    "forward": ("replayed {}",),
    "backward": ("prepare", "replayed {}", "forward {}", "objective {}"),
}


def with_predecessors(programs: list[str]) -> set[str]:
    """Returns the names of programs, and of those whose results they take."""
    names = set(programs)
    for program in programs:
        kind, _, length = program.partition(" ")
        names |= {name.format(length) for name in BEFORE.get(kind, ())}
    return names


def measure(program: Any, compiled: Any, chip: Any) -> dict[str, Any]:
    """Returns the numbers of one compiled program."""
    from compass_jax.apps.plan.collectives import collectives, total_bytes
    from compass_jax.apps.plan.cycles import estimated_cycles

    hlo = compiled.as_text()
    sent, cycles = collectives(hlo), estimated_cycles(hlo)
    return {
        "program": program.name,
        "tokens": program.tokens,
        "estimated_ms": round(cycles / (chip.clock_ghz * 1e6), 1) if chip.clock_ghz else None,
        "estimated_cycles": cycles,
        "sent_gib": round(total_bytes(sent.values()) / GIB, 2),
        "collectives": sum(x.count for x in sent.values()),
        "asynchronous": sum(x.asynchronous for x in sent.values()),
        "temporary_gib": round(compiled.memory_analysis().temp_size_in_bytes / GIB, 2),
    }


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one row for each program of `args`."""
    from compass_jax.apps.plan.programs import Step, topology_devices
    from compass_jax.devices.tpu_versions import installed

    config = apply(load_config(args.config), read_arguments(args.settings))
    step = Step(config, topology_devices(args.topology))
    names = with_predecessors(args.programs)
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()
    common_fields = {"change": args.change, "commit": commit, "versions": installed()}
    common_fields |= {"flags": os.environ.get(VARIABLE, "")}
    common_fields |= {"config": args.config, "settings": args.settings, "topology": args.topology}
    measured = []
    for program in step.programs:
        if program.name in names:
            started = time.perf_counter()
            compiled = program.lower(step.results).compile()
            step.done(program, compiled)
            if program.name in args.programs:
                row = common_fields | measure(program, compiled, step.chip)
                measured.append(row | {"compile_s": round(time.perf_counter() - started, 1)})
    return measured


def main() -> None:
    """Compiles, prints and appends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("topology")
    parser.add_argument("--programs", nargs="+", default=["forward 32768", "backward 32768"])
    parser.add_argument("--change", default="", help="what the row is of")
    parser.add_argument("--out", help="file to append to")
    words = [*sys.argv[1:], "--"]
    end = words.index("--")  # argparse leaves no words after an option's list to a positional
    args = parser.parse_args(words[:end], argparse.Namespace(settings=words[end + 1 : -1]))
    compile_alone(args.topology)
    for row in rows(args):
        line = json.dumps(row)
        print(line)
        if args.out:
            with open(args.out, "a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
