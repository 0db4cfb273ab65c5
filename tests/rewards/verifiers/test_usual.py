"""The usual verifiers, by hand: right, wrong and missing answers."""

import time
import types
from fractions import Fraction

import pytest

from compass_jax.base.chat.base import read_calls
from compass_jax.config import ConfigError, DataConfig, FileSource
from compass_jax.config.kinds import kinds
from compass_jax.rewards.called import called
from compass_jax.rewards.checks import Check, Graded, build, checks_of
from compass_jax.rewards.verifiers.answers import exact
from compass_jax.rewards.verifiers.extract import (
    boxed,
    extract_answer,
    final_answer,
    hashed,
    json_text,
    number,
)
from compass_jax.rewards.verifiers.program_blocks import find_program

OURS = {"prompt", "response", "row", "answer", "answer_tag", "chat_format"}
RIGHT, WRONG, NOTHING = Graded(1.0, {}), Graded(0.0, {}), Graded(0.0, {}, False)


def judged(name, response, answer="72", tag="answer", **args):
    source = FileSource("rows.jsonl", verifier=name, verifier_args=args)
    (checks,) = checks_of(DataConfig(sources=(source,)))
    row = {} if answer is None else {"answer": answer}
    return build(checks, tag)(row, response, "a question")


TAGGED = {
    "<answer>5</answer>": "5",
    "x <answer> 1 </answer> no, <answer>\n2\n</answer> done": "2",
    "<answer>1</answer> and <answer>2": "1",
    "<answer>a<answer>b</answer>": "b",
    "<answer></answer>": "",
}
UNTAGGED = ["<answer>5", "5</answer>", "</answer>5<answer>", "the answer is 5", ""]


@pytest.mark.parametrize("response", [*TAGGED, *UNTAGGED])
def test_extract_answer(response):
    assert extract_answer(response, "answer") == TAGGED.get(response)
    assert extract_answer(f" {response} \n", "") == response


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} no, \boxed{ \frac{1}{2} } done", r"\frac{1}{2}"),
        (r"\boxed{a{b}c}", "a{b}c"),
        (r"{ unclosed \boxed{7}", "7"),
        (r"\boxed{7} and \boxed{8", None),  # the last box is cut off
        (r"\boxed{7} and \boxed{8}", "7, 8"),
        (r"\boxed{7}, so \boxed{8}.", "8"),
        (r"\boxed{7} and again \boxed{7}", "7"),
        (r"\fbox{13}", "13"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed {3}", "3"),
        ("} 5 {", None),
        (r"\boxed 5", "5"),
        (r"\boxed 13.", "13"),
    ],
)
def test_boxed(text, expected):
    assert boxed(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>1</answer> \\boxed{2} #### 3", "1"),
        ("\\boxed{2}\n#### 3", "2"),
        ("#### 3\n#### 1,234 \nthanks", "1,234"),
        ("the answer is 5", "5"),
        ("The final answer is $5$. I hope it is right.", "$5$"),
        ("**Answer:** 5 cm\n", "5 cm"),
        ("the answer is no. The answer is 7", "7"),
        (r"<answer>so \boxed{4}</answer>", "4"),
        (r"First \boxed{5}, then the final \boxed{", None),
        (r"<think>\boxed{5}</think>", None),
        ("####", None),
        ("<answer> </answer>", None),
        (r"\boxed{5} <answer></answer>", "5"),
        ("#### Step 1: add\nThe answer is 5", "5"),
        ("#### 5\n#### Explanation\n2 + 3 = 5", "5"),
        ("#### **Final Answer:**\n5", "5"),
        ("#### Step 2: 2 + 3 = 5", None),
        ("#### Final answer: 5", "Final answer: 5"),
        ("#### Solution: 5", "Solution: 5"),
        ("#### Stephen", "Stephen"),
    ],
)
def test_the_final_answer_is_whatever_is_there(text, expected):
    assert final_answer(text, "answer") == expected


def test_marks_without_end_are_read_in_time():
    start = time.process_time()
    for text in ("\\boxed{" * 200_000, "{" * 10**6, "####" * 10**6, "```\n" * 10**5):
        assert boxed(text) is None and hashed(text) is None
        judged("json", text), judged("choice", text, "B"), judged("format", text)
    assert time.process_time() - start < 10


