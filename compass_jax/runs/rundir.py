"""The directory of one run: one process at a time, one configuration for its whole life.

config.json  metrics.jsonl  evaluation.json  rollouts.jsonl  tokens.jsonl  verdicts.jsonl
checkpoints/  in_flight/  evaluation_start/  evaluation/  tb/  trackers/  machine.json  .lock
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError
from compass_jax.config import ConfigError, RunConfig
from compass_jax.config.io import changed_keys, config_to_json, flatten, read_config
from compass_jax.config.rewards import NO_FILE
from compass_jax.runs.logfile import replaced

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
        "log.part_steps",
        "log.stall_s",
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
        *(f"rl.guard.{name}" for name in ("window", "false_alarms", "action")),
        "evaluation.at",
        "evaluation.start",
        "evaluation.prompts",
        "evaluation.start_prompts",
        "sft.steps",
        "sft.save_every",
        "sft.bad_rows",  # a refused row ended the run before its step
        "data.cache",
    }
)
MOST_TOLD = 10  # maximum settings that an error names
# A checkpoint can resume on any mesh; a hook can be mended or taken out.
FREE_BELOW = ("mesh.", "rollout_mesh", "rollout_apart", "samplers.", "rl.hooks")


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
    reason, so no stale lock can stop the next process. Raises RunDirectoryInUse;
    RunDirectoryUnusable if the folder cannot be made or locked.
    """

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path)
        self.file = self.path / ".lock"
        self._lock: int | None = None

    def __enter__(self) -> FolderLock:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire(self.file, self.path)
        except (OSError, ValueError) as error:  # ValueError: a name with a NUL in it
            raise unusable(self.path, error) from error
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            os.close(self._lock)  # closing the file releases its flock
            self._lock = None

    def check(self) -> None:
        """Raises RunDirectoryGone if the folder was removed or renamed. No-op without a lock."""
        if self._lock is not None and not self.file.exists():
            raise RunDirectoryGone(
                f"{self.path} was removed or replaced while this process was writing to it: it ends"
                " here. Put the folder back, and the same command goes on from its last checkpoint"
            )


class NewFolderLock(FolderLock):
    """The lock of a folder that gets its name when complete: a file next to it, which is removed at
    the end.
    """

    def __init__(self, path: str | os.PathLike):
        super().__init__(path)
        self.file = self.path.absolute().with_name(f".{self.path.absolute().name}.lock")

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self.file.unlink(missing_ok=True)
        super().__exit__()


class NewRunLock(FolderLock):
    """The lock of a run directory that a command fills. If the command fails, the folders that it
    created are removed; a folder that was there before stays.
    """

    def __enter__(self) -> NewRunLock:
        folders = (self.path.absolute(), *self.path.absolute().parents)
        self._created = [folder for folder in folders if not folder.exists()]
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        failed = bool(exc) and exc[0] is not None
        if failed and self._created:
            shutil.rmtree(self.path, ignore_errors=True)
        super().__exit__()
        for parent in self._created[1:] if failed else ():
            with contextlib.suppress(OSError):  # another command's files are in it
                parent.rmdir()


