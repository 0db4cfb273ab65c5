"""Validation of rows before the first response. A row whose setup or tests cannot run would give
every response a reward of 0. Only verifiers with `row_faults` validate rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from compass_jax.config import DataConfig
from compass_jax.records import Prompt, Score
from compass_jax.rewards.checks import sources_with
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.joined import AnyScorer

ROWS_AT_ONCE = 16
MOST_NAMED = 3


def sources_of(data: DataConfig) -> frozenset[int]:
    """Returns the indices of the sources whose rows can be validated."""
    return frozenset(sources_with(data, lambda kind: kind.row_faults))


def check_rows(scorer: AnyScorer, data: DataConfig, prompts: Sequence[Prompt]) -> None:
    """Raises VerifierError, naming file and row, for prompts whose setup or tests cannot run.

    Rows that were validated before are skipped.
    """
    sources = sources_of(data)
    if not sources:
        return
    tried = scorer.workers.tried_rows
    untried = [x for x in prompts if x.source in sources and x.row not in tried]
    faults = list(_faults(scorer, untried))
    if not faults:
        tried.update(prompt.row for prompt in untried)
        return
    named = "; ".join(f"{_place(prompt)}: {fault}" for prompt, fault in faults[:MOST_NAMED])
    more = len(faults) - MOST_NAMED
    raise VerifierError(
        f"{named}{f'; {more:,} more rows' if more > 0 else ''}. Every response to such a row would"
        " get 0: mend it, or leave it out"
    )


def _place(prompt: Prompt) -> str:
    return prompt.place or f"{prompt.label}, {prompt.question!r:.60}"


def _faults(scorer: AnyScorer, prompts: Sequence[Prompt]) -> Iterator[tuple[Prompt, str]]:
    """Yields (prompt, fault) for the prompts with an invalid row, in their order."""
    by_source: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    for source, group in by_source.items():
        chunks = [group[i : i + ROWS_AT_ONCE] for i in range(0, len(group), ROWS_AT_ONCE)]
        scores = _try_rows(scorer, source, chunks)
        for chunk, score in zip(chunks, scores, strict=True):
            if score.outcome == "unjudged":
                for number, fault in json.loads(score.detail):
                    yield chunk[number], fault
                continue
            # a row hangs or crashes the process, so try each row alone
            alone = [[prompt] for prompt in chunk]
            for (prompt,), one in zip(alone, _try_rows(scorer, source, alone), strict=True):
                if fault := _fault_of_row(one):
                    yield prompt, fault


def _fault_of_row(score: Score) -> str:
    if score.outcome == "unjudged":
        return "".join(fault for _, fault in json.loads(score.detail))
    last = (score.detail.strip().splitlines() or [""])[-1]
    return f"its setup and tests cannot be tried ({score.outcome}: {last:.200})"


def _try_rows(scorer: AnyScorer, source: int, chunks: Sequence[Sequence[Prompt]]) -> list[Score]:
    workers = scorer.workers
    for n, chunk in enumerate(chunks):
        workers.submit_rows(n, source, [prompt.row for prompt in chunk])
    scores: dict[int, Score] = {}
    while len(scores) < len(chunks):
        scores.update(workers.collect(block=True))
    return [scores[n] for n in range(len(chunks))]
