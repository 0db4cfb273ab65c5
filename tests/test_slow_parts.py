"""The parts of the slow tests, and the page that explains what each slow test proves."""

import re
from pathlib import Path

import pytest
from slow_parts import part_of, slow_functions

PAGE = Path(__file__).parent / "slow.md"


@pytest.mark.parametrize("count", [0, 1, 4, 5, 53])
def test_the_parts_are_all_tests_each_once_and_of_one_size(count):
    items = [f"tests/test_{i // 3}.py::test_{i}" for i in range(count)]
    parts = [part_of(items, f"{k}/5") for k in range(1, 6)]
    assert sorted(x for part in parts for x in part) == sorted(items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("part", ["", "3", "0/5", "6/5", "a/5", "1/", "-1/5", "1/5/2", "²/5"])
def test_what_is_no_part_is_refused_by_name(part):
    with pytest.raises(ValueError, match="--slow-part is"):
        part_of(["a"], part)


def test_a_part_runs_its_own_and_no_other(pytestconfig):
    """The collection hook reads the option and deselects the slow tests of the other parts."""

    class Item:
        def __init__(self, nodeid, slow):
            self.nodeid, self.slow = nodeid, slow

        def get_closest_marker(self, _):
            return self.slow

    deselected = []

    class Config:
        class hook:
            pytest_deselected = staticmethod(lambda items: deselected.extend(items))

        @staticmethod
        def getoption(_):
            return "2/3"

    conftest = pytestconfig.pluginmanager.get_plugin(str(PAGE.parent / "conftest.py"))
    items = [Item(f"x::{i}", slow=i != 0) for i in range(5)]
    conftest.pytest_collection_modifyitems(Config, items)
    assert [item.nodeid for item in items] == ["x::0", "x::2"]
    assert [item.nodeid for item in deselected] == ["x::1", "x::3", "x::4"]


def test_every_slow_test_says_what_it_proves():
    rows = re.findall(r"^\| `([^`]+)::([^`]+)` \| (.+?) \|", PAGE.read_text(), re.M)
    assert [(file, name) for file, name, _ in rows] == sorted(slow_functions())
    assert all(len(proves.split()) >= 5 for _, _, proves in rows)
