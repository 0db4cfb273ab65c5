"""Shared parts of the experiments: results as lines of JSON, so that a killed experiment can
continue, and the identity of a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from compass_jax.config import RunConfig
from compass_jax.config.io import config_to_json

ROOT = Path(__file__).resolve().parents[1]


def finished(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Returns the rows written so far, oldest first; none if the file does not exist. A last line
    that a kill cut off is left out.

    Raises ValueError, with the line's number, if another line is not JSON.
    """
    file = Path(path)
    lines = file.read_text().split("\n") if file.exists() else []
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):  # only the last line has no line feed at its end
                raise ValueError(f"{file}:{number}: not a line of JSON: {error}") from error
    return rows


def append(path: str | os.PathLike, row: Mapping[str, Any]) -> None:
    """Appends one row and flushes it to the disk, after removing the rest of a line that a kill cut
    off.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, allow_nan=False)
    with open(file, "a+b") as out:
        out.seek(0)
        content = out.read()
        out.truncate(content.rfind(b"\n") + 1)
        out.write(line.encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def forget_compiled() -> None:
    """Frees the programs of the last run: each holds memory mappings, of which Linux gives a
    process 65,530, and a few runs of RL use them up.
    """
    jax.clear_caches()


def config_hash(config: RunConfig) -> str:
    """Returns twelve hexadecimal digits that change with any setting but the directories, so that a
    run keeps its hash in another directory.
    """
    settings = {
        k: v
        for k, v in json.loads(config_to_json(config)).items()
        if k not in ("run_dir", "init_from")
    }
    folder = settings["data"]["tokenizer"]
    settings["data"]["tokenizer"] = Path(folder).name
    # the file of an example's task has an absolute path
    text = json.dumps(settings, sort_keys=True).replace(f"{ROOT}/", "")
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def commit() -> str:
    """Returns the commit of this tree, with -dirty if tracked files differ from it; empty outside a
    git checkout.
    """
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    ]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
