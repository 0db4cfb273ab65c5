"""What is read as an answer, and what is refused, without evaluating it."""

import inspect
import re
import sys
import types
from fractions import Fraction

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.reasoning import READERS, can_be_read, evaluates
from compass_jax.verifiers.answers import AnswerError, arithmetic, exact, is_expression, literal
from compass_jax.verifiers.extract import number
from compass_jax.verifiers.kinds.math import math_decided

NAMES = {"eval", "exec", "compile", "parse_expr", "sympify"}
# evaluate texts of their own, or have a method of such a name; scored in children all the same
OTHERS = {"basic_arithmetic", "bf", "bitwise_arithmetic", "codeio", "number_sorting"}
OTHERS |= {"propositional_logic", "rubiks_cube"}
VALUES = {
    "2 + 3*4": 14,
    "(1 - 2)/4": Fraction(-1, 4),
    "-2**2": -4,
    " 2**-3 ": Fraction(1, 8),
    "+.5 + 1.": Fraction(3, 2),
    "1+\t1": 2,
}


@pytest.mark.parametrize("text", VALUES)
def test_arithmetic_is_exact(text):
    assert arithmetic(text) == VALUES[text]


REFUSED = ["x", "1 if 2 else 3", "2(3)", "1e5", "0x10", "1_0", "1j", "", "1,2", "()", "9**65"]
REFUSED += ["2**0.5", "2**(1/2)", "1//2", "1%2", "1 < 2", "7" * 201, "(" * 51 + "1" + ")" * 51]
REFUSED += ["-" * 60 + "1", "- " * 60 + "1", "1+" * 6000 + "1", "1 +\n1", "True", "'1'", "1\x00"]
REFUSED += ["²", "１"]


@pytest.mark.parametrize("text", REFUSED, ids=lambda text: repr(text[:20]))
def test_what_is_no_arithmetic_is_refused(text):
    with pytest.raises(AnswerError):
        arithmetic(text)
    assert not can_be_read("countdown", text)


NO_EXPRESSIONS = ["x.real", "x[0]", "lambda: 1", "f(x)", "exit(0)", "S(1)", "simplify(x)", "sin()"]
NO_EXPRESSIONS += ["sin(x, evaluate=False)", "x = 1", "x if x else x", "x and x", "2x", "N(x)"]
NO_EXPRESSIONS += [
    "sin + 1",
    "9**9999",
    "x**65",
    "x**(9**9)",
    "((9**64)**64)**64",
    "exit",
    "~x",
    "x//2",
]
EXPRESSIONS = ["-9*x**8/10 + 3*x**4/2", "2*(2 - 8*x)**(3/2)/3", "exp(x)*sin(2*x) - log(x)/pi"]
EXPRESSIONS += ["sqrt(x)**-1 + 0.25", "3*Integral(x**3*cos(3*x), x)", "C", "a1*b", "x**x"]


@pytest.mark.parametrize("text", [*NO_EXPRESSIONS, *EXPRESSIONS])
def test_expressions_are_numbers_symbols_and_elementary_functions(text):
    assert is_expression(text) == (text in EXPRESSIONS)


NO_LISTS = ["{1}", "{'a': 1}", "1", "None", "[None]", "[x]", "[1][0]", "['a'.b]", "[f'{1}']", "AB"]


def test_literals_are_lists_and_texts():
    assert literal("[[0, 1], ['Q', '_']]") == [[0, 1], ["Q", "_"]]
    assert literal("('A', 'B')") == ["A", "B"] and literal(" 'AB' ") == "AB"
    for text in [*NO_LISTS, "[" * 60 + "]" * 60]:
        with pytest.raises(AnswerError):
            literal(text)


@pytest.fixture
def restored():
    """The data sets' modules without `literal`."""
    modules = [vars(sys.modules[DATASETS[name][0].__module__]) for name in READERS]
    for names in modules:
        names.pop("eval", None)
    yield
    for name, names in zip(READERS, modules):
        if READERS[name] is literal:
            names["eval"] = literal


