"""The directory of one run: one process at a time, one configuration for its whole life.

config.json  metrics.jsonl  evaluation.json  rollouts.jsonl  tokens.jsonl  verdicts.jsonl
checkpoints/  evaluation_start/  evaluation/  tb/  trackers/  machine.json  .lock
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from compass_jax.config import ConfigError, PolicyConfig, ScoredConfig
from compass_jax.config.io import config_to_json, differences, flatten, read_config
from compass_jax.config.rewards import NO_FILE
from compass_jax.errors import CompassError
from compass_jax.runs.logfile import removed_on_error

P = TypeVar("P", bound=PolicyConfig)
FileHashes = tuple[tuple[str, str], ...]  # user code by name, with its hash

EVALUATION = "evaluation.json"  # held-out accuracy after the last step of a finished run
EVALUATION_FOLDER = "evaluation"  # its answers, in the form of `compass eval --out`
EVALUATION_START = "evaluation_start"  # the same of the weights before the first step
ANSWERS = "answers.jsonl"
SUMMARY = "summary.json"

# Settings that do not affect past steps: lengths, intervals, and the directory's path.
MAY_CHANGE = frozenset(
    {
        "run_dir",
        "keep_checkpoints",
        "log.groups",
        "log.tokens",
        "rewards.code",  # set by the code that opens the run
        *(f"rewards.judge.{name}" for name in ("endpoint", "key_env", "timeout_s")),
        *(f"rewards.judge.{name}" for name in ("retries", "requests")),
        "rewards.smallest_gap",  # only checked and monitored, not used in a computation
        "show_samples_every",
        "trackers",
        "callbacks",
        "rl.steps",
        "rl.save_every",
        "rl.eval_every",
        "evaluation.at",
        "evaluation.start",
        "sft.steps",
        "sft.save_every",
        "sft.bad_rows",  # a refused row ended the run before its step
        "data.cache",
    }
)
MOST_TOLD = 10  # maximum settings that an error names
MESHES = ("mesh.", "rollout_mesh", "rollout_apart")  # a checkpoint can resume on any mesh


class RunDirectoryInUse(CompassError, RuntimeError):
    """Another process writes to the run directory; the message names its pid and host."""


class ConfigMismatch(ConfigError):
    """The run directory belongs to another configuration; the message names the first ten keys
    with both values.
    """


class RunDirectoryUnusable(ConfigError):
    """No run can be written at this path; the message has the obstacle or the system's error."""


class RunDirectoryGone(CompassError, RuntimeError):
    """The run directory was removed or replaced during the run."""


class FolderLock:
    """The lock of a folder's single writer, as a context manager; the folder is created if absent.

    The lock is `flock` on `.lock`. The kernel releases it when the process ends for whatever
    reason, so no stale lock can stop the next process. `check` compares the file at the path with
    the locked one: in a folder that was removed and created again a second writer would get another
    lock.

    Raises RunDirectoryInUse; RunDirectoryUnusable if the folder cannot be made or locked.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.file = self.path / ".lock"
        self._lock: int | None = None

    def __enter__(self) -> FolderLock:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            while self._lock is None:
                self._lock = _acquire(self.file, self.path)
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
            raise unusable(self.path, error) from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            os.close(self._lock)  # closing the file releases its flock
            self._lock = None

    def check(self) -> None:
        """Raises RunDirectoryGone unless the folder is the locked one. No-op without a lock."""
        if self._lock is not None and not _same_file(self._lock, self.file):
            raise RunDirectoryGone(
                f"{self.path} was removed or replaced while this process was writing to it: it "
                "ends here. "
                "Put the folder back, and the same command goes on from its last checkpoint"
            )


def is_locked(path: str | os.PathLike) -> bool:
    """Returns whether a process holds a folder's lock. Briefly takes a shared lock, and writes
    nothing.
    """
    try:
        descriptor = os.open(Path(path) / ".lock", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


class NewFolderLock(FolderLock):
    """The lock of a folder that gets its name when complete: a file next to it, which is removed at
    the end.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.file = self.path.absolute().with_name(f".{self.path.absolute().name}.lock")

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None and _same_file(self._lock, self.file):
            # a process that opened it earlier finds it unlinked once it gets the lock
            self.file.unlink()
        super().__exit__()


