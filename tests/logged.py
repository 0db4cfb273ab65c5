"""What a run wrote, read back."""

from __future__ import annotations

import json
from pathlib import Path

# of a run whose rollout was cut in two, the whole rollout/ family depends on where
CLOCKS = ("time/", "rollout/", "memory/")


def lines(directory: Path, name: str = "metrics") -> list[dict]:
    """The rows of NAME.jsonl."""
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


def numbers(directory: Path, clocks: tuple[str, ...] = CLOCKS) -> list[dict[str, float]]:
    """What each step's result is, without the clock: [{name: value}] by step."""
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
