"""Supervised examples that are read by record: a row is read and tokenised when it is taken, so
memory does not grow with the files.

Rows are in one order over all processes (data/stream.py). Each process reads and tokenises its own
part of the rows that are taken, every n-th of them where there are n, and gets the others' tokens:
so the batches are the same for any number of processes. Rows that cannot be used are met when they
are taken; rows that repeat others are not looked for.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from compass_jax.config import RunConfig
from compass_jax.data.by_record import open_rows
from compass_jax.data.files import BadRows, DataError, row_of
from compass_jax.data.heldout import heldout_texts, sets_not_counted
from compass_jax.data.questions import Tell, questions
from compass_jax.data.raw import CODECS
from compass_jax.data.sft import (
    BESIDE,
    Conversation,
    SFTExample,
    asks,
    conversation_of,
    encoded,
    labelled_files,
    other_conversations,
    sft_examples,
    sft_reading,
)
from compass_jax.data.splits import tell_splits
from compass_jax.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LARGE_BYTES = 256 * 2**20  # from here on files are read by record, where nobody says how
PACKED = 4  # packed files count so many times: text is packed to about a quarter

TOO_LONG, HELDOUT, BLANK, BAD = "too_long", "heldout", "blank", "bad"


class Team(NamedTuple):
    """The processes that read together. `exchange` gives every process's payload, in their order;
    all call it at the same place.
    """

    process: int
    processes: int
    exchange: Callable[[bytes], list[bytes]]


ALONE = Team(0, 1, lambda payload: [payload])


class LeftOut(NamedTuple):
    """Why a row gives no example."""

    reason: str  # TOO_LONG, HELDOUT, BLANK or BAD
    text: str = ""  # of a bad one


def sft_records(
    config: RunConfig, tokenizer: Tokenizer, tell: Tell = logger.warning, team: Team = ALONE
) -> tuple[list[SFTExample] | StreamedExamples, dict[str, int]]:
    """The examples of `config.sft`, in a list or by record as `sft.reading` says, and their counts:
    those of `sft_examples`, or "examples" (the rows) and "bytes" (of their files).

    Errors are those of `sft_examples`; of rows that are read by record, those at the files' ends.
    """
    if config.sft.reading == "memory" or (
        config.sft.reading == "auto" and _bytes(config, PACKED) <= LARGE_BYTES
    ):
        return sft_examples(config, tokenizer, tell)
    records = StreamedExamples(config, tokenizer, tell, team)
    counts = {"examples": len(records), "bytes": _bytes(config)}
    tell(f"{work_in_words(counts)}; repeats among them are not looked for")
    return records, counts


def work_in_words(counts: dict[str, int]) -> str:
    """What a run learns from, of its counts: "3,400 examples, 96,000 tokens"."""
    if "tokens" in counts:
        return f"{counts['examples']:,} examples, {counts['tokens']:,} tokens"
    size = f"{counts['bytes'] / 2**30:.2f} GiB"
    return f"{counts['examples']:,} rows ({size} of files), read by record"


def _bytes(config: RunConfig, packed: int = 1) -> int:
    """Bytes of `sft.files` as they lie there, packed ones counted so many times; a file that is
    missing has none.
    """
    total = 0
    for _, path in labelled_files(config):
        if os.path.isfile(path):
            times = packed if path.endswith((*CODECS, ".parquet")) else 1
            total += os.path.getsize(path) * times
    return total


class StreamedExamples:
    """The examples of `config.sft` by number (stream.Records), those of one label after each other.

    `sizes` has the rows of each label; `left_out` counts, by reason, the rows that were read and
    gave no example.
    """

    def __init__(self, config: RunConfig, tokenizer: Tokenizer, tell: Tell, team: Team):
        tell_splits((*config.sft.files, *config.sft.preferences), tell)
        pool = questions(config.data, config.seed, tell)
        self._asked = heldout_texts(pool)
        if line := sets_not_counted(config.data):
            tell(line)
        self._tokenizer, self._longest = tokenizer, config.sft.buckets[-1]
        self._team, self._bad = team, BadRows(config.sft.bad_rows == "skip", tell)
        self.left_out: Counter[str] = Counter()
        parts: list[_Part] = []
        for label, path in labelled_files(config):
            parts.append(_File(config, label, path, tell))
        others: dict[str, list[Conversation]] = {}
        for row in other_conversations(config, pool, tell):
            others.setdefault(row.label, []).extend([row] * row.times)
        parts += [_Listed(label, rows) for label, rows in others.items()]
        if not parts:
            raise DataError("there is nothing to learn from: sft.files and its like name nothing")
        self._parts = sorted(parts, key=lambda part: part.label)
        self._ends = list(accumulate(map(len, self._parts)))
        self.sizes: dict[str, int] = {}
        for part in self._parts:
            self.sizes[part.label] = self.sizes.get(part.label, 0) + len(part)

    def __len__(self) -> int:
        return self._ends[-1]

    def keys(self) -> Iterator[str]:
        """One for each file, the same for the same content, and one for each other label."""
        for part in self._parts:
            yield f"{part.label} {len(part)} {part.key}"

    def read(self, indices: Sequence[int]) -> list[SFTExample | None]:
        """The examples of these rows, the same in every process; None for one that is left out.

        Raises DataError, in every process, for a bad row that is not to be left out, and where a
        file cannot be read any more.
        """
        team = self._team
        payloads = team.exchange(self._payload(indices[team.process :: team.processes]))
        found: list[SFTExample | LeftOut | None] = [None] * len(indices)
        for process, payload in enumerate(payloads):
            labels = [self._at(i)[0].label for i in indices[process :: team.processes]]
            found[process :: team.processes] = _unpacked(payload, labels)
        for one in found:
            if isinstance(one, LeftOut):
                self.left_out[one.reason] += 1
                if one.reason == BAD:
                    self._bad(DataError(one.text))
        return [one if isinstance(one, SFTExample) else None for one in found]

    def _payload(self, indices: Sequence[int]) -> bytes:
        """The examples of these rows for every process, or the error that reading them ended in."""
        try:
            return _packed(self._examples(indices))
        except DataError as error:
            return json.dumps({"error": str(error)}).encode() + b"\n"

    def _examples(self, indices: Sequence[int]) -> list[SFTExample | LeftOut]:
        rows = self._rows(indices)
        taught = [row for row in rows if isinstance(row, Conversation)]
        problems: list[DataError] = []
        examples = encoded(taught, self._tokenizer, problems.append)
        found: list[SFTExample | LeftOut] = []
        for row in rows:
            example = next(examples) if isinstance(row, Conversation) else row
            if example is None:
                example = LeftOut(BAD, str(problems[-1]))
            elif isinstance(example, SFTExample) and example.longest > self._longest:
                example = LeftOut(TOO_LONG)
            found.append(example)
        return found

    def _rows(self, indices: Sequence[int]) -> list[Conversation | LeftOut]:
        """What these rows say; the rows of one file are read together."""
        places = [self._at(i) for i in indices]
        rows: dict[int, Conversation | LeftOut] = {}
        for part in dict.fromkeys(part for part, _ in places):
            wanted = [n for n, (one, _) in enumerate(places) if one is part]
            rows.update(zip(wanted, part.read([places[n][1] for n in wanted]), strict=True))
        for n, row in rows.items():
            if isinstance(row, Conversation) and self._asked.intersection(asks(row)):
                rows[n] = LeftOut(HELDOUT)
        return [rows[n] for n in range(len(indices))]

    def _at(self, index: int) -> tuple[_Part, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


class _Listed:
    """Conversations of one label that are in memory."""

    def __init__(self, label: str, rows: Sequence[Conversation]):
        self.label = label
        self._rows = rows
        said = json.dumps([[row.messages, list(row.tools)] for row in rows], default=str)
        self.key = hashlib.blake2b(said.encode(), digest_size=16).hexdigest()

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Conversation | LeftOut]:
        return [self._rows[i] for i in indices]


class _File:
    """The conversations of one file."""

    def __init__(self, config: RunConfig, label: str, path: str, tell: Tell):
        self.label = label
        self._system = config.data.system_prompt
        self._reading, self._fields = sft_reading(config, path, tell)
        self._rows = open_rows(path, self._fields, BESIDE, config.data.cache)
        self.key = self._rows.key

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, indices: Sequence[int]) -> list[Conversation | LeftOut]:
        found: list[Conversation | LeftOut] = []
        for where, raw in self._rows.read(indices):
            try:
                row = row_of(where, raw, self._fields)
                if row is None:
                    found.append(LeftOut(BLANK))
                else:
                    found.append(
                        conversation_of(self._reading, where, row, self.label, self._system)
                    )
            except DataError as error:
                found.append(LeftOut(BAD, str(error)))
        return found


_Part = _Listed | _File


def _packed(examples: Sequence[SFTExample | LeftOut]) -> bytes:
    """A line of JSON, then all tokens, then all masks; `sizes` are those of the sequences."""
    whole = [one for one in examples if isinstance(one, SFTExample)]
    head: dict[str, Any] = {
        "sizes": [
            (one.sizes or [one.size]) if isinstance(one, SFTExample) else None for one in examples
        ],
        "left_out": [list(one) for one in examples if isinstance(one, LeftOut)],
    }
    tokens = [np.asarray(one.tokens, "<i4").tobytes() for one in whole]
    masks = [np.asarray(one.mask, np.uint8).tobytes() for one in whole]
    return b"".join([json.dumps(head).encode(), b"\n", *tokens, *masks])


def _unpacked(payload: bytes, labels: Sequence[str]) -> list[SFTExample | LeftOut]:
    """What `_packed` was given. Raises the DataError that reading ended in."""
    line, _, body = payload.partition(b"\n")
    head = json.loads(line)
    if "error" in head:
        raise DataError(head["error"])
    total = sum(sum(sizes) for sizes in head["sizes"] if sizes is not None)
    left_out = iter(head["left_out"])
    tokens = np.frombuffer(body, "<i4", count=total)
    masks = np.frombuffer(body, np.uint8, offset=tokens.nbytes).astype(bool)
    found: list[SFTExample | LeftOut] = []
    start = 0
    for label, sizes in zip(labels, head["sizes"], strict=True):
        if sizes is None:
            found.append(LeftOut(*next(left_out)))
            continue
        part = slice(start, start + sum(sizes))
        several = tuple(sizes) if len(sizes) > 1 else ()
        found.append(SFTExample(tokens[part].astype(np.int32), masks[part], label, several))
        start += sum(sizes)
    return found
