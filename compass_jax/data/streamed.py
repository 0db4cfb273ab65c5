"""SFT examples as a stream: from a list in memory, or read by record in constant memory.

Threads read and tokenise rows ahead of the update that takes them. Each process prepares its part
of the rows and receives the others' tokens, so the batches are the same for any number of
processes. Duplicate rows are not detected.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config import DataConfig, ScoredConfig, SFTConfig
from compass_jax.data.files import CODECS, BadRows, DataError, FileRows, Raw, row_of
from compass_jax.data.questions import Tell, heldout_texts, questions, sets_not_counted
from compass_jax.data.sft import (
    BESIDE,
    Conversation,
    SFTExample,
    asks,
    conversation_of,
    example_of,
    labelled_files,
    other_conversations,
    sft_examples,
    sft_reading,
)
from compass_jax.data.splits import tell_splits
from compass_jax.data.stream import ALONE, LeftOut, Share, ShuffledStream, Workers
from compass_jax.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LARGE_BYTES = 256 * 2**20  # sft.reading = "auto" reads by record from this size on
PACKED = 4  # assumed compression ratio of packed files

TOO_LONG, HELDOUT, BLANK, BAD, UNREADABLE = "too_long", "heldout", "blank", "bad", "unreadable"


def sft_records(
    sft: SFTConfig,
    scored: ScoredConfig,
    tokenizer: Tokenizer,
    tell: Tell = logger.warning,
) -> tuple[list[SFTExample] | StreamedExamples, dict[str, int]]:
    """Returns the examples of `sft`, as a list or by record according to `sft.reading`, and
    their counts.

    The counts are those of `sft_examples`, or "examples" (number of rows) and "bytes" (size of the
    files). Raises the errors of `sft_examples`; for rows read by record only those of the last row
    of each file.
    """
    if sft.reading == "memory" or (sft.reading == "auto" and _bytes(sft, PACKED) <= LARGE_BYTES):
        return sft_examples(sft, scored, tokenizer, tell)
    records = StreamedExamples(sft, scored, tokenizer, tell)
    counts = {"examples": len(records), "bytes": _bytes(sft)}
    tell(f"{work_in_words(counts)}; repeats among them are not looked for")
    return records, counts


def work_in_words(counts: Mapping[str, int]) -> str:
    """Returns the size of a run's data from its counts: "3,400 examples, 96,000 tokens"."""
    if "tokens" in counts:
        return f"{counts['examples']:,} examples, {counts['tokens']:,} tokens"
    size = f"{counts['bytes'] / 2**30:.2f} GiB"
    return f"{counts['examples']:,} rows ({size} of files), read by record"


def _bytes(sft: SFTConfig, packed: int = 1) -> int:
    """Returns the total size of `sft.files`, compressed ones counted `packed` times."""
    return sum(
        os.path.getsize(path) * (packed if path.endswith((*CODECS, ".parquet")) else 1)
        for _, path in labelled_files(sft)
        if os.path.isfile(path)
    )


class ExampleStream(ShuffledStream[Any]):
    """An endless stream of examples in shuffled order.

    Args:
        examples: records, or a list of examples with a `key` each and, for weights, a `label`.
        seed: the seed of the order.
        weights: (label, weight) of every label (`sft.weights`). If empty, each example comes once
            per pass.
        team, read_ahead: as in `ShuffledStream`, for records. Each process holds a whole list.
    """

    def __init__(
        self,
        examples: Sequence[Json] | StreamedExamples,
        seed: int,
        weights: Sequence[tuple[str, float]] = (),
        team: Workers = ALONE,
        read_ahead: int = 0,
    ):
        self.left_out: Counter[str] = Counter()
        self._records = examples if isinstance(examples, StreamedExamples) else None
        if isinstance(examples, StreamedExamples):
            sizes, keys = examples.sizes, examples.keys()
        else:
            if weights:  # the sort is stable; without weights the files' order is kept
                examples = sorted(examples, key=lambda example: example.label)
            sizes = Counter(example.label for example in examples) if weights else Counter()
            keys = (example.key for example in examples)
            team, read_ahead = ALONE, 0
        super().__init__(examples, keys, seed, _shares(weights, sizes), read_ahead, team)

    def next_batch(self, n: int) -> list[Json]:
        """Returns the next `n` examples."""
        return [example for example, _ in self.take(n)]

    def leave_out(self, item: LeftOut) -> None:
        """Counts a row without an example. Raises DataError if it must not be skipped."""
        assert self._records is not None
        if item.reason == UNREADABLE:
            raise DataError(item.text)
        self.left_out[item.reason] += 1
        if item.reason == BAD:
            self._records.bad(DataError(item.text))

    def pack(self, item: SFTExample | LeftOut) -> Json:
        """Returns an example as strings, bytes and numbers."""
        if isinstance(item, LeftOut):
            return list(item)
        return [item.label, item.tokens.tobytes(), item.mask.tobytes(), item.sizes]

    def unpack(self, packed: Any) -> SFTExample | LeftOut:
        """Inverts `pack`."""
        # A dropped row has two fields, an example four.
        if len(packed) == len(LeftOut._fields):
            return LeftOut(*packed)
        label, tokens, mask, sizes = packed
        arrays = np.frombuffer(tokens, np.int32), np.frombuffer(mask, bool)
        return SFTExample(*arrays, label, tuple(sizes))

    def metrics(self) -> dict[str, float]:
        """Returns the share of dropped rows and the number of bad ones; empty for a list."""
        if self._records is None:
            return {}
        share = self.left_out.total() / max(self.position, 1)
        return {"data/left_out_frac": share, "data/bad_rows": float(self.left_out["bad"])}

    def state(self) -> JsonObject:
        """Returns the state of ShuffledStream and the counts of dropped rows."""
        counts = {} if self._records is None else {"left_out": dict(self.left_out)}
        return super().state() | counts

    def restore(self, state: JsonObject) -> None:
        """Restores `state`; see ShuffledStream."""
        super().restore(state)
        self.left_out = Counter(state.get("left_out"))


