"""Objects that stay in a program's process: right programs earn 1, and no object of a program can
claim to be what a test expects. Without a sandbox."""

import pytest
from test_program_verdicts import fenced, judged

from compass_jax.rewards.verifiers import program_files
from compass_jax.rewards.verifiers.kinds import code
from compass_jax.rewards.verifiers.program_objects import RowError

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")

SOLUTION = "class Solution:\n def two(self, x): return {}\n"
LIAR = (
    "class Liar:\n"
    " def _yes(self, *a, **k): return True\n"
    " __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = _yes\n"
    " startswith = endswith = isdigit = issubset = equals = is_integer = all = any = _yes\n"
    " __hash__ = object.__hash__\n"
    " def _nought(self, *a): return 0.0\n"
    " __sub__ = __rsub__ = __add__ = __radd__ = __truediv__ = __mod__ = __float__ = _nought\n"
    " __abs__ = __round__ = _nought\n"
    " __class__ = property(lambda self: int)\n"
    " def __len__(self): return 1\n"
    " def __array__(self, *a, **k): return 22\n"
    " def f(self, x): return self\n"
    " two = f\n"
)
LIES = {
    "a function": f"{LIAR}def f(x): return Liar()\n",
    "a class as the function": LIAR.replace("class Liar", "class f").replace(" def f(", " def g(")
    + " def __init__(self, *a): pass\n",
    "a list of them": f"{LIAR}def f(x): return [Liar()]\n",
    "a subclass of int": LIAR.replace("Liar:", "Liar(int):").replace(
        " __hash__ = object.__hash__\n", " __hash__ = int.__hash__\n"
    )
    + "def f(x): return Liar(7)\n",
    "the same object": f"{LIAR}liar = Liar()\ndef f(x): return liar\n",
    "written": "import os\ndef f(x):\n"
    ' os.write(4, b\'{"value": {"kept": [1, "object", "decimal.Decimal", ["Decimal"]]},'
    ' "after": [], "objects": []}\\n\' * 5)\n',
}
EXPECTATIONS = [
    "assert f(20) == 22",
    "assert 22 == f(20)",
    "assert not f(20) != 22 and f(20) == [22]",
    "assert abs(f(20) - 22.0) < 1e-6",
    "assert f(20) > 10 and f(20) < 30",
    "assert 22 in f(20)",
    "assert f(20) in (22, 23)",
    "assert f(20).startswith('ab')",
    "assert f(20).issubset({1, 2})",
    "assert isinstance(f(20), int) and f(20) == 22",
    "import math\nassert math.isclose(f(20), 22)",
    "import pytest\nassert f(20) == pytest.approx(22)",
    "from decimal import Decimal\nassert f(20) == Decimal(22)",
    "from unittest import TestCase\nTestCase().assertAlmostEqual(f(20), 22.0)",
    "import numpy as np\nassert np.allclose(f(20), [22.0, 23.0])",
    "import numpy as np\nnp.testing.assert_array_equal(f(20), np.array([22, 23]))",
    "assert f(20) == f(20) and f(20) is not None and f(20) == 22",
    "assert sorted([f(20), 22]) == [22, 22]",
]


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages = program_files.package_files(["numpy", "sympy"])[0]
    monkeypatch.setattr(program_files, "_importable", packages)


@pytest.mark.parametrize("name", LIES)
def test_no_object_of_a_program_is_what_a_test_expects(name):
    assert judged(fenced(LIES[name]), tests=EXPECTATIONS, seconds=10).reward == 0.0


@pytest.mark.parametrize("result", ["self", "Solution()", "Liar()", "type(self)"])
def test_no_object_of_a_class_under_test_is_what_a_test_expects(result):
    text = LIAR + SOLUTION.format(result).replace("class Solution", "class Solution(Liar)")
    tests = [test.replace("f(20)", "Solution().two(20)") for test in EXPECTATIONS]
    assert judged(fenced(text), tests=tests, seconds=10).reward == 0.0


