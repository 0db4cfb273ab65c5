"""A pipeline: a list of stages, each a function that resumes, its settings and its folder.

A setting names the output of an earlier stage by its path, which `Pipeline.add` returns. The folder
of the pipeline has the state of each stage (pipeline.json), the folder of each started stage its
function and settings (stage.json). A stage is stale if its settings, its input files, or the
outputs of other stages that it reads have changed since it started.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import inspect
import json
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from compass_jax.apps.pipeline.work import FOR_RL, OUTPUTS
from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.untrusted import parse_json, read_json, read_text
from compass_jax.config import ConfigError, RunConfig
from compass_jax.config.errors import check
from compass_jax.config.io import changed_keys, decode, flatten, to_plain
from compass_jax.config.named import file_of, is_name, load
from compass_jax.config.ranges import Section
from compass_jax.data.files import files_of
from compass_jax.runs.rundir import FREE_BELOW, MAY_CHANGE, write_atomically

FILE, SETTINGS = "pipeline.json", "stage.json"
WAITING, RUNNING, DONE = "waiting", "running", "done"
# settings that do not change a stage's output; the number of steps does
FREE = MAY_CHANGE - {"rl.steps", "sft.steps"}
MOST_TOLD = 3  # maximum settings that an error names
# files of at most this size together are hashed by content, others by size
WHOLE_BYTES = 64 * 2**20
# settings that name rows or another file, and those that name the folder of a model
ROWS = re.compile(r"(.*\.)?(path|keep_file|(files|preferences|data|against)\[\d+\])|rollouts|file")
FOLDERS = re.compile(r"(.*\.)?(tokenizer|init_from|weights)|base|parents\[\d+\]|of\..+")
_HERE = "PIPELINE"  # stands for the pipeline's folder in stage.json, so that it can be moved
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A stage that has started."""

    folder: str  # name within the pipeline's folder
    state: str
    inputs: dict[str, str]  # earlier stage, file or pattern -> its hash when the stage started
    output_hash: str = ""  # hash of the stage's output, once it is done
    seconds: float = 0.0  # duration of its last start


@dataclasses.dataclass(frozen=True)
class Stage:
    """A function of apps/pipeline/work.py or of the user's, which continues what it left in its
    folder.
    """

    name: str
    function: Callable[..., int | None]
    settings: JsonObject
    folder: Path

    @property
    def kind(self) -> str:
        """The name of the function."""
        return self.function.__name__

    @property
    def output(self) -> Path:
        """The file or folder that later stages read."""
        return self.folder / OUTPUTS.get(self.function, "")

    def run(self) -> int:
        """Returns 0, or the exit status of a run that stopped on request."""
        return self.function(self.folder, **self.settings) or 0

    def to_json(self) -> str:
        """Returns the stage as text, which `read_stage` reads."""
        settings = {
            name: to_plain(value) if dataclasses.is_dataclass(value) else value
            for name, value in self.settings.items()
        }
        module, file = self.function.__module__, inspect.getfile(self.function)
        place = module if module.startswith("compass_jax.") else os.path.abspath(file)
        stage = {"name": self.name, "function": f"{place}:{self.kind}", "settings": settings}
        return json.dumps(stage, indent=1).replace(_quoted(self.folder.parent), _quoted(_HERE))

    def check(self) -> None:
        """Raises ConfigError for a name or a setting that cannot be used."""
        good = bool(_NAME.fullmatch(self.name))
        check(good, "a name has small letters, digits, - and _, at most 64")
        try:
            inspect.signature(self.function).bind(self.folder, **self.settings)
            self.to_json()
        except TypeError as error:
            raise ConfigError(f"{self.kind}: {error}") from error
        for value in self.settings.values():
            if isinstance(value, RunConfig) and self.function in FOR_RL:
                value.validate_for_rl()
            elif isinstance(value, Section):
                value.validate()


def read_stage(folder: Path, text: str = "") -> Stage:
    """Returns the stage of `Stage.to_json`: `text`, or the file in the stage's folder."""
    file = folder / SETTINGS
    text = text or read_text(file, error=ConfigError)
    plain = parse_json(
        text.replace(_quoted(_HERE), _quoted(folder.parent)), str(file), error=ConfigError
    )
    try:
        function = load(plain["function"], f"{file}: function")
        hints = typing.get_type_hints(function)
        settings = {
            name: decode(value, hints.get(name), name) for name, value in plain["settings"].items()
        }
        return Stage(plain["name"], function, settings, folder)
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is not what compass pipeline writes ({error})") from error


