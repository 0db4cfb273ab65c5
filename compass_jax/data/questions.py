"""The questions of RL and evaluation before tokenisation, from reasoning-gym's datasets, files and
custom tasks.

1. Each source yields its distinct questions (`questions`), the same for the same configuration and
   seed. Two rows are equal if all their messages are, character by character: white space matters
   in code, and so does the task's system turn.
2. A hash of the question's text alone decides whether it is held out (for a pair to be judged, the
   text of the question that it answers). So neither another seed nor another source with the same
   question can move it into training. If there are `eval_sources`, exactly their questions are held
   out. Questions of `eval_sets` are always held out, and so are the files of a source's test or
   validation split (splits.py), which replace the hashed part of its questions. The hash normalises
   white space and ignores system turns, so rows that differ only in these fall on the same side,
   and no question is in both splits.
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

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.records import EPISODE, stable_id
from compass_jax.config import DataConfig, EpisodeSource, FileSource, ProceduralSource
from compass_jax.config.errors import of_file
from compass_jax.config.kinds import kinds
from compass_jax.config.verifiers import VERDICT, pairs
from compass_jax.data.benchmarks import convert
from compass_jax.data.episodes import episode_rows
from compass_jax.data.files import DataError, field_of, label_of, read_rows
from compass_jax.data.formats import TURNS, Reading, open_format, reference, tools_of, turns_of
from compass_jax.data.messages import (
    INSTRUCTIONS,
    MOST_LABEL,
    answer_of,
    asked_of,
    check_messages,
    labels_of,
)
from compass_jax.data.preferences import asked_in_both_orders
from compass_jax.data.procedural import distinct_entries, normalised
from compass_jax.data.splits import describe_splits, evaluation_files, split_files
from compass_jax.rewards.tasks import Task
from compass_jax.rewards.tasks.rows import LABELS, encode_row
from compass_jax.rewards.tasks.task import load_task

logger = logging.getLogger(__name__)
Tell = Callable[[str], None]  # reports one line to the user
EVALUATED = ("eval_sources", "eval_sets")
OVERLAP = "overlap/training"  # the label of a set's question that is also in `sources`


@dataclass(frozen=True)
class Question:
    """A question before tokenisation."""

    id: int
    source: int
    label: str
    text: str
    messages: tuple[JsonObject, ...]  # input of the chat template
    answer: str  # the reference as shown in logs
    row: str  # input of the verifier, as JSON (rewards/tasks/rows.py)
    heldout: bool
    asks: str  # the text that decides whether it is held out; equal for both orders of a pair
    labels: tuple[str, ...] = ()  # "domain/algebra"
    tools: tuple[JsonObject, ...] = ()  # tools for the chat template
    turns: int = 0  # as in Prompt
    entry: JsonObject | None = None  # the entry of the procedural dataset
    place: str = field(default="", compare=False)  # "rows.jsonl, line 3"


def is_heldout(question: str, heldout_frac: float) -> bool:
    """Returns whether a hash of a question's text puts it into the held-out split."""
    digest = hashlib.blake2b(b"held-out split:" + normalised(question).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") % 10_000 < heldout_frac * 10_000


def unique_notices(tell: Tell) -> Tell:
    """Returns a `tell` that forwards each distinct line once."""
    lines: set[str] = set()

    def tell_once(line: str) -> None:
        if line not in lines:
            lines.add(line)
            tell(line)

    return tell_once


def questions(config: DataConfig, seed: int, tell: Tell = logger.warning) -> list[Question]:
    """Returns the questions of all sources and both splits in a fixed order.

    The order is `eval_sources`, `sources`, `eval_sets`. Questions are distinct within a source, and
    ids are distinct overall. A question of `eval_sources` is removed from `sources`, and a question
    of `eval_sets` from training. In its set it has the label OVERLAP if `sources` contain it too.

    `tell` receives a line for each source with dropped rows, and for each file whose format was
    detected.
    """
    result = evaluation_questions(config, seed, tell)
    sets = []
    for one, place in zip(config.eval_sets, config.set_places(), strict=True):
        members = [x for index in place for x in _of_source(config, index, seed, tell)]
        sets.append(at_most(one.prompts or len(members), members))
    questions = [x for i in range(len(config.sources)) for x in _of_source(config, i, seed, tell)]
    # a split by file name may hold out a question of another file or source
    heldout = [question for question in questions if question.heldout]
    evaluated = {normalised(x.asks) for group in (result, heldout, *sets) for x in group}
    training = [question for question in questions if not question.heldout]
    overlap = {normalised(question.asks) for question in training} & evaluated
    remaining = [x for x in questions if x.heldout or normalised(x.asks) not in overlap]
    if shared := len(questions) - len(remaining):
        names = [f"data.{name}" for name in EVALUATED if getattr(config, name)]
        tell(
            f"{shared} of {len(training)} training questions are in"
            f" {' and '.join(names) or 'the held-out files'} too; they are left out of the training"
        )
    result += remaining
    for one, group in zip(config.eval_sets, sets, strict=True):
        is_shared = [normalised(question.asks) in overlap for question in group]
        if any(is_shared):
            tell(
                f"data.eval_sets, {one.name}: {sum(is_shared)} of its {len(group)} questions are in"
                " data.sources too; weights that were trained without this set may know them"
            )
        for question, known in zip(group, is_shared, strict=True):
            result.append(replace(question, labels=question.labels + (OVERLAP,) * known))
    return _numbered(result)


def evaluation_questions(config: DataConfig, seed: int, tell: Tell) -> list[Question]:
    """Returns the questions of `data.eval_sources`; `tell` as in `questions`."""
    first = len(config.sources)
    indices = range(first, first + len(config.eval_sources))
    return _numbered([x for index in indices for x in _of_source(config, index, seed, tell)])


def _numbered(pool: Iterable[Question]) -> list[Question]:
    """Returns the questions with distinct ids: the next free one after a collision."""
    used: dict[int, Question] = {}
    for question in pool:
        number = question.id
        while number in used:
            number = (number + 1) % 2**32
        used[number] = replace(question, id=number)
    return list(used.values())


def _of_source(config: DataConfig, index: int, seed: int, tell: Tell) -> Iterator[Question]:
    key, source = config.keyed_sources()[index]
    if isinstance(source, ProceduralSource):
        return _procedural(_Source(config, index, source.label or source.dataset), source, seed)
    if isinstance(source, FileSource):
        return _of_files(config, index, source, key, tell)
    if isinstance(source, EpisodeSource):
        label = source.label or source.env.rpartition(":")[2]
        dropped = _DroppedLabels(tell)
        common = _Source(config, index, label, turns=EPISODE, dropped=dropped)
        return _distinct(common, source.env, _episode_rows(common, source, key, seed), tell)
    task = load_task(source.task, f"{key}.task")
    label = source.label or source.task.rpartition(":")[2]
    names = task.verify if isinstance(task.verify, Mapping) else {task.verify: 1.0}
    common = _Source(
        config,
        index,
        label,
        compared=task.verify == "math",
        labelled=bool(source.gold),
        answer_texts=_readers(names),
        turns=task.turns,
        dropped=_DroppedLabels(tell),
    )
    return _distinct(common, source.task, _task_rows(common, source.task, task, key, seed), tell)


def _readers(names: Iterable[Any]) -> tuple[Callable[[JsonMapping], str], ...]:
    """Returns the function `answer_text` of each verifier that has one."""
    named = (kinds().get(name) for name in names if isinstance(name, str))
    return tuple(kind.answer_text for kind in named if kind and kind.answer_text)


def with_system_prompt(
    messages: Sequence[JsonObject], system_prompt: str
) -> tuple[JsonObject, ...]:
    """Returns the messages, after the system prompt if they do not begin with one."""
    if system_prompt and messages[0]["role"] not in INSTRUCTIONS:
        return ({"role": "system", "content": system_prompt}, *messages)
    return tuple(messages)


class _DroppedLabels:
    """Tells the first value of each column that is no label."""

    def __init__(self, tell: Tell):
        self._tell, self._columns = tell, set[str]()

    def add(self, name: str, value: Json, where: str) -> None:
        """Adds the value of a row's column."""
        if name not in self._columns:
            self._columns.add(name)
            self._tell(
                f"{where}, field {name!r}: {value!r:.80} is no label (a text of at most"
                f" {MOST_LABEL} characters, or a number); rows with such values are used without it"
            )


class _Source(NamedTuple):
    """The properties that all questions of a source share."""

    config: DataConfig
    source: int
    label: str
    compared: bool = False  # `math` compares with the answer and reads only that
    labelled: bool = False  # a gold label is computed from other columns too
    # of each verifier that reads the reference: the text of a right answer (base.Kind)
    answer_texts: tuple[Callable[[JsonMapping], str], ...] = ()
    verifier_args: tuple[tuple[str, Json], ...] = ()
    turns: int = 0
    dropped: _DroppedLabels | None = None  # None: without rows

    def question(self, text: str, prompt: Sequence[JsonObject], **fields: Json) -> Question:
        """Returns a question with its id, its split and the system prompt."""
        config, messages = self.config, with_system_prompt(prompt, self.config.system_prompt)
        own_system = [message["content"] for message in prompt if message["role"] in INSTRUCTIONS]
        asks = fields.pop("asks", "") or text
        heldout = self.source >= len(config.sources) or (
            not config.eval_sources and is_heldout(asks, config.heldout_frac)
        )
        identity = stable_id("\n".join([self.label, *own_system, text]))
        fields |= {"heldout": heldout, "asks": asks, "turns": self.turns}
        return Question(identity, self.source, self.label, text, messages, **fields)

    def of_row(
        self,
        where: str,
        prompt: Json,
        answer: Json,
        row: JsonMapping,
        columns: tuple[str, str] = ("prompt", "answer"),
        labels: tuple[str, ...] = (),
        asks: str = "",
    ) -> Question:
        """Returns the question of a row.

        Args:
            where: the row's place.
            prompt, answer: a text or messages, and the reference or None.
            row: all columns that were read.
            columns: the names of the prompt's and the answer's column, for messages.
            labels: labels in addition to those of the row's columns.
            asks: the question, if it is only a part of the prompt.
        """
        text, messages = asked_of(prompt, f"{where}, field {columns[0]!r}")
        own_labels, unusable = labels_of(row)
        for name, value in unusable.items():
            (self.dropped or _DroppedLabels(logger.warning)).add(name, value, where)
        text_answer, verifier_row = self.answer(f"{where}, field {columns[1]!r}", answer, row), row
        if answer is not None:
            lean = self.compared and not self.labelled
            verifier_row = {"answer": answer} if lean else {**row, "answer": answer}
        return self.question(
            text,
            messages,
            answer=text_answer,
            row=_encoded(verifier_row, where),
            asks=asks,
            labels=(*own_labels, *labels),
            tools=tuple(tools_of(row, where)),
            place=where,
        )

    def answer(self, where: str, answer: Json, row: JsonMapping) -> str:
        """Returns the text of a right answer; empty without a reference. Raises DataError for a
        reference that the source's verifiers cannot read.
        """
        arguments = {**dict(self.verifier_args), **row, "answer": answer}
        try:
            answers = [answer_text(arguments) for answer_text in self.answer_texts]
        except ValueError as error:
            raise DataError(f"{where}: {error}") from error
        return answers[0] if answers else "" if answer is None else answer_of(answer)


def _encoded(row: JsonMapping, where: str) -> str:
    try:
        return encode_row(row)
    except TypeError as error:
        raise DataError(f"{where}: {error}; leave it out, or write it as text") from error


def _procedural(common: _Source, source: ProceduralSource, seed: int) -> Iterator[Question]:
    for entry in distinct_entries(source, seed):
        text = entry["question"]
        prompt = f"{source.instruction}\n{text}" if source.instruction else text
        # some tasks have many right answers and give no reference
        answer = "" if entry["answer"] is None else str(entry["answer"])
        row = _encoded(entry, f"reasoning-gym's {source.dataset}")
        messages = [{"role": "user", "content": prompt}]
        yield common.question(text, messages, answer=answer, row=row, entry=entry)


def _of_files(
    config: DataConfig, index: int, source: FileSource, key: str, tell: Tell
) -> Iterator[Question]:
    """Yields the questions of files. For a training source with a test or validation split, exactly
    the questions of that split are held out.
    """
    label, compared = source.label or label_of(source.path), source.verifier == "math"
    common = _Source(
        config,
        index,
        label,
        compared,
        bool(source.gold),
        _readers(name for name, _ in pairs(source.verifier)),
        source.verifier_args,
        dropped=_DroppedLabels(tell),
    )

    def read(files: list[str]) -> Iterator[Question]:
        return _distinct(common, source.path, _file_rows(common, source, files, key, tell), tell)

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


def _distinct(
    common: _Source, name: str, rows: Iterable[Question], tell: Tell
) -> Iterator[Question]:
    """Yields the distinct prompts of rows; the first row with the same messages is used.

    A second answer to the same prompt is a contradiction that the rows cannot resolve. It is
    reported with its place and does not end the run: otherwise one row in 100,000 would make the
    file unusable. Dropping the first row too would let a bad row remove a good one.
    """
    first: dict[bytes, Question] = {}
    repeats, contradictions = 0, []
    for one in rows:
        content = json.dumps([*one.messages, *one.tools])
        key = hashlib.blake2b(content.encode(), digest_size=16).digest()
        known = first.setdefault(key, one)
        if known is one:
            yield one
        elif known.answer == one.answer if common.compared else known.row == one.row:
            repeats += 1
        else:
            answers = f"{known.answer!r:.40} in {known.place}, {one.answer!r:.40} in {one.place}"
            contradictions.append(f"{one.text!r:.60} ({answers})")
    if repeats:
        tell(f"{name}: {repeats} rows repeat an earlier prompt with its answer; they are left out")
    if contradictions:
        tell(
            f"{name}: {len(contradictions)} rows give another answer to an earlier "
            f"prompt; the first answer is used: {contradictions[0]}"
        )


def _file_rows(
    common: _Source, source: FileSource, files: list[str], key: str, tell: Tell
) -> Iterator[Question]:
    if VERDICT in dict(pairs(source.verifier)):
        for one in asked_in_both_orders(source.path, lambda _: files):
            labels, pair = (f"verdict/{one.verdict}", f"order/{one.order}"), one.pair
            place, asks = pair.where, pair.question
            yield common.of_row(place, one.messages, one.verdict, {}, labels=labels, asks=asks)
        return
    named = (source.prompt_field, source.answer_field)
    settings = (f"{key}.prompt_field", f"{key}.answer_field")
    for path in files:
        reading, fields = open_format(path, "answer", named, settings, tell, common.compared)
        lean = common.compared and not source.gold and reading.make is None
        optional = (*LABELS, "tools", "system") if lean else None
        for where, row in read_rows(path, fields, optional):
            converted = row if reading.make is None else convert(reading.make, row, where, path)
            yield _file_row(common, reading, where, converted, settings[1])


def _file_row(
    common: _Source, reading: Reading, where: str, row: JsonObject, setting: str
) -> Question:
    place = f"{where}, field {reading.prompt!r}"
    prompt = turns_of(field_of(row, reading.prompt), row, place)
    if reading.target != TURNS:
        target = reading.target or "answer"
        column = f"{where}, field {target!r}"
        answer = reference(field_of(row, target), column) if reading.target else row.get("answer")
        return common.of_row(where, prompt, answer, row, (reading.prompt, target))
    messages = check_messages(prompt, place)
    answer = None
    if messages[-1]["role"] == "assistant":
        answer, messages = reference(messages[-1]["content"]), messages[:-1]
    if common.compared and answer is None:
        raise DataError(
            f"{place}: ends with what is asked, so that there is no reference answer; add the"
            f" assistant's turn, or name the column that has it in {setting}"
        )
    return common.of_row(where, messages, answer, row, (reading.prompt, reading.prompt))


def _episode_rows(
    common: _Source, source: EpisodeSource, key: str, seed: int
) -> Iterator[Question]:
    for number, row in enumerate(episode_rows(source, key, seed), 1):
        yield common.of_row(f"{source.env}, row {number}", row["prompt"], row.get("answer"), row)


def _task_rows(common: _Source, name: str, task: Task, key: str, seed: int) -> Iterator[Question]:
    file = Path(getattr(getattr(task.prompts, "__code__", None), "co_filename", name))
    with of_file(file):
        rows = list(task.prompts(seed))
    for number, row in enumerate(rows, 1):
        place = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            raise DataError(f"{place}: a {type(row).__name__}; it must be a mapping")
        for column in ("prompt", *(("answer",) if task.verify == "math" else ())):
            if row.get(column) is None:
                raise DataError(
                    f"{place}: no {column!r} (columns: {', '.join(map(str, row))}); add it"
                )
        yield common.of_row(place, row["prompt"], row.get("answer"), row)
    if not rows:
        raise DataError(
            f"{key}.task = {name!r}: prompts({seed}) gave no row; a task needs one prompt at least"
        )


def at_most(limit: int, available: Sequence[Question]) -> list[Question]:
    """Returns at most `limit` questions in their order, proportionally for each label, with largest
    remainders; ties go to the earlier label. Those of a label are evenly spaced, since rows of a
    file may be in the order of their difficulty.
    """
    counts, total = Counter(one.label for one in available), max(1, len(available))
    limit = min(limit, len(available))
    shares = {label: limit * count // total for label, count in counts.items()}
    by_remainder = sorted(counts, key=lambda label: -(limit * counts[label] % total))
    for label in by_remainder[: limit - sum(shares.values())]:
        shares[label] += 1
    places = {label: {i * counts[label] // n for i in range(n)} for label, n in shares.items()}
    chosen, seen = list[Question](), Counter[str]()
    for one in available:
        if seen[one.label] in places[one.label]:
            chosen.append(one)
        seen[one.label] += 1
    return chosen


# ---- held-out questions in SFT rows --------------------------------------------------------------


def forms(question: Question) -> Iterable[str]:
    """Returns the normalised texts in which a row may ask this question."""
    return map(normalised, (question.text, question.asks, question.messages[-1]["content"]))


def heldout_texts(pool: Iterable[Question]) -> set[str]:
    """Returns the texts in which an example may ask a held-out question."""
    return {text for question in pool if question.heldout for text in forms(question)}


def sets_asked(config: DataConfig, pool: Collection[Question], texts: Collection[str]) -> str:
    """Returns a line with the number of each evaluation set's questions in the SFT rows; empty
    without sets.

    Args:
        config: the data configuration.
        pool: all questions, as `questions` returns them.
        texts: the texts of `heldout_texts` that occur in the rows.
    """
    counts = []
    for one, place in zip(config.eval_sets, config.set_places(), strict=True):
        members = [question for question in pool if question.source in place]
        count = sum(any(text in texts for text in forms(question)) for question in members)
        counts.append(f"{count:,} of the {len(members):,} questions of {one.name}")
    if not counts:
        return ""
    return f"data.eval_sets: the SFT rows ask {', '.join(counts)}; rows that ask one are left out"


def sets_not_counted(config: DataConfig) -> str:
    """Returns the line for rows that are read by record; empty without sets."""
    if not config.eval_sets:
        return ""
    names = ", ".join(one.name for one in config.eval_sets)
    return (
        f"data.eval_sets, {names}: it was not counted how many of their questions the SFT rows ask,"
        " because the rows are read by record; one that asks one is left out when it is taken"
    )
