"""Readers of a run's logs."""

from __future__ import annotations

import json
from pathlib import Path

# In a run whose rollout was interrupted, all rollout/ metrics depend on where that happened.
CLOCKS = ("time/", "rollout/", "memory/")


def lines(directory: Path, name: str = "metrics") -> list[dict]:
    """Returns the rows of NAME.jsonl."""
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def numbers(directory: Path, clocks: tuple[str, ...] = CLOCKS) -> list[dict[str, float]]:
    """Returns each step's metrics ({name: value}), except those that depend on the clock."""
    rows = lines(directory)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [
        {
            k: v
            for k, v in row["metrics"].items()
            if not k.startswith(clocks) and not k.endswith("tokens_per_s")
        }
        for row in rows
    ]
