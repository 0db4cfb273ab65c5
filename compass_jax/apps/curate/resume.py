"""What commands share that resume in their output folder: settings, and files of JSON lines."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from pathlib import Path

from compass_jax.base.aliases import Json, JsonMapping
from compass_jax.base.untrusted import parse_json, read_lines
from compass_jax.config import ConfigError
from compass_jax.data.files import DataError


def resumed_lines(path: Path) -> Iterator[tuple[str, int, Json]]:
    """Yields (where, bytes, value) of each JSON line; removes a partial last line."""
    total = 0
    for where, line in read_lines(path, error=DataError) if path.exists() else ():
        if not line.endswith(b"\n"):
            os.truncate(path, total)
            return
        total += len(line)
        yield where, len(line), parse_json(line, where, error=DataError)


def require_same_settings(
    out: Path, before: JsonMapping, now: JsonMapping, may_change: Collection[str]
) -> None:
    """Raises ConfigError for a setting that differs from that of the folder's first command."""
    for name, value in now.items():
        if name not in may_change and before.get(name) != value:
            raise ConfigError(
                f"{out} was begun with {name} = {before.get(name)!r:.200}, and now it is"
                f" {value!r:.200}; go on with the former, or give another --out"
            )
