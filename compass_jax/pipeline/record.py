"""What a pipeline remembers: its settings (config.json), the state of each stage (pipeline.json),
and the settings with which a stage began (stage.json in the stage's folder).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError
from compass_jax.config.io import differences, from_plain, to_plain
from compass_jax.config.named import file_of
from compass_jax.config.pipeline import (
    REFERENCE,
    PipelineConfig,
    inputs,
    paths,
    texts,
    with_texts,
)
from compass_jax.config.stages import Rl, Rows, Sft, Stage
from compass_jax.data.files import files_of
from compass_jax.runs.rundir import MAY_CHANGE, MESHES, write_atomically
from compass_jax.untrusted import read_json

WHOLE, FILE, SETTINGS = "config.json", "pipeline.json", "stage.json"
WAITING, RUNNING, DONE = "waiting", "running", "done"
# how far a run goes is what it makes; the other settings leave it as it is
FREE = MAY_CHANGE - {"rl.steps", "sft.steps"}
MOST_TOLD = 3  # settings that changed
WHOLE_BYTES = 64 * 2**20  # files up to this size are compared by what they hold, others by size


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stage that has begun."""

    folder: str  # in the pipeline's
    state: str
    outside: dict[str, str]  # file that no stage made -> what it held when the stage began
    taken: dict[str, str]  # stage -> what it had made when this one began
    made: str = ""  # what the stage made, once it is done
    seconds: float = 0.0  # since its last start


class Record:
    """pipeline.json of a folder. A stage without an entry, or whose folder is gone, is waiting."""

    def __init__(self, config: PipelineConfig):
        self.config, self.folder = config, Path(config.run_dir)
        self.entries = _read(self.folder / FILE)

    def entry(self, name: str) -> Entry | None:
        """The entry of a stage that has begun."""
        found = self.entries.get(name)
        return found if found and (self.folder / found.folder / SETTINGS).is_file() else None

    def state(self, name: str) -> str:
        """WAITING, RUNNING or DONE."""
        entry = self.entry(name)
        return entry.state if entry else WAITING

    def place(self, stage: Stage) -> Path:
        """The folder of a stage; where it has not begun, the one that it will have."""
        entry = self.entry(stage.name)
        number = [one.name for one in self.config.stages].index(stage.name) + 1
        return self.folder / (entry.folder if entry else f"{number:02d}-{stage.name}")

    def output(self, name: str) -> Path:
        """What a stage makes: its rows or its weights."""
        stage = next(one for one in self.config.stages if one.name == name)
        return self.place(stage) / stage.OUTPUT

    def placed(self, stage: Stage) -> Stage:
        """`stage` with a path in the place of each "stage:NAME" and "stage:NAME/FILE"."""
        known = {one.name: one for one in self.config.stages}

        def path(text: str) -> str:
            name, _, rest = text.partition(":")[2].partition("/")
            return str(self.place(known[name]) / rest if rest else self.output(name))

        return with_texts(stage, path)

    def open(self) -> None:
        """Writes the pipeline's settings down, from which each stage's process reads them."""
        _write_config(self.folder / WHOLE, self.config)

    def begin(self, stage: Stage) -> Path:
        """Writes down that a stage runs, with its settings; its folder."""
        folder = self.place(stage)
        folder.mkdir(parents=True, exist_ok=True)
        taken = {name: self.entries[name].made for name in inputs(stage)}
        _write_config(folder / SETTINGS, PipelineConfig((stage,), self.config.run_dir))
        self._set(stage.name, Entry(folder.name, RUNNING, outside(stage), taken))
        return folder

    def end(self, stage: Stage, seconds: float) -> None:
        """Writes down that a stage is done."""
        entry, made = self.entries[stage.name], held(_kept(stage, self.output(stage.name)))
        ended = dataclasses.replace(entry, state=DONE, made=made, seconds=seconds)
        self._set(stage.name, ended)

    def stale(self) -> dict[str, str]:
        """Stage -> why what it made is not what it would make now, of those that have begun."""
        found: dict[str, str] = {}
        for stage in self.config.stages:
            why = self._why_stale(stage, found) if self.entry(stage.name) else ""
            if why:
                found[stage.name] = why
        return found

    def _why_stale(self, stage: Stage, found: dict[str, str]) -> str:
        entry = self.entries[stage.name]
        if changed := _changed(begun_with(self.folder / entry.folder), stage):
            return changed
        for name, now in outside(stage).items():
            if entry.outside.get(name, now) != now:
                return f"{name} holds something else"
        if entry.state == DONE and entry.made != held(_kept(stage, self.output(stage.name))):
            return f"{self.output(stage.name)} is not what the stage left there"
        for name in inputs(stage):
            above = self.entry(name)
            if name in found or above is None or above.made != entry.taken.get(name):
                return f"it takes from {name}"
        return ""

    def set_aside(self, name: str) -> list[tuple[Path, Path]]:
        """Renames the folders of a stage and of those after it that take from it; (old, new) of
        each. They wait then.
        """
        gone = [name]
        for stage in self.config.stages:
            if stage.name not in gone and set(inputs(stage)) & set(gone):
                gone.append(stage.name)
        moved = []
        for one in reversed(gone):
            entry = self.entries.pop(one, None)
            if entry and (old := self.folder / entry.folder).exists():
                new = next(x for n in range(1, 10**6) if not (x := _aside(old, n)).exists())
                old.rename(new)
                moved.append((old, new))
        self._write()
        return moved

    def _set(self, name: str, entry: Entry) -> None:
        self.entries[name] = entry
        self._write()

    def _write(self) -> None:
        plain = {name: dataclasses.asdict(entry) for name, entry in self.entries.items()}
        write_atomically(self.folder / FILE, json.dumps({"stages": plain}, indent=1) + "\n")


