"""The rows of an environment's episodes, which its driver lists in a process of its own."""

from __future__ import annotations

import json
import subprocess
from functools import lru_cache

from compass_jax.aliases import JsonObject
from compass_jax.config import EpisodeSource
from compass_jax.data.files import DataError
from compass_jax.processes.start import environment, module_command

DRIVER = "compass_jax.experience.episodes.play"
LIST_S = 600.0  # timeout of listing the rows


@lru_cache(maxsize=32)
def episode_rows(source: EpisodeSource, key: str, seed: int) -> tuple[JsonObject, ...]:
    """Returns the rows of a source's environment, in its order. Raises DataError, which names the
    setting `key`, for an environment that cannot list them.
    """
    setup = {"env": source.env, "mode": "rows", "seed": seed, "memory_gib": source.memory_gib}
    where = f"{key}.env = {source.env!r}"
    try:
        done = subprocess.run(
            module_command(DRIVER),
            input=json.dumps(setup),
            capture_output=True,
            text=True,
            timeout=LIST_S,
            env=environment(passes_all=True),
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{where}: its rows took longer than {LIST_S:g} s") from error
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    refused = next((line["refused"] for line in lines if "refused" in line), "")
    if refused or done.returncode:
        why = refused or f"the driver ended with status {done.returncode}: {done.stderr[-1000:]}"
        raise DataError(f"{where}: {why}")
    return tuple(line["row"] for line in lines)
