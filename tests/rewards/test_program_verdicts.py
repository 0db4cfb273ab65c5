"""Programs that try to change their verdict, and rows that no program can pass: without a sandbox
(test_code.py has the sandbox)."""

import pytest

from compass_jax.rewards.checks import Check, build

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")

NEAR = {"tests": ["assert abs(f(20) - 22.0) < 1e-6"]}
AS_SET = {"tests": ["assert set(f([3, 4], [4])) == set((4,))"]}
HELPED = {
    "setup": "def expected(x):\n    return x + 2\n",
    "tests": ["assert f(20) == expected(20)"],
}
HELPED_TO_END = {
    "setup": 'def expected(x):\n    return x + 2\n\n\ndef f(x):\n    """Adds two."""\n',
    "test": "def check(g):\n    assert g(20) == expected(20)\n",
    "entry_point": "f",
}
IMPORTED = {"setup": "import math\n", "tests": ["assert math.isclose(f(20), 22)"]}
SUM = {"tests": ["assert sum(10, 15) == 6", "assert sum(4, 6) == 3"]}  # MBPP/126
RAISES = "try:\n    f(-1)\nexcept {}:\n    pass\nelse:\n    assert False"
EXPECTS = {"tests": [RAISES.format("Exception"), "assert f(20) == 22"], "credit": "share"}
EXPECTS_ANY = {"tests": [RAISES.format("BaseException"), "assert f(20) == 22"]}
EXPECTS_TYPE = {"tests": [RAISES.format("TypeError")]}
EXPECTS_VALUE = {"tests": [RAISES.format("ValueError")]}
SORTS = {"tests": ["xs = [3, 1, 2]\ngot = f(xs)\nassert got == sorted(xs)"]}
CHANGES = {"tests": ["xs = [3, 1, 2]\nf(xs)\nassert xs == [1, 2, 3]"]}
CHANGES_NONE = {"tests": ["xs = [3, 1, 2]\nassert f(xs) is None and xs == [1, 2, 3]"]}
ALL_OF = {"tests": ["assert all(map(lambda x: f(x) == x + 2, range(9)))"]}
BAD = "def f(*a): return 0\n"

