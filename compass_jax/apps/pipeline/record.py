"""The record of a pipeline: its settings (config.json), the state of each stage (pipeline.json),
and the settings of each started stage (stage.json in its folder).

A stage is stale if its settings, its input files, or the outputs of other stages that it reads have
changed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from compass_jax.base.aliases import Json
from compass_jax.base.untrusted import read_json
from compass_jax.config import ConfigError
from compass_jax.config.io import differences, from_plain, to_plain
from compass_jax.config.named import file_of
from compass_jax.config.pipeline import PipelineConfig, inputs, texts, with_texts
from compass_jax.config.stages import REFERENCE, Rl, Rows, Sft, Stage, TrainJudge
from compass_jax.data.files import files_of
from compass_jax.runs.rundir import FREE_BELOW, MAY_CHANGE, write_atomically

WHOLE, FILE, SETTINGS = "config.json", "pipeline.json", "stage.json"
WAITING, RUNNING, DONE = "waiting", "running", "done"
# settings that do not change a stage's output; the number of steps does
FREE = MAY_CHANGE - {"rl.steps", "sft.steps"}
MOST_TOLD = 3  # maximum settings that an error names
WHOLE_BYTES = (
    64 * 2**20
)  # files of at most this size together are hashed by content, others by size


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stage that has started."""

    folder: str  # name within the pipeline's folder
    state: str
    outside: dict[str, str]  # external file -> its hash when the stage started
    input_hashes: dict[str, str]  # input stage -> the hash of its output when this one started
    output_hash: str = ""  # hash of the stage's output, once it is done
    seconds: float = 0.0  # duration of its last start


class Record:
    """The pipeline.json of a folder. A stage without an entry, or without a folder, is waiting."""

    def __init__(self, config: PipelineConfig):
        self.config, self.folder = config, Path(config.run_dir)
        self.entries = _read(self.folder / FILE)

    def stage(self, name: str) -> Stage:
        """Returns the stage with this name."""
        return next(stage for stage in self.config.stages if stage.name == name)

    def entry(self, name: str) -> Entry | None:
        """Returns the entry of a started stage, or None."""
        entry = self.entries.get(name)
        return entry if entry and (self.folder / entry.folder / SETTINGS).is_file() else None

    def state(self, name: str) -> str:
        """Returns WAITING, RUNNING or DONE."""
        entry = self.entry(name)
        return entry.state if entry else WAITING

    def place(self, stage: Stage) -> Path:
        """Returns the folder of a stage, existing or planned."""
        entry = self.entry(stage.name)
        number = [one.name for one in self.config.stages].index(stage.name) + 1
        return self.folder / (entry.folder if entry else f"{number:02d}-{stage.name}")

    def output(self, name: str) -> Path:
        """Returns the path of a stage's rows or weights."""
        stage = self.stage(name)
        return self.place(stage) / stage.output

    def placed(self, stage: Stage) -> Stage:
        """Returns `stage` with paths instead of "stage:NAME" and "stage:NAME/FILE"."""

        def path(text: str) -> str:
            name, _, rest = text.removeprefix(REFERENCE).partition("/")
            return str(self.place(self.stage(name)) / rest if rest else self.output(name))

        return with_texts(stage, path)

    def open(self) -> None:
        """Writes the pipeline's settings, which each stage's process reads."""
        _write_json(self.folder / WHOLE, to_plain(self.config))

    def begin(self, stage: Stage) -> Path:
        """Records a stage as running, with its settings; returns its folder."""
        folder = self.place(stage)
        folder.mkdir(parents=True, exist_ok=True)
        settings = PipelineConfig((stage,), self.config.run_dir)
        _write_json(folder / SETTINGS, to_plain(settings))
        input_hashes = {name: self.entries[name].output_hash for name in inputs(stage)}
        self.entries[stage.name] = Entry(folder.name, RUNNING, outside(stage), input_hashes)
        self._write()
        return folder

    def end(self, stage: Stage, seconds: float) -> None:
        """Records a stage as done."""
        output_hash = self._output_hash(stage)
        entry = self.entries[stage.name]
        self.entries[stage.name] = dataclasses.replace(
            entry, state=DONE, output_hash=output_hash, seconds=seconds
        )
        self._write()

    def stale(self) -> dict[str, str]:
        """Returns stage -> reason, of the started stages whose output would now differ."""
        stale: dict[str, str] = {}
        for stage in self.config.stages:
            if self.entry(stage.name) and (reason := self._why_stale(stage, stale)):
                stale[stage.name] = reason
        return stale

    def _why_stale(self, stage: Stage, stale: dict[str, str]) -> str:
        entry = self.entries[stage.name]
        if changes := _changes(_begun_with(self.folder / entry.folder), stage):
            return changes
        for name, now in outside(stage).items():
            if entry.outside.get(name, now) != now:
                return f"{name} holds something else"
        if entry.state == DONE and entry.output_hash != self._output_hash(stage):
            return f"{self.output(stage.name)} is not what the stage left there"
        for name in inputs(stage):
            source = self.entry(name)
            if (
                name in stale
                or source is None
                or source.output_hash != entry.input_hashes.get(name)
            ):
                return f"it takes from {name}"
        return ""

    def _output_hash(self, stage: Stage) -> str:
        """Returns the hash of a stage's output. For runs it covers the checkpoints only, since
        reports are written into the same folder.
        """
        output = self.output(stage.name)
        is_run = isinstance(stage, Sft | Rl | TrainJudge)
        folder = output / "checkpoints" if is_run else output
        return hash_of(folder)

    def set_aside(self, name: str) -> list[tuple[Path, Path]]:
        """Renames the folders of a stage and of the later stages that depend on it, whose state is
        then waiting. Returns (old, new) of each. Raises ConfigError for an unknown stage.
        """
        names = [stage.name for stage in self.config.stages]
        if name not in names:
            raise ConfigError(
                f"--redo {name}: there is no such stage; there are {', '.join(names)}"
            )
        redone = [name]
        for stage in self.config.stages:
            if stage.name not in redone and set(inputs(stage)) & set(redone):
                redone.append(stage.name)
        moved = []
        for one in reversed(redone):
            entry = self.entries.pop(one, None)
            if entry and (old := self.folder / entry.folder).exists():
                places = (old.with_name(f"{old.name}.before-{n}") for n in range(1, 10**6))
                new = next(place for place in places if not place.exists())
                old.rename(new)
                moved.append((old, new))
        self._write()
        return moved

    def _write(self) -> None:
        plain = {name: dataclasses.asdict(entry) for name, entry in self.entries.items()}
        _write_json(self.folder / FILE, {"stages": plain})