def _write_config(file: Path, config: PipelineConfig) -> None:
    write_atomically(file, json.dumps(to_plain(config), indent=1) + "\n")


def begun_with(folder: Path) -> Stage:
    """The settings with which the stage of a folder began."""
    try:
        plain = read_json(folder / SETTINGS, error=ConfigError)
        return from_plain(PipelineConfig, plain).stages[0]
    except (ConfigError, IndexError) as error:
        raise ConfigError(f"{folder / SETTINGS}: {error}") from error


def outside(stage: Stage) -> dict[str, str]:
    """File, folder or pattern -> what it holds, of all files that a stage's settings name and no
    stage makes, that of its function and folders and patterns of rows included.
    """
    named = set(texts(stage))
    if isinstance(stage, Rows) and (file := file_of(stage.function)):
        named.add(str(file))
    found = {text: held(Path(text)) for text in sorted(named) if os.path.isfile(text)}
    several = {path for _, path, folder in paths(stage) if not folder} - found.keys()
    rows = sorted(path for path in several if not path.startswith(REFERENCE))
    return found | {path: _held_together(files_of(path)) for path in rows}


def _held_together(files: Sequence[str]) -> str:
    """`held` of several files: by what they hold where all of them together are small."""
    sizes = [os.path.getsize(file) if os.path.isfile(file) else 0 for file in files]
    small = sum(sizes) <= WHOLE_BYTES
    told = [[file, held(Path(file)) if small else size] for file, size in zip(files, sizes)]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


def held(path: Path) -> str:
    """A short text that differs where a file, or the files in a folder, do: of a small file by
    what it holds, of others by names and sizes.
    """
    if path.is_file() and path.stat().st_size <= WHOLE_BYTES:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    files = [path] if path.is_file() else sorted(x for x in path.rglob("*") if x.is_file())
    sizes = [[str(file.relative_to(path)), file.stat().st_size] for file in files]
    return hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16] if sizes else "nothing"


def _kept(stage: Stage, output: Path) -> Path:
    """Where of a stage's output nothing is written once it is done: a report goes into runs."""
    return output / "checkpoints" if isinstance(stage, Sft | Rl) else output


def _changed(old: Stage, new: Stage) -> str:
    """The settings that differ and matter, in words; empty where there are none."""
    if type(old) is not type(new):
        return f"it was a stage of the kind {type(old).__name__}"
    told = []
    for key, (was, now) in differences(old, new).items():
        setting = key.removeprefix("run.")
        if setting not in FREE and not setting.startswith(MESHES):
            told.append(f"{key} was {was!r:.60}, and is {now!r:.60}")
    more = [f"and {len(told) - MOST_TOLD} more"] if len(told) > MOST_TOLD else []
    return "; ".join([*told[:MOST_TOLD], *more])


def _aside(folder: Path, number: int) -> Path:
    return folder.with_name(f"{folder.name}.before-{number}")


def _read(file: Path) -> dict[str, Entry]:
    """The entries of a pipeline.json; none where there is no such file. ConfigError for another
    file.
    """
    if not file.exists():
        return {}
    plain: Any = read_json(file, error=ConfigError)
    try:
        return {name: Entry(**entry) for name, entry in plain["stages"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not what compass pipeline writes ({error}); put it back, or choose another"
            " run_dir"
        ) from error
