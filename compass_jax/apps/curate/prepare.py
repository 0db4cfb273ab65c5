"""`compass prepare-sft`: passes rows of conversations through all filters, batch by batch.

    OUT/train.jsonl     the kept rows, unchanged (train.jsonl.part until the work is done)
    OUT/report.json     counts and examples of each filter; report.md is the readable version
    OUT/state.json      the settings, and the counts once the work is done
    OUT/verdicts.jsonl  a verifier's verdicts, until the work is done

Memory grows only with the index of kept rows. After a kill the same command decides all rows again
with the stored verdicts and ends with the same files.
"""

from __future__ import annotations

import array
import bisect
import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compass_jax.apps.curate.contamination import Contamination
from compass_jax.apps.curate.duplicates import Batch, NearDuplicates
from compass_jax.apps.curate.filters import check_languages, switched_on
from compass_jax.apps.curate.report import Tally, markdown
from compass_jax.apps.curate.resume import require_same_settings, resumed_lines
from compass_jax.apps.curate.sample import Sample
from compass_jax.apps.curate.words import Numbers
from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.records import Prompt, Score
from compass_jax.base.untrusted import read_json
from compass_jax.config import ConfigError, DataConfig, RewardConfig
from compass_jax.config.kinds import kinds
from compass_jax.config.prepare import PrepareConfig
from compass_jax.config.ranges import AUTO
from compass_jax.data.files import DataError, field_of, read_rows
from compass_jax.data.formats import FORMATS, TURNS, Reading, open_format, reference, tools_of
from compass_jax.data.sft import taught
from compass_jax.data.splits import evaluation_files, tell_splits, training_files
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row
from compass_jax.runs.rundir import FolderLock, write_atomically

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
        sets = [name for pattern in config.against for name in evaluation_files(pattern)]
        self._sets = Contamination(sets if config.ngram_words else [], config.ngram_words, tell)
        self._tokenizer = Tokenizer.load(config.tokenizer) if config.tokenizer else None
        self._alone = switched_on(config)
        if self._sets.questions:
            self._alone["contamination"] = self._contaminated
        self._tally = Tally()
        for i, file in enumerate(self._sets.files):
            questions = self._sets.of_file.count(i)
            self._tally.overlap[file] = {"questions": questions, "rows": 0, "hit": []}
        self._kept = KeptRows(config, TRAIN)

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
                    self._tell(f"{self._tally.rows:,} rows read, {self._tally.rows_kept:,} kept")
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
                context, response = taught(reading, where, row, "")
                messages, tools = [*context, *response], tools_of(row, where)
                sample = Sample(where, messages, tools, config.shingle_words)
                reference = self._reference(reading, row, where)
                yield Row(sample, _line(where, row), row, reference, len(context))

    def _reference(self, reading: Reading, row: JsonObject, where: str) -> Json:
        """Returns the row's reference answer for the verifier, which is not the response."""
        named = self._config.answer_field
        for name in ANSWERS if named == AUTO else (named,):
            if name != reading.target and (value := field_of(row, name)) is not None:
                return reference(value, f"{where}, field {name!r}")
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
            self._tally.unjudged += verdicts.count(None)
            self._tally.judged += len(verdicts) - verdicts.count(None)
            judged = zip(remaining, verdicts, strict=True)
            remaining = [row for row, wrong in judged if not self._take(row, "wrong", wrong or "")]
        for row, name, reason in self._kept.add(remaining):
            if not self._take(row, name, reason):
                yield row.line
        self._tally.rows_kept = len(self._kept)

    def _take(self, row: Row, name: str, reason: str) -> bool:
        """Counts the row under a filter if there is a reason, and returns whether there is one."""
        if reason:
            question = row.sample.user_text
            self._tally.take(name, row.sample.where, reason, question, self._config.examples)
        return bool(reason)

    def _fitting(self, rows: list[Row], tokenizer: Tokenizer) -> list[Row]:
        """Returns the rows that the chat template accepts and that are short enough."""
        remaining, limit = [], self._config.most_tokens
        for row in rows:
            try:
                messages, tools = row.sample.messages, row.sample.tools
                parts = tokenizer.encode_turns(messages, tools, row.context)
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

    def _settings(self) -> JsonObject:
        return json.loads(json.dumps(dataclasses.asdict(self._config)))

    def _state(self) -> JsonObject:
        sizes = [os.stat(file).st_size for file in self._files]
        return {"settings": self._settings(), "sizes": sizes, "sets": self._sets.digest}

    def _save(self, **fields: Json) -> None:
        write_atomically(self._out / STATE, json.dumps(self._state() | fields) + "\n")

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
        if not self._tally.rows_kept:
            removed = (f"{name} {count}" for name, count in self._tally.removed.items() if count)
            raise DataError(
                f"none of {self._tally.rows} rows is left: {', '.join(removed)}; {self._out / PAGE}"
                " shows some"
            )


