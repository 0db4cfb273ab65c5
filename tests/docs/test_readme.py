"""README.md stays short, links lead somewhere, and the first page of the site answers questions."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def test_it_is_at_most_150_lines_and_1200_words():
    assert len(README.splitlines()) <= 150
    assert len(README.split()) <= 1200


def test_it_says_once_that_no_tpu_has_run_it():
    assert README.count("has not run on a TPU") == 1
    assert README.index("has not run on a TPU") < README.index("\n## ")


@pytest.mark.parametrize(
    "question, link, answer",
    [
        ("30B MoE on 64 v5p", "howto/pod.md#which-settings", "qwen3_30b_a3b_v5p_4x4x4.py` sets"),
        ("my reward not rise", "howto/failures.md#the-reward-does", "Look at `groups/varied_frac`"),
        ("a tool environment", "howto/environments.md", "self.tools = "),
        ("`mismatch/kl_k3`", "concepts/mismatch.md#what-mismatchkl_k3", "rho - 1 - log rho"),
        ("Which preset", "howto/presets.md", "`screened` is the default"),
        ("out of memory", "howto/failures.md#out-of-memory", "Lower `rl.micro_batch_tokens`"),
    ],
)
def test_the_first_page_of_the_site_answers_a_question_in_a_click(question, link, answer):
    rows = (ROOT / "docs" / "index.md").read_text().splitlines()
    assert [row for row in rows if question in row and f"]({link}" in row]
    assert answer in (ROOT / "docs" / link.partition("#")[0]).read_text()


def anchors(page):
    """Returns the anchors of a page's titles, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", t.lower()).strip().replace(" ", "-") for t in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_within_the_project_leads_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in _LINK.findall(text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"