ZEROS = {
    # redefines names that the test uses
    "abs": (NEAR, "def f(x): return 0.0\ndef abs(x): return 0.0\n"),
    "abs by assignment": (NEAR, "def f(x): return 0.0\nabs = lambda x: 0.0\n"),
    "abs in globals": (NEAR, "globals()['abs'] = lambda x: 0.0\ndef f(x): return 0.0\n"),
    "abs of builtins": (NEAR, "import builtins\nbuiltins.abs = lambda x: 0.0\n" + BAD),
    "a class": (AS_SET, "class set:\n def __eq__(self, o): return True\ndef f(a, b): return ()\n"),
    "a helper": (HELPED, "def f(x): return 0\ndef expected(x): return 0\n"),
    "a helper and a stub": (HELPED_TO_END, "    return 0\ndef expected(x): return 0\n"),
    "a module": (IMPORTED, "class math:\n isclose = lambda *a: True\ndef f(x): return 0\n"),
    "the mark of a statement": (SORTS, "def __unused__(x): return 0\ndef f(x): return 0\n"),
    # ends the program, which is not the exception that the test expects
    "ends": (EXPECTS, "import os\ndef f(x): os._exit(0)\n"),
    "ends, and anything is expected": (EXPECTS_ANY, "import os\ndef f(x): os._exit(0)\n"),
    "closes its pipe": (EXPECTS, "import os\ndef f(x): os.closerange(3, 99)\n"),
    "writes malformed answers": (
        EXPECTS,
        "import os\ndef f(x):\n for n in range(3, 9):\n"
        "  try: os.write(n, b'?\\n')\n  except OSError: pass\n",
    ),
    "hangs": (EXPECTS, "def f(x):\n while True: pass\n"),
    "raises no Exception": (EXPECTS, "class E(BaseException): pass\ndef f(x): raise E\n"),
    "returns an object": (EXPECTS_TYPE, "def f(x): return object()\n"),
    "returns deep lists": (
        EXPECTS,
        "def f(x):\n a = []\n for _ in range(999): a = [a]\n return a\n",
    ),
    "returns what raises": (
        EXPECTS_VALUE,
        "class A:\n def __getattr__(self, name): raise ValueError\ndef f(x): return A()\n",
    ),
    "a large number": (EXPECTS_VALUE, "def f(x): return 10**5000\n"),
    "raises what a missing package would": (
        {
            "tests": [
                "first = None\nfor x in (1, 2):\n    try:\n        f(x)\n"
                "    except Exception as error:\n        first = first or error\nraise first"
            ]
        },
        "def f(x): raise ImportError('no', x)\n",
    ),
    "ends the loop of a test": (ALL_OF, "def f(x): raise StopIteration\n"),
    "ends the loop by a class of its own": (
        ALL_OF,
        "class E(StopIteration): pass\ndef f(x): raise E\n",
    ),
    "an exception that cannot be told": (
        {"tests": [RAISES.format("OSError")]},
        "class E(BaseException):\n def __str__(self): raise OSError\ndef f(x): raise E\n",
    ),
    # changes its arguments
    "clears what it is given": (SORTS, "def f(xs): xs.clear(); return []\n"),
    # returns odd results
    "equals everything": (
        {"tests": ["assert f(20) == 22"]},
        "class A(float):\n __eq__ = lambda *a: True\ndef f(x): return A(7)\n",
    ),
    "cannot be hashed": ({"tests": ["assert len(set(f(20))) == 1"]}, "def f(x): return [[]]\n"),
    "says that it has another function": (
        {"tests": ["assert g(20) == 22"]},
        "globals()['g'] = lambda x: 22\ndef f(x): return 22\n",
    ),
}
ONES = {
    "with a helper of its own name": (
        HELPED,
        "def expected(x): return 9\ndef f(x): return x + 2\n",
    ),
    "the rest of a stub": (HELPED_TO_END, "    return x + 2\n"),
    "an imported function": ({"tests": ["assert f(2, 3) == 5"]}, "from operator import add as f\n"),
    "a function called sum": (
        SUM,
        "def sum(a, b): return len([1]) and {25: 6, 10: 3}[a + b]\n",
    ),
    "names as entry_point": (
        {"tests": ["assert set(max([1, 2])) == set([2])"], "entry_point": "max"},
        "def max(x): return [2]\n",
    ),
    "raises what is expected": (
        EXPECTS,
        "def f(x):\n if x < 0: raise ValueError\n return x + 2\n",
    ),
    "raises a class of its own": (
        EXPECTS_VALUE,
        "class Bad(ValueError): pass\ndef f(x): raise Bad('no')\n",
    ),
    "leaves Python as expected": (
        {"tests": [RAISES.format("SystemExit")]},
        "import sys\ndef f(x): sys.exit(2)\n",
    ),
    "the key of a KeyError": (
        {"tests": ["try: f(1)\nexcept KeyError as e: assert e.args == (1,)\nelse: assert 0"]},
        "def f(x): return {}[x]\n",
    ),
    "a large number": ({"tests": ["assert f(1) == 10**5000"]}, "def f(x): return 10**5000\n"),
    "a generator that raises": (
        {"tests": [RAISES.format("ValueError").replace("f(-1)", "list(f(-1))")]},
        "def f(x):\n raise ValueError\n yield\n",
    ),
    "sorts in place": (CHANGES, "def f(xs): xs.sort()\n"),
    "sorts in place, as the row says": (
        {**CHANGES_NONE, "in_place": True},
        "def f(xs): xs.sort()\n",
    ),
    "sorts a copy": (SORTS, "def f(xs): return sorted(xs)\n"),
}


def fenced(program):
    return f"```python\n{program}```"


def judged(response, **row):
    return build(Check("code"), "answer")({"seconds": 2, **row}, response)


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", ZEROS)
def test_a_program_that_does_not_solve_its_tests_gets_0(name):
    row, program = ZEROS[name]
    assert judged(fenced(program), **row).reward == 0.0


@pytest.mark.parametrize("name", ONES)
def test_a_program_that_solves_its_tests_gets_1(name):
    row, program = ONES[name]
    assert judged(fenced(program), **row).reward == 1.0


@pytest.mark.parametrize("place", [0, 1])
def test_a_program_that_ended_fails_the_tests_that_are_left(place):
    row = {"tests": ["assert f(1) == 3"] * 4}
    row["tests"][place] = RAISES.format("Exception")
    text = "import os\ndef f(x):\n if x < 0: os._exit(0)\n return x + 2\n"
    assert judged(fenced(text), **row).reward == place / 4


@pytest.mark.parametrize(
    "tests",
    [
        "try:\n    f(-1)\nexcept BaseException:\n    pass",
        "try:\n    f(-1)\nfinally:\n    pass",
        "def g():\n    try:\n        f(-1)\n    finally:\n        return\ng()",
        "import contextlib\nwith contextlib.suppress(Exception):\n    f(-1)",
    ],
)
def test_nothing_that_a_test_does_with_the_error_makes_a_dead_program_pass(tests):
    text = "import os\ndef f(x): os._exit(0)\n"
    assert judged(fenced(text), tests=[tests, "assert True or f"]).reward == 0.0
