"""Each concept page's example prints the output on the page, and each page has its parts."""

from pathlib import Path

import pytest
from snippets import blocks, run_page

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [x for x in sorted((DOCS / "concepts").glob("*.md")) if x.name != "index.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_an_example_prints_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [x.kind for x in blocks(page)] == ["python", "text"]
    assert run_page(page) == 2


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_a_picture_an_example_and_a_price(page):
    text = page.read_text()
    assert "](../img/" in text and "\n## Example\n" in text
    assert "\n## When, and what it costs\n" in text
    assert f"({page.name})" in (DOCS / "concepts" / "index.md").read_text()


def test_a_wrong_number_on_a_page_is_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match=r"page\.md says"):
        run_page(page)