# name -> (test, right program, the part that makes it wrong: old, new)
RIGHT = {
    "a method": (
        "assert Solution().two(20) == 22",
        "class Solution:\n def two(self, x): return x + 2\n",
        ("x + 2", "x + 3"),
    ),
    "a static method": (
        "assert Solution.two(20) == 22",
        "class Solution:\n @staticmethod\n def two(x): return x + 2\n",
        ("x + 2", "x + 3"),
    ),
    "a float of a method": (
        "assert abs(Solution().two(20) - 22.0) < 1e-6",
        "class Solution:\n def two(self, x): return x + 2\n",
        ("x + 2", "x + 3"),
    ),
    "a generator": (
        "assert [*f(3)] == [2, 3, 4]",
        "def f(n):\n for i in range(n): yield i + 2\n",
        ("i + 2", "i + 3"),
    ),
    "next": (
        "g = f(3)\nassert next(g) == 2 and next(g) == 3",
        "def f(n): return (i + 2 for i in range(n))\n",
        ("i + 2", "i + 3"),
    ),
    "sent": (
        "g = f()\nnext(g)\nassert g.send(5) == 7",
        "def f():\n x = yield\n while 1: x = yield x + 2\n",
        ("x + 2", "x + 3"),
    ),
    "the end": (
        "g = f(1)\nassert next(g) == 2\ntry: next(g)\nexcept StopIteration: pass\nelse: assert 0",
        "def f(n): return iter([2] * n)\n",
        ("[2] * n", "[2] * 2"),
    ),
    "an endless iterator": (
        "from itertools import islice\nassert [*islice(f(), 2)] == [2, 3]",
        "import itertools\ndef f(): return itertools.count(2)\n",
        ("count(2)", "count(3)"),
    ),
    "a map": (
        "assert list(f([1])) == [3]",
        "def f(xs): return map(lambda x: x + 2, xs)\n",
        ("x + 2", "x + 3"),
    ),
    "a range": (
        "assert f(3) == range(2, 5) and len(f(3)) == 3",
        "def f(n): return range(2, n + 2)\n",
        ("n + 2", "n + 3"),
    ),
    "an array's shape": (
        "assert f(2).shape == (2, 4)",
        "import numpy as np\ndef f(n): return np.zeros((n, n + 2))\n",
        ("n + 2", "n + 3"),
    ),
    "an array's sum": (
        "assert f(2).sum() == 4 and f(2).dtype == 'int8'",
        "import numpy as np\ndef f(n): return np.full(2, 2, 'i1')\n",
        ("np.full(2, ", "np.full(3, "),
    ),
    "a scalar": (
        "assert f(2.0).item() == 4.0",
        "import numpy as np\ndef f(x): return np.float64(x) + 2\n",
        ("x) + 2", "x) + 3"),
    ),
    "an array of lists": (
        "assert f()[1] == [2]",
        "import numpy as np\ndef f():\n a = np.empty(2, object)\n a[1] = [2]\n return a\n",
        ("[2]", "[3]"),
    ),
    "in place, and the result": (
        "xs = [3, 1]\nassert f(xs) == 2\nassert xs == [1, 3]",
        "def f(xs):\n xs.sort()\n return 2\n",
        ("return 2", "return 3"),
    ),
    "in place, by a part": (
        "def check(f):\n nums, expected = [1, 1, 2], [1, 2]\n k = f(nums)\n"
        " assert k == len(expected)\n"
        " for i in range(k): assert nums[i] == expected[i]\ncheck(f)",
        "def f(xs):\n xs[:] = sorted(set(xs))\n return len(xs)\n",
        ("len(xs)", "len(xs) - 1"),
    ),
    "in place, by a method": (
        "g = [[1, 2], [3, 4]]\nSolution().two(g)\nassert g == [[3, 4], [1, 2]]",
        "class Solution:\n def two(self, g): g.reverse()\n",
        ("g.reverse()", "g.sort"),
    ),
    "in place, as expected before": (
        "xs = [3, 1]\nexpected = sorted(xs)\nr = f(xs)\nassert r is None\nassert xs == expected",
        "def f(xs): xs.sort()\n",
        ("xs.sort()", "xs.copy()"),
    ),
    "in place, an array": (
        "import numpy as np\na = np.zeros(2)\nf(a)\nassert a.tolist() == [2.0, 2.0]",
        "def f(a): a += 2\n",
        ("a += 2", "a += 3"),
    ),
    "unchanged": (
        "xs = [3, 1]\nassert f(xs) == [1, 3]\nassert xs == [3, 1]",
        "def f(xs): return sorted(xs)\n",
        ("sorted(xs)", "xs.sort() or xs"),
    ),
    "an object with state": (
        "c = Counter2()\nc.add(2)\nc.add(3)\nassert c.total == 5\nc.total = 7\n"
        "c.add(1)\nassert c.total == 8",
        "class Counter2:\n total = 0\n def add(self, n): self.total += n\n",
        ("+= n", "+= 2 * n"),
    ),
    "objects that hold objects": (
        "a, b = Node(1), Node(2)\na.next = b\nassert total(a) == 3 and a.next.value == 2",
        "class Node:\n def __init__(self, v): self.value, self.next = v, None\n"
        "def total(n): return n.value + total(n.next) if n else 0\n",
        ("return n.value + total(n.next) if n else 0", "return n.value"),
    ),
    "a context": (
        "with Timer() as t: pass\nassert t.done == 2",
        "class Timer:\n def __enter__(self): return self\n def __exit__(self, *a): self.done = 2\n",
        ("done = 2", "done = 3"),
    ),
    "items and length": (
        "d = Bag()\nd['a'] = 2\nassert d['a'] == 2 and len(d) == 1 and 'a' in d",
        "class Bag:\n def __init__(self): self.d = {}\n"
        " def __setitem__(self, k, v): self.d[k] = v\n"
        " def __getitem__(self, k): return self.d[k]\n"
        " def __len__(self): return len(self.d)\n"
        " def __iter__(self): return iter(self.d)\n",
        ("self.d[k] = v", "self.d[k] = 3"),
    ),
    "a closure": (
        "assert f(2)(20) == 22",
        "def f(n): return lambda x: x + n\n",
        ("x + n", "x + 3"),
    ),
    "an error of its own, with pytest": (
        "import pytest\nwith pytest.raises(Bad): f(-1)",
        "class Bad(Exception): pass\ndef f(x): raise Bad(2)\n",
        ("Bad(2)", "ValueError(2)"),
    ),
    "an error of its own": (
        "try: f(-1)\nexcept Bad as e: assert e.code == 2\nelse: assert 0",
        "class Bad(Exception):\n def __init__(self, code): self.code = code\n"
        "def f(x): raise Bad(2)\n",
        ("Bad(2)", "Bad(3)"),
    ),
    "a constant": (
        "assert LIMIT == 22 and f() == 1",
        "LIMIT = 22\ndef f(): return 1\n",
        ("= 22", "= 23"),
    ),
    "an inherited class": (
        "assert isinstance(Dog(), Animal) and issubclass(Dog, Animal)\nassert Dog().legs() == 4",
        "class Animal:\n def legs(self): return 4\nclass Dog(Animal): pass\n",
        ("return 4", "return 3"),
    ),
    "an identity": (
        "assert Only() is Only()\nassert Only().x == 2",
        "class Only:\n x = 2\n made = None\n def __new__(cls):\n"
        "  cls.made = cls.made or object.__new__(cls)\n  return cls.made\n",
        ("x = 2", "x = 3"),
    ),
    "a class of the setup": (
        "assert f(Node(1, Node(2))) == Node(3, None)",
        "def f(n): return Node(n.v + n.n.v, None)\n",
        ("n.v + n.n.v", "n.v - n.n.v"),
    ),
    "a cycle of the setup's class": (
        "a = Node(1, None)\na.n = a\nassert f(a).n.n.v == 3",
        "def f(a):\n a.v = 3\n return a\n",
        ("v = 3", "v = 4"),
    ),
    "a member of the setup's enum": (
        "assert f(Kind.A) is Kind.B",
        "def f(k): return Kind.B\n",
        ("return Kind.B", "return k"),
    ),
    "date, decimal, fraction and path": (
        "import datetime, decimal, fractions, pathlib\n"
        "assert f() == (datetime.date(2024, 2, 9), "
        "datetime.timedelta(2), decimal.Decimal('1.10'), "
        "fractions.Fraction(1, 3), pathlib.Path('a'))",
        "import datetime as d, decimal, fractions, pathlib\n"
        "def f(): return (d.date(2024, 2, 9), d.timedelta(2), "
        "decimal.Decimal('1.10'), fractions.Fraction(1, 3), pathlib.Path('a'))\n",
        ("timedelta(2)", "timedelta(3)"),
    ),
    "views and counters": (
        "assert f().keys() == {'a'} and f().most_common(1) == [('a', "
        "2)] and list(f().values()) == [2]",
        "from collections import Counter\ndef f(): return Counter('aa')\n",
        ("'aa'", "'aaa'"),
    ),
}
SETUP = (
    "import enum\nfrom dataclasses import dataclass\n@dataclass\nclass Node:\n    v: int\n"
    "    n: object = None\nclass Kind(enum.Enum):\n    A = 1\n    B = 2\n"
)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_with_objects_earns_1_and_a_wrong_one_0(name):
    test, right, part = RIGHT[name]
    row = {"tests": [test], "setup": SETUP if "setup" in name else "", "seconds": 20}
    assert code.row_faults([row]) == [""]
    assert judged(fenced(right), **row).reward == 1.0
    wrong = right.replace(*part)
    assert wrong != right and judged(fenced(wrong), **row).reward == 0.0


