"""Isolation of the workers: selection of their guards, from the setting and from the guards that
this machine supports; and a check that programs written by the model cannot read the answers.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from compass_jax.config import ConfigError, DataConfig, FileSource, TaskSource
from compass_jax.config.named import file_of
from compass_jax.devices.processes.guards import GUARDS
from compass_jax.devices.processes.start import environment, module_command
from compass_jax.rewards.checks import sources_with
from compass_jax.rewards.verifiers.program_files import package_files, python_files, readable_at

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
    """Returns the guards that this machine lacks, with the reasons, tried once by a process."""
    command = module_command("compass_jax.devices.processes.guards")
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
            reasons = json.loads(trial.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            output = getattr(error, "stderr", None) or b""
            reason = output.decode(errors="replace").strip().splitlines()[-1:] or [str(error)]
            return {name: f"the trial failed: {reason[0]}" for name in GUARDS}
    return {name: str(reasons[name]) for name in GUARDS if name in reasons}


def refuse_readable_sources(data: DataConfig, packages: Sequence[str]) -> None:
    """Raises ConfigError if the model's programs can read the file of a data source.

    packages: the packages that programs may import.
    """
    if not sources_with(data, lambda kind: kind.runs_programs):
        return
    python = python_files()
    allowed = [*python.readable, *package_files(packages)[1]]
    for key, path in _files(data):
        if where := readable_at(path, allowed):
            raise ConfigError(
                f"{key} = {path!r}: the programs that are judged can read {where}, and with it the"
                " answers; move the file out of it"
            )


def _files(data: DataConfig) -> Iterator[tuple[str, str]]:
    """Yields (setting, path) for the files of each source."""
    for key, source in data.keyed_sources():
        if isinstance(source, FileSource):
            for path in glob.glob(source.path) or [source.path]:
                yield f"{key}.path", path
                inside = os.listdir(path) if os.path.isdir(path) else ()
                yield from ((f"{key}.path", os.path.join(path, name)) for name in inside)
        elif isinstance(source, TaskSource) and (file := file_of(source.task)):
            yield f"{key}.task", str(file)
