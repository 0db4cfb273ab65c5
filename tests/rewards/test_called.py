"""The rule of called.py by hand: a verifier's parameter names decide which arguments it gets."""

import asyncio
import re
import threading

import pytest

from compass_jax.config import ConfigError
from compass_jax.rewards.called import Case, called

CASES = [
    Case({"answer": "7", "level": 1, "prompt": ["raw"]}, "seven", "What is 3 + 4?"),
    Case({"answer": "8", "prompt": ["raw"]}, "eight", "What is 4 + 4?"),
]


def results_of(function, cases=CASES[:1], **args):
    """Returns the results of the function, called as a verifier, for the cases."""
    return called(function, "here", args, "box")(cases)


def test_each_name_gets_what_it_says():
    assert results_of(lambda prompt, response: (prompt, response)) == [("What is 3 + 4?", "seven")]
    assert results_of(lambda row, response: row) == [CASES[0].row]
    assert results_of(lambda response, answer, answer_tag: (answer, answer_tag)) == [("7", "box")]
    assert results_of(lambda response, answer, level=5, other=6: (answer, level, other)) == [
        ("7", 1, 6)
    ]
    assert results_of(lambda response, *, most: most, most=9) == [9]
    # A column of the row takes precedence over an argument of the source.
    assert results_of(lambda response, level: level, level=9) == [1]


def test_the_rest_of_the_row_comes_by_name():
    (rest,) = results_of(lambda prompt, response, **row: row, most=9)
    assert rest == {"answer": "7", "level": 1, "most": 9}
    (arguments,) = results_of(lambda **all: all, most=9)
    assert arguments == rest | {"prompt": "What is 3 + 4?", "response": "seven"}


def test_a_parameter_called_responses_makes_a_batch_of_lists():
    def score(prompts, responses, rows, answer, level, **rest):
        assert rest == {"prompt": [["raw"], ["raw"]]}
        assert prompts == [case.prompt for case in CASES] and rows == [c.row for c in CASES]
        return zip_of(responses, answer, level)

    def zip_of(*lists):
        return [list(one) for one in zip(*lists, strict=True)]

    assert results_of(score, CASES) == [["seven", "7", 1], ["eight", "8", None]]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda responses: 1.0, "returned float for 2 responses"),
        (lambda responses: [1.0], "returned 1 for 2 responses"),
        (lambda responses: {"reward": 1.0, "b": 2.0}, "returned dict for 2 responses"),
        (lambda responses: "ab", "returned str for 2 responses"),
    ],
)
def test_a_batch_that_returns_another_number_is_an_error(function, message):
    with pytest.raises(ValueError, match=message):
        results_of(function, CASES)


def test_a_column_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(LookupError, match="takes 'tests', and the row has no such column"):
        results_of(lambda response, tests: 1.0)
    with pytest.raises(LookupError, match=re.escape("(it has: answer, level, prompt)")):
        results_of(lambda response, truth: 1.0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda prompt, answer: 1.0, "it takes no response"),
        (lambda completions: 1.0, "what other libraries call completions is responses here"),
        (
            lambda completions, **kwargs: 1.0,
            "call completions is responses here, and a response is a",
        ),
        (lambda prompts, completions, answer, **kwargs: 1.0, "rename it responses"),
        (lambda completion, answer: 1.0, "what other libraries call completion is response here"),
        (lambda completions=None, **rest: 1.0, "rename it responses"),
        (lambda response, /: 1.0, "response can only be given by position"),
        (lambda responses, row: 1.0, "responses makes it a batch, and row does not"),
        (len, "obj can only be given by position"),
        (7, "a int, and no function"),
    ],
)
def test_a_function_that_cannot_be_called_so_is_refused_with_a_remedy(function, message):
    with pytest.raises(ConfigError, match=message) as error:
        results_of(function)
    assert "(prompt, response, **row)`, and return a number" in str(error.value)


def test_async_functions_are_run_one_or_a_batch_and_may_use_threads():
    async def one(response):
        await asyncio.sleep(0.001)
        thread = await asyncio.to_thread(threading.current_thread)
        return float(thread is not threading.main_thread())

    async def many(responses):
        return await asyncio.gather(*(one(response) for response in responses))

    assert results_of(one) == [1.0] and results_of(many, CASES) == [1.0, 1.0]


def test_a_column_called_completion_is_given_beside_the_response():
    case = Case({"completion": "gold"}, "said")
    assert results_of(lambda response, completion: (response, completion), [case]) == [
        ("said", "gold")
    ]