def _line(where: str, row: JsonObject) -> bytes:
    """Returns a row as a JSON line. Raises DataError for values that JSON cannot represent."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError) as error:  # Parquet values: bytes, dates, NaN
        raise DataError(
            f"{where}: it cannot be written as JSON ({error}); leave the column out, or write it as"
            " text"
        ) from error


# ---- verdicts and duplicates ---------------------------------------------------------------------


class Judge:
    """A context manager that owns a verifier's workers.

    Verdicts are stored in the file `path`, so that a command that was killed judges no row twice.
    Raises ConfigError and VerifierError like `Scorer`.
    """

    def __init__(self, config: PrepareConfig, path: Path):
        self._name = config.reward
        kind = kinds().get(config.reward)
        self._compares = kind is not None and kind.answer
        self._rewards = RewardConfig(
            workers=config.workers, timeout_s=config.timeout_s, answer_tag=config.answer_tag
        )
        self._verdicts: dict[str, str] = dict(value for _, _, value in resumed_lines(path))
        self._file = path.open("a")
        self._scorer = Scorer(self._rewards, DataConfig(sources=(config.source,)))

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._scorer.close()
        self._file.close()

    def __call__(self, rows: Sequence[Row]) -> list[str | None]:
        """Returns the reason why each row's answer is wrong; empty for a right one. None: the
        verifier needs a reference and the row lacks it, or the check fails.
        """
        keys = [hashlib.blake2b(row.line, digest_size=16).hexdigest() for row in rows]
        verdicts = [self._verdicts.get(key) for key in keys]
        for i, row in enumerate(rows):
            if verdicts[i] is not None or (row.reference is None and self._compares):
                continue
            reference = {} if row.reference is None else {"answer": row.reference}
            encoded = encode_row({**row.columns, **reference})
            no_tokens = np.zeros(1, np.int32)
            prompt = Prompt(0, 0, "", row.sample.user_text, no_tokens, "", encoded)
            self._scorer.submit(i, prompt, row.sample.answer)
        while done := self._scorer.collect(block=True):
            for i, score in done:
                if score.known:
                    verdicts[i] = self._wrong(score, rows[i].reference)
                    self._file.write(json.dumps([keys[i], verdicts[i]]) + "\n")
        self._file.flush()
        return verdicts

    def _wrong(self, score: Score, reference: Json) -> str:
        if score.reward >= self._rewards.right_at:
            return ""
        compared = "" if reference is None else f"; the reference is {reference!r:.80}"
        return f"{self._name} gives {score.reward:g}{compared}"


class Row(NamedTuple):
    """A row with its conversation, its output line, and its reference answer."""

    sample: Sample
    line: bytes
    columns: dict
    reference: object  # None if the row has no reference
    context: int = 0  # number of first messages that SFT does not train


class KeptRows:
    """A context manager that indexes the rows that stay. Their shingles are stored in a temporary
    file and read back for each candidate.
    """

    def __init__(self, config: PrepareConfig, name: str):
        self._config, self._name = config, name
        self._near = NearDuplicates(config.similarity, self.shingles) if config.similarity else None
        self._exact: dict[bytes, int] = {}
        self._ends = array.array("Q", [0])  # byte offset after each row's shingles

    def __enter__(self) -> KeptRows:
        self._file = tempfile.TemporaryFile()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def shingles(self, number: int) -> Numbers:
        """Returns the shingles of a kept row."""
        start, end = self._ends[number : number + 2]
        return np.frombuffer(os.pread(self._file.fileno(), end - start, start), np.uint64)

    def copy_of(self, sample: Sample) -> str:
        """Returns the place of a kept row that equals the sample up to white space, or ""."""
        number = self._exact.get(sample.key)
        return "" if number is None else self._place(number)

    def add(self, rows: Sequence[Row]) -> Iterator[tuple[Row, str, str]]:
        """Keeps the rows that are not duplicates. Yields (row, filter, reason) for each row; the
        filter of a kept row is empty.
        """
        batch = Batch(self._near, [row.sample for row in rows]) if self._near else None
        for place, row in enumerate(rows):
            if reason := self.copy_of(row.sample):
                yield row, "duplicate", reason
                continue
            duplicate = batch.near_duplicate(place) if batch else None
            if duplicate is not None:
                yield row, "near_duplicate", self._place(duplicate)
                continue
            yield row, "", ""
            if self._config.exact:
                self._exact[row.sample.key] = len(self)
            shingles = b""
            if batch:
                batch.keep(place)
                shingles = row.sample.shingles.tobytes()
            os.pwrite(self._file.fileno(), shingles, self._ends[-1])
            self._ends.append(self._ends[-1] + len(shingles))
        if batch:
            batch.close()

    def _place(self, number: int) -> str:
        return f"as {self._name}, line {number + 1}"
