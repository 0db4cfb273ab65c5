"""Faults of pass_rates.jsonl, which `compass filter` writes and `train` reads (`data.keep_file`).

A line has the ten fields of `FIELDS`, of their types and ranges, each once; every training prompt
has a line, and lines of one prompt do not contradict each other. Everything else has to be
refused by the file and the line. Compared: which prompts are kept.
"""

from __future__ import annotations

import json
from typing import Any

from . import spies
from .strict import damage_bytes, damage_json, odd_encoding, strict_json
from .words import Ended, Expected, Verdict, judge
from .world import CONFIG, ROWS, Case

SHARE = 7
FIELDS = {
    "id": lambda x: _whole(x) and x >= 0,
    "label": lambda x: isinstance(x, str),
    "question": lambda x: isinstance(x, str),
    "pass_rate": lambda x: _number(x) and 0 <= x <= 1,
    "known": lambda x: _whole(x) and x >= 0,
    "samples": lambda x: _whole(x) and x >= 1,
    "tokens": lambda x: _whole(x) and x >= 0,
    "low": lambda x: _number(x) and 0 <= x <= 1,
    "high": lambda x: _number(x) and 0 <= x <= 1,
    "keep": lambda x: isinstance(x, bool),
}


def _whole(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool)


def _number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def run(case: Case) -> Verdict:
    """One fault of the file of pass rates."""
    rng = case.rng
    ids = [
        row["id"]
        for row in case.world.outcome("prompts", ["train", CONFIG], spies.prompts)["train"]
    ]
    rows = [
        {
            "id": number,
            "label": "rows",
            "question": row["prompt"],
            "pass_rate": rate,
            "known": 8,
            "samples": 8,
            "tokens": 40,
            "low": 0.0,
            "high": 1.0,
            "keep": 0 < rate < 1,
        }
        for number, row, rate in zip(ids, ROWS, (0.5, 0.0, 0.25, 1.0, 0.75, 0.125), strict=True)
    ]
    data, told, _ = _mutated(rng, rows)
    case.bring("rows.jsonl", "tokenizer")
    if data is None:
        (case.folder / "rates.jsonl").mkdir()
    else:
        (case.folder / "rates.jsonl").write_bytes(data)
    case.tell(f"rates.jsonl: {told}; train --data.keep-file rates.jsonl")
    expected = Expected(meaning(data, ids), ["rates.jsonl"])
    ended = case.compass(["train", CONFIG, "--data.keep-file", "rates.jsonl"], spies.prompts)
    return judge(kept(ended), expected)


def _mutated(rng, rows: list[dict]) -> tuple[bytes | None, str, bool]:
    at = rng.randrange(len(rows))
    lines = [json.dumps(row) for row in rows]
    kind = rng.choice(
        ["json"] * 8
        + ["bytes"] * 4
        + [
            "encoding",
            "without",
            "again",
            "against",
            "unknown",
            "none kept",
            "empty",
            "folder",
            "order",
            "line",
        ]
    )
    if kind == "json":
        lines[at], told, _ = damage_json(rows[at], rng)
        told = f"line {at + 1}: {told}"
    elif kind == "bytes":
        return *damage_bytes(("\n".join(lines) + "\n").encode(), rng), False
    elif kind == "encoding":
        return *odd_encoding("\n".join(lines) + "\n", rng), False
    elif kind == "without":
        told = f"line {at + 1} is gone"
        del lines[at]
    elif kind == "again":
        told = f"line {at + 1} comes twice"
        lines.append(lines[at])
    elif kind == "against":
        told = f"line {at + 1} again with the opposite"
        lines.append(json.dumps(rows[at] | {"keep": not rows[at]["keep"]}))
    elif kind == "unknown":
        told = "a line of a prompt that is not there"
        lines.append(json.dumps(rows[at] | {"id": 4}))
    elif kind == "none kept":
        told, lines = (
            "no prompt is kept",
            [json.dumps(row | {"keep": False, "pass_rate": 0.0}) for row in rows],
        )
    elif kind == "empty":
        return rng.choice([b"", b"\n", b"\n\n"]), "an empty file", False
    elif kind == "folder":
        return None, "a folder", False
    elif kind == "order":
        told = "lines in another order"
        rng.shuffle(lines)
    else:
        lines[at] = rng.choice(["3", "[]", "null", '"a"', "{}", "[1, 2]", "true"])
        told = f"line {at + 1}: {lines[at]}"
    return ("\n".join(lines) + "\n").encode("utf-8", "surrogatepass"), told, False


def meaning(data: bytes | None, ids: list[int]) -> list[Any]:
    """[the kept ids], or [] where the file has to be refused."""
    if data is None or (data and not data.endswith(b"\n")):
        return []
    found: dict[int, Any] = {}
    try:
        for line in data.decode("utf-8-sig").split("\n"):
            if not line.strip(" \t\r"):
                continue
            row = strict_json(line)
            if (
                not isinstance(row, dict)
                or set(row) != set(FIELDS)
                or not all(sound(row[name]) for name, sound in FIELDS.items())
            ):
                return []
            if (
                row["known"] > row["samples"]
                or row["low"] >= row["high"]
                or found.get(row["id"], row) != row
            ):
                return []
            found[row["id"]] = row
    except ValueError:
        return []
    if not all(number in found for number in ids) or not any(
        found[number]["keep"] for number in ids
    ):
        return []
    return [[number for number in ids if found[number]["keep"]]]


def kept(ended: Ended) -> Ended:
    """The outcome of `spies.prompts`: ids of the kept prompts."""
    if not isinstance(ended.outcome, dict):
        return ended
    rows = ended.outcome["train"]
    return Ended(
        ended.status,
        ended.out,
        ended.err,
        ended.timed_out,
        [row["id"] for row in rows],
        ended.seconds,
    )
