"""Files with the user code of the pages in docs/howto."""

import re
from pathlib import Path

HOWTO = Path(__file__).parents[1] / "docs" / "howto"


def write_code(page: str, name: str, folder: Path) -> Path:
    """Writes the block of a page that begins with the comment `# NAME`; returns its file."""
    text = (HOWTO / page).read_text()
    code = re.search(rf"```python\n(# {re.escape(name)}\n.*?)```", text, re.S)[1]
    (folder / name).write_text(code)
    return folder / name
