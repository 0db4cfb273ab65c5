"""Hashes of the user's code that judges a run's answers. They are in the run's config.json, so that
a resume reports a changed file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from compass_jax.config import DataConfig
from compass_jax.config.named import file_of
from compass_jax.config.rewards import NO_FILE
from compass_jax.rewards.checks import checks_of

Code = tuple[tuple[str, str], ...]  # (name in a setting, hash of its file)
DIGITS = 16  # of SHA-256, in hexadecimal


def code_of(data: DataConfig) -> Code:
    """Returns the hash of the file of each of the user's verifiers, tasks and registered data sets,
    without the files that it imports. NO_FILE: the module has no file, as a compiled one.
    """
    checks = [check for source in checks_of(data) for check in source if check.own]
    hashes = {}
    for name in (check.module or check.name for check in checks):
        file = file_of(name if ":" in name else f"{name}:")
        hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:DIGITS] if file else NO_FILE
    return tuple(hashes.items())


def changed(before: Iterable[tuple[str, str]], now: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a line for each name whose file has a new hash."""
    then = dict(before)
    return [
        f"{name} was changed since this run was last started (its hash was {then[name]}, and is"
        f" {digest}): its rewards are the new file's from here on"
        for name, digest in now
        if name in then and then[name] != digest
    ]
