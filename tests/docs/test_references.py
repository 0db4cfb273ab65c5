"""docs/reference and docs/img equal the output of docs/generate, the site lists the pages on
functions, and every metric that a run logs has its sentence.
"""

import ast
import re
import sys
from pathlib import Path

import pytest

from compass_jax.runs.metric_table import METRICS, PANELS, metric_help

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS / "generate"))

import pictures  # noqa: E402
import references  # noqa: E402

# prefixes of metric names; a text with such a prefix and without a space is a metric name
PREFIXES = {name.split("/")[0] for name in METRICS if "/" in name}


def test_the_references_are_those_of_the_code():
    for name, text in references.pages().items():
        page = (references.REFERENCE / name).read_text()
        assert page == text, f"docs/reference/{name} is old: run python docs/generate/references.py"


def test_the_site_lists_each_page_on_functions():
    listed = re.findall(r"reference/(api-\S+)", (ROOT / "mkdocs.yml").read_text())
    pages = references.api_pages()
    assert list(pages) == listed
    assert all(text.count("\n### ") > 5 for text in pages.values())


def test_the_pictures_are_those_of_their_generator():
    for name, draw in pictures.PICTURES.items():
        assert (pictures.IMG / f"{name}.svg").read_text() == draw().svg()


def names_in_code():
    """Yields (file, pattern) of each text in the package that is a metric's name; a value in an
    f-string becomes .+ in the pattern.
    """
    for file in sorted((ROOT / "compass_jax").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(file.read_text())))
        joined = [n.values for n in nodes if isinstance(n, ast.JoinedStr)]
        inside = {id(x) for parts in joined for x in parts}
        single = [[n] for n in nodes if isinstance(n, ast.Constant) and id(n) not in inside]
        for parts in joined + single:
            texts = [str(x.value) if isinstance(x, ast.Constant) else "1" for x in parts]
            if (
                re.fullmatch(r"[a-z_]+(/\w+)+", "".join(texts))
                and texts[0].split("/")[0] in PREFIXES
            ):
                fixed = [re.escape(t) for t in texts]
                any_ = [f if isinstance(x, ast.Constant) else ".+" for f, x in zip(fixed, parts)]
                yield file.name, "".join(any_)


CODE_NAMES = dict.fromkeys(x for x in names_in_code() if x[0] != "metric_table.py")


def test_every_metric_in_the_code_has_its_sentence():
    assert len(CODE_NAMES) > 70  # the search sees them
    undescribed = [
        f"{file}: {pattern}"
        for file, pattern in CODE_NAMES
        if metric_help(pattern) is None
        and not any(re.fullmatch(pattern, shape) for shape in METRICS)
    ]
    assert not undescribed, f"say what they mean in compass_jax/runs/metric_table.py: {undescribed}"


def test_every_sentence_is_of_a_metric_in_the_code():
    files = [x for x in (ROOT / "compass_jax").rglob("*.py") if x.name != "metric_table.py"]
    text = "".join(file.read_text() for file in files)
    for shape, metric in METRICS.items():
        assert metric.text.endswith(".") and metric.text[0].isupper()
        if "/" in shape:
            assert any(
                re.fullmatch(pattern, shape) or metric_help(pattern) is metric
                for _, pattern in CODE_NAMES
            ), shape
        else:
            assert f'"{shape}"' in text, shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("reward/mean", "reward/mean"),
        ("reward/format/mean", "reward/<part>/mean"),
        ("espo/group_12/epsilon", "espo/group_<i>/epsilon"),
        ("eval/difficulty/0/avg_at_k", "eval/<label>/avg_at_k"),
        ("eval/heldout/avg_at_k", "eval/<set>/avg_at_k"),
        ("espo/group_x/epsilon", None),
        ("reward/", None),
    ],
)
def test_a_name_is_found_by_its_shape(name, shape):
    assert metric_help(name) is (METRICS[shape] if shape else None)


def test_each_panel_draws_described_metrics_in_known_colours_and_scales():
    panels = [panel for section in PANELS.values() for panel in section]
    assert {panel.scale for panel in panels} == {"linear", "log", "share", "stacked", "time"}
    lines = [line for panel in panels for line in panel.lines]
    assert [line for line in lines if metric_help(line.metric) is None] == []
    style = (ROOT / "compass_jax" / "runs" / "report" / "web" / "page.css").read_text()
    assert {line.colour for line in lines} <= set(re.findall(r"--(\w+):", style))