class RunDir(FolderLock):
    """Opens (or creates) a run directory for writing, as a context manager.

    `resumed`: whether the directory already held a run. In an existing directory the configuration
    must be equal except for `MAY_CHANGE` and the meshes, unless the directory has no training step
    yet (a failed start leaves its config.json); the new configuration then replaces the old one.

    Raises RunDirectoryInUse, RunDirectoryUnusable, ConfigMismatch.
    """

    def __init__(self, path: str | os.PathLike, config: ScoredConfig):
        super().__init__(path)
        self.config = config
        self.resumed = False
        self.before: ScoredConfig | None = None  # the previous configuration of a resumed run

    def __enter__(self) -> RunDir:
        super().__enter__()
        try:
            _check_layout(self.path)
            self.resumed = self._settle_config()
        except OSError as error:
            self.__exit__()
            raise unusable(self.path, error) from error
        except BaseException:
            self.__exit__()
            raise
        return self

    def check(self) -> None:
        """Raises RunDirectoryGone like `FolderLock.check`, and if config.json was removed."""
        super().check()
        if self._lock is not None and not (self.path / "config.json").is_file():
            raise RunDirectoryGone(
                f"{self.path / 'config.json'} was removed while this process was writing to the "
                "folder: it ends here. The same command writes it anew and goes on from the last "
                "checkpoint"
            )

    def _settle_config(self) -> bool:
        """Writes config.json; returns whether the directory holds a started run of a compatible
        configuration.
        """
        self.before = _started_config(self.path, self.config)
        write_atomically(self.path / "config.json", config_to_json(self.config) + "\n")
        return self.before is not None


def look_into(path: str | os.PathLike, config: ScoredConfig) -> bool:
    """Returns whether the directory that `RunDir` would open holds a started run. Raises the same
    errors and creates nothing.
    """
    path = Path(path)
    try:
        if os.path.lexists(path / ".lock"):
            with FolderLock(path):
                pass
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
            code = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
            raise OSError(code, os.strerror(code), str(nearest))
        _check_layout(path)
        return _started_config(path, config) is not None
    except (OSError, ValueError) as error:
        if isinstance(error, CompassError):
            raise
        raise unusable(path, error) from error


def _started_config(path: Path, config: ScoredConfig) -> ScoredConfig | None:
    """Returns the configuration of the started run in a directory, or None. Raises ConfigMismatch
    if `config` cannot continue it.
    """
    old = read_config(path) if os.path.lexists(path / "config.json") else None
    if old is None or nothing_trained(path):
        return None
    check_same_run(old, config, str(path))
    return old


def nothing_trained(path: Path) -> bool:
    """Returns whether a run directory has neither a line of a step nor a checkpoint, damaged or
    not.
    """
    logs = (path / name for name in ("metrics.jsonl", "rollouts.jsonl"))
    has_lines = any(log.exists() and log.stat().st_size for log in logs)
    folder = path / "checkpoints"
    return not has_lines and not (folder.exists() and any(folder.iterdir()))


def staged(config: P, stage: str) -> P:
    """Returns `config` with the default directory of stage "sft" or "rl", runs/NAME/STAGE, unless
    `run_dir` is set.

    RL then starts from the SFT in the same folder, unless `init_from` is set. A started run keeps
    its initial weights.
    """
    if config.run_dir:
        return config
    config = replace(config, run_dir=f"{config.directory}/{stage}")
    if stage == "sft" or config.init_from:
        return config
    run_folder = Path(config.run_dir)
    if (run_folder / "config.json").is_file() and not nothing_trained(run_folder):
        return replace(config, init_from=read_config(run_folder).init_from)
    tuned = run_folder.with_name("sft")
    return replace(config, init_from=str(tuned)) if any(tuned.glob(_CHECKPOINTS)) else config


# chosen by the free memory at a run's start, for a configuration made from files
SIZES = (
    "rollout.slots",
    "rl.prompts_per_step",
    "rl.group_size",
    "rl.updates_per_rollout",
    "rl.optim.warmup_steps",
    "rl.micro_batch_tokens",
    "sft.micro_batch_tokens",
)


def with_recorded_sizes(config: P, given: Collection[str] = ()) -> P:
    """Returns `config` with the SIZES of the started run in its directory, if any: less memory may
    be free now, and a resumed run keeps its sizes.

    Args:
        config: made from files.
        given: settings that the user set and that stay, as words of a command line or names.
    """
    path = Path(config.directory)
    if not (path / "config.json").is_file() or nothing_trained(path):
        return config
    old = flatten(read_config(path))
    named = {word.partition("=")[0].lstrip("-").replace("-", "_") for word in given}
    for key in SIZES:
        if key in old and key not in named:
            config = _with_value(config, key.split("."), old[key])
    return config