def is_locked(path: str | os.PathLike) -> bool:
    """Returns whether a process holds a folder's lock. Briefly takes a shared lock."""
    try:
        with open(Path(path) / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


class RunDir(FolderLock):
    """Opens (or creates) the directory of a run for writing, as a context manager.

    `code` are the hashes of the user's code files, which become `rewards.code` of `config`.
    `resumed`: whether the directory already held a run. In an existing directory the configuration
    must be equal except for `MAY_CHANGE` and the meshes, unless the directory has no training step
    yet (a failed start leaves its config.json); the new configuration then replaces the old one.

    Raises RunDirectoryInUse, RunDirectoryUnusable, ConfigMismatch.
    """

    def __init__(self, config: RunConfig, code: FileHashes = ()):
        super().__init__(config.directory)
        self.config = replace(config, rewards=replace(config.rewards, code=code))
        self.resumed = False
        self.before: RunConfig | None = None  # the previous configuration of a resumed run

    def __enter__(self) -> RunDir:
        super().__enter__()
        try:
            self.before = self._started()
            self.resumed = self.before is not None
            write_atomically(self.path / "config.json", config_to_json(self.config) + "\n")
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                raise unusable(self.path, error) from error
            raise
        return self

    def look(self) -> bool:
        """Returns whether the directory holds a started run. Raises as `__enter__`; creates
        nothing.
        """
        path = self.path
        if self.file.exists():
            with FolderLock(path):
                pass
        nearest = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
            code = errno.EACCES if nearest.is_dir() else errno.ENOTDIR
            raise unusable(path, OSError(code, os.strerror(code), str(nearest)))
        return self._started() is not None

    def _started(self) -> RunConfig | None:
        """Returns the started run's configuration. Raises ConfigMismatch for another run's."""
        old = read_config(self.path) if (self.path / "config.json").exists() else None
        if old is None or nothing_trained(self.path):
            return None
        check_same_run(flatten(old), flatten(self.config), str(self.path))
        return old


def nothing_trained(path: Path) -> bool:
    """Returns whether a run directory has neither a step's line nor a checkpoint."""
    logs = (path / name for name in ("metrics.jsonl", "rollouts.jsonl"))
    has_lines = any(log.exists() and log.stat().st_size for log in logs)
    folder = path / "checkpoints"
    return not has_lines and not (folder.exists() and any(folder.iterdir()))


def staged(config: RunConfig, stage: str) -> RunConfig:
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
    return (
        replace(config, init_from=str(tuned)) if any(tuned.glob("checkpoints/step_*")) else config
    )


# chosen at a run's start by the free memory and the lengths of the data, for a configuration made
# from files
SIZES = (
    "rollout.slots",
    "rollout.prompt_buckets",
    "rollout.max_new_tokens",
    "rollout.cache_bucket",
    "rl.buckets",
    "rl.prompts_per_step",
    "rl.group_size",
    "rl.updates_per_rollout",
    "rl.optim.warmup_steps",
    "rl.micro_batch_tokens",
    "sft.micro_batch_tokens",
)


def recorded_sizes(path: Path, overridden: Collection[str] = ()) -> JsonObject:
    """Returns the SIZES of the started run in a directory, if any, for a configuration made from
    files: less memory may be free now, and a resumed run keeps its sizes. `overridden` names
    settings that the user set and that are left out.
    """
    if not (path / "config.json").is_file() or nothing_trained(path):
        return {}
    old = flatten(read_config(path))
    return {key: old[key] for key in SIZES if key in old and key not in overridden}


def unusable(path: Path, error: Exception) -> RunDirectoryUnusable:
    """Returns an error of the system as one that names the folder and the file."""
    file = getattr(error, "filename", None)
    where = f" ({str(file)[:200]})" if file and str(file) != str(path) else ""
    why = getattr(error, "strerror", None) or error
    return RunDirectoryUnusable(
        f"{str(path)[:200]} cannot be written to: {why}{where}; choose another folder"
    )


def check_same_run(old: JsonObject, new: JsonObject, path: str) -> None:
    """Raises ConfigMismatch if a run with the settings `new` (`flatten`) cannot continue one with
    `old`. User code at another path but with equal content counts as equal.
    """
    moved = _moved(old["rewards.code"], new["rewards.code"])
    changed = {
        k: v
        for k, v in changed_keys(old, new).items()
        if k not in MAY_CHANGE and not k.startswith(FREE_BELOW) and not _equal_values(*v, moved)
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
    """Returns (old name, new name) of equal user code (rewards.code) at another path."""
    return {
        (was, now)
        for was, old_hash in old
        for now, new_hash in new
        if old_hash == new_hash != NO_FILE and was.rpartition(":")[2] == now.rpartition(":")[2]
    }


def _equal_values(was: Any, now: Any, moved: set[tuple[str, str]]) -> bool:
    """Returns whether two values of a setting are equal, except for the paths of moved code."""
    if isinstance(was, tuple) and isinstance(now, tuple) and len(was) == len(now):
        return all(_equal_values(a, b, moved) for a, b in zip(was, now))
    return was == now or (isinstance(was, str) and (was, now) in moved)


def write_atomically(file: Path, text: str) -> None:
    """Replaces `file` by `text` atomically: a crash leaves the old or the new text."""
    with replaced(file) as temporary, open(temporary, "w", encoding="utf-8") as out:
        out.write(text)
        out.flush()
        # On the disk before the rename: otherwise a power failure could leave an empty file.
        os.fsync(out.fileno())


def _acquire(file: Path, what: Path, tries: int = 3) -> int:
    """Returns the descriptor that holds the lock, with this process's pid and host in the file."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 4096).decode(errors="replace") or "another process"
        os.close(descriptor)
        if tries > 1:  # `is_locked` in another process briefly holds a shared lock
            time.sleep(0.02)
            return _acquire(file, what, tries - 1)
        advice = "wait for it, stop it, or choose another folder"
        raise RunDirectoryInUse(f"{what} is in use by {holder}: {advice}") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on host {socket.gethostname()}".encode())
    return descriptor
