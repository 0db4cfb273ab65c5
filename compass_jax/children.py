"""How this package starts Python processes of its own: a child imports the same files as its
parent, and nothing from the current folder.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

ROOT = str(Path(__file__).resolve().parents[1])


def module_command(module: str, *arguments: str) -> list[str]:
    """Returns the command that runs `python -m module`; -P keeps the current folder off its import
    path.
    """
    return [sys.executable, "-P", "-m", module, *arguments]


def import_path() -> str:
    """Returns the PYTHONPATH of a child: the standard library, the folder of this package, then
    the import path of this process in its order.

    The standard library has to be named: everything in PYTHONPATH precedes it otherwise, and a
    `random.py` beside somebody's reward function would hide Python's.
    """
    library = Path(sysconfig.get_path("stdlib"))
    standard = [str(folder) for folder in (library, library / "lib-dynload") if folder.is_dir()]
    others = [os.path.abspath(entry) for entry in sys.path if entry]
    return os.pathsep.join(dict.fromkeys([*standard, ROOT, *others]))
