"""The parts of the slow tests, the page that explains what each slow test proves, and the list of
the dear ones, which run with them.
"""

import ast
import re
from pathlib import Path

import pytest
from dear import KEPT, LIMIT_S, LIST, dear_tests, listed, measured
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

        def add_marker(self, mark):
            self.slow = mark.name == "slow"

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


def functions(file):
    """Returns the names of the functions of a file of tests."""
    tree = ast.parse((PAGE.parent.parent / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_dear_tests_exist_and_are_marked_slow(pytestconfig):
    lines = LIST.read_text().splitlines()
    dear = dear_tests(lines)
    every = KEPT | dear.keys()
    known = {file: functions(file) for file in {node.split("::")[0] for node in every}}
    assert not [x for x in every if re.split(r"::|\[", x)[1] not in known[x.split("::")[0]]]
    assert sorted(dear) == [line.split("\t")[1] for line in lines] and not KEPT & dear.keys()
    conftest = pytestconfig.pluginmanager.get_plugin(str(PAGE.parent / "conftest.py"))
    assert dear.keys() == conftest.DEAR


REPORT = """<testsuites><testsuite>
<testcase classname="tests.rl.test_a" name="test_x[1-b]" time="9.0"/>
<testcase classname="tests.rl.test_a" name="test_x[2-b]" time="0.5"/>
<testcase classname="tests.test_b" name="test_y" time="3.0"/>
<testcase classname="tests.test_b" name="test_y" time="2.0"/>
</testsuite></testsuites>"""


def test_the_list_is_of_a_run_of_all_tests(tmp_path):
    """A test that fails in its tear-down has two entries. One that was not run stays on the list,
    and leaves it once it is fast.
    """
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    seconds = measured(report)
    assert seconds["tests/test_b.py::test_y"] == 5.0
    before = {"tests/rl/test_a.py::test_x[2-b]": 9.0, "tests/rl/test_c.py::test_z": 4.0}
    assert 0.5 < LIMIT_S < 4
    assert listed(seconds, before) == [
        "9.0\ttests/rl/test_a.py::test_x[1-b]",
        "4.0\ttests/rl/test_c.py::test_z",
        "5.0\ttests/test_b.py::test_y",
    ]


def test_every_slow_test_says_what_it_proves():
    rows = re.findall(r"^\| `([^`]+)::([^`]+)` \| (.+?) \|", PAGE.read_text(), re.M)
    assert [(file, name) for file, name, _ in rows] == sorted(slow_functions())
    assert all(len(proves.split()) >= 5 for _, _, proves in rows)
