"""How a package that is not installed is installed: in words that hold for a clone and for an
installed compass_jax alike.

`pip install compass_jax[NAME]` holds for neither: in a clone pip would look for compass_jax
elsewhere.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement


def how_to_install(extra: str, *packages: str) -> str:
    """Two commands of which one works: the requirements that the extra has on this Python of
    `packages`, wherever compass_jax came from; and the extra itself, in a clone.
    """
    known = _requirements(extra)
    lines = [line for name in packages for line in known.get(name, [name])]
    quoted = " ".join(f"'{line}'" for line in lines)
    return f"pip install {quoted}, or in a clone of the project pip install -e '.[{extra}]'"


def _requirements(extra: str) -> dict[str, list[str]]:
    """Package -> what the extra asks of it here, the most exact one; nothing of a folder that was
    never installed.
    """
    found: dict[str, list[str]] = {}
    try:
        lines = requires("compass_jax") or []
    except PackageNotFoundError:
        lines = []
    for one in map(Requirement, lines):
        if one.marker and "extra" in str(one.marker) and one.marker.evaluate({"extra": extra}):
            one.marker = None
            found[one.name] = [max([str(one), *found.get(one.name, [])], key=len)]
    return found
