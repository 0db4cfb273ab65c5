"""docs/results.md equals the output of docs/generate/results.py, and its prose agrees with it."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "generate"))

import results  # noqa: E402

PAGES = [page.read_text() for page in results.PAGES]
PAGE = PAGES[0]
SECTIONS = PAGE.split("\n## ")[1:]


def test_the_tables_are_those_of_the_raw_files():
    names = list[str]()
    for page in PAGES:
        assert results.filled(page) == page, "a page is old: run python docs/generate/results.py"
        names += re.findall(r"<!-- table: (\w+) -->", page)
    assert names == list(results.TABLES)


def test_a_table_is_written_between_its_markers(monkeypatch):
    monkeypatch.setattr(results, "TABLES", {"a": lambda: "new", "b": lambda: "other"})
    page = "x\n\n<!-- table: a -->\n\n<!-- end -->\n\ny <!-- table: b -->\n\nold\n\n<!-- end -->"
    text = results.filled(page)
    assert text == page.replace("a -->\n\n", "a -->\n\nnew\n\n").replace("old", "other")
    assert results.filled(text) == text


@pytest.mark.parametrize("section", SECTIONS, ids=lambda x: x.splitlines()[0])
def test_a_decimal_in_the_prose_is_in_a_table_of_its_section(section):
    tables = re.findall(r"<!-- table: .*?<!-- end -->", section, re.DOTALL)
    assert tables and "](../benchmarks/results/" in section
    prose = re.sub(
        r"<!-- table: .*?<!-- end -->|`[^`]*`|TRL \S+|\]\(\S+\)", "", section, flags=re.S
    )
    cells = re.findall(r"(?<![\d.])\d+\.\d+", "".join(tables))
    for number in re.findall(r"\d+\.\d+(?!M)", prose):
        assert any(cell.startswith(number) for cell in cells), number


def test_it_is_short():
    assert len(PAGE.split()) <= 2500