@pytest.mark.parametrize("count", [15, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(READERS))
def test_no_reference_answer_is_refused_and_scores_stay(name, count, monkeypatch, restored):
    """sympy simplifies too slowly for all of them, so that fewer integrals are scored than read."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    dataset = reasoning_gym.create_dataset(name, seed=17, size=count)
    entries = [dataset[n] for n in range(count)]
    scored = entries[: 3 + count // 20] if "integration" in name else entries
    before = [dataset.score_answer(entry["answer"], entry) for entry in scored]
    check = build(Check("reasoning_gym", name), "")
    assert all(can_be_read(name, entry["answer"]) for entry in entries)
    assert [check(entry, entry["answer"]).reward for entry in scored] == before


@pytest.mark.parametrize("name", sorted(READERS))
def test_the_reader_is_what_stops_an_evaluation(name, monkeypatch, restored):
    """Without it the answer's code runs, with it none does."""
    entry = reasoning_gym.create_dataset(name, seed=17, size=1)[0]
    payload = "setattr(__import__('sys'), 'reached', True)"
    score = reasoning_gym.create_dataset(name, seed=17, size=1).score_answer
    monkeypatch.setattr(sys, "reached", False, raising=False)
    for text in (payload, f"[{payload}]"):
        score(text, entry)
    assert sys.reached
    sys.reached = False
    check = build(Check("reasoning_gym", name), "")
    for text in (payload, f"[{payload}]"):
        assert check(entry, text).reward == 0.0 and not sys.reached


def test_every_data_set_whose_module_evaluates_is_known():
    """One that a later reasoning-gym adds is scored in a child, and named here."""
    sources = {x: inspect.getsource(sys.modules[y[0].__module__]) for x, y in DATASETS.items()}
    words = re.compile(rf"\b({'|'.join(NAMES)})\(")
    evaluating = {name for name, text in sources.items() if words.search(text)}
    assert evaluating == set(READERS) | OTHERS
    assert all(map(evaluates, OTHERS)) and not evaluates("chain_sum")
    symbolic = {"intermediate_integration", "polynomial_multiplication", "simple_integration"}
    assert {name for name in READERS if evaluates(name)} == symbolic


DECIDED = [
    ("0.12345678", "0.123456789", 0.0),
    ("$0.5$", "0.50", 1.0),
    ("\\boxed{1,000}", "1000", 1.0),
    ("-0", "0", 1.0),
    ("+7", "7.", 1.0),
    ("1,00", "100", 0.0),
    ("2/4", "\\frac{1}{2}", 1.0),
    ("1/3", "2/3", 0.0),
    ("0.5", "1/2", 1.0),
    ("1/0", "1/0 ", 1.0),
    ("1/0", "2", 0.0),
    ("50%", "0.5", 1.0),
    ("(lambda: 7)()", "7", 0.0),
    ("__import__", "7", 0.0),
    ("x+1", "1+x", 1.0),
    (r"\sum_{k=1}^3 k", "6", None),
    ("pairs", "Paris", 0.0),
    ("\u22127", "-7", 1.0),
    ("1e3", "1000", 1.0),
]


@pytest.mark.parametrize(("answer", "reference", "decided"), DECIDED)
def test_what_needs_no_math_verify_is_decided(answer, reference, decided):
    assert math_decided(answer, reference) == decided


def test_exact_knows_decimals_and_fractions():
    assert exact(" $-1.50$ ") == ("decimal", Fraction(-3, 2))
    assert exact("-\\dfrac{1}{4}") == ("fraction", Fraction(-1, 4))
    assert not any(map(exact, ("", ".", "1.2.3", "9" * 300)))


def test_a_score_is_a_number():
    import numpy as np

    for value in (True, 1, 1.0, np.float32(1), np.bool_(True), Fraction(1)):
        assert number(value) == 1.0 and type(number(value)) is float
    for value in ("1", " 1.0 ", None, b"1", [1.0], types.SimpleNamespace(__float__=lambda: 1.0)):
        with pytest.raises(TypeError, match="must be a number"):
            number(value)
    with pytest.raises(ValueError, match="returned nan"):
        number(float("nan"))
