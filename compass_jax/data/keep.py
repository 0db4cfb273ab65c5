"""Pass rates written by the offline filter (compass filter), and the prompts that it keeps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from compass_jax.base.records import Prompt
from compass_jax.base.untrusted import read_lines
from compass_jax.data.difficulty import Measured
from compass_jax.data.files import DataError, validation_problem

_Share = Annotated[float, Field(ge=0, le=1)]
_Count = Annotated[int, Field(ge=0)]


class PassRate(NamedTuple):
    """The measurement of one training prompt.

    `pass_rate` is the share of correct answers among the `known` (judged) ones of its `samples`.
    The filter keeps pass rates between `low` and `high`.
    """

    id: Annotated[int, Field(ge=0, lt=2**32)]
    label: str
    question: str
    pass_rate: _Share
    known: _Count
    samples: Annotated[int, Field(ge=1)]
    tokens: _Count  # tokens generated for the estimate
    low: _Share
    high: _Share
    keep: bool


_LINE = TypeAdapter(PassRate, config=ConfigDict(strict=True))


def read_pass_rates(
    path: str | Path, complete: bool = True, prompts: Sequence[Prompt] | None = None
) -> dict[int, PassRate]:
    """Returns the rows by prompt id.

    If the file must be `complete`, a truncated last line is an error. Otherwise it is removed from
    the file, so that a resumed filter appends after complete lines.

    Raises DataError, which names the line, for a damaged line, for one that contradicts another,
    and for one whose prompt is not among `prompts`.
    """
    if not os.path.lexists(path):
        raise DataError(
            f"{str(path)[:200]}: no such file; compass filter writes it (pass_rates.jsonl)"
        )
    question_by_id = None if prompts is None else {p.id: p.question for p in prompts}
    rows: dict[int, PassRate] = {}
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
        try:
            row = _LINE.validate_json(line)
        except ValidationError as error:
            raise DataError(
                f"{where}: not a line of compass filter: {validation_problem(error)}; correct it,"
                " or run compass filter again"
            ) from error
        if question_by_id is not None and question_by_id.get(row.id) != row.question:
            problem = f"{row.question!r:.60} (id {row.id}) is no training prompt of this run"
            raise DataError(
                f"{where}: {problem}; run compass filter with this configuration, its seed and "
                "data sources"
            )
        if rows.setdefault(row.id, row) != row:
            raise DataError(
                f"{where}: contradicts an earlier line on the prompt with id {row.id}; remove the"
                " wrong one"
            )
    return rows


class SelectedPrompts(NamedTuple):
    """The prompts that the filter keeps, with their measurements."""

    prompts: list[Prompt]
    tokens: int  # tokens generated for the estimate
    measured: list[Measured]  # one per prompt, in the same order


def kept_prompts(prompts: Sequence[Prompt], path: str) -> SelectedPrompts:
    """Returns the prompts that the filter keeps, with their pass rates; all prompts without a
    `path`.

    Raises DataError if a prompt has no pass rate, if a line belongs to no prompt (other sources or
    another seed), or if no prompt is kept.
    """
    if not path:
        return SelectedPrompts(list(prompts), 0, [])
    rows = read_pass_rates(path, prompts=prompts)
    missing = [p for p in prompts if p.id not in rows]
    if missing:
        raise DataError(
            f"{path} has no pass rate for {len(missing)} of {len(prompts)} training prompts, "
            f"the first: {missing[0].question!r:.80}; "
            "run compass filter with this configuration, its seed and data sources"
        )
    remaining = [p for p in prompts if rows[p.id].keep]
    if not remaining:
        raise DataError(
            f"{path} keeps none of {len(prompts)} training prompts: widen --low and --high of "
            "compass filter"
        )
    counts = ((p, rows[p.id].pass_rate, rows[p.id].known) for p in remaining)
    measured = [Measured(p, rate * known, float(known)) for p, rate, known in counts]
    return SelectedPrompts(remaining, sum(row.tokens for row in rows.values()), measured)
