"""A runner of the fenced blocks of a page, in order, in one folder.

    sh                  `compass` is called in this process, `cat > FILE << END` writes a file, and
                        the shell runs any other command
    python              is executed, or written to the file that a comment in its first line names
    text                after a python block: the output of that block
A comment before a block (`<!-- cloud -->`) is the reason why it does not run; any comment skips it.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

from compass_jax.commands.cli import main

_BLOCK = re.compile(
    r"(?:<!-- (?P<why>[^\n]*) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
_FILE = re.compile(r"# ([\w/]+\.py)\n")
_HERE_DOCUMENT = re.compile(r"cat > (\S+) << '?(\w+)'?\n")
# options that make a command small enough for a test
SMALL = {
    "train": {
        "--rl.prompts-per-step": "2",
        "--rl.group-size": "3",
        "--rl.updates-per-rollout": "1",
        "--rollout.slots": "4",
        "--rollout.max-new-tokens": "8",
        "--data.eval-prompts": "0",
    }
}


class Block(NamedTuple):
    """A fenced block; `why` is the reason why it does not run, or empty."""

    kind: str
    text: str
    why: str


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page that have a kind."""
    fenced = [
        Block(x["kind"], x["text"], x["why"] or "") for x in _BLOCK.finditer(page.read_text())
    ]
    return [x for x in fenced if x.kind]


def run_page(page: Path) -> int:
    """Runs a page in the current folder. Returns how many blocks ran."""
    names: dict[str, object] = {"__name__": page.stem}
    printed, count = "", 0
    for block in blocks(page):
        if block.why or block.kind not in ("sh", "python", "text"):
            printed = ""
        elif block.kind == "text":
            assert not printed or block.text == printed, (
                f"{page.name} says {block.text!r}, printed was {printed!r}"
            )
            count += bool(printed)
            printed = ""
        else:
            printed = (
                run_python(block.text, names) if block.kind == "python" else run_sh(block.text)
            )
            count += 1
    return count


def run_python(text: str, names: dict[str, object]) -> str:
    """Executes a block, or writes its file, and returns the output."""
    file = _FILE.match(text)
    if file:
        Path(file[1]).write_text(text)
        return ""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "<documentation>", "exec"), names)
    return out.getvalue()


def run_sh(text: str) -> str:
    """Runs commands, each of which must end with status 0; their output is not compared."""
    while text.strip():
        document = _HERE_DOCUMENT.match(text)
        if document:
            body, _, text = text[document.end() :].partition(f"{document[2]}\n")
            Path(document[1]).write_text(body)
            continue
        line, _, text = text.partition("\n")
        while line.endswith("\\"):
            more, _, text = text.partition("\n")
            line = line[:-1] + more
        if line.startswith("compass "):
            words = shlex.split(line, comments=True)[1:]
            small = [word for pair in SMALL.get(words[0], {}).items() for word in pair]
            assert not main([*words, *small]), line
        elif line.strip():
            subprocess.run(["bash", "-ec", line], check=True, cwd=os.getcwd())
    return ""
