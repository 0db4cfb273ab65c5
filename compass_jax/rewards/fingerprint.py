"""Hashes of the user's verifier code. They are stored in the run's config.json, so that a resumed
run reports a changed file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from compass_jax.config import DataConfig
from compass_jax.config.named import file_of
from compass_jax.config.rewards import NO_FILE
from compass_jax.rewards.checks import checks_of

Code = tuple[tuple[str, str], ...]  # (name in a setting, hash of its file)
DIGITS = 16  # hexadecimal digits of SHA-256 that are stored


def code_of(data: DataConfig) -> Code:
    """Returns (name, hash of the file) for each of the user's verifiers, tasks and registered data
    sets. Files that they import are not hashed. The hash is NO_FILE for a module without a file,
    such as a compiled one.
    """
    checks = [check for source in checks_of(data) for check in source if check.own]
    hashes = {}
    for name in (check.module or check.name for check in checks):
        file = file_of(name if ":" in name else f"{name}:")
        hashes[name] = hashlib.sha256(file.read_bytes()).hexdigest()[:DIGITS] if file else NO_FILE
    return tuple(hashes.items())


def changed(before: Iterable[tuple[str, str]], now: Iterable[tuple[str, str]]) -> list[str]:
    """Returns a message for each name whose file has a new hash."""
    then = dict(before)
    return [
        f"{name} was changed since this run was last started (its hash was {then[name]}, and is"
        f" {digest}): its rewards are the new file's from here on"
        for name, digest in now
        if name in then and then[name] != digest
    ]
