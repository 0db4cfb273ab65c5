"""Which guards a worker gets: what this machine has, found by trying, and what the setting
wants.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from functools import lru_cache

from compass_jax.children import import_path, module_command
from compass_jax.config import ConfigError
from compass_jax.untrusted import UntrustedError, parse_json
from compass_jax.verifiers.guards import GUARDS

_TRIAL_LIMIT_S = 60.0
# what Python and a verifier need; an answer that reads its environment finds no token in it
_PASSED = ("PATH", "HOME", "LANG", "LANGUAGE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
_PASSED_PREFIXES = ("LC_", "PYTHONHASHSEED", "PYTHONUTF8", "PYTHONIOENCODING", "COVERAGE_")


def guards_for(mode: str) -> tuple[str, ...]:
    """The guards to enter, in `rewards.sandbox` = "auto", "required" or "off".

    Raises ConfigError for "required" where one is missing, with its name and the kernel's reason.
    """
    if mode == "off":
        return ()
    missing = missing_guards()
    if mode == "required" and missing:
        raise ConfigError(
            f"rewards.sandbox = 'required': this machine has no {_listed(missing)}; allow it, or "
            "set 'auto', which does with what there is"
        )
    return tuple(name for name in GUARDS if name not in missing)


def notice(mode: str) -> str:
    """One line for whoever starts a run: what keeps the checks of answers apart from the rest."""
    active = guards_for(mode)
    if mode == "off":
        return (
            "rewards.sandbox = 'off': checks of answers have this user's files and network, and a"
            " program that a model wrote can read the answers of its tests"
        )
    said = f"checks of answers run behind: {', '.join([*active, 'limits'])}"
    missing = missing_guards()
    return f"{said}; missing: {_listed(missing)}" if missing else said


def _listed(missing: dict[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in missing.items())


@lru_cache(maxsize=1)
def missing_guards() -> dict[str, str]:
    """The guards that this machine lacks, each with the reason. Tried once, in another process."""
    command = module_command("compass_jax.verifiers.guards")
    with tempfile.TemporaryDirectory(prefix="compass-trial-") as folder:
        try:
            tried = subprocess.run(
                [*command, folder],
                env=environment(guarded=True),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TRIAL_LIMIT_S,
                check=True,
            )
            found = parse_json(tried.stdout, "the trial of the guards")
        except (OSError, subprocess.SubprocessError, UntrustedError) as error:
            said = getattr(error, "stderr", None) or b""
            reason = said.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
            return {name: f"the trial failed: {reason[0]}" for name in GUARDS}
    return {name: str(found[name]) for name in GUARDS if name in found}


def environment(guarded: bool) -> dict[str, str]:
    """The environment of a worker: what it imports is what this process imports."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not guarded or name in _PASSED or name.startswith(_PASSED_PREFIXES)
    }
    own = {"PYTHONPATH": import_path()}
    return kept | own | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
