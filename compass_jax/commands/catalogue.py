"""The catalogue of `compass tasks`: verifiers, tasks and reasoning-gym's data sets."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from typing import NamedTuple

from compass_jax.base.errors import UserError
from compass_jax.commands.options import Tasks
from compass_jax.config import (
    ConfigError,
    DataConfig,
    EpisodeSource,
    FileSource,
    ProceduralSource,
    TaskSource,
)
from compass_jax.config.data import Source
from compass_jax.config.kinds import kinds
from compass_jax.config.named import is_name, load
from compass_jax.config.verifiers import JUDGE
from compass_jax.data.procedural import open_dataset
from compass_jax.data.questions import Question, questions
from compass_jax.rewards.tasks.environment import Environment
from compass_jax.rewards.tasks.rows import encode_row
from compass_jax.rewards.tasks.task import Task

OWN_SCORERS = "reasoning_gym"
SHIPPED = ("compass_jax.data.bfcl", "compass_jax.data.human_eval")  # modules with tasks
MOST_SHOWN = 110  # maximum characters of a row in the list


class Entry(NamedTuple):
    """An entry of the catalogue."""

    name: str  # as a data source and `compass try` accept it
    verifier: str  # its description
    rows: int | None = None  # their number; None: unknown or unlimited
    languages: tuple[str, ...] = ()  # in the labels of the rows
    row: str = ""  # an example as JSON, or empty
    lacks: str = ""  # the reason why the fields above are unknown, such as a missing package


def datasets() -> list[str]:
    """Returns the sorted names of reasoning-gym's data sets."""
    importlib.import_module("reasoning_gym")
    return sorted(importlib.import_module("reasoning_gym.factory").DATASETS)


def shipped() -> dict[str, Task]:
    """Returns the tasks of this package by the names that a TaskSource uses."""
    return {
        f"{module}:{name}": value
        for module in SHIPPED
        for name, value in vars(importlib.import_module(module)).items()
        if isinstance(value, Task)
    }


def source_of(name: str) -> Source:
    """Returns the data source for a name: rows of a built-in verifier, a data set, a task, or a
    user's function.

    Raises ConfigError, with the nearest names, for an unknown name.
    """
    if name in kinds():
        return FileSource("rows.jsonl", verifier=name)
    if is_name(name):
        value = load(name, "TASK")
        if isinstance(value, type) and any(hasattr(value, x) for x in ("reset", "play")):
            return EpisodeSource(name)
        task = isinstance(value, Task)
        return TaskSource(name) if task else FileSource("rows.jsonl", verifier=name)
    if name == JUDGE:
        raise ConfigError(
            "TASK = 'judge': a run asks it, by rewards.judge, and compass try judge --endpoint URL"
            " --model NAME one question"
        )
    if name in datasets():
        return ProceduralSource(name, size=1)
    names = {one: one for one in (*kinds(), *datasets())}
    for one in shipped():  # a task also matches by a part of its name
        names |= {one: one, one.rpartition(".")[2]: one, one.rpartition(":")[2]: one}
        names.setdefault(one.rpartition(".")[2].partition(":")[0], one)
    close = {names[x] for x in difflib.get_close_matches(name, names, n=2, cutoff=0.6)}
    hint = f"did you mean {' or '.join(map(repr, sorted(close)))}?" if close else ""
    hint = hint or "compass tasks lists all"
    raise ConfigError(f"TASK = {name!r:.100} is no verifier, task or data set; {hint}")


def rows_of(source: Source, seed: int) -> list[Question]:
    """Returns a source's distinct rows. Raises UserError if they cannot be loaded."""
    return questions(DataConfig(sources=(source,)), seed, lambda line: None)


def entry_of(name: str, seed: int = 0) -> Entry:
    """Returns the catalogue entry of a name. Raises ConfigError like `source_of`."""
    source = source_of(name)
    if isinstance(source, ProceduralSource):
        words = "the data set's own scorer"
        try:
            return Entry(name, words, row=encode_row(open_dataset(name, {}, seed=seed, size=1)[0]))
        except UserError as error:
            return Entry(name, words, lacks=str(error))
    if isinstance(source, TaskSource):
        return _of_task(name, load(name, "TASK"), seed)
    kind = kinds().get(name)
    if kind is None:
        return Entry(name, "a function of your own")
    return Entry(name, f"1 where {kind.about}", row=encode_row(kind.example.row))


def _of_task(name: str, task: Task, seed: int) -> Entry:
    verify = task.verify
    if isinstance(verify, Environment):
        words = f"a conversation of up to {verify.turns} turns"
    elif isinstance(verify, dict):
        words = " + ".join(_word(x, f"{weight:g} ") for x, weight in verify.items())
    else:
        words = _word(verify)
    try:
        rows = rows_of(TaskSource(name), seed)
    except UserError as error:
        cause = error.__cause__  # the task's own message, without the place before it
        return Entry(name, words, lacks=str(cause if isinstance(cause, UserError) else error))
    languages = {
        label.partition("/")[2] for one in rows for label in one.labels if "language" in label
    }
    return Entry(name, words, len(rows), tuple(sorted(languages)), rows[0].row)


def _word(verify: object, weight: str = "") -> str:
    name = verify if isinstance(verify, str) else getattr(verify, "__name__", "a function")
    return f"{weight}{name}" if weight != "1 " else name


def listed(names: list[str]) -> Iterator[str]:
    """Yields two lines for each name."""
    for name in names:
        entry = entry_of(name)
        size = "" if entry.rows is None else f"{entry.rows:,} rows"
        about = "; ".join(filter(None, (entry.verifier, size, ", ".join(entry.languages))))
        yield f"  {name}: {about}"
        yield f"      {entry.lacks or shortened(entry.row)}"


def shortened(text: str, most: int = MOST_SHOWN) -> str:
    """Returns the start of a long text, on one line."""
    return text if len(text) <= most else f"{text[:most]}..."


def run(options: Tasks) -> None:
    """Prints the catalogue, or all details of one name."""
    name = options.task
    if name == OWN_SCORERS:
        print("\n".join(listed(datasets())))
    elif name:
        _print_entry(entry_of(name))
    else:
        print("verifiers, of the rows of files and tasks:")
        print("\n".join(listed(list(kinds()))))
        print("tasks:")
        print("\n".join(listed(list(shipped()))))
        names = datasets()
        print(
            f"reasoning-gym's {len(names)} data sets, drawn without end, judged by their own"
            f" scorers (compass tasks {OWN_SCORERS} shows a row of each):"
        )
        print(f"  {', '.join(names)}")


def _print_entry(entry: Entry) -> None:
    print(f"{entry.name}: {entry.verifier}")
    if entry.rows is not None:
        print(f"rows: {entry.rows:,}")
    if entry.languages:
        print(f"languages: {', '.join(entry.languages)}")
    if entry.lacks or entry.row:
        print(entry.lacks or f"row: {entry.row}")
    kind = kinds().get(entry.name)
    if kind:
        print(f"right: {kind.example.right}\nwrong: {kind.example.wrong}")
