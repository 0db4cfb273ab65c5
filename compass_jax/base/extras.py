"""Installation commands for missing packages, which work for a clone and for an installed
compass_jax.

`pip install compass_jax[NAME]` works for neither: in a clone pip would search its index for
compass_jax.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement


def how_to_install(extra: str, *packages: str) -> str:
    """Returns two commands of which one works: the extra's requirements for `packages` on this
    Python, and the extra itself in a clone.
    """
    known = _requirements(extra)
    lines = [line for name in packages for line in known.get(name, [name])]
    quoted = " ".join(f"'{line}'" for line in lines)
    return f"pip install {quoted}, or in a clone of the project pip install -e '.[{extra}]'"


def _requirements(extra: str) -> dict[str, list[str]]:
    """Returns package -> the extra's most exact requirement here; empty if not installed."""
    requirements: dict[str, list[str]] = {}
    try:
        lines = requires("compass_jax") or []
    except PackageNotFoundError:
        lines = []
    for one in map(Requirement, lines):
        if one.marker and "extra" in str(one.marker) and one.marker.evaluate({"extra": extra}):
            one.marker = None
            requirements[one.name] = [max([str(one), *requirements.get(one.name, [])], key=len)]
    return requirements