def _with_value(part: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with_value(getattr(part, path[0]), path[1:], value)
    return replace(part, **{path[0]: inner})


_CHECKPOINTS = "checkpoints/step_*"


def unusable(path: Path, error: Exception) -> RunDirectoryUnusable:
    """Returns an error of the system as one that names the folder and the file."""
    file = getattr(error, "filename", None)
    where = f" ({str(file)[:200]})" if file and str(file) != str(path) else ""
    why = getattr(error, "strerror", None) or error
    return RunDirectoryUnusable(
        f"{str(path)[:200]} cannot be written to: {why}{where}; choose another folder"
    )


_FILES = ("config.json", "metrics.jsonl", "rollouts.jsonl", "tokens.jsonl")
_FOLDERS = ("checkpoints", "tb", "tokenizer", "trackers")


def _check_layout(path: Path) -> None:
    """Raises RunDirectoryUnusable if a path that a run writes to is another kind of file."""
    for name in (*_FILES, *_FOLDERS):
        if not os.path.lexists(path / name):
            continue
        try:
            mode = os.stat(path / name).st_mode
        except FileNotFoundError:
            raise RunDirectoryUnusable(f"{path / name} is a link to nothing; remove it") from None
        folder = name in _FOLDERS
        if not (stat.S_ISDIR(mode) if folder else stat.S_ISREG(mode)):
            kind = "folder" if folder else "file"
            raise RunDirectoryUnusable(
                f"{path / name} is no {kind}, and a run keeps its {name} there; remove it"
            )


def check_same_run(old: ScoredConfig, new: ScoredConfig, path: str) -> None:
    """Raises ConfigMismatch if `new` cannot continue a run of `old`. User code at another path but
    with equal content counts as equal.
    """
    moved = _moved(old.rewards.code, new.rewards.code)
    changed = {
        k: v
        for k, v in differences(old, new).items()
        if k not in MAY_CHANGE and not k.startswith(MESHES) and not _equal_values(*v, moved)
    }
    if changed:
        entries = [
            f"  {key}: {was!r} in the run, {now!r} now" for key, (was, now) in changed.items()
        ]
        if len(entries) > MOST_TOLD:
            entries[MOST_TOLD:] = [f"  and {len(entries) - MOST_TOLD} more"]
        lines = "\n".join(entries)
        advice = f"Use another run_dir, or the configuration of the run ({path}/config.json)."
        raise ConfigMismatch(f"{path} holds a run of another configuration:\n{lines}\n{advice}")


def _moved(old: FileHashes, new: FileHashes) -> set[tuple[str, str]]:
    """Returns (old name, new name) of user code with the same attribute name, in files of the same
    content (rewards.code).
    """
    return {
        (was, now)
        for was, old_hash in old
        for now, new_hash in new
        if old_hash == new_hash != NO_FILE and _attribute(was) == _attribute(now)
    }


def _attribute(name: str) -> str:
    return name.rpartition(":")[2] if ":" in name else ""


def _equal_values(was: Any, now: Any, moved: set[tuple[str, str]]) -> bool:
    """Returns whether two values of a setting are equal, except for the paths of moved code."""
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        return all(_equal_values(a, b, moved) for a, b in zip(was, now))
    return was == now or (isinstance(was, str) and (was, now) in moved)


def write_atomically(file: Path, text: str) -> None:
    """Replaces `file` by `text` atomically: a crash leaves the old or the new text."""
    temporary = file.with_name(f".{file.name}.tmp")
    with removed_on_error(temporary):
        with open(temporary, "w", encoding="utf-8") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)


def _acquire(file: Path, what: Path) -> int | None:
    """Returns the descriptor that holds the lock, with this process's pid and host in the file;
    None if the file was removed before it was locked.
    """
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o644)
    try:
        _lock(descriptor)
    except BlockingIOError:
        holder = _holder(os.read(descriptor, 4096))
        os.close(descriptor)
        advice = "wait for it, stop it, or choose another folder"
        raise RunDirectoryInUse(f"{what} is in use by {holder}: {advice}") from None
    if not _same_file(descriptor, file):
        os.close(descriptor)
        return None
    try:
        os.ftruncate(descriptor, 0)
        owner = {"pid": os.getpid(), "host": socket.gethostname()}
        os.write(descriptor, json.dumps(owner).encode())
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _lock(descriptor: int, tries: int = 3) -> None:
    """Takes the exclusive lock. Retries, because `is_locked` in another process briefly holds a
    shared one. Raises BlockingIOError.
    """
    for last in range(tries - 1, -1, -1):
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not last:
                raise
            time.sleep(0.02)


def _same_file(descriptor: int, path: Path) -> bool:
    opened = os.fstat(descriptor)
    try:
        at_path = os.stat(path)
    except OSError:
        return False
    return (opened.st_dev, opened.st_ino) == (at_path.st_dev, at_path.st_ino)


def _holder(content: bytes) -> str:
    """Returns a description of the lock's holder; unknown before it has written its pid."""
    try:
        owner = json.loads(content)
        return f"process {owner['pid']} on host {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
