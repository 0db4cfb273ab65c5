"""The directory of one run: one process at a time, one configuration for its whole life.

    config.json  metrics.jsonl  rollouts.jsonl  checkpoints/  tb/  .lock
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path

from compass_jax.config import ConfigError, RunConfig
from compass_jax.config_io import config_from_json, config_to_json, differences

# How far and how often: settings that leave every step already taken as it was. `run_dir` only says where the directory lies.
MAY_CHANGE = frozenset(
    {"run_dir", "keep_checkpoints", "rl.steps", "rl.save_every", "rl.eval_every", "sft.steps", "sft.save_every", "sft.eval_every"}
)
MESHES = ("mesh.", "rollout_mesh", "rollout_apart")  # a checkpoint goes on on any mesh


class RunDirectoryInUse(RuntimeError):
    """Another process is writing to the run directory; the message names its pid and host."""


class ConfigMismatch(ConfigError):
    """The run directory belongs to another configuration; the message names each key with both values."""


class RunDir:
    """Opens (or creates) a run directory for writing, as a context manager.

    The lock is `flock` on `.lock`: the kernel releases it when the process ends, however it ends, so no stale lock
    can stop a resume. `resumed` says whether the directory held a run before. On an existing directory the
    configuration must be the same but for `MAY_CHANGE` and the meshes; the new one is then written in its place.

    Raises RunDirectoryInUse, ConfigMismatch; OSError where the directory cannot be made.
    """

    def __init__(self, path: str | os.PathLike, config: RunConfig):
        self.path = Path(path)
        self.config = config
        self.resumed = False
        self._lock: int | None = None

    def __enter__(self) -> RunDir:
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _acquire(self.path)
        try:
            self.resumed = self._settle_config()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self._release()

    def _settle_config(self) -> bool:
        """Writes config.json; True where a compatible one was there."""
        file = self.path / "config.json"
        existed = file.exists()
        if existed:
            check_same_run(read_config(self.path), self.config, str(self.path))
        write_atomically(file, config_to_json(self.config) + "\n")
        return existed

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)  # closing the file gives up its flock
            self._lock = None


def read_config(path: str | os.PathLike) -> RunConfig:
    """The configuration a run directory was made with. Raises ConfigError naming the file where it is absent or damaged."""
    file = Path(path) / "config.json"
    if not file.exists():
        raise ConfigError(f"{file} does not exist: {path} is not a run directory")
    try:
        return config_from_json(file.read_text())
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error


def check_same_run(old: RunConfig, new: RunConfig, path: str) -> None:
    """Raises ConfigMismatch where `new` cannot continue a run of `old`."""
    changed = {k: v for k, v in differences(old, new).items() if k not in MAY_CHANGE and not k.startswith(MESHES)}
    if changed:
        lines = "\n".join(f"  {key}: {was!r} in the run, {now!r} now" for key, (was, now) in changed.items())
        advice = f"Use another run_dir, or the configuration of the run ({path}/config.json)."
        raise ConfigMismatch(f"{path} holds a run of another configuration:\n{lines}\n{advice}")


def write_atomically(file: Path, text: str) -> None:
    """Replaces `file` by `text` so that a reader, or a crash at any moment, finds either the old text or the new."""
    temporary = file.with_name(f".{file.name}.tmp")
    with open(temporary, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)


def _acquire(path: Path) -> int:
    """The file descriptor that holds the lock, with this process's pid and host written into the file."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = _holder(os.read(descriptor, 4096))
        os.close(descriptor)
        raise RunDirectoryInUse(f"{path} is in use by {holder}: wait for it, stop it, or choose another run_dir") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
    return descriptor


def _holder(written: bytes) -> str:
    """Who holds the lock, in words; a holder that has not yet written its name is unknown."""
    try:
        owner = json.loads(written)
        return f"process {owner['pid']} on host {owner['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"
