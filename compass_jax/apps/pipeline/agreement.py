"""Measures a judge's agreement with human preferences (`compass eval-judge`, and each stage of
`compass train-judge`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from compass_jax.base.aliases import JsonMapping
from compass_jax.config import DataConfig, EngineJudgeConfig, PolicyConfig
from compass_jax.data.preferences import Preference
from compass_jax.devices.distributed import is_main_process
from compass_jax.experience.evaluate import decoder_of
from compass_jax.rewards.judges.agreement import Agreement, agreement
from compass_jax.rewards.judges.endpoint import Asker, Batched, Reply
from compass_jax.rewards.judges.judging import UNPARSABLE
from compass_jax.rewards.verifiers.judge import messages, verdict
from compass_jax.runs.report import summary_table
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.own_judge import OwnJudge, rollout_of

AT_ONCE = 256  # number of pairs whose texts are in memory
RULINGS = "rulings.jsonl"
SUMMARY = "summary.json"


class Ruled(NamedTuple):
    """A pair with the judge's verdict in both orders. A missing verdict has a failure; `ended`
    holds the ends of the two replies.
    """

    pair: Preference
    first: int | None
    swapped: int | None
    failures: tuple[str, ...]
    endings: tuple[str, str]


def ruled(pairs: Iterable[Preference], asker: Asker) -> list[Ruled]:
    """Returns the judge's verdicts on all pairs, each asked in both orders."""
    rulings: list[Ruled] = []
    remaining = iter(pairs)
    while chunk := list(islice(remaining, AT_ONCE)):
        futures = [
            [
                asker.submit(messages(one.question, *answers))
                for answers in ((one.candidate, one.anchor), (one.anchor, one.candidate))
            ]
            for one in chunk
        ]
        asker.run()
        rulings += [_ruled(pair, pending) for pair, pending in zip(chunk, futures, strict=True)]
    return rulings


def _ruled(pair: Preference, futures: Sequence[Future[Reply]]) -> Ruled:
    replies = [one.result() for one in futures]
    first, swapped = (None if one.failure else verdict(one.text) for one in replies)
    answers = zip(replies, (first, swapped), strict=True)
    failures = tuple(one.failure or UNPARSABLE for one, ruling in answers if ruling is None)
    endings = tuple((one.text or one.detail)[-200:].strip() for one in replies)
    return Ruled(pair, first, swapped, failures, (endings[0], endings[1]))


def own_judge(policy: PolicyConfig, data: DataConfig, seed: int, weights: str) -> Batched:
    """Returns a greedy judge in this process's engine, with the weights of a run, a checkpoint or a
    Hugging Face folder.

    The sizes are those of `policy.rollout`.
    """
    sizes = policy.rollout
    judge = EngineJudgeConfig(
        weights,
        prompt_buckets=sizes.prompt_buckets,
        max_tokens=sizes.max_new_tokens,
        slots=sizes.slots,
    )
    like = replace(policy, rollout=rollout_of(judge, sizes))
    engine, params, tokenizer = decoder_of(like, data, seed, weights)
    asker = Batched(judge)
    asker.generate = OwnJudge(engine, params, tokenizer, seed)
    return asker


def judged(
    pairs: Sequence[Preference], asker: Asker, named: dict[str, str], out: str = ""
) -> Agreement:
    """Asks about all pairs, closes the asker, and prints and returns the agreement.

    named: description of the judge in SUMMARY. out: folder for SUMMARY and RULINGS (one line per
    pair); empty: no files.
    """
    try:
        rulings = ruled(pairs, asker)
    finally:
        asker.close()
    return report(rulings, named, out)


def report(rulings: Sequence[Ruled], named: JsonMapping, out: str = "") -> Agreement:
    """Prints and returns the agreement. `named` and `out` are as in `judged`. With several
    processes all of them have the rulings, and process 0 prints and writes.
    """
    golds = [one.pair.gold for one in rulings]
    numbers = agreement(golds, [x.first for x in rulings], [x.swapped for x in rulings])
    failures = dict(Counter(name for one in rulings for name in one.failures))
    if not is_main_process():
        return numbers
    _tell(numbers, failures, rulings)
    if out:
        _write(Path(out), {**named, "failures": failures}, numbers, rulings)
    return numbers


def _tell(numbers: Agreement, failures: dict[str, int], rulings: Sequence[Ruled]) -> None:
    console = Console(soft_wrap=True, emoji=False)
    ties = sum(one.pair.gold == 0 for one in rulings)
    rows = [
        {"share": name.replace("_", " "), "value": number(value)}
        for name, value in numbers._asdict().items()
        if isinstance(value, float)
    ]
    title = f"{numbers.pairs} pairs, {ties} of them ties; {numbers.judged} judged in both orders"
    console.print(summary_table(rows, title=title))
    if failures:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(failures.items()))
        lost = next(one for one in rulings if one.failures)
        console.print(f"questions without a verdict: {counts}", highlight=False, markup=False)
        ending = next((x for x in lost.endings if x), "")
        where = f"the first, of {lost.pair.where}, ended: {ending!r}"
        console.print(where, highlight=False, markup=False)


def number(value: float) -> str:
    """Returns a share as a table shows it; - for NaN."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def _write(folder: Path, named: JsonMapping, numbers: Agreement, rulings: Sequence[Ruled]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = (
        {"row": one.pair.where, "gold": one.pair.gold}
        | {name: value for name, value in one._asdict().items() if name != "pair"}
        for one in rulings
    )
    write_atomically(folder / RULINGS, "".join(json.dumps(row) + "\n" for row in rows))
    shares = {name: None if math.isnan(x) else x for name, x in numbers._asdict().items()}
    write_atomically(folder / SUMMARY, json.dumps({**named, **shares}, indent=2) + "\n")