def _quoted(folder: Path | str) -> str:
    """Returns the beginning of a path below a folder, as JSON has it."""
    return json.dumps(f"{folder}/")[:-1]


class Pipeline:
    """The stages in their order, and the record of what they have done."""

    def __init__(self, folder: str | os.PathLike):
        self.folder, self.entries = Path(folder), _read(Path(folder))
        self.stages: list[Stage] = []

    def add(self, name: str, function: Callable[..., int | None], /, **settings: Json) -> str:
        """Adds a stage, `function(its folder, **settings)`; returns the path of its output.

        Raises ConfigError, naming the stage, for a setting that cannot be used.
        """
        entry = self.entries.get(name)
        place = entry.folder if entry else f"{len(self.stages) + 1:02d}-{name}"
        stage = Stage(name, function, settings, self.folder / place)
        try:
            check(name not in [x.name for x in self.stages], "two stages have this name")
            stage.check()
        except ConfigError as error:
            raise ConfigError(f"stage {name:.80}: {error}") from error
        self.stages.append(stage)
        return str(stage.output)

    def state(self, stage: Stage) -> str:
        """Returns WAITING, RUNNING or DONE."""
        entry = self.entries.get(stage.name)
        return entry.state if entry else WAITING

    def sources(self, stage: Stage) -> list[Stage]:
        """Returns the earlier stages whose output a stage reads."""
        paths = [text for _, text in _texts(stage.settings)]
        before = self.stages[: self.stages.index(stage)]
        return [x for x in before if any(_is_below(path, x) for path in paths)]

    def check_files(self) -> None:
        """Raises ConfigError, naming stage and setting, for a missing file or function."""
        for stage in self.stages:
            for key, path in self._outside(stage):
                if key == "function":
                    load(path, f"stage {stage.name}: function")
                elif ROWS.fullmatch(key) or FOLDERS.fullmatch(key):
                    where = f"stage {stage.name}: {key} = {path!r:.200}"
                    check(os.path.exists(path) or bool(glob.glob(path)), f"{where}: no such file")

    def _outside(self, stage: Stage) -> Iterator[tuple[str, str]]:
        """Yields the settings that are texts and name no output of an earlier stage."""
        sources = self.sources(stage)
        for key, text in _texts(stage.settings):
            is_function = ROWS.fullmatch(key) and is_name(text)
            if text and not is_function and not any(_is_below(text, x) for x in sources):
                yield key, text

    def _inputs(self, stage: Stage) -> dict[str, str]:
        """Returns the hashes of the stages, files, folders and patterns that a stage reads."""
        waiting = Entry("", WAITING, {})
        names = [source.name for source in self.sources(stage)]
        hashes = {name: self.entries.get(name, waiting).output_hash for name in names}
        for key, text in self._outside(stage):
            file = file_of(text) if key == "function" else None
            if file or os.path.isfile(text):
                hashes[str(file or text)] = _hash_of_files([str(file or text)])
            elif ROWS.fullmatch(key):
                hashes[text] = _hash_of_files(files_of(text))
        return hashes

    def begin(self, stage: Stage) -> None:
        """Records a stage as running, with its settings."""
        stage.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(stage.folder / SETTINGS, stage.to_json() + "\n")
        self.entries[stage.name] = Entry(stage.folder.name, RUNNING, self._inputs(stage))
        self._write()

    def end(self, stage: Stage, seconds: float) -> None:
        """Records a stage as done."""
        self.entries[stage.name] = dataclasses.replace(
            self.entries[stage.name],
            state=DONE,
            output_hash=_hash_of_output(stage.output),
            seconds=seconds,
        )
        self._write()

    def stale(self) -> dict[str, str]:
        """Returns stage -> reason, of the started stages whose output would now differ."""
        stale: dict[str, str] = {}
        for stage in self.stages:
            if stage.name in self.entries and (reason := self._why_stale(stage, stale)):
                stale[stage.name] = reason
        return stale

    def _why_stale(self, stage: Stage, stale: Mapping[str, str]) -> str:
        entry, names = self.entries[stage.name], [x.name for x in self.stages]
        if changes := _changes(read_stage(stage.folder), stage):
            return changes
        if entry.state == DONE and entry.output_hash != _hash_of_output(stage.output):
            return f"{stage.output} is not what the stage left there"
        for name, now in self._inputs(stage).items():
            if name in stale or entry.inputs.get(name, now) != now:
                return f"it takes from {name}" if name in names else f"{name} holds something else"
        return ""

    def set_aside(self, name: str) -> list[tuple[Path, Path]]:
        """Renames the folders of a stage and of the later stages that depend on it, whose state is
        then waiting. Returns (old, new) of each. Raises ConfigError for an unknown stage.
        """
        names = [stage.name for stage in self.stages]
        if name not in names:
            raise ConfigError(
                f"--redo {name}: there is no such stage; there are {', '.join(names)}"
            )
        redone = [self.stages[names.index(name)]]
        for stage in self.stages:
            if any(source in redone for source in self.sources(stage)):
                redone.append(stage)
        moved = []
        for stage in reversed(redone):
            old = stage.folder
            if self.entries.pop(stage.name, None) and old.exists():
                places = (old.with_name(f"{old.name}.before-{n}") for n in range(1, 10**6))
                new = next(place for place in places if not place.exists())
                old.rename(new)
                moved.append((old, new))
        self._write()
        return moved

    def _write(self) -> None:
        plain = {name: dataclasses.asdict(entry) for name, entry in self.entries.items()}
        write_atomically(self.folder / FILE, json.dumps({"stages": plain}, indent=1) + "\n")


