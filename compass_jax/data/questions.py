"""The questions of RL and evaluation, before tokenisation: those of reasoning-gym's datasets, of
files, and of a user's tasks.

1. Every source gives its distinct questions (`questions`), the same for the same configuration and
   seed. Two rows are the same where all their messages are, character by character: white space is
   part of code, and the system turn of the task.
2. A hash of the question's text alone (of a pair to be judged: of what it answers) decides whether
   it is held out, so neither another seed nor another source with the same question can move it
   into training; where there are `eval_sources`, their questions are held out, and no others; those
   of `eval_sets` always are, and so are the files of a source's test or validation split
   (splits.py), instead of a part of its questions. White space is normalised there, and system
   turns are left out, so that rows which differ in these alone fall on the same side: no question
   is in both splits.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.config import DataConfig, FileSource, ProceduralSource, TaskSource
from compass_jax.config.errors import of_file
from compass_jax.config.verifiers import VERDICT, pairs
from compass_jax.data.asked import answer_of, asked_of, labels_of
from compass_jax.data.files import (
    INSTRUCTIONS,
    DataError,
    check_messages,
    field_of,
    label_of,
    read_rows,
)
from compass_jax.data.formats import TURNS, Reading, open_format, reference, tools_of, turns_of
from compass_jax.data.preferences import Asked, asked_in_both_orders
from compass_jax.data.procedural import distinct_entries, normalised
from compass_jax.data.splits import describe_splits, evaluation_files, split_files
from compass_jax.records import stable_id
from compass_jax.tasks import Task
from compass_jax.tasks.rows import LABELS, encode_row
from compass_jax.tasks.task import load_task

logger = logging.getLogger(__name__)
Tell = Callable[[str], None]  # shows a person one line
EVALUATED = ("eval_sources", "eval_sets")
OVERLAP = "overlap/training"  # the label of a set's question that `sources` have too


@dataclass(frozen=True)
class Question:
    """A question before tokenisation."""

    id: int
    source: int
    label: str
    text: str
    messages: tuple[dict[str, Any], ...]  # what the chat template gets
    answer: str  # the reference, as logs show it
    row: str  # what the verifier reads, as JSON (tasks/rows.py)
    heldout: bool
    asks: str  # the text that decides whether it is held out: two orders of a pair ask the same
    labels: tuple[str, ...] = ()  # "domain/algebra"
    tools: tuple[dict[str, Any], ...] = ()  # what the chat template gets beside the messages
    turns: int = 0  # most turns of the model, where an environment answers it
    entry: dict[str, Any] | None = None  # the procedural dataset's own
    place: str = field(default="", compare=False)  # "rows.jsonl, line 3"


def is_heldout(question: str, heldout_frac: float) -> bool:
    """Whether a question belongs to the held-out split: a hash of its text, white space normalised,
    and of nothing else.
    """
    digest = hashlib.blake2b(b"held-out split:" + normalised(question).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") % 10_000 < heldout_frac * 10_000


def once(tell: Tell) -> Tell:
    """Returns a `tell` that passes each line on once."""
    said: set[str] = set()

    def told(line: str) -> None:
        if line not in said:
            said.add(line)
            tell(line)

    return told


def questions(config: DataConfig, seed: int, tell: Tell = logger.warning) -> list[Question]:
    """Returns the questions of all sources, both splits, in a fixed order: of `eval_sources`, of
    `sources`, of `eval_sets`; distinct within a source; ids distinct overall. A question of
    `eval_sources` is in no other, one of `eval_sets` is not trained on; there it has the label
    OVERLAP where `sources` have it too.

    `tell` gets a line for each source with rows that were left out, and for each file whose columns
    were recognised.
    """
    found = evaluation_questions(config, seed, tell)
    sets = []
    for one, place in zip(config.eval_sets, config.set_places(), strict=True):
        mine = [question for index in place for question in _of_source(config, index, seed, tell)]
        sets.append(at_most(one.prompts or len(mine), mine))
    used = {question.id for question in found}
    asked = {normalised(question.asks) for group in (found, *sets) for question in group}
    own = [x for i in range(len(config.sources)) for x in _of_source(config, i, seed, tell)]
    # a split by name may hold out what another file or source would train on
    asked |= {normalised(question.asks) for question in own if question.heldout}
    training, both, overlap = 0, 0, set[str]()
    for question in own:
        training += not question.heldout
        if not question.heldout and (text := normalised(question.asks)) in asked:
            both += 1
            overlap.add(text)
        else:
            found.append(_numbered(question, used))
    if both:
        where = " and ".join(f"data.{name}" for name in EVALUATED if getattr(config, name))
        tell(
            f"{both} of {training} training questions are in {where or 'the held-out files'} too;"
            " they are left out of the training"
        )
    for one, group in zip(config.eval_sets, sets, strict=True):
        seen = [normalised(question.asks) in overlap for question in group]
        if any(seen):
            tell(
                f"data.eval_sets, {one.name}: {sum(seen)} of its {len(group)} questions are in"
                " data.sources too; weights that were trained without this set may know them"
            )
        for question, known in zip(group, seen, strict=True):
            label = (OVERLAP,) * known
            found.append(_numbered(replace(question, labels=question.labels + label), used))
    return found


def evaluation_questions(config: DataConfig, seed: int, tell: Tell) -> list[Question]:
    """Returns the questions of `data.eval_sources`; `tell` as in `questions`."""
    used: set[int] = set()
    first = len(config.sources)
    return [
        _numbered(question, used)
        for index in range(first, first + len(config.eval_sources))
        for question in _of_source(config, index, seed, tell)
    ]


def _numbered(question: Question, used: set[int]) -> Question:
    """Returns the question with an id that is not in `used`, and adds the id."""
    number = question.id
    while number in used:  # a 32-bit collision, or one label used by two sources
        number = (number + 1) % 2**32
    used.add(number)
    return replace(question, id=number)


def _of_source(config: DataConfig, index: int, seed: int, tell: Tell) -> Iterator[Question]:
    key, source = config.keyed_sources()[index]
    if isinstance(source, ProceduralSource):
        return _procedural(config, index, source, seed)
    if isinstance(source, TaskSource):
        task = load_task(source.task, f"{key}.task")
        label = source.label or source.task.rpartition(":")[2]
        kind = _Kind(label, source.task, task.verify == "math", task.turns, bool(source.gold))
        return _distinct(config, index, kind, _task_rows(source.task, task, key, seed), tell)
    return _of_files(config, index, source, key, tell)


def _of_files(
    config: DataConfig, index: int, source: FileSource, key: str, tell: Tell
) -> Iterator[Question]:
    """Yields the questions of files: of a source to train on, those of its test or validation split
    are held out, and no others of this source.
    """
    compared, labelled = source.verifier == "math", bool(source.gold)
    kind = _Kind(source.label or label_of(source.path), source.path, compared, 0, labelled)

    def read(files: list[str]) -> Iterator[Question]:
        rows = _file_rows(source, files, key, compared, tell)
        return _distinct(config, index, kind, rows, tell)

    if index >= len(config.sources):
        yield from read(evaluation_files(source.path))
        return
    files = split_files(source.path)
    if line := describe_splits(source.path, evaluates=not config.eval_sources):
        tell(line)
    for question in read(files.heldout):
        yield replace(question, heldout=True)
    for question in read(files.training):
        yield replace(question, heldout=False) if files.split else question


def _procedural(
    config: DataConfig, index: int, source: ProceduralSource, seed: int
) -> Iterator[Question]:
    label = source.label or source.dataset
    for entry in distinct_entries(source, seed):
        text = entry["question"]
        prompt = f"{source.instruction}\n{text}" if source.instruction else text
        messages = [{"role": "user", "content": prompt}]
        # some tasks have many right answers and name none
        answer = "" if entry["answer"] is None else str(entry["answer"])
        row = _encoded(entry, f"reasoning-gym's {source.dataset}")
        yield _question(config, index, label, text, messages, answer=answer, row=row, entry=entry)


class _Kind(NamedTuple):
    """What is the same for all rows of a source."""

    label: str
    place: str  # of the source, in messages
    compared: bool  # `math` compares with the answer, and reads nothing else
    turns: int = 0
    labelled: bool = False  # a gold label is made beside, of any column


class _Row(NamedTuple):
    """A row of a file or a task."""

    where: str
    prompt: Any
    answer: Any  # the reference; None: there is none
    row: Mapping[str, Any]  # with all that was read of it
    columns: tuple[str, str] = ("prompt", "answer")  # their names, in messages
    asks: str = ""  # what it asks, where that is not all of the prompt
    labels: tuple[str, ...] = ()  # beside those of its columns


def _distinct(
    config: DataConfig, index: int, kind: _Kind, rows: Iterable[_Row], tell: Tell
) -> Iterator[Question]:
    """The distinct prompts of rows. Of those with the same messages the first counts.

    A second answer to the same prompt is a contradiction that the rows alone cannot settle. It is
    told with its place and does not end the run: one of 100,000 rows would make the file useless,
    and to drop the first too would let a bad row remove a good one.
    """
    first: dict[str, tuple[str, str, str]] = {}  # messages -> what is judged, answer, place
    repeats = 0
    contradictions: list[str] = []
    for row in rows:
        where, question = row.where, _of_row(config, index, kind, row)
        asked = json.dumps([*question.messages, *question.tools])
        key = hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()
        judged = question.answer if kind.compared else question.row
        if key not in first:
            first[key] = (judged, question.answer, where)
            yield question
        elif first[key][0] == judged:
            repeats += 1
        else:
            _, answer, place = first[key]
            answers = f"{answer!r:.40} in {place}, {question.answer!r:.40} in {where}"
            contradictions.append(f"{question.text!r:.60} ({answers})")
    if repeats:
        tell(
            f"{kind.place}: {repeats} rows repeat an earlier prompt with its answer; they "
            "are left out"
        )
    if contradictions:
        tell(
            f"{kind.place}: {len(contradictions)} rows give another answer to an earlier "
            f"prompt; the first answer is used: {contradictions[0]}"
        )


def _of_row(config: DataConfig, index: int, kind: _Kind, found: _Row) -> Question:
    where, row = found.where, found.row
    text, messages = asked_of(found.prompt, f"{where}, field {found.columns[0]!r}")
    place, answer, read = f"{where}, field {found.columns[1]!r}", "", row
    if found.answer is not None:
        answer = answer_of(found.answer, place, kind.compared)
        only = kind.compared and not kind.labelled
        read = {"answer": found.answer} if only else {**row, "answer": found.answer}
    return _question(
        config,
        index,
        kind.label,
        text,
        messages,
        answer=answer,
        row=_encoded(read, where),
        asks=found.asks or text,
        labels=(*labels_of(row, where), *found.labels),
        tools=tuple(tools_of(row, where)),
        turns=kind.turns,
        place=where,
    )


def _encoded(row: Mapping[str, Any], where: str) -> str:
    try:
        return encode_row(row)
    except TypeError as error:
        raise DataError(f"{where}: {error}; leave it out, or write it as text") from error


def _file_rows(
    source: FileSource, files: list[str], key: str, compared: bool, tell: Tell
) -> Iterator[_Row]:
    if VERDICT in dict(pairs(source.verifier)):
        yield from map(_pair_row, asked_in_both_orders(source.path, lambda _: files))
        return
    named = (source.prompt_field, source.answer_field)
    settings = (f"{key}.prompt_field", f"{key}.answer_field")
    for path in files:
        reading, fields = open_format(path, "answer", named, settings, tell, compared)
        lean = compared and not source.gold and reading.make is None
        optional = (*LABELS, "tools", "system") if lean else None
        for where, row in read_rows(path, fields, optional):
            made = row if reading.make is None else reading.make(row, where, path)
            yield _file_row(reading, where, made, compared, settings[1])


def _pair_row(asked: Asked) -> _Row:
    pair, labels = asked.pair, (f"verdict/{asked.verdict}", f"order/{asked.order}")
    return _Row(pair.where, asked.messages, asked.verdict, {}, asks=pair.question, labels=labels)


def _file_row(
    reading: Reading, where: str, row: dict[str, Any], compared: bool, setting: str
) -> _Row:
    place = f"{where}, field {reading.prompt!r}"
    prompt = turns_of(field_of(row, reading.prompt), row, place)
    if reading.target != TURNS:
        answer = reference(field_of(row, reading.target)) if reading.target else row.get("answer")
        return _Row(where, prompt, answer, row, (reading.prompt, reading.target or "answer"))
    asked = check_messages(prompt, place)
    answer = None
    if asked[-1]["role"] == "assistant":
        answer, asked = reference(asked[-1]["content"]), asked[:-1]
    if compared and answer is None:
        raise DataError(
            f"{place}: ends with what is asked, so that there is no reference answer; add the"
            f" assistant's turn, or name the column that has it in {setting}"
        )
    return _Row(where, asked, answer, row, (reading.prompt, reading.prompt))


def _task_rows(name: str, task: Task, key: str, seed: int) -> Iterator[_Row]:
    """The rows of a task, each after its place."""
    file = Path(getattr(getattr(task.prompts, "__code__", None), "co_filename", name))
    number = 0
    with of_file(file):
        rows = iter(task.prompts(seed))
    while True:
        with of_file(file):
            row = next(rows, None)
        if row is None:
            break
        number += 1
        place = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{place}: a {type(row).__name__}; it must be a mapping")
        for column in ("prompt", *(("answer",) if task.verify == "math" else ())):
            if row.get(column) is None:
                raise DataError(
                    f"{place}: no {column!r} (columns: {', '.join(map(str, row))}); add it"
                )
        yield _Row(place, row["prompt"], row.get("answer"), row)
    if not number:
        raise DataError(
            f"{key}.task = {name!r}: prompts({seed}) gave no row; a task needs one prompt at least"
        )


def _question(
    config: DataConfig,
    index: int,
    label: str,
    text: str,
    asked: Sequence[dict[str, Any]],
    **fields: Any,
) -> Question:
    """Returns a question with its id, its side and the system prompt; `fields`: the others."""
    messages = tuple(asked)
    if config.system_prompt and messages[0]["role"] not in INSTRUCTIONS:
        messages = ({"role": "system", "content": config.system_prompt}, *messages)
    own_system = [message["content"] for message in asked if message["role"] in INSTRUCTIONS]
    asks = fields.pop("asks", text)
    heldout = index >= len(config.sources) or (
        not config.eval_sources and is_heldout(asks, config.heldout_frac)
    )
    identity = stable_id("\n".join([label, *own_system, text]))
    return Question(identity, index, label, text, messages, heldout=heldout, asks=asks, **fields)


def at_most(wanted: int, available: Sequence[Question]) -> list[Question]:
    """Returns the first `wanted` questions or fewer, in their order; each label has its share."""
    left = _shares(Counter(one.label for one in available), wanted)
    chosen = []
    for one in available:
        if left[one.label] > 0:
            left[one.label] -= 1
            chosen.append(one)
    return chosen


def _shares(available: Counter[str], wanted: int) -> dict[str, int]:
    """Apportions `wanted` over labels by their counts and largest remainders; ties go to the
    earlier label.
    """
    total = sum(available.values())
    wanted = min(wanted, total)
    shares = {label: wanted * count // total for label, count in available.items()}
    by_remainder = sorted(available, key=lambda label: -(wanted * available[label] % total))
    for label in by_remainder[: wanted - sum(shares.values())]:
        shares[label] += 1
    return shares


# ---- questions that SFT rows ask -----------------------------------------------------------------


def forms(question: Question) -> Iterable[str]:
    """Returns the normalised texts that a row may ask this question by."""
    return map(normalised, (question.text, question.asks, question.messages[-1]["content"]))


def heldout_texts(pool: Iterable[Question]) -> set[str]:
    """Returns the texts by which an example may ask a held-out question."""
    return {text for question in pool if question.heldout for text in forms(question)}


def sets_asked(config: DataConfig, pool: Collection[Question], asked: Collection[str]) -> str:
    """Returns a line with the count of each evaluation set's questions that the SFT rows ask;
    empty without sets.

    Args:
        pool: all questions, as `questions` returns them.
        asked: those of `heldout_texts` that the rows ask.
    """
    counts = []
    for one, place in zip(config.eval_sets, config.set_places(), strict=True):
        mine = [question for question in pool if question.source in place]
        met = sum(any(text in asked for text in forms(question)) for question in mine)
        counts.append(f"{met:,} of the {len(mine):,} questions of {one.name}")
    if not counts:
        return ""
    return f"data.eval_sets: the SFT rows ask {', '.join(counts)}; rows that ask one are left out"


def sets_not_counted(config: DataConfig) -> str:
    """Returns the line for rows that are read by record, which are not counted at the start."""
    if not config.eval_sets:
        return ""
    names = ", ".join(one.name for one in config.eval_sets)
    return (
        f"data.eval_sets, {names}: it was not counted how many of their questions the SFT rows ask,"
        " because the rows are read by record; one that asks one is left out when it is taken"
    )
