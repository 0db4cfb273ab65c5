"""Which part of a response is the program: without a sandbox."""

import pytest
from test_program_verdicts import judged

from compass_jax.rewards.checks import Graded

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
ROW = {"tests": ["assert f(2) == 4"], "seconds": 20}
RIGHT = "def f(x):\n    return x + 2\n"
WRONG = "def f(x):\n    return x\n"
NOTHING = Graded(0.0, {}, False)


def block(text, label="python", indent=""):
    return "\n".join(f"{indent}{line}" for line in f"```{label}\n{text}```".split("\n")) + "\n"


RIGHT_ANSWERS = {
    "an output without a label": block(RIGHT) + "Example output:\n" + block("4\n", ""),
    "an output of a console": block(RIGHT, "py") + block("f = 4\n", "text") + block("$ f\n", "sh"),
    "a usage example": block(RIGHT) + "Use it so:\n" + block("assert f(1) == 3\nprint(f(2))\n"),
    "a usage example without a label": block(RIGHT) + block("y = f(2)\n", ""),
    "no label, then an output": block(RIGHT, "") + block("4\n", "") + block(">>> f(2)\n4\n", ""),
    "no label, then a labelled example": block(RIGHT, "") + block("print(f(2))\n"),
    "a helper, then the program": block("def two():\n    return 2\n")
    + block("def f(x):\n    return x + two()\n")
    + block("print(f(2))\n"),
    "an import of its own": block("import math\n")
    + block("def f(x):\n    return math.floor(x + 2)\n"),
    "a draft, then the program": block(WRONG) + "Better:\n" + block(RIGHT),
    "in a list": "1. The program:\n\n" + block(RIGHT, indent="   ") + "2. Run it.\n",
    "in a list, on the item's line": "1. " + block(RIGHT, indent="   ").lstrip(),
    "deep in a list": "- a\n  - b\n\n" + block(RIGHT, "python3", indent="      "),
    "with a title": block(RIGHT, 'python title="f.py"') + block("4\n", ""),
    "with a file": block(RIGHT, "Python:f.py") + block("4\n", ""),
    "in braces": block(RIGHT, "{.python .numberLines}") + block("4\n", ""),
    "in capitals": block(WRONG, "") + block(RIGHT, "Python"),
    "from the future": block("def two():\n    return 2\n")
    + block("from __future__ import annotations\ndef f(x):\n    return x + two()\n"),
    "after thoughts": "<think>Try\n" + block(WRONG) + "</think>\n" + block(RIGHT),
    "by assignment": block("f = lambda x: x + 2\n") + block("print(f(2))\n"),
}
WRONG_ANSWERS = {
    "thoughts": "<think>Try\n" + block(RIGHT) + "hm</think> I cannot do it.",
    "thoughts that are cut off": "<think>Try\n" + block(RIGHT),
    "thoughts that the prompt opened": "Try\n" + block(RIGHT) + "</think>\nI cannot do it.",
    "thoughts, then a wrong program": "<think>" + block(RIGHT) + "</think>" + block(WRONG),
    "the right program is a draft": block(RIGHT) + "Better:\n" + block(WRONG),
    "the right program has no label": block(RIGHT, "") + block(WRONG),
    "the last program does not compile": block(RIGHT) + block("def f(x) return x + 2\n"),
    "another language": block(RIGHT, "text"),
    "a usage example alone": block("print(f(2))\n"),
}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", RIGHT_ANSWERS)
def test_the_program_is_found_among_other_blocks(name):
    assert judged(RIGHT_ANSWERS[name], **ROW).reward == 1.0


@pytest.mark.parametrize("name", WRONG_ANSWERS)
def test_what_is_no_answer_earns_nothing(name):
    assert judged(WRONG_ANSWERS[name], **ROW).reward == 0.0


def test_a_response_of_thoughts_has_no_answer():
    assert judged(WRONG_ANSWERS["thoughts"], **ROW) == NOTHING


def test_both_functions_of_a_row_may_have_their_block():
    row = {"tests": ["assert f(g(1)) == 4"]}
    text = block(RIGHT) + block("def g(x):\n    return x + 1\n") + block("print(f(g(1)))\n")
    assert judged(text, **row).reward == 1.0


def test_a_script_is_the_last_labelled_block():
    row = {"inputs": ["1 2\n"], "outputs": ["3"]}
    text = block("print(sum(map(int, input().split())))\n") + "Output:\n" + block("3\n", "")
    assert judged(text, **row).reward == 1.0