@pytest.mark.parametrize(
    ("name", "response", "answer", "verdict"),
    [
        ("exact", "<answer>New  York</answer>", "New York", RIGHT),
        ("exact", "<answer>new york</answer>", "New York", WRONG),
        ("exact", "New York", "New York", NOTHING),
        ("choice", "<answer>(B) Paris</answer>", "B", RIGHT),
        ("choice", r"\boxed{\text{B}}", "B", RIGHT),
        ("choice", "The correct answer is **C**.", "(C)", RIGHT),
        ("choice", "answer: A. No, the answer is B", 1, RIGHT),
        ("choice", "b", "B", RIGHT),
        ("choice", "a but", "B", NOTHING),
        ("choice", "Z is the answer", "B", NOTHING),
        ("json", '{"a": [1, 2.0]}', '{"a": [1.0, 2]}', RIGHT),
        ("json", 'so:\n```json\n{"a": true}\n```', {"a": 1}, WRONG),
        ("json", "<answer>[]</answer>", None, RIGHT),
        ("json", "[1, 2", "[1, 2]", NOTHING),
        ("json", "[" * 1000 + "]" * 1000, "[]", NOTHING),
        ("format", "<think>a</think>\n<answer>b</answer>\n", None, RIGHT),
        ("format", "<think>a</think> so <answer>b</answer>", None, WRONG),
        ("format", "<think> </think><answer>b</answer>", None, WRONG),
        ("format", "<think>a</think><answer>b</answer><answer>c</answer>", None, WRONG),
        ("format", "<answer>b</answer><think>a</think>", None, WRONG),
    ],
)
def test_the_others(name, response, answer, verdict):
    assert judged(name, response, answer) == verdict


def test_those_with_arguments():
    assert judged("regex", "12 apples", pattern=r"\d+ apples") == RIGHT
    assert judged("regex", "apples", pattern=r"\d+ apples") == WRONG
    assert judged("format", "<t>a</t> b", None, tag="", think_tag="t") == RIGHT
    assert judged("choice", "<answer>d</answer>", "D", choices="abcd") == RIGHT
    ramp = {"most_chars": 10, "free_chars": 6}
    lengths = [judged("length", "x" * n, **ramp).reward for n in (6, 7, 10, 99)]
    assert lengths == [1.0, 0.75, 0.0, 0.0]
    assert [judged("length", "x" * n, most_chars=10).reward for n in (10, 11)] == [1.0, 0.0]


# Starting a program runs code between fork and exec. jax warns about that if an earlier test
# imported it; workers do not import jax.
@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
@pytest.mark.parametrize("name", kinds())
def test_every_kind_says_what_it_takes_and_judges_its_example(name):
    kind = kinds()[name]
    (part,) = build(Check(name), "answer").parts
    for function in filter(None, (kind.judge, kind.at_once)):
        call = called(function, name, {}, "answer")
        assert {*call.required, *call.offered} - OURS == set(kind.takes)
        assert ("answer" in call.required) == kind.answer
    verifier = build(Check(name), "answer")
    assert verifier(kind.example.row, kind.example.right).reward == 1
    assert verifier(kind.example.row, kind.example.wrong).reward < 1
    assert part.name.startswith(name) and not kind.complaint({})


def test_a_row_without_a_reference_is_an_error_and_no_zero():
    verifier = build(Check("math", "answer"), "answer")
    with pytest.raises(ValueError, match="no reference answer"):
        verifier({"answer": None}, "<answer>3</answer>")
    with pytest.raises(LookupError, match="math takes 'answer'"):
        verifier({}, "<answer>3</answer>")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"verifier": {"math": 1.0, "format": 0}}, "'format' has weight 0; leave it out"),
        ({"verifier": {}}, "verifier is empty: name one of 'choice', 'code'"),
        ({"verifier": (("math", 1.0), ("math", 2.0))}, "names 'math' twice"),
        ({"verifier": {"maths": 1.0}}, "did you mean 'math'"),
        ({"verifier": {"math": 1e9}}, "must be at most 1000"),
        ({"verifier": "exact", "answer_field": ""}, "verifier = 'exact' compares with it"),
        ({"verifier_args": {"pattern": "x"}}, "math take no pattern; they take none"),
        ({"verifier": "regex", "verifier_args": {"pattern": "("}}, "pattern = '.'.*unterminated"),
        (
            {"verifier": "length", "verifier_args": {"most_chars": 5, "free_chars": 9}},
            "free_chars at most most_chars",
        ),
    ],
)
def test_a_source_that_names_what_cannot_be_is_refused(source, message):
    with pytest.raises(ConfigError, match=message):
        DataConfig(sources=(FileSource("rows.jsonl", **source),)).validate()


@pytest.mark.parametrize(
    "before", ["", "```bash\npip install x\n```\n", "```text\na\n```\nOr ```f``` again\n"]
)
@pytest.mark.parametrize("after", ["", "\nIt prints:\n```text\n3\n```\nand\n```text\n4\n```\n"])
def test_blocks_of_other_languages_do_not_shift_the_pairs_of_fences(before, after):
    program = f"{before}Here:\n```python\ndef f():\n    return 3\n```{after}"
    assert find_program(program, "answer", {"f"}) == "def f():\n    return 3\n"
    text = f'{before}So:\n```JSON\n{{"a": 1}}\n```{after}'
    assert json_text(text, "answer") == '{"a": 1}'
    calls = f'{before}So:\n```json\n[{{"name": "f", "arguments": {{}}}}]\n```{after}'
    assert [call.name for call in read_calls(calls)] == ["f"]
