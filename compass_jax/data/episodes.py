"""The drivers of environments: their processes, and the rows that they list."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.config import EpisodeSource
from compass_jax.data.files import DataError
from compass_jax.devices.processes.start import environment, module_command

DRIVER = "compass_jax.experience.episodes.play"
# run as a script, since another interpreter does not have this package
VERIFIERS = Path(__file__).parents[1] / "experience" / "episodes" / "verifiers_driver.py"
LIST_S = 600.0  # timeout of listing the rows


class Command(NamedTuple):
    """The command and the environment of a driver's process."""

    words: list[str]
    variables: dict[str, str]


def command_of(source: EpisodeSource) -> Command:
    """Returns the command that starts the driver of a source."""
    if source.of_verifiers:
        variables = {name: x for name, x in os.environ.items() if name != "PYTHONPATH"}
        return Command([source.python or sys.executable, "-P", str(VERIFIERS)], variables)
    return Command(module_command(DRIVER), environment(passes_all=True))


def setup_of(source: EpisodeSource, mode: str, **more: object) -> JsonObject:
    """Returns the first line that a driver reads."""
    limits = {"memory_gib": source.memory_gib, "size": source.size, "turns": source.turns}
    return {"env": source.env, **limits, "options": source.settings, "mode": mode, **more}


@lru_cache(maxsize=32)
def episode_rows(source: EpisodeSource, key: str, seed: int) -> tuple[JsonObject, ...]:
    """Returns the rows of a source's environment, in its order. Raises DataError, which names the
    setting `key`, for an environment that cannot list them.
    """
    command, where = command_of(source), f"{key}.env = {source.env!r}"
    try:
        done = subprocess.run(
            command.words,
            input=json.dumps(setup_of(source, "rows", seed=seed)),
            capture_output=True,
            text=True,
            timeout=LIST_S,
            env=command.variables,
        )
    except OSError as error:
        raise DataError(f"{where}: {command.words[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{where}: its rows took longer than {LIST_S:g} s") from error
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    refused = next((line["refused"] for line in lines if "refused" in line), "")
    if refused or done.returncode:
        why = refused or f"the driver ended with status {done.returncode}: {done.stderr[-1000:]}"
        raise DataError(f"{where}: {why}")
    if not lines:
        raise DataError(f"{where}: it has no row; an environment needs one task at least")
    return tuple(line["row"] for line in lines)
