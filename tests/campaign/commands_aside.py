"""Commands in separate processes, for kills and for two commands at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import quick_compile

TESTS, TIMEOUT_S = Path(__file__).parents[1], 300


class Command:
    """`compass ARGUMENTS` in a process, in `folder`; its output is in folder/NAME.txt."""

    def __init__(self, arguments: list[str], folder: Path, name: str):
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("COV_", "XLA_FLAGS"))}
        variables |= {"PYTHONPATH": f"{TESTS.parent}:{TESTS}", "JAX_PLATFORMS": "cpu"}
        self.log = folder / f"{name}.txt"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "compass_jax", *arguments],
                env=variables | quick_compile.asked(variables),
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    def finish(self) -> int:
        """Waits for the process and returns its exit status."""
        try:
            return self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()

    def output(self) -> str:
        """Returns the output so far."""
        return self.log.read_text(errors="replace")
