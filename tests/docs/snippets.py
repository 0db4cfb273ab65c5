"""Runs the fenced blocks of a page, in order, in one folder.

    sh                  `compass` is called in this process, `cat > FILE << END` writes a file,
                        anything else is the shell's
    python              runs; one whose first line is a comment with a file's name is written there
    text                after a python block: what that block printed
Comments before a block (`<!-- cloud -->`) say why it does not run; any comment skips it.
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
_HERE = re.compile(r"cat > (\S+) << '?(\w+)'?\n")
# what makes a command small enough for a test
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
    """A fenced block; `why` it does not run, empty where it does."""

    kind: str
    text: str
    why: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page that have a kind."""
    found = [Block(x["kind"], x["text"], x["why"] or "") for x in _BLOCK.finditer(page.read_text())]
    return [x for x in found if x.kind]


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
    """What a block prints."""
    file = _FILE.match(text)
    if file:
        Path(file[1]).write_text(text)
        return ""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(text, "<documentation>", "exec"), names)
    return out.getvalue()


def run_sh(text: str) -> str:
    """Each command must end with status 0. Nothing that is printed is compared."""
    while text.strip():
        here = _HERE.match(text)
        if here:
            body, _, text = text[here.end() :].partition(f"{here[2]}\n")
            Path(here[1]).write_text(body)
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
