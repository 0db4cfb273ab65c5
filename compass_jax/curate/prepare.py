"""`compass prepare-sft`: passes rows of conversations through all filters, batch by batch.

    OUT/train.jsonl     the kept rows, unchanged (train.jsonl.part until the work is done)
    OUT/report.json     counts and examples of each filter; report.md is the readable version
    OUT/state.json      the settings, and whether the work is done
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
from compass_jax.curate.filters import check_languages, switched_on, too_long
from compass_jax.curate.judge import Judge
from compass_jax.curate.kept import Kept, Row
from compass_jax.curate.report import Tally, markdown
from compass_jax.curate.sample import Sample
from compass_jax.curate.settings import require_same_settings
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
STATED = ("done", "settings", "sizes", "sets", "tally")
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
        if tally := self._made_before():
            self._publish()
            self._tell(f"{self._out / TRAIN} was made by this command before")
            return tally
        self._save(done=False)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._kept)
            train = stack.enter_context((self._out / f"{TRAIN}.part").open("wb"))
            judge = None
            if self._config.reward:
                judge = stack.enter_context(Judge(self._config, self._out / VERDICTS))
            rows = self._rows()
            for number in count(1):
                if not (batch := list(islice(rows, AT_ONCE))):
                    break
                train.writelines(self._decide(batch, judge))
                if number % TOLD_EVERY == 0:
                    lock.check()
                    self._tell(f"{self._tally.rows:,} rows read, {self._tally.kept:,} kept")
            lock.check()
            train.flush()
            os.fsync(train.fileno())
        self._finish()
        self._publish()
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
        """Returns the row's reference answer for the verifier, or None. The response itself is not
        a reference.
        """
        named = self._config.answer_field
        for name in ANSWERS if named == AUTO else (named,):
            if name != reading.target and (value := field_of(row, name)) is not None:
                return reference(value)
        return None

    # ---- deciding --------------------------------------------------------------------------------

    def _decide(self, batch: list[Row], judge: Judge | None) -> Iterator[bytes]:
        """Yields the output lines of the rows that stay. The cheapest filters run first."""
        remaining = [row for row in batch if not self._out_alone(row)]
        if self._tokenizer is not None:
            remaining = self._fitting(remaining, self._tokenizer)
        if judge is not None:
            # a copy needs no verdict; copies within this batch are removed below
            remaining = [row for row in remaining if not self._out_as_copy(row)]
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

    def _out_alone(self, row: Row) -> bool:
        return any(self._take(row, name, ask(row.sample)) for name, ask in self._alone.items())

    def _out_as_copy(self, row: Row) -> bool:
        return self._take(row, "duplicate", self._kept.copy_of(row.sample))

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
            if not self._take(row, "too_long", too_long(size, limit)):
                remaining.append(row)
        return remaining

    def _contaminated(self, sample: Sample) -> str:
        hit = self._sets.hit(sample)
        if hit is None:
            return ""
        file = self._sets.files[self._sets.of_file[hit.question]]
        overlap = self._tally.overlap[file]
        overlap["rows"] += 1
        place = bisect.bisect_left(overlap["hit"], hit.question)
        if overlap["hit"][place : place + 1] != [hit.question]:
            overlap["hit"].insert(place, hit.question)
        question = " ".join(self._sets.questions[hit.question].split())
        return f"{hit.why} of {file}: {question!r:.80}"

    # ---- the folder ------------------------------------------------------------------------------

    def _settings(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self._config)))

    def _made_before(self) -> Tally | None:
        """Returns the counts of this command's completed result, or None. Raises ConfigError if the
        folder belongs to another command.
        """
        path = self._out / STATE
        if not path.exists():
            if (self._out / TRAIN).exists():
                raise ConfigError(
                    f"{self._out / TRAIN} is there, and this command did not make it; give another"
                    " --out"
                )
            return None
        state = read_json(path, error=DataError)
        if not isinstance(state, dict) or set(state) != set(STATED):
            raise ConfigError(f"{path} is not of compass prepare-sft; give another --out")
        require_same_settings(self._out, state["settings"], self._settings(), MAY_CHANGE)
        if not state["done"]:
            return None
        if state["sizes"] != self._sizes() or state["sets"] != self._sets.digest:
            raise ConfigError(
                f"{self._out} was made from files that have changed since; give another --out"
            )
        return Tally(**state["tally"])

    def _sizes(self) -> list[int]:
        return [os.stat(file).st_size for file in self._files]

    def _save(self, done: bool) -> None:
        state = {
            "done": done,
            "settings": self._settings(),
            "sizes": self._sizes(),
            "sets": self._sets.digest,
            "tally": dataclasses.asdict(self._tally),
        }
        write_atomically(self._out / STATE, json.dumps(state) + "\n")

    def _finish(self) -> None:
        report = {"settings": self._settings(), **self._tally.report()}
        write_atomically(
            self._out / REPORT, json.dumps(report, indent=2, ensure_ascii=False) + "\n"
        )
        write_atomically(self._out / PAGE, markdown(self._tally, self._settings()))
        if not self._tally.kept:
            removed = {name: count for name, count in self._tally.taken.items() if count}
            summary = ", ".join(f"{name} {count}" for name, count in removed.items())
            raise DataError(
                f"none of {self._tally.rows} rows is left: {summary}; {self._out / PAGE} shows some"
            )
        self._save(done=True)

    def _publish(self) -> None:
        """Renames the finished output, also after a kill before the rename."""
        part, train = self._out / f"{TRAIN}.part", self._out / TRAIN
        if part.exists():
            os.replace(part, train)
        if not train.exists():
            raise DataError(f"{train} was removed since it was made; remove {self._out} too")
        (self._out / VERDICTS).unlink(missing_ok=True)


def _line(where: str, row: dict[str, Any]) -> bytes:
    """Returns a row as a JSON line. Raises DataError for values that JSON cannot represent."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:  # Parquet values: bytes, dates, NaN
        raise DataError(
            f"{where}: it cannot be written as JSON ({error}); leave the column out, or write it as"
            " text"
        ) from error
