"""Weights & Biases and trackio. Their environment variables set account, server, project and
offline mode: WANDB_PROJECT, WANDB_MODE, TRACKIO_SPACE_ID and so on.

The packages are imported by the tracker's thread, since that takes a second.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from compass_jax.base.aliases import JsonMapping

PROJECT = "compass_jax"  # the default project
START_S = 30.0
FINISH_S = 30.0


class Run(Protocol):
    """A tracker's run object, common to both packages. Every method may raise any exception."""

    def log(self, numbers: dict[str, float], step: int) -> None:
        """Records finite numbers of a step that is later than all previous ones."""

    def finish(self) -> None:
        """Waits until the tracker has all numbers; raises if it rejects them."""


class Service(NamedTuple):
    """A tracker's title, and the function that opens a run in it."""

    title: str
    open: Callable[[Path, str, JsonMapping, Callable[[str], None]], tuple[Run, int]]
    """Opens the run of (folder, stage, settings, tell), or resumes the one of that folder. Returns
    it and the last step that the tracker has of it, or 0.
    """


def open_wandb(
    folder: Path, stage: str, settings: JsonMapping, tell: Callable[[str], None]
) -> tuple[Run, int]:
    """Opens a run of Weights & Biases, whose files and id are in `folder`. Offline, each start
    begins a further file of the same id. Raises RuntimeError without a login; it does not prompt
    for one.
    """
    import wandb

    options = wandb.Settings(
        silent=True,
        console="off",
        init_timeout=START_S,
        finish_timeout=FINISH_S,
        finish_timeout_raises=True,
    )
    person = wandb.setup(settings=options).settings
    if person.mode == "online" and not wandb.login(prompt=False):
        raise RuntimeError("nobody is logged in: type wandb login, or set WANDB_MODE=offline")
    identifier = run_id(folder, "wandb", stage)
    run = wandb.init(
        project=person.project or PROJECT,
        name=f"{settings.get('name', 'run')}-{stage}",
        id=identifier,
        resume="allow",
        dir=str(folder),
        config=dict(settings),
        job_type=stage,
        settings=options,
    )
    if not run.offline:
        tell(f"Weights & Biases: {run.url}")
        return run, run.starting_step - 1 if run.resumed else 0
    tell(f"Weights & Biases: offline; send it by wandb sync {folder}/wandb/offline-run-*")
    return run, 0


def open_trackio(
    folder: Path, stage: str, settings: JsonMapping, tell: Callable[[str], None]
) -> tuple[Run, int]:
    """Opens a run in trackio's database, one for all projects of a user, or in a Space."""
    import trackio

    # trackio identifies a run by its name, which two run directories may share
    identifier = run_id(folder, "trackio", stage)
    run = trackio.init(
        project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
        name=f"{settings.get('name', 'run')}-{stage}-{identifier}",
        resume="allow",
        config=dict(settings),
        embed=False,
    )
    return run, max(run._next_step - 1, 0)  # from trackio's database; it has no public method


SERVICES = {
    "wandb": Service("Weights & Biases", open_wandb),
    "trackio": Service("trackio", open_trackio),
}


def run_id(folder: Path, tracker: str, stage: str) -> str:
    """Returns the id of a stage's run in a tracker, which a resumed run keeps."""
    file = folder / f"{tracker}-{stage}.id"
    known = file.read_text().strip() if file.exists() else ""
    if not re.fullmatch(r"[0-9a-f]{8}", known):
        known = secrets.token_hex(4)
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(known + "\n")
    return known
