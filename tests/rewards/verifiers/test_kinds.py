"""Numbers within a tolerance, options by their text, and JSON by its schema: right, wrong and
absurd answers."""

import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_usual import NOTHING, RIGHT, WRONG, judged

from compass_jax.config import ConfigError, FileSource
from compass_jax.rewards.checks import Check, Graded, build
from compass_jax.rewards.verifiers.kinds.math import value_of


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
        ("9.8 m/s^2", Fraction(98, 10)),
        (r"9.8 \text{ m/s}^2", Fraction(98, 10)),
        ("4.2 kg·m/s²", Fraction(42, 10)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("10^3", Fraction(1000)),
        ("6.02×10^{23} mol^{-1}", Fraction(602 * 10**21)),
        ("2 million", Fraction(2_000_000)),
        (r"\sqrt{4}", Fraction(2)),
        ("It has 5 CO2 molecules", Fraction(5)),
        ("It fell to minus 5 degrees", Fraction(-5)),
        ("5 (or six)", None),
        ("plus or minus 5", None),
        ("> 5", None),
        ("1, 2", None),
        ("3 ft 4 in", None),
        ("12:30", None),
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
    assert judged("numeric", "#### 10.5", "10", abs_tol=0.5) == RIGHT  # the bound is included
    assert judged("numeric", "#### 10.500001", "10", abs_tol=0.5) == WRONG
    assert judged("numeric", "<answer>7</answer>", "7") == RIGHT
    assert judged("numeric", "<answer>many</answer>", "7") == NOTHING
    with pytest.raises(ValueError, match="the reference 'many' is no number"):
        judged("numeric", "<answer>7</answer>", "many")


@pytest.mark.parametrize(
    ("reference", "answer", "reward"),
    [
        ("0.5", "50\\%", 1),
        ("0.5", "50%", 1),
        ("0.5", "50 percent", 1),
        ("50", "50%", 1),
        ("50%", "0.5", 1),
        ("50%", "50", 1),
        ("0.5", "0.5%", 0),
        ("50%", "50%", 1),
        ("50%", "0.5%", 0),
        ("0.25", "about 25% of them", 1),
        ("0.25", "25 \\text{ percent}", 1),
        ("25", "$25\\%$", 1),
        ("1", "100%", 1),
        ("0.01", "1%", 1),
        ("1", "1%", 1),
        ("150%", "1.5", 1),
        ("0", "0%", 1),
        ("0.25", "26\\%", 0),
    ],
)
def test_a_percentage_is_its_number_or_its_hundredth(reference, answer, reward):
    assert judged("numeric", f"<answer>{answer}</answer>", reference).reward == reward


@pytest.mark.parametrize("arguments", [{"abs_tol": -1}, {"rel_tol": "1"}, {"rel_tol": True}])
def test_a_tolerance_that_is_none_is_refused(arguments):
    with pytest.raises(ConfigError, match=r"_tol = .* must be a number, 0 or more"):
        FileSource("rows.jsonl", verifier="numeric", verifier_args=arguments).validate("s")


METALS = {"answer": "B", "options": ["Iron", "White gold", "A"]}


@pytest.mark.parametrize(
    ("row", "response", "verdict"),
    [
        (METALS, "<answer>(B) white gold</answer>", RIGHT),
        (METALS, r"\boxed{white  Gold.}", RIGHT),
        (METALS, r"\boxed{iron}", WRONG),
        (METALS | {"answer": "A"}, r"\boxed{A}", RIGHT),  # a letter, not the third option's text
        (METALS | {"answer": "C"}, r"\boxed{A}", WRONG),
        (METALS | {"answer": "White gold"}, "The answer is B", RIGHT),
        (METALS | {"answer": 1}, r"\boxed{white gold}", RIGHT),
        ({"answer": "C", "options": {"A": "x", "C": "y"}}, "<answer>y</answer>", RIGHT),
        ({"answer": "A", "options": ["same", "same"]}, "<answer>same</answer>", NOTHING),
        ({"answer": "A", "options": 7}, "<answer>A</answer>", RIGHT),
        (METALS, "I do not know", NOTHING),
        (METALS, "The answer is white gold.", RIGHT),
        ({"answer": "B"}, "The answer is B because option A is false.", RIGHT),
        ({"answer": "B"}, "<answer>B. Because A is wrong</answer>", RIGHT),
        ({"answer": "B"}, "B", RIGHT),
        ({"answer": "B"}, "**(B)**", RIGHT),
        ({"answer": "B"}, "B) Paris", RIGHT),
        ({"answer": "D"}, "Option A is false. D is correct.", RIGHT),
        ({"answer": "C"}, r"$\boxed{\textbf{(C) } 12}$", RIGHT),
        ({"answer": "A"}, r"\boxed{A, B, C, D}", WRONG),
        ({"answer": "D"}, r"\boxed{A}, \boxed{B}, \boxed{C}, \boxed{D}", WRONG),
        ({"answer": "A"}, "<answer>A or B</answer>", WRONG),
        ({"answer": "A"}, "<answer>A B C D</answer>", WRONG),
        ({"answer": "D"}, "Option A, option B, option C or option D.", WRONG),
        ({"answer": "A"}, "<answer>ABCD</answer>", NOTHING),
        ({"answer": "B"}, "The answer is not B", NOTHING),
        ({"answer": "A"}, "The answer is a bit unclear", NOTHING),
        ({"answer": "I"}, "<answer>I think B</answer>", NOTHING),
        ({"answer": "B"}, "<answer>B. A cell wall</answer>", RIGHT),
        ({"answer": "C"}, r"\boxed{\textbf{(C) } I and II only}", RIGHT),
        ({"answer": "A"}, "<answer>B. A cell wall</answer>", WRONG),
        ({"answer": "B"}, "<answer>B. A and C</answer>", WRONG),
        ({"answer": "B"}, "<answer>B. A</answer>", WRONG),
        ({"answer": "B"}, "<answer>B, A are right</answer>", WRONG),
        ({"answer": "A", "options": ["C major", "D major"]}, "<answer>A: C major</answer>", RIGHT),
        ({"answer": "B. White gold"}, "<answer>B</answer>", RIGHT),
        ({"answer": "(B) White gold"}, "<answer>A</answer>", WRONG),
        ({"answer": r"\text{B}"}, "<answer>B</answer>", RIGHT),
        ({"answer": ["B"]}, "<answer>B</answer>", RIGHT),
        ({"answer": [1]}, "<answer>B</answer>", RIGHT),
        ({"answer": "()"}, "<answer>A and B</answer>", WRONG),
        ({"answer": "Bronze"}, "<answer>B</answer>", WRONG),
        ({"answer": "B"}, "<think>The answer is B", NOTHING),
        ({"answer": "B"}, "The answer is A</think>The answer is B", RIGHT),
    ],
)
def test_an_option_is_chosen_by_letter_or_text(row, response, verdict):
    assert kind("choice", row, response) == verdict


@pytest.mark.parametrize("reference", ["12", ["12"], [12], ("x = 12",), ["#### 12"]])
@pytest.mark.parametrize("name", ["math", "numeric"])
def test_the_only_element_of_a_list_is_the_reference(name, reference):
    assert kind(name, {"answer": reference}, "<answer>12</answer>") == RIGHT
    assert kind(name, {"answer": reference}, "<answer>13</answer>") == WRONG
    assert kind(name, {"answer": reference}, "<answer>[12]</answer>") == RIGHT


MMLU = {"choices": ["iron", "white gold", "tin", "lead"], "answer": 1}
ARC = {"choices": {"text": ["iron", "gold"], "label": ["1", "2"]}, "answer": "2"}


@pytest.mark.parametrize(
    ("row", "response", "verdict"),
    [
        (MMLU, "Answer: B", RIGHT),
        (MMLU, r"\boxed{white gold}", RIGHT),
        (MMLU, "Answer: C", WRONG),
        (MMLU | {"answer": "white gold"}, "Answer: B", RIGHT),
        (ARC, "Answer: 2", RIGHT),
        (ARC, "<answer>Gold</answer>", RIGHT),
        (ARC, "Answer: 1", WRONG),
        ({"choices": {"text": ["x", "y"], "label": ["A", "B"]}, "answer": "B"}, "(B)", RIGHT),
        ({"choices": ["A", "B"], "answer": "B"}, "Answer: B", RIGHT),
        ({"choices": [f"option {n}" for n in range(12)], "answer": "L"}, "Answer: L", RIGHT),
    ],
)
def test_columns_of_mmlu_and_arc_are_read(row, response, verdict):
    assert kind("choice", row, response) == verdict


def test_choices_that_are_no_texts_are_an_error():
    with pytest.raises(ValueError, match=r"choices = .* it must be letters, or a list of texts"):
        kind("choice", {"choices": [1, 2], "answer": 0}, "Answer: A")


@pytest.mark.parametrize(
    ("name", "row", "answer"),
    [
        ("math", {"answer": "12"}, "#### 12"),
        ("numeric", {"answer": "12"}, r"\boxed{12}"),
        ("exact", {"answer": "12"}, "<answer>12</answer>"),
        ("choice", {"answer": "B"}, "The answer is B."),
        ("json", {"answer": {"a": 1}}, '{"a": 1}'),
        ("tools", {"answer": [{"name": "f", "arguments": {"a": 1}}]}, "[f(a=1)]"),
        ("regex", {"pattern": r"\bParis\b"}, "Paris"),
        ("verdict", {"answer": "Tie"}, "Tie"),
    ],
)
def test_a_thought_answers_nothing(name, row, answer):
    assert kind(name, row, answer).reward == 1
    for thought in (
        f"<think>{answer}</think>",  # closed
        f"<think>{answer}",  # cut off
        f"{answer}\n</think>",  # opened by the prompt's template
        f"<think>{answer}</think> no.",
        f"<think>a <think>{answer}</think> b</think>",
    ):
        assert kind(name, row, thought).reward == 0, thought
    for before in ("<think>so</think>", "so</think>\n", "<think></think>\n\n"):
        assert kind(name, row, before + answer).reward == 1, before


def test_a_pattern_that_mentions_thoughts_searches_them():
    assert kind("regex", {"pattern": "<think>.*Paris"}, "<think>Paris</think>").reward == 1


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


@pytest.mark.parametrize(
    "response",
    ["B. A is also correct", "B. A or maybe C", "B: A too", "B. A as well as C", "B. A vs C"],
)
def test_an_option_after_the_label_is_a_second_choice(response):
    tagged = f"<answer>{response}</answer>"
    assert kind("choice", {"answer": "B"}, tagged).reward == 0
    assert kind("choice", {"answer": "B"}, "<answer>B. A cell wall</answer>").reward == 1
    assert kind("choice", {"answer": "C++"}, "C").reward == 0
