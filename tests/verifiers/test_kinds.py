"""Numbers within a tolerance, options by their text, JSON by schema: right, wrong and absurd."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_usual import NOTHING, RIGHT, WRONG, judged

from compass_jax.config import ConfigError, FileSource
from compass_jax.rewards.checks import Check, Graded, build
from compass_jax.verifiers.kinds.numeric import value_of


def kind(name, row, response):
    return build(Check(name), "answer")(row, response)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3/4", Fraction(3, 4)),
        ("about 3.50 km", Fraction(7, 2)),
        ("$1,200", Fraction(1200)),
        ("1.2e3", Fraction(1200)),
        (r"-2.5 \times 10^{-2} m", Fraction(-25, 1000)),
        ("\u22127 °C", Fraction(-7)),
        ("between 3 and 4", None),
        ("none", None),
        ("1e999", None),
        ("9" * 10**6, None),
        ("1" + "e5" * 10**5, None),
    ],
)
def test_the_one_number_of_a_text(text, value):
    assert value_of(text) == value


@given(st.decimals(-(10**9), 10**9, allow_nan=False, places=4))
def test_a_decimal_is_read_exactly(value):
    assert value_of(f"x = {value} kg") == Fraction(value)


def test_numbers_within_a_tolerance():
    assert judged("numeric", r"\boxed{3.14159}", "3.1415926", rel_tol=1e-5) == RIGHT
    assert judged("numeric", r"\boxed{3.14}", "3.1415926", rel_tol=1e-5) == WRONG
    assert judged("numeric", "#### 10.5", "10", abs_tol=0.5) == RIGHT  # the bound belongs to it
    assert judged("numeric", "#### 10.500001", "10", abs_tol=0.5) == WRONG
    assert judged("numeric", "<answer>7</answer>", "7") == RIGHT
    assert judged("numeric", "<answer>many</answer>", "7") == NOTHING
    with pytest.raises(ValueError, match="the reference 'many' is no number"):
        judged("numeric", "<answer>7</answer>", "many")


@pytest.mark.parametrize("given", [{"abs_tol": -1}, {"rel_tol": "1"}, {"rel_tol": True}])
def test_a_tolerance_that_is_none_is_refused(given):
    with pytest.raises(ConfigError, match=r"_tol = .* must be a number, 0 or more"):
        FileSource("rows.jsonl", verifier="numeric", verifier_args=given).validate("s")


METALS = {"answer": "B", "options": ["Iron", "White gold", "A"]}


@pytest.mark.parametrize(
    ("row", "response", "verdict"),
    [
        (METALS, "<answer>(B) white gold</answer>", RIGHT),
        (METALS, r"\boxed{white  Gold.}", RIGHT),
        (METALS, r"\boxed{iron}", WRONG),
        (METALS, r"\boxed{A}", WRONG),  # the letter, not the third option's text
        (METALS | {"answer": "White gold"}, "The answer is B", RIGHT),
        (METALS | {"answer": 1}, r"\boxed{white gold}", RIGHT),
        ({"answer": "C", "options": {"A": "x", "C": "y"}}, "<answer>y</answer>", RIGHT),
        ({"answer": "A", "options": ["same", "same"]}, "<answer>same</answer>", NOTHING),
        ({"answer": "A", "options": 7}, "<answer>A</answer>", RIGHT),
        (METALS, "I do not know", NOTHING),
    ],
)
def test_an_option_is_chosen_by_letter_or_text(row, response, verdict):
    assert kind("choice", row, response) == verdict


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("row", "response", "verdict"),
    [
        ({"schema": SCHEMA}, '{"n": 3, "m": 1}', Graded(1.0, {"valid": 1.0})),
        ({"schema": SCHEMA}, '{"n": "3"}', Graded(0.0, {"valid": 0.0})),
        ({"schema": SCHEMA, "answer": {"n": 3}}, '{"n": 3}', Graded(1.0, {"valid": 1.0})),
        ({"schema": SCHEMA, "answer": {"n": 3}}, '{"n": 4}', Graded(0.0, {"valid": 1.0})),
        ({"schema": SCHEMA}, "{n: 3}", NOTHING),
        ({}, '{"n": 3}', RIGHT),
    ],
)
def test_json_by_schema_and_by_value(row, response, verdict):
    assert kind("json", row, response) == verdict


def test_a_schema_is_judged_in_a_child_and_one_that_is_none_is_refused():
    from compass_jax.rewards.called import Case
    from compass_jax.rewards.checks import UNDECIDED

    verifier = build(Check("json"), "answer")
    assert verifier.decided(Case({"schema": SCHEMA}, '{"n": 3}')) == [UNDECIDED]
    assert verifier.decided(Case({}, '{"n": 3}')) == [{"reward": 1.0}]
    for schema in ('{"type": "nothing"}', "{", 7):
        with pytest.raises(ConfigError, match="schema = "):
            args = {"schema": schema}
            FileSource("r.jsonl", verifier="json", verifier_args=args).validate("s")


@pytest.mark.parametrize("name", ["numeric", "choice", "json", "exact"])
def test_noise_is_judged_and_never_right(name):
    rng = random.Random(0)
    row = {"answer": "B" if name == "choice" else "31.5", "options": ["iron", "gold"]}
    for _ in range(300):
        text = "".join(rng.choice("<answer>/{}[]\\boxed#e+-. \"'\u2212é𝟙") for _ in range(40))
        assert kind(name, row, text).reward == 0
