"""Which code of a person's own judges a run's answers: its hash is in the run's config.json, so
that a file that was changed before a resume is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from compass_jax.config import DataConfig
from compass_jax.config.named import file_of
from compass_jax.config.rewards import NO_FILE
from compass_jax.rewards.checks import checks_of

Code = tuple[tuple[str, str], ...]  # (what a setting names, hash of its file)
DIGITS = 16  # of SHA-256, in hexadecimal


def code_of(data: DataConfig) -> Code:
    """The hash of the file that each own verifier, task and registered data set is in; what that
    file imports is not looked at. NO_FILE where there is none, as in a compiled module.
    """
    checks = [check for source in checks_of(data) for check in source if check.own]
    found = {}
    for name in (check.module or check.name for check in checks):
        file = file_of(name if ":" in name else f"{name}:")
        found[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:DIGITS] if file else NO_FILE
    return tuple(found.items())


def changed(before: Iterable[tuple[str, str]], now: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each name whose file has another hash than it had."""
    then = dict(before)
    return [
        f"{name} was changed since this run was last started (its hash was {then[name]}, and is"
        f" {found}): its rewards are the new file's from here on"
        for name, found in now
        if name in then and then[name] != found
    ]