def _shares(weights: Sequence[tuple[str, float]], sizes: Mapping[str, int]) -> list[Share]:
    """Returns the share of each label. Raises DataError unless labels and weights correspond."""
    weight_of = dict(weights)
    if weights and set(weight_of) != set(sizes):
        raise DataError(
            f"sft.weights names {', '.join(sorted(weight_of))}, and the examples' labels are"
            f" {', '.join(sorted(sizes))}: give each of them a weight, and no other; a file that"
            " has its label in common with another is named as sft.files writes it"
        )
    return [Share(size, weight_of[label]) for label, size in sizes.items()] if weights else []


class _Part(NamedTuple):
    """Rows of one label: of a file, or conversations in memory."""

    label: str
    rows: Any  # a FileRows or a list
    key: str
    read: Callable[[Any], Conversation | None]  # None for a blank line


class StreamedExamples:
    """The examples of `sft` by index, grouped by label.

    `sizes` holds the number of rows of each label. `bad` receives the DataError of a row that
    cannot be used.
    """

    def __init__(self, sft: SFTConfig, scored: ScoredConfig, tokenizer: Tokenizer, tell: Tell):
        tell_splits((*sft.files, *sft.preferences), tell)
        pool = questions(scored.data, scored.seed, tell)
        self._asked = heldout_texts(pool)
        if line := sets_not_counted(scored.data):
            tell(line)
        self._tokenizer, self._longest = tokenizer, sft.buckets[-1]
        self.bad = BadRows(sft.bad_rows == "skip", tell)
        parts = [_file(sft, scored.data, label, path, tell) for label, path in labelled_files(sft)]
        listed: dict[str, list[Conversation]] = {}
        tag = scored.rewards.answer_tag
        for row in other_conversations(sft, scored.data, tag, pool, tell):
            listed.setdefault(row.label, []).extend([row] * row.times)
        for label, rows in listed.items():
            content = json.dumps([[row.messages, list(row.tools)] for row in rows], default=str)
            key = hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
            parts.append(_Part(label, rows, key, lambda row: row))
        if not parts:
            raise DataError("there is nothing to learn from: sft.files and its like name nothing")
        self._parts = sorted(parts, key=lambda part: part.label)
        self._ends = list(accumulate(len(part.rows) for part in self._parts))
        self.sizes: Counter[str] = Counter()
        for part in self._parts:
            self.sizes[part.label] += len(part.rows)

    def __len__(self) -> int:
        return self._ends[-1]

    def keys(self) -> Iterator[str]:
        """Yields a content key for each file and for each other label."""
        for part in self._parts:
            yield f"{part.label} {len(part.rows)} {part.key}"

    def __getitem__(self, index: int) -> SFTExample | LeftOut:
        number = bisect_right(self._ends, index)
        part = self._parts[number]
        try:
            raw = part.rows[index - self._ends[number] + len(part.rows)]
        except DataError as error:
            return LeftOut(UNREADABLE, str(error))
        try:
            row = part.read(raw)
            if row is None:
                return LeftOut(BLANK)
            if self._asked.intersection(asks(row)):
                return LeftOut(HELDOUT)
            example = example_of(row, self._tokenizer)
        except DataError as error:
            return LeftOut(BAD, str(error))
        return LeftOut(TOO_LONG) if example.longest > self._longest else example


def _file(sft: SFTConfig, data: DataConfig, label: str, path: str, tell: Tell) -> _Part:
    reading, fields = sft_reading(sft, path, tell)
    rows = FileRows(path, fields, BESIDE, data.cache)

    def read(placed: tuple[str, Raw]) -> Conversation | None:
        row = row_of(*placed, fields)
        if row is None:
            return None
        return conversation_of(reading, placed[0], row, label, data.system_prompt)

    return _Part(label, rows, rows.key, read)
