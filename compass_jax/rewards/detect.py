"""Selection of a worker's guards, from the setting and from the guards that this machine
supports.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache

from compass_jax.config import ConfigError
from compass_jax.processes.guards import GUARDS
from compass_jax.processes.start import environment, module_command
from compass_jax.untrusted import UntrustedError, parse_json

_TRIAL_LIMIT_S = 60.0


def guards_for(mode: str, missing: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Returns the guards to enter for `rewards.sandbox` = "auto", "required" or "off".

    missing: the guards that this machine lacks, with the reasons; None: `missing_guards()`.

    Raises ConfigError for "required" if a guard is missing; the message has its name and the
    kernel's reason.
    """
    if mode == "off":
        return ()
    missing = missing_guards() if missing is None else missing
    if mode == "required" and missing:
        raise ConfigError(
            f"rewards.sandbox = 'required': this machine has no {_format(missing)}; allow it, or "
            "set 'auto', which does with what there is"
        )
    return tuple(name for name in GUARDS if name not in missing)


def notice(mode: str, missing: Mapping[str, str] | None = None) -> str:
    """Returns a line that describes the isolation of verifiers from the run.

    missing: as in `guards_for`.
    """
    if mode == "off":
        return (
            "rewards.sandbox = 'off': checks of answers have this user's files and network, and a"
            " program that a model wrote can read the answers of its tests"
        )
    missing = missing_guards() if missing is None else missing
    line = f"checks of answers run behind: {', '.join([*guards_for(mode, missing), 'limits'])}"
    return f"{line}; missing: {_format(missing)}" if missing else line


def _format(missing: Mapping[str, str]) -> str:
    return "; ".join(f"{name} ({why})" for name, why in missing.items())


@cache
def missing_guards() -> dict[str, str]:
    """Returns the guards that this machine lacks, with the reasons. They are tried once, in another
    process.
    """
    command = module_command("compass_jax.processes.guards")
    with tempfile.TemporaryDirectory(prefix="compass-trial-") as folder:
        try:
            trial = subprocess.run(
                [*command, folder],
                env=environment(passes_all=False),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TRIAL_LIMIT_S,
                check=True,
            )
            reasons = parse_json(trial.stdout, "the trial of the guards")
        except (OSError, subprocess.SubprocessError, UntrustedError) as error:
            output = getattr(error, "stderr", None) or b""
            reason = output.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
            return {name: f"the trial failed: {reason[0]}" for name in GUARDS}
    return {name: str(reasons[name]) for name in GUARDS if name in reasons}
