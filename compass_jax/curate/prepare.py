"""`compass prepare-sft`: passes rows of conversations through all filters, batch by batch.

    OUT/train.jsonl     the kept rows, unchanged (train.jsonl.part until the work is done)
    OUT/report.json     counts and examples of each filter; report.md is the readable version
    OUT/state.json      the settings, and the counts once the work is done
    OUT/verdicts.jsonl  a verifier's verdicts, until the work is done

Memory grows only with the index of kept rows. After a kill the same command decides all rows again
with the stored verdicts and ends with the same files.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import AUTO
from compass_jax.curate.contamination import Contamination
from compass_jax.curate.filters import check_languages, switched_on
from compass_jax.curate.judge import Judge
from compass_jax.curate.kept import Kept, Row
from compass_jax.curate.report import Tally, markdown
from compass_jax.curate.resume import require_same_settings
from compass_jax.curate.sample import Sample
from compass_jax.data.files import DataError, field_of, files_of, read_rows
from compass_jax.data.formats import FORMATS, TURNS, Reading, open_format, reference, tools_of
from compass_jax.data.sft import taught
from compass_jax.data.splits import tell_splits, training_files
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.runs.rundir import FolderLock, write_atomically
from compass_jax.untrusted import read_json

AT_ONCE = 1024  # rows per batch
TOLD_EVERY = 8  # batches of AT_ONCE rows between progress messages
TRAIN, STATE, REPORT, PAGE = "train.jsonl", "state.json", "report.json", "report.md"
VERDICTS = "verdicts.jsonl"
MAY_CHANGE = ("workers", "timeout_s")  # settings that do not affect decisions
ANSWERS = tuple(
    dict.fromkeys(known.answer for known in FORMATS if known.answer not in (None, "", TURNS))
)
Tell = Callable[[str], None]


def prepare(config: PrepareConfig, out: str, tell: Tell) -> Tally:
    """Filters the rows of `config.data` into the folder `out`; returns the counts of each filter.

    Args:
        config: data, filters and their thresholds.
        out: the output folder.
        tell: receives progress messages.

    Raises DataError for a row that cannot be read, and if no row is left; ConfigError for invalid
    settings, and for settings that differ from those that `out` was begun with.
    """
    config.validate()
    if config.languages:
        check_languages(config.languages)
    work = _Preparation(config, Path(out), tell)
    with FolderLock(out) as lock:
        return work.run(lock)


class _Preparation:
    """The preparation of one output folder."""

    def __init__(self, config: PrepareConfig, out: Path, tell: Tell):
        self._config = config
        self._tell = tell
        self._out = out
        self._files = [name for pattern in config.data for name in training_files(pattern)]
        tell_splits(config.data, tell)
        sets = [name for pattern in config.against for name in files_of(pattern)]
        self._sets = Contamination(sets if config.ngram_words else [], config.ngram_words, tell)
        self._tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
        self._alone = switched_on(config)
        if self._sets.questions:
            self._alone["contamination"] = self._contaminated
        self._tally = Tally()
        for i, file in enumerate(self._sets.files):
            questions = self._sets.of_file.count(i)
            self._tally.overlap[file] = {"questions": questions, "rows": 0, "hit": []}
        self._kept = Kept(config, TRAIN)

    def run(self, lock: FolderLock) -> Tally:
        """Writes the files, unless an earlier command completed them."""
        train, part = self._out / TRAIN, self._out / f"{TRAIN}.part"
        if tally := self._made_before():
            self._tell(f"{train} was made by this command before")
            return tally
        self._save()
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._kept)
            file = stack.enter_context(part.open("wb"))
            judge = None
            if self._config.reward:
                judge = stack.enter_context(Judge(self._config, self._out / VERDICTS))
            rows = self._rows()
            for number in count(1):
                if not (batch := list(islice(rows, AT_ONCE))):
                    break
                file.writelines(self._decide(batch, judge))
                if number % TOLD_EVERY == 0:
                    lock.check()
                    self._tell(f"{self._tally.rows:,} rows read, {self._tally.kept:,} kept")
            lock.check()
            file.flush()
            os.fsync(file.fileno())
        self._report()
        self._save(tally=dataclasses.asdict(self._tally))
        os.replace(part, train)
        (self._out / VERDICTS).unlink(missing_ok=True)
        return self._tally

    # ---- reading ---------------------------------------------------------------------------------

    def _rows(self) -> Iterator[Row]:
        """Yields the rows of all files, in order."""
        config, settings = self._config, ("--prompt-field", "--response-field")
        for path in self._files:
            named = (config.prompt_field, config.response_field or TURNS)
            reading, fields = open_format(path, "response", named, settings, self._tell)
            for where, row in read_rows(path, fields, None):
                self._tally.rows += 1
                messages = taught(reading, where, row, "")
                sample = Sample(where, messages, tools_of(row, where), config.shingle_words)
                yield Row(sample, _line(where, row), row, self._reference(reading, row))

    def _reference(self, reading: Reading, row: dict[str, Any]) -> Any:
        """Returns the row's reference answer for the verifier, which is not the response."""
        named = self._config.answer_field
        for name in ANSWERS if named == AUTO else (named,):
            if name != reading.target and (value := field_of(row, name)) is not None:
                return reference(value)
        return None

    # ---- deciding --------------------------------------------------------------------------------

    def _decide(self, batch: list[Row], judge: Judge | None) -> Iterator[bytes]:
        """Yields the output lines of the rows that stay. The cheapest filters run first."""
        remaining = [
            row
            for row in batch
            if not any(self._take(row, name, ask(row.sample)) for name, ask in self._alone.items())
        ]
        if self._tokenizer is not None:
            remaining = self._fitting(remaining, self._tokenizer)
        if judge is not None:
            # a copy needs no verdict; copies within this batch are removed below
            copy_of = self._kept.copy_of
            remaining = [x for x in remaining if not self._take(x, "duplicate", copy_of(x.sample))]
            verdicts = judge(remaining)
            known = sum(verdict.known for verdict in verdicts)
            self._tally.judged += known
            self._tally.unjudged += len(remaining) - known
            for row, verdict in zip(remaining, verdicts, strict=True):
                self._take(row, "wrong", verdict.wrong)
            remaining = [row for row, one in zip(remaining, verdicts, strict=True) if not one.wrong]
        for row, name, reason in self._kept.add(remaining):
            if not self._take(row, name, reason):
                yield row.line
        self._tally.kept = len(self._kept)

    def _take(self, row: Row, name: str, reason: str) -> bool:
        """Counts the row under a filter if there is a reason, and returns whether there is one."""
        if reason:
            question = row.sample.asked
            self._tally.take(name, row.sample.where, reason, question, self._config.examples)
        return bool(reason)

    def _fitting(self, rows: list[Row], tokenizer: Tokenizer) -> list[Row]:
        """Returns the rows that the chat template accepts and that are short enough."""
        remaining, limit = [], self._config.most_tokens
        for row in rows:
            try:
                parts = tokenizer.encode_turns(row.sample.messages, row.sample.tools)
            except TokenizerError as error:
                self._take(row, "template", str(error))
                continue
            size = max(len(tokens) for tokens, _ in parts)
            reason = f"{size} tokens, more than {limit}" if 0 < limit < size else ""
            if not self._take(row, "too_long", reason):
                remaining.append(row)
        return remaining

    def _contaminated(self, sample: Sample) -> str:
        hit = self._sets.hit(sample)
        if hit is None:
            return ""
        file = self._sets.files[self._sets.of_file[hit.question]]
        overlap = self._tally.overlap[file]
        overlap["rows"] += 1
        if hit.question not in overlap["hit"]:
            bisect.insort(overlap["hit"], hit.question)
        question = " ".join(self._sets.questions[hit.question].split())
        return f"{hit.why} of {file}: {question!r:.80}"

    # ---- the folder ------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self._config)))

    def _state(self) -> dict[str, Any]:
        sizes = [os.stat(file).st_size for file in self._files]
        return {"settings": self._settings(), "sizes": sizes, "sets": self._sets.digest}

    def _save(self, **others: Any) -> None:
        write_atomically(self._out / STATE, json.dumps(self._state() | others) + "\n")

    def _made_before(self) -> Tally | None:
        """Returns the counts of this command's completed result, or None."""
        path, train = self._out / STATE, self._out / TRAIN
        before = read_json(path, error=DataError) if path.exists() else {}
        if not isinstance(before, dict) or ("settings" not in before and train.exists()):
            raise ConfigError(
                f"{train} is there, and this command did not make it; give another --out"
            )
        if "settings" in before:
            require_same_settings(self._out, before["settings"], self._settings(), MAY_CHANGE)
        if not train.exists():
            return None
        if any(before.get(name) != self._state()[name] for name in ("sizes", "sets")):
            raise ConfigError(
                f"{self._out} was made from files that have changed since; give another --out"
            )
        return Tally(**before["tally"])

    def _report(self) -> None:
        report = {"settings": self._settings(), **self._tally.report()}
        text = json.dumps(report, indent=2, ensure_ascii=False)
        write_atomically(self._out / REPORT, text + "\n")
        write_atomically(self._out / PAGE, markdown(self._tally, self._settings()))
        if not self._tally.kept:
            taken = (f"{name} {count}" for name, count in self._tally.taken.items() if count)
            raise DataError(
                f"none of {self._tally.rows} rows is left: {', '.join(taken)}; {self._out / PAGE}"
                " shows some"
            )


def _line(where: str, row: dict[str, Any]) -> bytes:
    """Returns a row as a JSON line. Raises DataError for values that JSON cannot represent."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:  # Parquet values: bytes, dates, NaN
        raise DataError(
            f"{where}: it cannot be written as JSON ({error}); leave the column out, or write it as"
            " text"
        ) from error
