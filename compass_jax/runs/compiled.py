"""Compiled programs that outlive the process: JAX's persistent compilation cache, in the user's
cache folder.

A cached program is the compiled one, so no number changes; only the compiler's time is saved.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path
from typing import Any

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

MOST_BYTES = 4 * 2**30  # the programs that were used longest ago go first
OFF = "off"


def default_folder() -> Path:
    """Where programs are kept: $XDG_CACHE_HOME (default ~/.cache) /compass_jax/programs."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "compass_jax" / "programs"


def keep_programs(where: str = "") -> str:
    """Has JAX keep what it compiles in `where` (empty: `default_folder()`), and take it from there.

    Returns what a person should know: an empty string, or why nothing can be kept. The run goes on
    then, and compiles. Where JAX has a folder already ($JAX_COMPILATION_CACHE_DIR), that one stays
    unless `where` names another; "off" keeps nothing. Programs of other processors lie in other
    folders: one that was compiled for instructions that a machine lacks would end the process.
    """
    if where == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return ""
    settings: Any = jax.config
    if not where and settings.jax_compilation_cache_dir:
        return ""
    folder = (Path(where) if where else default_folder()) / _processor()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lockfile", timeout=10):
            _trim(folder)
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is an OSError
        return f"compiled programs are not kept ({folder}: {error}): every start compiles them"
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # JAX's own limit of size reads every entry for each one that it adds: 0.3 s with 3,000 of them
    jax.config.update("jax_compilation_cache_max_size", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # it is opened once, and something may be compiled already
    return ""


def _trim(folder: Path) -> None:
    """Removes what was used longest ago, until MOST_BYTES are left."""
    found = []
    for entry in os.scandir(folder):
        if entry.name.endswith(("-cache", "-atime")):
            said = entry.stat()
            found.append((max(said.st_atime, said.st_mtime), said.st_size, entry.path))
    size = sum(one for _, one, _ in found)
    for _, one, path in sorted(found):
        if size <= MOST_BYTES:
            return
        os.unlink(path)
        size -= one


def _processor() -> str:
    """A name for machines that run each other's programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