def _read(folder: Path) -> dict[str, Entry]:
    """Returns the entries of a pipeline.json whose folders exist. Raises ConfigError for another
    file.
    """
    file = folder / FILE
    if not file.exists():
        return {}
    plain: Json = read_json(file, error=ConfigError)
    try:
        entries = {name: Entry(**entry) for name, entry in plain["stages"].items()}
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} is not what compass pipeline writes ({error}); put it back, or choose another"
            " folder"
        ) from error
    return {x: y for x, y in entries.items() if (folder / y.folder / SETTINGS).is_file()}


def _texts(part: Json, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields key and value of every text in the settings of a stage."""
    if isinstance(part, str):
        yield key, part
    elif isinstance(part, list | tuple):
        for i, inner in enumerate(part):
            yield from _texts(inner, f"{key}[{i}]")
    elif isinstance(part, Mapping) or dataclasses.is_dataclass(part):
        for name, inner in (part if isinstance(part, Mapping) else vars(part)).items():
            yield from _texts(inner, f"{key}.{name}" if key else name)


def _is_below(path: str, stage: Stage) -> bool:
    return path == str(stage.folder) or path.startswith(f"{stage.folder}/")


def _changes(old: Stage, new: Stage) -> str:
    """Returns the relevant settings that differ, as text; empty if there is no difference."""
    new = read_stage(new.folder, new.to_json())  # both as they are read
    if (old.function.__module__, old.kind) != (new.function.__module__, new.kind):
        return f"it was a stage of the kind {old.kind}"
    flat_old, flat_new = (
        {
            key: x
            for name, value in stage.settings.items()
            for key, x in flatten(value, name).items()
        }
        for stage in (old, new)
    )
    changes = [
        f"{key} was {was!r:.60}, and is {now!r:.60}"
        for key, (was, now) in changed_keys(flat_old, flat_new).items()
        if (setting := key.removeprefix("run.")) not in FREE and not setting.startswith(FREE_BELOW)
    ]
    more = [f"and {len(changes) - MOST_TOLD} more"] if len(changes) > MOST_TOLD else []
    return "; ".join([*changes[:MOST_TOLD], *more])


def _hash_of_output(output: Path) -> str:
    """Returns the hash of a stage's output. For runs it covers the checkpoints only, since reports
    are written into the same folder.
    """
    folder = output / "checkpoints" if (output / "checkpoints").exists() else output
    files = sorted(str(x) for x in folder.rglob("*") if x.is_file())
    return _hash_of_files(files or [str(output)], str(folder))


def _hash_of_files(files: Sequence[str], folder: str = "/") -> str:
    """Returns a hash of files' names within a folder, and of their contents, or of their sizes if
    they are large.
    """
    sizes = [os.path.getsize(file) if os.path.isfile(file) else 0 for file in files]
    parts = [[os.path.relpath(file, folder), size] for file, size in zip(files, sizes, strict=True)]
    if sum(sizes) <= WHOLE_BYTES:
        for file, part in zip(files, parts, strict=True):
            data = Path(file).read_bytes() if os.path.isfile(file) else b""
            part.append(hashlib.sha256(data).hexdigest())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
