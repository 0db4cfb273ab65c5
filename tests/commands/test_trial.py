"""`compass try`: one answer, judged by real workers, with the reason."""

import io
import json
import re

import pytest
from judged import quoted, served

from compass_jax.base.records import Score
from compass_jax.commands.catalogue import rows_of, source_of
from compass_jax.commands.cli import main
from compass_jax.commands.trial import Trial, reasons
from compass_jax.config import ProceduralSource
from compass_jax.config.kinds import kinds
from compass_jax.rewards.tasks.rows import decode_row
from examples.shop import shop

SHORT = f"{shop.__file__}:short_1"
AT = ("--endpoint", "http://127.0.0.1:1/v1", "--model", "m")
OWN = """
import time
from compass_jax.rewards.tasks import Task

def score(response, letters): return {"reward": float(len(response) == letters), "n": len(response)}
def hang(response): time.sleep(60)
def fail(response): return 1 / 0
def silent(response): return None
def near(response, answer, within): return float(abs(int(response) - answer) <= within)
task = Task(lambda seed: [{"prompt": "Two letters.", "letters": 2}], {score: 1.0, "format": 0.5})
"""


@pytest.fixture
def tried(tmp_path, capsys, monkeypatch):
    """Returns a function that runs `compass try` and returns its output lines by their first word,
    the exit status and the text on stderr.
    """
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)

    def run(*words):
        status = main(["try", *words])
        captured = capsys.readouterr()
        lines = [line.partition(" ") for line in captured.out.splitlines()]
        return {name: text.strip() for name, _, text in lines}, status, captured.err

    return run


def test_the_reason_of_wrong_calls_is_the_verifiers_own(tried):
    result, status, _ = tried("tools", "--response", "[weather(city='Paris')]")
    assert (result["reward"], result["outcome"], status) == ("0", "ok", 0)
    assert result["components"] == "arguments 0, name 1" and result["why"] == "weather lacks days"


