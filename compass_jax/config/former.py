"""Former names of the package's modules.

A run's config.json may name one, as the task of a shipped configuration does, and so may a user's
file. The first is read under the present name; an error about the second has it.
"""

from __future__ import annotations

PACKAGE = "compass_jax"
_ROOMS = {
    "base": "aliases chat errors extras masked programs records token_ids untrusted",
    "devices": "allocator chips distributed machine processes sharding tpu_flags tpu_versions",
    "model": "families",
    "rewards": "tasks verifiers",
    "rewards.tasks": "tools",
    "rollout": "serving",
    "training": "from_files memory presets session",
    "runs": "report trackers",
    "apps": "curate pipeline plan",
    "commands": "configs library run",
}
# former -> present, both below the package; the longest name that fits decides
MODULES = {name: f"{room}.{name}" for room, names in _ROOMS.items() for name in names.split()} | {
    "samplers": "rollout.remote",
    "verifiers.base": "config.kinds",
    **{f"rewards.{x}": f"rewards.judges.{x}" for x in ("agreement", "endpoint", "judging")},
    "rewards.scalar": "rewards.judges.scalar",
}


def present_name(name: str) -> str:
    """Returns the present form of "compass_jax.module" or "compass_jax.module:name"; another name
    is unchanged.
    """
    module, colon, attribute = name.partition(":")
    top, _, below = module.partition(".")
    parts = below.split(".")
    for n in range(len(parts), 0, -1) if top == PACKAGE else ():
        if moved := MODULES.get(".".join(parts[:n])):
            return ".".join([PACKAGE, moved, *parts[n:]]) + colon + attribute
    return name
