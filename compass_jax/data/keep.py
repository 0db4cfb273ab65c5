"""The pass rates that the offline filter wrote, and the prompts that it keeps."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.data.difficulty import Measured
from compass_jax.data.files import DataError
from compass_jax.records import Prompt
from compass_jax.untrusted import parse_json, read_lines


class PassRate(NamedTuple):
    """One training prompt. `pass_rate` is the share of right answers among the `known` of its
    `samples`.
    """

    id: int
    label: str
    question: str
    pass_rate: float
    known: int
    samples: int
    tokens: int  # generated for the estimate
    low: float
    high: float
    keep: bool


def read_pass_rates(
    path: str | Path, complete: bool = True, prompts: Sequence[Prompt] | None = None
) -> dict[int, PassRate]:
    """Rows by prompt id. Raises DataError naming the line that is damaged, that contradicts
    another, or that is of none of `prompts`.

    A cut-off last line too is an error if the file must be `complete`. Otherwise it is removed from
    the file, so that a continued filter writes after whole lines.
    """
    if not os.path.lexists(path):
        raise DataError(
            f"{str(path)[:200]}: no such file; compass filter writes it (pass_rates.jsonl)"
        )
    asked = None if prompts is None else {p.id: p.question for p in prompts}
    rows: dict[int, PassRate] = {}
    places: dict[int, str] = {}
    size = 0
    for where, line in read_lines(path, error=DataError):
        if not line.endswith(b"\n"):
            if complete:
                raise DataError(
                    f"{where}: the last line is cut off; run the same compass filter command "
                    "again, it continues"
                )
            os.truncate(path, size)
            break
        size += len(line)
        row = _checked(parse_json(line, where, error=DataError), where)
        if asked is not None and asked.get(row.id) != row.question:
            what = f"{row.question!r:.60} (id {row.id}) is no training prompt of this run"
            raise DataError(
                f"{where}: {what}; run compass filter with this configuration, its seed and "
                "data sources"
            )
        if rows.setdefault(row.id, row) != row:
            raise DataError(
                f"{where}: contradicts {places[row.id]} on the prompt with id {row.id}; remove "
                "the wrong one"
            )
        places.setdefault(row.id, where)
    return rows


def _checked(values: Any, where: str) -> PassRate:
    """The row, or DataError naming the field that compass filter would not have written."""
    if not isinstance(values, dict) or set(values) != set(PassRate._fields):
        raise DataError(
            f"{where}: not a line of compass filter: it must be an object with the fields "
            f"{', '.join(PassRate._fields)}"
        )
    row = PassRate(**values)

    def whole(value: Any, low: int, high: float) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high

    def share(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1

    bounds = share(row.low) and share(row.high) and row.low < row.high
    sound = {
        "id": whole(row.id, 0, 2**32 - 1),
        "label": isinstance(row.label, str),
        "question": isinstance(row.question, str),
        "pass_rate": share(row.pass_rate),
        "samples": whole(row.samples, 1, math.inf),
        "known": whole(row.samples, 1, math.inf) and whole(row.known, 0, row.samples),
        "tokens": whole(row.tokens, 0, math.inf),
        "low": bounds,
        "high": bounds,
        "keep": isinstance(row.keep, bool),
    }
    for name, ok in sound.items():
        if not ok:
            value = json.dumps(values[name])
            raise DataError(
                f"{where}: not a line of compass filter: {name} = {value:.80}; correct it, or "
                "run compass filter again"
            )
    return row


class Kept(NamedTuple):
    """What a filter leaves of the prompts, and what it measured."""

    prompts: list[Prompt]
    tokens: int  # that the estimate cost
    measured: list[Measured]  # of `prompts`, in their order


def kept_prompts(prompts: Sequence[Prompt], path: str) -> Kept:
    """The prompts that the filter keeps, with their pass rates; without a `path` all of them, none
    measured.

    DataError if a prompt was not estimated or a line is of no prompt (other sources or another
    seed), or none is kept.
    """
    if not path:
        return Kept(list(prompts), 0, [])
    rows = read_pass_rates(path, prompts=prompts)
    missing = [p for p in prompts if p.id not in rows]
    if missing:
        raise DataError(
            f"{path} has no pass rate for {len(missing)} of {len(prompts)} training prompts, "
            f"the first: {missing[0].question!r:.80}; "
            "run compass filter with this configuration, its seed and data sources"
        )
    kept = [p for p in prompts if rows[p.id].keep]
    if not kept:
        raise DataError(
            f"{path} keeps none of {len(prompts)} training prompts: widen --low and --high of "
            "compass filter"
        )
    measured = [
        Measured(p, row.pass_rate * row.known, float(row.known))
        for p, row in ((p, rows[p.id]) for p in kept)
    ]
    return Kept(kept, sum(row.tokens for row in rows.values()), measured)
