"""The settings of a command that resumes in its output folder."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from compass_jax.config import ConfigError


def require_same_settings(
    out: Path, before: Mapping[str, Any], now: Mapping[str, Any], may_change: Collection[str]
) -> None:
    """Raises ConfigError for a setting that differs from that of the folder's first command."""
    for name, value in now.items():
        if name not in may_change and before.get(name) != value:
            raise ConfigError(
                f"{out} was begun with {name} = {before.get(name)!r:.200}, and now it is"
                f" {value!r:.200}; go on with the former, or give another --out"
            )
