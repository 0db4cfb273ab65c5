"""Weights & Biases, and trackio, as their own packages offer them. What is asked of the person (an
account, a server, a project's name, offline or not) is asked by their own variables: WANDB_PROJECT,
WANDB_MODE, TRACKIO_SPACE_ID and so on.

The packages are imported by the thread that speaks to them: they take a second.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from compass_jax.trackers.remote import Service

PROJECT = "compass_jax"  # where the person names none
START_S = 30.0
FINISH_S = 30.0


class WandB:
    """The run in Weights & Biases. Its files, and its id, are in the run directory."""

    title = "Weights & Biases"

    def __init__(self, folder: Path, stage: str, settings: Mapping[str, Any]):
        self.folder, self.stage, self.settings = folder, stage, settings
        self.run: Any = None

    def start(self, tell: Callable[[str], None]) -> int:
        """See `Service`. Raises RuntimeError where nobody is logged in: it is never asked for."""
        import wandb

        options = wandb.Settings(
            silent=True,
            console="off",
            init_timeout=START_S,
            finish_timeout=FINISH_S,
            finish_timeout_raises=True,
        )
        asked = wandb.setup(settings=options).settings
        if asked.mode == "online" and not wandb.login(prompt=False):
            raise RuntimeError("nobody is logged in: type wandb login, or set WANDB_MODE=offline")
        own = run_id(self.folder, "wandb", self.stage)
        self.run = wandb.init(
            project=asked.project or PROJECT,
            name=f"{self.settings.get('name', 'run')}-{self.stage}",
            id=own,
            resume="allow",
            dir=str(self.folder),
            config=dict(self.settings),
            job_type=self.stage,
            settings=options,
        )
        if not self.run.offline:
            tell(f"{self.title}: {self.run.url}")
            return self.run.starting_step - 1 if self.run.resumed else 0
        files = sorted(self.folder.glob(f"wandb/offline-run-*-{own}/run-{own}.wandb"))
        tell(f"{self.title}: offline; send it by wandb sync {self.folder}/wandb/offline-run-*")
        return max((step for file in files for step in offline_steps(file)), default=0)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Service`."""
        self.run.log(dict(numbers), step=step)

    def finish(self) -> None:
        """See `Service`."""
        self.run.finish()


class Trackio:
    """The run in trackio's database, which is the person's own for all projects, or in a Space."""

    title = "trackio"

    def __init__(self, folder: Path, stage: str, settings: Mapping[str, Any]):
        self.folder, self.stage, self.settings = folder, stage, settings
        self.run: Any = None

    def start(self, tell: Callable[[str], None]) -> int:
        """See `Service`."""
        import trackio

        # a run is known by its name, which two run directories may share
        own = run_id(self.folder, "trackio", self.stage)
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=f"{self.settings.get('name', 'run')}-{self.stage}-{own}",
            resume="allow",
            config=dict(self.settings),
            embed=False,
        )
        return max(self.run._next_step - 1, 0)  # as its database has it: nothing public says it

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """See `Service`."""
        self.run.log(dict(numbers), step=step)

    def finish(self) -> None:
        """See `Service`."""
        self.run.finish()


SERVICES: dict[str, Callable[[Path, str, Mapping[str, Any]], Service]] = {
    "wandb": WandB,
    "trackio": Trackio,
}


def run_id(folder: Path, tracker: str, stage: str) -> str:
    """The id of the stage's run in a tracker: a file of the run directory keeps it, so that a
    resumed run is the same one there.
    """
    file = folder / f"{tracker}-{stage}.id"
    known = file.read_text().strip() if file.exists() else ""
    if not re.fullmatch(r"[0-9a-f]{8}", known):
        known = secrets.token_hex(4)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(known + "\n")
    return known


_BLOCK, _HEAD, _FILE_HEAD = 32 * 1024, 7, 7  # of LevelDB's log format, in bytes


def offline_steps(file: Path) -> Iterator[int]:
    """The steps in a file that wandb wrote offline: a process that was killed takes along what its
    last block held, and only the file says what that was.
    """
    for record in offline_records(file):
        if record.HasField("history"):
            yield record.history.step.num


def offline_records(file: Path) -> Iterator[Any]:
    """wandb's records in a file, up to where it was cut."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, whole = file.read_bytes(), _FILE_HEAD, b""
    while at + _HEAD <= len(data):
        if (left := _BLOCK - at % _BLOCK) < _HEAD:
            at += left
            continue
        size, part = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        piece = data[at + _HEAD : at + _HEAD + size]
        at += _HEAD + size
        if len(piece) < size:
            return
        whole = piece if part in (1, 2) else whole + piece  # whole, first; middle, last
        if part in (1, 4):
            yield Record.FromString(whole)
