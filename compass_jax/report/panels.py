"""The panels of a run's metrics: one table, web/panels.json, for the report's page and the pictures
of the curves. The descriptions of metrics are in `runs/metric_help.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from typing import Literal

from compass_jax.aliases import JsonMapping

# Colours that colour-blind readers can tell apart (Okabe and Ito); the page has separate values.
COLOURS = {
    "blue": "#0072B2",
    "orange": "#E69F00",
    "green": "#009E73",
    "red": "#D55E00",
    "sky": "#56B4E9",
    "grey": "#B8B8B8",
    "purple": "#8D5FA8",
}


@dataclass(frozen=True)
class Panel:
    """One chart. Each of its lines is (metric, label, colour).

    `scale`: linear; log; share (a part of 1); stacked (shares that sum to 1); time (cut if a few
    values are far above all others).
    """

    title: str
    unit: str
    scale: Literal["linear", "log", "share", "stacked", "time"]
    lines: tuple[tuple[str, str, str], ...]


def read_panels() -> dict[str, list[Panel]]:
    """Returns section of the page -> its panels."""
    text = (resources.files("compass_jax.report") / "web" / "panels.json").read_text("utf-8")
    return {
        section: [Panel(**row | {"lines": tuple(map(tuple, row["lines"]))}) for row in rows]
        for section, rows in json.loads(text).items()
    }


PANELS = read_panels()


def panels_of(series: JsonMapping) -> list[Panel]:
    """Returns the panels that have a logged metric."""
    panels = [panel for section in PANELS.values() for panel in section]
    return [panel for panel in panels if any(name in series for name, _, _ in panel.lines)]