def _write_json(file: Path, plain: Json) -> None:
    write_atomically(file, json.dumps(plain, indent=1) + "\n")


def _begun_with(folder: Path) -> Stage:
    """Returns the settings with which the stage of a folder started."""
    try:
        plain = read_json(folder / SETTINGS, error=ConfigError)
        return from_plain(PipelineConfig, plain).stages[0]
    except (ConfigError, IndexError) as error:
        raise ConfigError(f"{folder / SETTINGS}: {error}") from error


def outside(stage: Stage) -> dict[str, str]:
    """Returns file, folder or pattern -> hash of all external inputs of a stage: files, the file of
    its function, folders and patterns of rows.
    """
    named = {text for text in texts(stage) if os.path.isfile(text)}
    if isinstance(stage, Rows) and (file := file_of(stage.function)):
        named.add(str(file))
    rows = {path for _, path, folder in stage.reads() if not folder} - named
    several = {path: files_of(path) for path in rows if not path.startswith(REFERENCE)}
    hashed = {name: hash_of(Path(name)) for name in sorted(named)}
    return hashed | {path: _hash_together(files) for path, files in sorted(several.items())}


def hash_of(path: Path) -> str:
    """Returns a hash of a small file's content; else of the names and sizes of files."""
    if path.is_file() and path.stat().st_size <= WHOLE_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    files = [path] if path.is_file() else sorted(x for x in path.rglob("*") if x.is_file())
    sizes = [[str(file.relative_to(path)), file.stat().st_size] for file in files]
    return _short(sizes) if sizes else "nothing"


def _hash_together(files: Sequence[str]) -> str:
    """Returns a hash of several files: of their contents if their total size is small."""
    sizes = [os.path.getsize(file) if os.path.isfile(file) else 0 for file in files]
    small = sum(sizes) <= WHOLE_BYTES
    return _short([[f, hash_of(Path(f)) if small else size] for f, size in zip(files, sizes)])


def _short(rows: list[Json]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _changes(old: Stage, new: Stage) -> str:
    """Returns the relevant settings that differ, as text; empty if there is no difference."""
    if type(old) is not type(new):
        return f"it was a stage of the kind {type(old).__name__}"
    changes = [
        f"{key} was {was!r:.60}, and is {now!r:.60}"
        for key, (was, now) in differences(old, new).items()
        if (setting := key.removeprefix("run.")) not in FREE and not setting.startswith(FREE_BELOW)
    ]
    more = [f"and {len(changes) - MOST_TOLD} more"] if len(changes) > MOST_TOLD else []
    return "; ".join([*changes[:MOST_TOLD], *more])


def _read(file: Path) -> dict[str, Entry]:
    """Returns the entries of a pipeline.json. Raises ConfigError for another file."""
    if not file.exists():
        return {}
    plain: Json = read_json(file, error=ConfigError)
    try:
        return {name: Entry(**entry) for name, entry in plain["stages"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not what compass pipeline writes ({error}); put it back, or choose another"
            " run_dir"
        ) from error
