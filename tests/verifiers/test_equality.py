"""What `math` takes for equal: each row of docs/equality.md, faults of other projects, hostile
answers."""

import re
import time
from pathlib import Path

import pytest

from compass_jax.verifiers.kinds.math import at_once, judge, math_decided, math_score
from compass_jax.verifiers.maths.evaluation import equal
from compass_jax.verifiers.maths.expressions import Unreadable, parse

PAGE = Path(__file__).parents[2] / "docs" / "equality.md"
ROW = re.compile(r"^\| `(.+)` \| `(.+)` \| (yes|no) \|$", re.MULTILINE)
ROWS = [
    (a.replace(r"\|", "|"), b.replace(r"\|", "|"), c) for a, b, c in ROW.findall(PAGE.read_text())
]
NOTHING = {"reward": 0.0, "extracted": False}


def test_the_page_has_rows_of_both_kinds():
    assert len(ROWS) > 120 and {row[2] for row in ROWS} == {"yes", "no"}


@pytest.mark.parametrize(("reference", "answer", "same"), ROWS)
def test_a_row_of_the_page(reference, answer, same):
    assert math_score(answer, reference) == (same == "yes")
    assert judge(rf"So it is \boxed{{{answer}}}", reference, "answer") == (same == "yes")


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        (r"\frac{9}{4}\pi", r"\frac94\pi"),
        ("1e+22", "10^{22}"),  # a row's number 1e22
        ("3 \\times 10^8 \\text{ m/s}", "3e8 m/s"),
        ("4\\pi \\text{ cm}^2", "4π cm²"),
        ("9.8 m/s^2", r"9.8\,\mathrm{m/s^2}"),
        ("2 h 30 min", "150 minutes"),
        ("2x+4y-3=0", r"y=-\frac{1}{2}x+\frac{3}{4}"),
        ("x^2/4 + y^2/3 = 1", "x^2/16 + y^2/12 = 1/4"),
        (r"\frac{a}{b}", "a/b"),
        ("n(n+1)/2", r"\frac{n^2+n}{2}"),
        ("(-1)^n", r"\cos(n\pi)"),
        (r"\ln(x^2)", r"2\ln x"),
        (r"\tan^{-1}(1)", "π/4"),
        ("C", "**(C)**"),
        ("12", "12 (twelve)"),
        ("\frac{1}{2}", "0.5"),  # a form feed: JSON's \f, escaped once too little
        (r"\\left(\\frac{1}{5},\\frac{1}{6}\\right)", "(1/5, 1/6)"),
        (r"p=5,q=2;p=7,q=2", "(5,2),(7,2)"),
        (r"1\leq|z|\leq \frac{3}{2}", r"[-\frac32,-1] \cup [1,\frac32]"),
        (r"\{x | x > 3\}", r"(3, \infty)"),
        ("x > 1 and x < 4", "1 < x < 4"),
        (r"k\pi, k \in \mathbb{Z}", r"k\pi"),
        (r"\begin{pmatrix}1\\2\\3\end{pmatrix}", "(1,2,3)"),
        (r"\lfloor x \rfloor + 1", r"1 + \lfloor x \rfloor"),
        (r"\sum_{k=1}^{n} k", r"\sum_{j=1}^{n} j"),
        (r"\sum_{k=1}^{3} k^2", "14"),
        (r"\int_0^1 x^2 dx", "1/3"),
        (r"\cos 60^\circ", "1/2"),
        ("|x-2|<3", "-1 < x < 5"),
        (r"x^2-4 \ge 0", r"(-\infty,-2]\cup[2,\infty)"),
        ("2x+1 > 7", "x > 3"),
        ("-1", "negative one"),
        (r"{5 \choose 2}", "10"),
        (r"f^{-1}(x) = \frac{x-1}{2}", r"\frac{x-1}{2}"),
        (r"\text{Alice and Bob}", "Bob and Alice"),
        ("3.5", "3,5"),
        ("13:30", "1:30 pm"),
    ],
)
def test_right_answers(reference, answer):
    assert math_score(answer, reference) == 1


