"""A script that writes examples/learner/learner.ipynb: each cell is a `# %%` part of learner.py.

python tests/examples/learner_notebook.py
"""

import json
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "learner"
SCRIPT, NOTEBOOK = FOLDER / "learner.py", FOLDER / "learner.ipynb"


def cells(script: str) -> list[tuple[str, str]]:
    """Returns (kind, text) of each cell; the kind is "markdown" or "code"."""
    pairs = []
    for part in script.split("# %%")[1:]:
        head, _, body = part.partition("\n")
        kind = "markdown" if head.strip() == "[markdown]" else "code"
        text = body.strip("\n")
        if kind == "markdown":
            text = "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.split("\n"))
        pairs.append((kind, text))
    return pairs


def notebook(script: str) -> str:
    """Returns the notebook's JSON text, without outputs."""
    cell_dicts = []
    for n, (kind, text) in enumerate(cells(script)):
        cell = {"cell_type": kind, "id": f"cell-{n}", "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        cell_dicts.append(cell | {"source": text.splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": cell_dicts,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(SCRIPT.read_text()))
