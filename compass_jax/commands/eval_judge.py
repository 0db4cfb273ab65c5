"""`compass eval-judge`: how often a judge says what people said of the same pairs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from compass_jax.commands.configured import keep_compiled
from compass_jax.commands.options import EvalJudge
from compass_jax.config import ConfigError, EngineJudgeConfig, JudgeConfig, RunConfig
from compass_jax.config.ranges import check_fields
from compass_jax.data.files import DataError
from compass_jax.data.preferences import Preference, read_preferences
from compass_jax.experience.evaluate import decoder_of
from compass_jax.from_files import engine_config
from compass_jax.report import summary_table
from compass_jax.rewards.agreement import Agreement, agreement
from compass_jax.rewards.asking import Asker, Batched, Pooled
from compass_jax.rewards.endpoint import Reply
from compass_jax.rewards.judging import UNPARSABLE
from compass_jax.runs.rundir import write_atomically
from compass_jax.training.own_judge import OwnJudge, rollout_of
from compass_jax.verifiers.judge import messages, verdict

AT_ONCE = 256  # pairs whose texts are held
RULINGS = "rulings.jsonl"
SUMMARY = "summary.json"


class Ruled(NamedTuple):
    """A pair with the judge's verdicts in both orders, or why one is missing; its last words."""

    pair: Preference
    first: int | None
    swapped: int | None
    failures: tuple[str, ...]
    ended: tuple[str, str]


def ruled(pairs: Iterable[Preference], asker: Asker) -> list[Ruled]:
    """The judge's verdicts on all pairs, each asked in both orders."""
    found: list[Ruled] = []
    left = iter(pairs)
    while some := list(islice(left, AT_ONCE)):
        asked = [
            (
                asker.submit(messages(one.question, one.candidate, one.anchor)),
                asker.submit(messages(one.question, one.anchor, one.candidate)),
            )
            for one in some
        ]
        asker.run()
        found += [_ruled(pair, both) for pair, both in zip(some, asked, strict=True)]
    return found


def _ruled(pair: Preference, both: Sequence[Future[Reply]]) -> Ruled:
    replies = [one.result() for one in both]
    first, swapped = (None if one.failure else verdict(one.text) for one in replies)
    said = zip(replies, (first, swapped), strict=True)
    failures = tuple(one.failure or UNPARSABLE for one, found in said if found is None)
    ended = tuple((one.text or one.detail)[-200:].strip() for one in replies)
    return Ruled(pair, first, swapped, failures, (ended[0], ended[1]))


def own_judge(config: RunConfig, weights: str) -> Batched:
    """Returns a judge with the weights of a run, a checkpoint or a Hugging Face folder, in an
    engine of our own with the sizes of `config.rollout`; greedy.
    """
    sizes = config.rollout
    judge = EngineJudgeConfig(
        weights,
        prompt_buckets=sizes.prompt_buckets,
        max_tokens=sizes.max_new_tokens,
        slots=sizes.slots,
    )
    like = replace(config, rollout=rollout_of(judge, sizes))
    engine, params, tokenizer = decoder_of(like, weights)
    asker = Batched(judge)
    asker.generate = OwnJudge(engine, params, tokenizer, config.seed)
    return asker


def run(options: EvalJudge) -> int:
    """Measures the judge of `compass eval-judge`; returns the exit status."""
    limit = options.max_tokens
    if options.endpoint:
        judge: JudgeConfig | str = JudgeConfig(
            options.endpoint,
            options.model,
            key_env=options.key_env,
            timeout_s=options.timeout_s,
            requests=options.requests,
            max_tokens=2048 if limit is None else limit,
        )
        check_fields(judge, "rewards.judge")
    else:
        if limit is not None and limit < 1:
            raise ConfigError(f"--max-tokens {limit}: must be at least 1")
        keep_compiled(options)
        judge = options.model
    run_eval_judge(options.data, judge, options.out, options.most, limit)
    return 0


