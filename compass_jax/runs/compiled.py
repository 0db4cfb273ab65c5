"""JAX's persistent compilation cache, in the user's cache folder.

It changes no number, because a cached program is the compiled one; it only saves compilation time.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import filelock
import jax
from jax.experimental.compilation_cache import compilation_cache

from compass_jax.base.aliases import Json

MOST_BYTES = 4 * 2**30  # the least recently used programs are removed first
OFF = "off"


def default_folder() -> Path:
    """Returns the folder of compiled programs: $XDG_CACHE_HOME (default ~/.cache)
    /compass_jax/programs.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "compass_jax" / "programs"


def keep_programs(where: str = "") -> str:
    """Sets JAX's compilation cache to `where` (empty: `default_folder()`; "off": no cache).

    Returns an empty string, or a notice that programs cannot be cached and why; the run then
    compiles them. A folder in $JAX_COMPILATION_CACHE_DIR stays unless `where` names another. Each
    kind of processor has a separate folder, because a program with instructions that a machine
    lacks would end the process.
    """
    if where == OFF:
        jax.config.update("jax_enable_compilation_cache", False)
        return ""
    settings: Json = jax.config
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
    # JAX's size limit reads every entry for each added one: 0.3 s with 3,000 entries
    jax.config.update("jax_compilation_cache_max_size", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX may have opened another one already
    return ""


def _trim(folder: Path) -> None:
    """Removes the least recently used programs until MOST_BYTES are left."""
    entries = []
    for entry in os.scandir(folder):
        if entry.name.endswith(("-cache", "-atime")):
            stat = entry.stat()
            entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, entry.path))
    total = sum(size for _, size, _ in entries)
    for _, size, path in sorted(entries):
        if total <= MOST_BYTES:
            return
        os.unlink(path)
        total -= size


def _processor() -> str:
    """Returns a name that is equal for machines that can run each other's programs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"
