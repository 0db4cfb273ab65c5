"""docs/architecture.md names rooms, folders, files and functions of the package that exist."""

import re

from house_rules import PACKAGE, PURE, ROOMS, ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_the_table_has_each_room_with_its_folders():
    rows = re.findall(r"^\| `(\w+)/` \| (.*) \|$", PAGE, re.MULTILINE)
    assert sorted(room for room, _ in rows) == sorted(ROOMS)
    folders = [(room, x) for room, text in rows for x in re.findall(r"`(\w+)/`", text)]
    assert len(folders) > 10
    assert [x for x in folders if not (PACKAGE / x[0] / x[1]).is_dir()] == []


def test_each_file_exists():
    files = re.findall(r"`([\w/]+\.py)`", PAGE)
    assert len(files) > 40
    assert [x for x in files if not ((PACKAGE / x).exists() or (ROOT / x).exists())] == []


def test_each_function_is_in_the_file_beside_it():
    named = re.findall(r"`([\w.]+)` \(`([\w/]+\.py)`\)", PAGE)
    assert len(named) > 20
    for name, file in named:
        for part in name.split("."):
            assert re.search(rf"\b(class|def) {part}\b", (PACKAGE / file).read_text()), name


def test_contributing_has_an_entry_for_each_seam():
    headings = set(re.findall(r"^## An? (.*)$", CONTRIBUTING, re.MULTILINE))
    assert headings >= {
        *("objective", "advantage", "correction", "optimiser", "router", "metric"),
        *("model family", "chat format", "verifier", "environment"),
        "weight transport or an engine",
    }


def test_contributing_lists_the_pure_modules():
    (line,) = re.findall(r"\*\*Pure modules\.\*\* (.*)", CONTRIBUTING)
    names = {x.removesuffix(".py").rpartition("/")[2] for x in re.findall(r"`([\w/.]+)`", line)}
    assert {x.rpartition(".")[2] for x in PURE} <= names
