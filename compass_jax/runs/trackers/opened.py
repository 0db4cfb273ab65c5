"""The trackers of a run (setting `trackers`), which get the names and steps of metrics.jsonl. No
tracker can end or delay the run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from compass_jax.base.aliases import JsonMapping
from compass_jax.base.extras import how_to_install
from compass_jax.config import ConfigError, named
from compass_jax.runs.trackers.board import Board
from compass_jax.runs.trackers.remote import Remote
from compass_jax.runs.trackers.services import SERVICES, Service


def check_trackers(names: Sequence[str]) -> None:
    """Raises ConfigError if the package of a tracker is not installed, or a function of the user's
    cannot be imported.
    """
    for name in names:
        if name in SERVICES and not _installed(name):
            raise ConfigError(
                f"trackers: {name} is not installed: {how_to_install(name, name)}; or leave it out"
            )
        if ":" in name:
            named.load(name, "trackers")


def open_trackers(
    names: Sequence[str],
    run_dir: Path,
    stage: str,
    settings: JsonMapping,
    tell: Callable[[str], None],
) -> list[Board | Remote]:
    """Opens the trackers of one stage of a run, each name once.

    Args:
        settings: the run's configuration in JSON's types, which trackers show with the curves.
        tell: prints a line: the address of the run in a tracker, or the reason of a tracker's
            failure.
    """
    trackers: list[Board | Remote] = []
    for name in dict.fromkeys(names):
        if name in SERVICES or ":" in name:
            service = SERVICES.get(name) or Service(name, named.load(name, "trackers"))
            trackers.append(Remote(service, run_dir, stage, settings, tell))
        else:
            board = Board(run_dir / "tb" / stage, tell, 1)
            board.prepare()
            trackers.append(board)
    return trackers


def _installed(package: str) -> bool:
    """Returns whether a package can be imported; a folder of its name (wandb's) does not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
