"""The commands and snippets of README.md and docs/, as a reader would type them.

A fenced block is run in its page's folder, in the page's order:

    sh        its commands; what begins with `cat >` writes a file
    python    a first line `# name.py` writes that file; any other block is executed
    other     is output, or a file's form: it is not run

`<!-- needs: WHAT -->` before a block says why a test cannot run it; its `compass` commands are
parsed all the same. WHAT is one of NEEDS.
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
        """The file that a Python block is, empty for none."""
        found = _FILE.match(self.text) if self.kind == "python" else None
        return found[1] if found else ""

    @property
    def commands(self) -> list[str]:
        """The commands of a block of sh, each with its here-document."""
        found: list[str] = []
        end = ""
        for line in self.text.replace("\\\n", " ").splitlines():
            if end:
                found[-1] += "\n" + line
                end = "" if line == end else end
            elif line.strip() and not line.startswith("#"):
                found.append(line)
                here = re.search(r"<< '?(\w+)'?$", line)
                end = here[1] if here else ""
        return found


def blocks(page: Path) -> list[Block]:
    """Every block of a page that is run or has to say why not."""
    text, name = page.read_text(), str(page.relative_to(ROOT))
    return [
        Block(name, text[: m.start()].count("\n") + 1, m["kind"], m["text"], m["need"] or "")
        for m in _BLOCK.finditer(text)
        if m["kind"] in ("sh", "python")
    ]


def words(command: str) -> list[str]:
    """The words of a command, without its remark."""
    return shlex.split(command, comments=True)