def run_eval_judge(
    files: Sequence[str],
    judge: JudgeConfig | str,
    out: str = "",
    most: int = 0,
    max_tokens: int | None = None,
) -> Agreement:
    """Asks the judge about the pairs of `files`, and prints how its verdicts fit.

    Args:
        files: of preferences (data/preferences.py).
        judge: the endpoint; or the folder of a model, which an engine of our own runs.
        out: a folder for SUMMARY and RULINGS, a line for each pair; empty: nothing is written.
        most: the first so many pairs; 0: all.
        max_tokens: of an answer of our own engine; None: as many as the model and machine leave.

    Raises DataError for rows that cannot be used, ConfigError for a judge that cannot be.
    """
    if isinstance(judge, JudgeConfig):
        judge.validate()
    pairs = [pair for name in files for pair in read_preferences(name)]
    pairs = pairs[:most] if most else pairs
    if out and Path(out).exists() and (not Path(out).is_dir() or any(Path(out).iterdir())):
        raise DataError(f"--out {out} is there already, and not empty; name another folder")
    if isinstance(judge, JudgeConfig):
        return judged(pairs, Pooled(judge), {"judge": judge.model, "endpoint": judge.endpoint}, out)
    asked = [messages(one.question, x, y) for one in pairs for x, y in (one[1:3], one[2:0:-1])]
    config = engine_config(judge, asked, max_tokens)
    return judged(pairs, own_judge(config, judge), {"judge": judge}, out)


def judged(
    pairs: Sequence[Preference], asker: Asker, named: dict[str, str], out: str = ""
) -> Agreement:
    """Asks about all pairs, closes the asker, and prints the agreement; `named` is the judge in
    SUMMARY. `out` as in `run_eval_judge`.
    """
    try:
        found = ruled(pairs, asker)
    finally:
        asker.close()
    return told(found, named, out)


def told(found: Sequence[Ruled], named: Mapping[str, Any], out: str = "") -> Agreement:
    """Prints and returns the agreement; `named` and `out` as in `judged`."""
    numbers = agreement(
        [one.pair.gold for one in found],
        [one.first for one in found],
        [one.swapped for one in found],
    )
    failures: dict[str, int] = {}
    for name in (name for one in found for name in one.failures):
        failures[name] = failures.get(name, 0) + 1
    _tell(numbers, failures, found)
    if out:
        _write(Path(out), named, numbers, failures, found)
    return numbers


def _tell(numbers: Agreement, failures: dict[str, int], found: Sequence[Ruled]) -> None:
    console = Console(soft_wrap=True)
    ties = sum(one.pair.gold == 0 for one in found)
    rows = [
        {"share": name.replace("_", " "), "value": number(value)}
        for name, value in numbers._asdict().items()
        if isinstance(value, float)
    ]
    title = f"{numbers.pairs} pairs, {ties} of them ties; {numbers.judged} judged in both orders"
    console.print(summary_table(rows, title=title))
    if failures:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(failures.items()))
        lost = next(one for one in found if one.failures)
        console.print(f"questions without a verdict: {counts}", highlight=False, markup=False)
        said = next((x for x in lost.ended if x), "")
        where = f"the first, of {lost.pair.where}, ended: {said!r}"
        console.print(where, highlight=False, markup=False)


def number(value: float) -> str:
    """Returns a share as a table shows it; - for NaN."""
    return "-" if math.isnan(value) else f"{value:.3f}"


def _write(
    folder: Path,
    named: Mapping[str, Any],
    numbers: Agreement,
    failures: dict[str, int],
    found: Sequence[Ruled],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {
            "row": one.pair.where,
            "gold": one.pair.gold,
            "first": one.first,
            "swapped": one.swapped,
            "failures": one.failures,
            "ended": one.ended,
        }
        for one in found
    ]
    write_atomically(folder / RULINGS, "".join(json.dumps(line) + "\n" for line in lines))
    shares: dict[str, Any] = {
        name: None if isinstance(x, float) and math.isnan(x) else x
        for name, x in numbers._asdict().items()
    }
    summary = {**named, "failures": failures, **shares}
    write_atomically(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")
