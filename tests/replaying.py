"""The hook of examples/group_replay.py, as a run loads it."""

from pathlib import Path

from compass_jax.config import StepHook
from compass_jax.config.seam import seam_class

_FILE = Path(__file__).parents[1] / "examples/group_replay.py"
GroupReplay = seam_class(StepHook, f"{_FILE}:GroupReplay")
age_of = GroupReplay.on_groups.__globals__["age_of"]
