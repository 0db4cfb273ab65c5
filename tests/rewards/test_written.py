"""The source of a reward that is defined in a notebook or a main module."""

import functools
import linecache
import re
import sys
import types
from fractions import Fraction

import pytest

from compass_jax.rewards.written import NotWritable, source_with_names

PREAMBLE = "import math, json as j\nfrom fractions import Fraction\nimport functools, re\n"


@pytest.fixture
def main(monkeypatch):
    """Returns a function that runs a notebook's cell in a main module without a file."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)

    def run(text):
        name = f"<cell {len(linecache.cache)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), vars(module))
        return types.SimpleNamespace(**vars(module))

    run(PREAMBLE)
    return run


def rebuilt(function):
    """Returns the namespace that a worker gets from the written file."""
    text = source_with_names(function)
    names = {"__name__": "written"}
    exec(compile(text, "reward.py", "exec"), names)
    assert source_with_names(function) == text  # the run's hash of it is stable
    return names


WRITTEN = {
    "constant": ("LIMIT = 3\ndef score(response): return len(response) / LIMIT", 4 / 3),
    "import": ("def score(response): return math.sqrt(len(j.loads('[1]')))", 1.0),
    "imported name": ("def score(response): return float(Fraction(1, 2))", 0.5),
    "helper of a helper": (
        "A = {'x': 2}\ndef inner(): return A['x']\ndef outer(): return inner() + 1\n"
        "def score(response): return outer()",
        3,
    ),
    "pattern": (
        "P = re.compile('[a-c]', re.I)\ndef score(response): return len(P.findall(response))",
        3,
    ),
    "default value": ("N = 7\ndef score(response, n=N): return n", 7),
    "recursion": (
        "def score(response): return 1 + score(response[1:]) if response else 0",
        4,
    ),
    "cache": (
        "@functools.lru_cache\ndef slow(x): return x * 2\ndef score(response): return slow(4)",
        8,
    ),
    "class": (
        "BASE = 5\nclass Meter:\n    step = BASE\n    def read(self): return self.step + BASE\n"
        "def score(response): return Meter().read()",
        10,
    ),
    "infinity and sets": (
        "LOW = float('-inf')\nW = frozenset({'Abcd', 'x'})\n"
        "def score(response): return max(LOW, response in W)",
        True,
    ),
    "comprehension": ("K = [1, 2]\ndef score(response): return sum(k for k in K)", 3),
    "annotation": (
        "from __future__ import annotations\ndef score(response: Nowhere) -> float: return 1.0",
        1.0,
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_function_is_written_with_what_it_uses(main, name):
    text, expected = WRITTEN[name]
    assert rebuilt(main(text).score)["score"]("Abcd") == expected


def test_an_attribute_of_the_function_is_kept(main):
    cell = main("def score(response): return 1\nscore.range = (0, 1)")
    assert rebuilt(cell.score)["score"].range == (0, 1)


def test_a_function_inside_another_one_brings_its_constants():
    weight, pattern = 0.25, re.compile("b+")

    def helper(text):
        return len(pattern.findall(text))

    def score(response):
        return weight * helper(response) * Fraction(2)

    names = rebuilt(score)
    assert names["score"]("abba b") == 1 and names["weight"] == 0.25


REFUSED = {
    "open file": ("import io\nF = io.StringIO()\ndef score(response): return F", "uses F: a Str"),
    "object": (
        "class Model:\n    pass\nM = Model()\ndef score(response): return M",
        "uses M: a Model cannot",
    ),
    "array": ("import numpy\nA = numpy.ones(2)\ndef score(response): return A[0]", "uses A: a nda"),
    "nested value": ("A = [math]\ndef score(response): return A", "uses A: a list cannot"),
    "lambda as a helper": (
        "f = lambda x: x\ndef score(response): return f(1)",
        "uses f: it is another name of <lambda>",
    ),
    "renamed": ("def f(): pass\ng = f\ndef score(response): return g()", "another name of f"),
    "partial": (
        "def f(x): pass\ng = functools.partial(f, 1)\ndef score(response): return g()",
        "uses g: a partial cannot",
    ),
    "from the string": ("exec('def score(response): return 1')", "its source cannot be found"),
    "attribute": (
        "def score(response): return 1\nscore.state = object()",
        r"uses score\.state: a object cannot",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused_by_its_name(main, name):
    text, message = REFUSED[name]
    with pytest.raises(NotWritable, match=rf"^reward = score: .*{message}.*write the function"):
        source_with_names(main(text).score)


def test_what_is_no_function_with_a_name_is_refused():
    for value, kind in ((lambda response: 1, "lambda"), (functools.partial(print), "partial")):
        with pytest.raises(NotWritable, match=f"a {kind} cannot be written"):
            source_with_names(value)


def test_two_objects_of_one_name_are_refused():
    def made(n):
        def part():
            return n

        return part

    part = made(1)

    def outer():
        return part()

    def swap():
        part = made(2)

        def inner():
            return part()

        return inner

    inner = swap()

    def score(response):
        return outer() + inner()

    with pytest.raises(NotWritable, match="uses part: it is two objects"):
        source_with_names(score)
