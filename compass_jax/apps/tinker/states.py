"""The models' states on disk, and a journal of what was answered.

A state is a checkpoint of this package. The journal has a line of JSON for each session and model,
for each saved state, and for each applied request, written before the client reads the answer. A
server that starts again knows from it which requests a model had applied, and which of them its
last saved state has.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import jax

from compass_jax.apps.tinker.errors import RequestError
from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import ConfigError, ModelConfig
from compass_jax.weights import checkpoint
from compass_jax.weights.manifest import CheckpointError

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_PATH = re.compile(r"tinker://([a-z0-9-]{1,64}):train:(\d{1,9})/(weights|sampler_weights)/(.+)")


class SavedState(NamedTuple):
    """A state that a model had after its request `number`: the first one (path ""), or one that was
    saved or loaded.
    """

    path: str
    number: int
    loaded: bool = False
    optimizer: bool = True  # whether the optimizer's state was loaded too


FIRST = SavedState("", 0)


@dataclass
class ModelRecord:
    """What the journal says about a model."""

    model: str
    options: JsonObject
    applied: int = 0  # number of the last request that was answered
    saved: SavedState = FIRST  # the last one that a restart can bring back


@dataclass
class Record:
    """What the journal says."""

    sessions: list[str] = field(default_factory=list)
    models: dict[str, ModelRecord] = field(default_factory=dict)


class States:
    """The folder of the states and the journal. Only one server may use a folder."""

    def __init__(self, folder: str | Path, model: ModelConfig):
        self.folder, self.model = Path(folder), model
        self._lock = threading.Lock()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:
                owner = opened.enter_context(open(self.folder / "lock", "wb"))
                fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path = self.folder / "journal.jsonl"
                self.record = _replayed(path)
                self._compact()
                self._journal = opened.enter_context(open(path, "ab", buffering=0))
                self._files = opened.pop_all()
        except BlockingIOError as error:
            raise ConfigError(f"--states {folder}: another server uses it; name another") from error
        except OSError as error:
            raise ConfigError(f"--states {folder}: {error.strerror}; name another") from error

    def close(self) -> None:
        """Closes the journal, and frees the folder for another server."""
        self._files.close()

    def note(self, **entry: str | int | JsonObject) -> None:
        """Writes a line to the journal."""
        with self._lock:
            _apply(self.record, entry)
            self._journal.write(json.dumps(entry).encode() + b"\n")

    def sync(self) -> None:
        """Waits until the journal is on disk."""
        os.fsync(self._journal.fileno())

    def path(self, model: str, kind: str, name: str) -> str:
        """Returns the path by which a client names a state. Raises RequestError for a name that is
        none.
        """
        if not _NAME.fullmatch(name):
            text = "letters, digits, '.', '_' and '-', at most 100"
            raise RequestError(f"the name {name[:100]!r}: must consist of {text}")
        return f"tinker://{model}/{kind}/{name}"

    def exists(self, path: str) -> bool:
        """Returns whether there is a state of this path."""
        return (self._folder(path) / "checkpoints").is_dir()

    def save(self, path: str, step: int, arrays: Tree, meta: JsonObject) -> None:
        """Saves a state. Raises CheckpointError if it cannot be written."""
        folder = self._folder(path)
        checkpoint.save(folder, step, arrays, meta, model=self.model, keep=1)

    def meta(self, path: str) -> JsonObject:
        """Returns what was saved beside the arrays. Raises RequestError if there is no such
        state.
        """
        try:
            return checkpoint.read_meta(self._folder(path))
        except CheckpointError as error:
            raise RequestError(f"{path[:200]}: there is no such state, or it is damaged") from error

    def load(self, path: str, abstract: Tree) -> Tree:
        """Returns arrays of a state. Raises RequestError for a state of other arrays."""
        try:
            return checkpoint.restore(self._folder(path), abstract, model=self.model, subset=True)[
                1
            ]
        except CheckpointError as error:
            text = "the state cannot be read, or belongs to another model"
            raise RequestError(f"{path[:200]}: {text}") from error

    def _folder(self, path: str) -> Path:
        match = _PATH.fullmatch(path)
        if not match or not _NAME.fullmatch(match[4]):
            raise RequestError(f"{path[:200]!r}: must be tinker://MODEL/weights/NAME")
        return self.folder / f"{match[1]}-{match[2]}" / match[3] / match[4]

    def _compact(self) -> None:
        """Writes the journal anew, without the requests that later lines make void."""
        new = self.folder / "journal.new"
        with open(new, "wb") as file:
            for entry in _entries(self.record):
                file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self.folder / "journal.jsonl")


def _replayed(path: Path) -> Record:
    """Returns what a journal says. A line that a kill cut off is left out. Raises ConfigError for
    any other line that no server wrote.
    """
    record = Record()
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if line.endswith(b"\n"):
                _apply(record, json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: not what a server writes ({error}); put the file back, or"
                " name other --states"
            ) from error
    return record


def _apply(record: Record, entry: JsonObject) -> None:
    kind = entry["event"]
    if kind == "session":
        record.sessions.append(entry["session"])
    elif kind == "model":
        record.models[entry["model"]] = ModelRecord(entry["model"], entry["options"])
    elif kind in ("applied", "passed"):
        one = record.models[entry["model"]]
        if kind == "passed" and one.saved.number == one.applied:
            # The request changed nothing: the saved state is that after it, too.
            one.saved = one.saved._replace(number=entry["number"])
        one.applied = entry["number"]
    elif kind == "saved":
        saved = SavedState(*(entry[name] for name in SavedState._fields))
        one = record.models[entry["model"]]
        one.saved, one.applied = saved, max(saved.number, one.applied)
    elif kind == "session_end":
        record.sessions.remove(entry["session"])
    elif kind == "model_end":
        record.models.pop(entry["model"])


def _entries(record: Record) -> Iterator[JsonObject]:
    """Yields the lines that say the same."""
    for session in record.sessions:
        yield {"event": "session", "session": session}
    for one in record.models.values():
        yield {"event": "model", "model": one.model, "options": one.options}
        yield {"event": "saved", "model": one.model, **one.saved._asdict()}
        yield {"event": "applied", "model": one.model, "number": one.applied}


def abstract_of(tree: Tree, on_mesh: bool) -> Tree:
    """Returns the shapes of arrays, with their places on a mesh."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if on_mesh else None),
        tree,
    )
