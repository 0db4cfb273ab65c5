"""The commands and snippets of README.md and docs/, as a reader would type them.

The blocks of a page run in one folder, in the page's order:

    sh        its commands; a command `cat >` writes a file
    python    a first line `# name.py` writes that file; any other block is executed
    other     output, or an example of a file: it is not run

`<!-- needs: NEED -->` before a block gives the reason why a test cannot run it; its `compass`
commands are still parsed. NEED is one of NEEDS.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
NEEDS = {
    "a cloud",
    "the network",
    "the installation",
    "the extra plan and minutes",
    "minutes",
    "a server that stays",
    "a model of your own",
    "an engine of your own",
    "several machines",
}
_BLOCK = re.compile(
    r"^(?:<!-- needs: (?P<need>[^>]*?) -->\n)?```(?P<kind>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_FILE = re.compile(r"# ([\w/]+\.py)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    kind: str
    text: str
    need: str

    @property
    def file(self) -> str:
        """The file that a Python block writes, or an empty text."""
        match = _FILE.match(self.text) if self.kind == "python" else None
        return match[1] if match else ""

    @property
    def commands(self) -> list[str]:
        """The commands of a block of sh, each with its here-document."""
        commands: list[str] = []
        end = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            if end:
                commands[-1] += "\n" + line
                end = "" if line == end else end
            elif line.strip() and not line.startswith("#"):
                commands.append(line)
                document = re.search(r"<< '?(\w+)'?$", line)
                end = document[1] if document else ""
        return commands


def blocks(page: Path) -> list[Block]:
    """Returns the blocks of a page that are run or need a reason not to be."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    return [
        Block(name, text[: m.start()].count("\n") + 1, m["kind"], m["text"], m["need"] or "")
        for m in _BLOCK.finditer(text)
        if m["kind"] in ("sh", "python")
    ]


def words(command: str) -> list[str]:
    """Returns the words of a command, without its comment."""
    return shlex.split(command, comments=True)