@pytest.mark.parametrize(
    ("reference", "answer"),
    [
        ("10^{-20}", "10^{-21}"),
        ("3^{100}", "3^{100}+1"),
        ("e^{-200}", "e^{-201}"),
        ("5 km", "5 miles"),
        ("60 mph", "60 km/h"),
        ("5 \\text{ million}", "5 \\text{ billion}"),
        ("5", "between 4 and 6"),
        ("5", "not 5"),
        ("5", "5 \\text{ or more}"),
        ("5", "< 5"),
        ("FF_{16}", "FF_{17}"),
        ("ABC", "BCA"),
        ("R", "r"),
        (r"p \implies q", r"q \implies p"),
        (r"\exists x, P(x)", r"\forall x, P(x)"),
        ("2, 4, 6, \\ldots", "1, 3, 5, \\ldots"),
        ("3,5", "3.5"),
        ("x^2 = 4", "x = 2"),
        ("x^2 < 4", "x < 2"),
        ("x^2 < 4", r"-2 \le x \le 2"),
        ("2x+1 > 7", r"x \ge 3"),
        (r"\sin 15^\circ", r"15^\circ"),
        (r"\emptyset", r"\{\emptyset\}"),
        ("July 4", "July 5"),
        ("12:00", "foo"),
        ("12:00", "x^2"),
        ("Paris, France", "5"),
        ("(0, 1)", "12:00"),
        ("1/0", "2"),
        (r"\sum_{k=1}^{n} k", "n"),
        ("5", ""),
        ("5", "5x"),
        ("5", "(lambda: 5)()"),
    ],
)
def test_wrong_answers_are_0_and_never_unknown(reference, answer):
    assert math_score(answer, reference) == 0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"<think>Try \boxed{12}. No.</think> It is 13.", 12, 0),
        (r"<think>\boxed{12}", 12, 0),
        (r"\boxed{12} hm, no.</think> \boxed{13}", 12, 0),
        (r"<think>\boxed{13}</think>\boxed{12}", 12, 1),
        (r"\boxed{13} no</think>So \boxed{12}.", 12, 1),
        ("<think>a <think> b</think> <answer>12</answer></think> 13", 12, 0),
        (r"First \boxed{5}, then the final \boxed{", 5, 0),
        (r"<answer>\boxed{5</answer>", 5, 0),
        (r"\boxed{5}, \boxed{6}, \boxed{7}", 5, 0),
        (r"\boxed{5} or \boxed{6}", 6, 0),
        (r"The roots are \boxed{1} and \boxed{-2}.", "1, -2", 1),
        ("We add.\nAnswer: 34", 34, 1),
        ("The answer is 34.", 34, 1),
        ("The answer is 35.", 34, 0),
        (r"\boxed{34}", r"We get 34, so \boxed{34}.", 1),  # the row's column is a solution
    ],
)
def test_which_text_is_the_answer(response, answer, reward):
    found = judge(response, answer, "answer")
    assert (found["reward"] if isinstance(found, dict) else found) == reward


def test_an_empty_tag_takes_the_last_formula_of_a_sentence():
    assert judge(r"Therefore $x \geq 5$ is the solution.", r"x \ge 5", "") == 1
    assert judge("The volume is 120.", "120", "") == 1
    assert judge("The volume is 120.", "120", "answer") == NOTHING


TOWERS = ["9^{9^{9^9}}", "9^9^9^9", "((9!)!)!", "(10^{1000})^{1000}", "x^{10^{10}}", "1/9^{9^9}"]
TOWERS += [r"\binom{10^9}{10^8}", "e^{e^{e^{e^e}}}", r"\sum_{k=1}^{10^{10}} k", "^".join("2" * 30)]
TOWERS += [r"\lim_{x\to 0}" + "x^" * 50 + "x", r"\sin(10^{1000})", "0." + "1" * 1900]
REPEATED = ["(", "-", "- ", "\\frac{", "9^{", "\\sqrt", "\\boxed{", "1,", "ab", "\\pm ", "|", "½"]
REPEATED += ["1 ft ", "and ", "\\text{a}", "x=", "answer is ", "0.1", "\\left(", "1 1/", "**", "<"]


@pytest.mark.parametrize("reference", ["5", r"\sum_{k=1}^n k", "(x+1, 2)"])
def test_hostile_answers_are_0_at_once(reference):
    texts = [*TOWERS, *(text * (3000 // len(text)) for text in REPEATED), "-" * 2999 + "7"]
    start = time.process_time()
    for text in texts:
        for response in (f"<answer>{text}</answer>", f"\\boxed{{{text}}}"):
            found = at_once(response, reference, "answer")
            assert found in (0.0, NOTHING), text[:30]
    assert time.process_time() - start < 20


def test_what_needs_no_math_verify_is_decided_at_once():
    assert math_decided("x+1", "1+x") == 1
    assert math_decided(r"\int_0^1 x dx", "1/2") is None
    assert math_score(r"\int_0^1 x dx", "1/2") == 1


@pytest.mark.parametrize("text", ["", "1 2", "x +", "(1", "1)", r"\frac{1}", "3..4", "1 1/0"])
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(Unreadable):
        parse(text)


def test_expressions_by_value():
    assert equal(parse("1/3 + 1/6"), parse("1/2"))
    assert equal(parse(r"\sqrt{2}\sqrt{3}"), parse(r"\sqrt{6}"))
    assert not equal(parse("x^2"), parse("2^x"))
    assert not equal(parse("f(x)"), parse("f(y)"))
    assert equal(parse("f(x+1)"), parse("f(1+x)"))