def test_options_are_arguments_of_the_verifier_or_the_data_set(tried):
    for task, options, more in (
        ("regex", {"pattern": "^5$"}, ()),
        ("own.py:near", {"within": 1}, ("--row", '{"answer": 4}')),
    ):
        result, status, _ = tried(task, "--options", json.dumps(options), *more, "--response", "5")
        assert (result["reward"], status) == ("1", 0)
    options = json.dumps({"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    result, _, _ = tried("chain_sum", "--options", options, "--response", "<answer>x</answer>")
    assert re.search(r": \d [+-] \d =", result["asked"])
    for task, options, message in (
        ("own.py:task", "{}", "is a task, whose code has its arguments"),
        ("math", "5", "TASK.verifier_args = 5: the wrong type"),
        ("math", '{"patern": 1}', "TASK.verifier_args: math take no patern"),
    ):
        _, status, error = tried(task, "--options", options, "--response", "5")
        assert status == 2 and message in error


def test_the_answer_may_come_from_standard_input(tried, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(r"so \boxed{0.5}"))
    result, _, _ = tried("math", "--response", "-")
    assert result["reward"] == "1" and "the answer was read as '0.5'" in result["why"]


def test_a_row_of_a_data_set_is_chosen_by_number(tried):
    (row,) = rows_of(ProceduralSource("chain_sum", size=3), 1)[2:]
    words = ["chain_sum", "--seed", "1", "--number", "2", "--response"]
    result, status, _ = tried(*words, f"<answer>{row.answer}</answer>")
    assert (result["reward"], status) == ("1", 0) and result["asked"] == row.text
    result, _, _ = tried(*words, row.answer)
    assert (
        result["why"]
        == "no answer was found; looked for: the text in the last <answer>...</answer>"
    )


def test_a_conversation_is_judged_turn_by_turn(tried):
    row = decode_row(rows_of(source_of(SHORT), 0)[0].row)
    turns = [one["content"] for one in shop.conversation(row) if one["role"] == "assistant"]
    words = [word for text in turns for word in ("--response", text)]
    result, _, _ = tried(SHORT, *words)
    assert (result["reward"], result["why"]) == ("1", "the conversation is over")
    result, _, _ = tried(SHORT, *words[:2])
    assert result["tool"] and result["why"] == "the conversation would go on"
    _, status, error = tried(SHORT, *words, "--response", "more")
    assert (
        status == 2 and f"the conversation is over after {len(turns)} of {len(turns) + 1}" in error
    )


@pytest.mark.parametrize(
    ("name", "outcome", "why"),
    [
        ("hang", "timeout", "0.5 s"),
        ("fail", "error", "ZeroDivisionError: division by zero ("),
        ("silent", "unjudged", "the verifier says that it can judge no answer here"),
    ],
)
def test_without_a_verdict_the_status_is_1_and_the_reason_is_said(name, outcome, why, tried):
    limit = ["--timeout-s", "0.5" if name == "hang" else "20"]
    result, status, error = tried(f"own.py:{name}", "--response", "x", *limit)
    assert (result["outcome"], status, error) == (outcome, 1, "")
    assert result["reward"].startswith("none") and why in result["why"]


def test_several_verifiers_give_a_component_and_a_reason_each(tried):
    result, _, _ = tried("own.py:task", "--response", "<think>a</think><answer>b</answer>")
    assert (result["reward"], result["asked"]) == ("0.5", "Two letters.")
    assert result["components"] == "format 1, score 0, score_n 34"
    assert result["why"].startswith("format: right: the response is <think>")


def polite(number, body):
    """Prefers the polite answer, or the candidate if neither is polite."""
    for name, word in (("Candidate", "Better"), ("Anchor", "Worse")):
        if "please" in quoted(body["messages"][1]["content"], name):
            return f"Reasons.\n{word}"
    return "Better"


def test_the_judge_of_a_task_is_asked_in_both_orders(tried):
    row = ["--row", json.dumps({"prompt": "Tea?", "answer": "No."})]
    with served(polite) as (at, seen):
        words = ["judge", *row, "--endpoint", at, "--model", "m", "--response"]
        result, status, _ = tried(*words, "<think>hm</think>Yes, please.")
        assert (result["reward"], result["outcome"], result["asked"], status) == (
            "1",
            "ok",
            "Tea?",
            0,
        )
        judge = "Worse of the anchor against the answer; it ended 'Reasons.\\nWorse'"
        assert result["judge"] == judge and "both orders" in result["why"]
        assert len(seen.requests) == 2 and all(x["model"] == "m" for x in seen.requests)
        result, _, _ = tried(*words, "Yes.")
        assert result["reward"] == "0.5" and "judge_disagreed 1" in result["components"]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ((401, "no such key"), "the judge gave no verdict (refused): HTTP 401: "),
        (b"<html>", "the judge gave no verdict (nonsense): "),
        ("I cannot say.", "the judge gave no verdict (unparsable): it ended: 'I cannot say.'"),
    ],
)
def test_why_a_judge_gives_no_verdict_is_one_sentence(answer, why, tried):
    with served(lambda number, body: answer) as (at, _):
        words = ["judge", "--endpoint", at, "--model", "m", "--row", '{"answer": "No."}']
        result, status, error = tried(*words, "--response", "Yes.")
    assert (status, error) == (1, "") and result["reward"].startswith("none")
    assert result["why"].startswith(why)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["regex", "--row", "{}", "--response", "x"],
            "the row has no 'pattern', which regex reads",
        ),
        (["own.py:score", "--response", "x"], "the row has no 'letters'"),
        (["chain_sum", "--row", '{"answer": "3"}', "--response", "3"], "the row has no 'metadata'"),
        (["math", "--row", "[1]", "--response", "x"], "--row is a list"),
        (["math", "--row", "{", "--response", "x"], "--row is no JSON"),
        (["math"], "--response TEXT is missing"),
        (["judge", "--response", "x"], "is judged by a model; say where it answers: --endpoint"),
        (["judge", "--response", "x", "--endpoint", "http://h/v1"], "rewards.judge.model"),
        (["judge", "--response", "x", *AT], "the row has no 'answer', which judge reads"),
        (["math", "--response", "1", "--response", "2"], "math judges one answer"),
        ([SHORT, "--number", "9999", "--response", "x"], "the first has number 0"),
        (["chain_sum", "--number", "-1", "--response", "x"], "--number -1: must be >= 0"),
        (["math", "--timeout-s", "0", "--response", "x"], "must be positive"),
    ],
)
def test_what_cannot_be_judged_is_one_line_and_status_2(words, message, tried):
    result, status, error = tried(*words)
    assert (result, status) == ({}, 2) and message in error and error.count("\n") == 1


@pytest.mark.parametrize("name", list(kinds()))
def test_every_verifier_says_why_its_own_examples_are_right_and_wrong(name):
    example, source = kinds()[name].example, source_of(name)
    for text, reward in ((example.right, 1.0), (example.wrong, 0.0)):
        trial = Trial(source, example.row, "", [text], "answer")
        (reason,) = reasons(trial, Score(reward, True, "ok"))
        assert reason.startswith("right: " if reward else ("not so: ", "weather: days"))