CHEATS = {
    "clears what is expected": (
        "xs = [3, 1]\ngot = f(xs)\nassert got == sorted(xs)",
        "def f(xs): xs.clear(); return []\n",
    ),
    "clears it, and the argument is checked": (
        "xs = [3, 1]\ngot = f(xs)\nassert got == sorted(xs) and xs != [1]",
        "def f(xs): xs.clear(); return []\n",
    ),
    "clears a copy's source": (
        "xs = [3, 1]\ngot = f(xs)\nexpected = sorted(xs)\nassert got == expected",
        "def f(xs): xs.clear(); return []\n",
    ),
    "clears it in a method": (
        "xs = [3, 1]\ns = Solution()\ngot = s.f(xs)\nassert got == sorted(xs)",
        "class Solution:\n def f(self, xs): xs.clear(); return []\n",
    ),
    "clears it in a check": (
        "def check(f):\n xs = [3, 1]\n assert f(xs) == sorted(xs)\ncheck(f)",
        "def f(xs): xs.clear(); return []\n",
    ),
    "clears it in a suite": (
        "import unittest\nclass T(unittest.TestCase):\n def test_f(self):\n  xs = [3, 1]\n"
        "  self.assertEqual(f(xs), sorted(xs))",
        "def f(xs): xs.clear(); return []\n",
    ),
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_program_does_not_choose_what_is_expected(name):
    test, text = CHEATS[name]
    assert judged(fenced(text), tests=[test]).reward == 0.0


@pytest.mark.parametrize(
    "test",
    [
        "assert Money(3) == Money(3)",
        "assert Money(3) != Money(4)",
        "assert Money(3) < Money(4)",
        "assert Money(3) == 3",
        "assert Money(1).plus(Money(2)) == Money(3)",
        "from unittest import TestCase\nTestCase().assertEqual(Money(3), Money(3))",
    ],
)
def test_a_comparison_that_the_program_would_decide_is_no_verdict(test):
    text = (
        "class Money:\n def __init__(self, n): self.n = n\n"
        " def __eq__(self, m): return True\n __lt__ = __ne__ = __eq__\n"
        " def plus(self, m): return Money(self.n + m.n)\n"
    )
    with pytest.raises(RowError, match=r"compares an object of program\.Money"):
        judged(fenced(text), tests=[test])
    (fault,) = code.row_faults([{"tests": [test], "solution": text}])
    assert "compares an object of program.Money" in fault


@pytest.mark.parametrize("when", ["load", "call"])
@pytest.mark.parametrize(
    "act",
    [
        "shutil.rmtree(os.getcwd())",
        "os.chmod('.', 0)",
        "os.chmod('..', 0) or os.chmod('.', 0)",
        "[os.remove(x) for x in os.listdir('.')]",
    ],
)
def test_a_test_that_misses_its_files_is_failed(act, when, tmp_path, monkeypatch):
    """The test writes a file: what the program did to the folder is no fault of the row."""
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    test = (
        "def test_f(tmp_path):\n    open('a', 'w').close()\n    assert f(str(tmp_path)) == 1\n"
        "    open('a').close()\n    (tmp_path / 'b').write_text('')\n"
    )
    text = f"import os, shutil\ndef act():\n    {act}\n    return 0\n"
    text += "act()\ndef f(x): return 0\n" if when == "load" else "def f(x): return act()\n"
    assert code.row_faults([{"test": test}]) == [""]
    assert judged(fenced(text), test=test).reward == 0.0
    tmp_path.chmod(0o700)
    if (tmp_path / "inner").exists():
        (tmp_path / "inner").chmod(0o700)
