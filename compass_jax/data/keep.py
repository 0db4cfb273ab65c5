"""The pass rates that the offline filter wrote, and the prompts that it keeps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from compass_jax.data.files import DataError
from compass_jax.records import Prompt


class PassRate(NamedTuple):
    """One training prompt. `pass_rate` is the share of right answers among the `known` of its `samples`."""

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


def read_pass_rates(path: str | Path, complete: bool = True) -> dict[int, PassRate]:
    """Rows by prompt id. A damaged line raises DataError naming it; a cut-off last line too if the file must be `complete`.

    Otherwise that line is removed from the file, so that a continued filter writes behind whole lines.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; compass filter writes it (pass_rates.jsonl)")
    text = path.read_text()
    whole, cut = text[: text.rfind("\n") + 1], text[text.rfind("\n") + 1 :]
    if cut:
        if complete:
            raise DataError(f"{path}: the last line is cut off; run the same compass filter command again, it continues")
        path.write_text(whole)
    rows = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            row = PassRate(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise DataError(f"{path}, line {number}: not a line of compass filter: {error}") from error
        rows[row.id] = row
    return rows


def kept_prompts(prompts: Sequence[Prompt], path: str) -> tuple[list[Prompt], int]:
    """(the prompts that the filter keeps, tokens that the estimate cost).

    DataError if a prompt was not estimated (other sources or another seed), or none is kept.
    """
    rows = read_pass_rates(path)
    missing = [p for p in prompts if p.id not in rows]
    if missing:
        raise DataError(
            f"{path} has no pass rate for {len(missing)} of {len(prompts)} training prompts, the first: {missing[0].question!r:.80}; "
            "run compass filter with this configuration, its seed and data sources"
        )
    kept = [p for p in prompts if rows[p.id].keep]
    if not kept:
        raise DataError(f"{path} keeps none of {len(prompts)} training prompts: widen --low and --high of compass filter")
    return kept, sum(row.tokens for row in rows.values())
