"""What the experiments share: results as lines of JSON, so that a killed experiment goes on where
it was; and what identifies a run.
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


def finished(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The rows written so far, oldest first; none where the file does not exist. A last line that a
    kill cut off is left out.

    Raises ValueError, naming the line, where another one is not JSON.
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
            if number < len(lines):  # only the last line has no line feed behind it
                raise ValueError(f"{file}:{number}: not a line of JSON: {error}") from error
    return rows


def append(path: str | os.PathLike, row: Mapping[str, Any]) -> None:
    """Adds one row and has it on the disk before returning; the rest of a line that a kill cut off
    is removed first.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(row, allow_nan=False)
    with open(file, "a+b") as out:
        out.seek(0)
        whole = out.read()
        out.truncate(whole.rfind(b"\n") + 1)
        out.write(line.encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


def forget_compiled() -> None:
    """Frees the programs of the last run: each holds memory mappings, of which Linux gives a
    process 65,530, and a few runs of RL use them up.
    """
    jax.clear_caches()


def config_hash(config: RunConfig) -> str:
    """Twelve hexadecimal digits that change with any setting but the directories: the same run at
    another place is the same run.
    """
    settings = {
        k: v
        for k, v in json.loads(config_to_json(config)).items()
        if k not in ("run_dir", "init_from")
    }
    folder = settings["data"]["tokenizer"]
    settings["data"]["tokenizer"] = Path(folder).name
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=6).hexdigest()


def commit() -> str:
    """The commit of this tree, with -dirty where tracked files differ from it; empty outside a git
    checkout.
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
