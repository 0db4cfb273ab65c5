"""The machine of a run: recorded with its logs, and compared when a run resumes.

A run's numbers repeat bit for bit on the same kind of machine with as many cores: XLA splits sums
over the cores of a CPU, and another split rounds differently.
"""

from __future__ import annotations

import json
import os
import platform
from importlib import metadata
from pathlib import Path

from compass_jax.base.aliases import JsonObject
from compass_jax.runs.rundir import write_atomically

MACHINE = "machine.json"


def machine_facts() -> JsonObject:
    """Returns the properties that determine how this process rounds: devices, cores and
    versions.
    """
    import jax  # imported here: a report reads the record without jax

    devices = jax.devices()
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # macOS has no affinity
        cores = os.cpu_count() or 1
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
        "cores": cores,
        "processor": platform.machine(),
        "jax": jax.__version__,
        "compass_jax": metadata.version("compass_jax"),
        "python": platform.python_version(),
    }


def record_machine(folder: Path) -> list[str]:
    """Writes the machine into a run's folder. Returns a notice if an earlier start of the run had
    another machine; the record is then that of the latest start.
    """
    facts, before = machine_facts(), read_machine(folder)
    write_atomically(folder / MACHINE, json.dumps(facts, indent=2) + "\n")
    changes = [
        f"{name} {before[name]} -> {facts[name]}"
        for name in facts
        if name in before and before[name] != facts[name] and name != "python"
    ]
    if not changes:
        return []
    return [
        f"the run began on another machine ({', '.join(changes)}): it resumes, and its numbers"
        " agree with those of the first machine only up to rounding"
    ]


def read_machine(folder: Path) -> JsonObject:
    """Returns the machine of a run's latest start, or an empty dict without a record."""
    try:
        facts = json.loads((folder / MACHINE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}
