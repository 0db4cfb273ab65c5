"""What a run wrote, for comparison with the undisturbed run: every number but those that a clock
decides.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# How full the slots of a process were: a rollout that a stop or a kill cut in two was made by two.
USE = ("rollout/slot_occupancy", "rollout/preempted", "memory/peak_gib")


def clocked(name: str) -> bool:
    """Whether a metric is a time, a rate, or how the slots of one process were used."""
    timed = name.startswith("time/") or name.endswith(("tokens_per_s", "_s", "/mfu"))
    return timed or name in USE


def steps(run: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """The rows of NAME.jsonl without clocks; [] where there is none. ValueError where a row is no
    JSON.
    """
    file = run / f"{name}.jsonl"
    if not file.is_file():
        return []
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    for row in rows:
        if "metrics" in row:
            row["metrics"] = {
                key: value for key, value in row["metrics"].items() if not clocked(key)
            }
    return rows
