"""Forms of references in published rows: read, or refused with the row and the remedy."""

import json

import pytest
from test_usual import RIGHT, WRONG, judged

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.rewards.verifiers.references import texts

SEARCH = {"target": ["Paris", "paris"]}
READ = [
    ("math", '["2"]', "2", "2", "3"),
    ("math", [2], "2", "2", "3"),
    ("math", '["\\\\frac{1}{2}"]', r"\frac{1}{2}", "0.5", "2"),
    ("math", {"target": "5"}, "5", "5", "6"),
    ("math", {"target": ["5", "7"]}, "5", "7", "6"),
    ("math", "[1, 2]", "[1, 2]", "[1,2]", "1, 2"),
    ("math", r"\{1, 2\}", r"\{1, 2\}", "2, 1", "1"),
    ("math", True, "True", "true", "false"),
    ("exact", SEARCH, "Paris", "paris", "Pari"),
    ("exact", json.dumps(SEARCH), "Paris", "Paris", "PARIS"),
    ("exact", True, "True", "true", "yes"),
    ("exact", False, "False", "False", "true"),
    ("exact", ["New York"], "New York", "New  York", "York"),
    ("exact", 3, "3", "3", "3.0"),
    ("numeric", '["0.5"]', "0.5", "1/2", "2"),
    ("numeric", {"target": [1, 2]}, "1", "2", "3"),
    ("choice", '["B"]', "B", "(B)", "C"),
    ("choice", {"target": ["B", 2]}, "B", "C", "D"),
    ("choice", 1, "B", "B", "A"),
    ("json", {"target": [1]}, '{"target": [1]}', '{"target": [1.0]}', "[1]"),
    ("json", '["2"]', '["2"]', '["2"]', "2"),
]
REFUSED = [
    ("math", ["2", "3"], "a list of 2 values: write .*target.* or one text"),
    ("math", '["2", "3"]', "a list of 2 values"),
    ("math", '[["2"]]', "is no reference answer"),
    ("math", [[1]], "is no reference answer"),
    ("math", {"a": {"b": 1}}, "an object with 'a': write its answer as text"),
    ("math", {"target": []}, "'target' is empty"),
    ("math", {"target": [None]}, "no reference answer"),
    ("math", [None], "no reference answer"),
    ("math", {"target": ["1"], "style": "rule"}, "an object with 'target', 'style'"),
    ("exact", [1, 2], "a list of 2 values"),
    ("exact", {"ground_truth": "2"}, "an object with 'ground_truth'"),
    ("exact", {"target": {"a": 1}}, "is no reference answer"),
    ("numeric", SEARCH, "'Paris' is no number"),
    ("numeric", True, "'True' is no number"),
    ("numeric", "many", "'many' is no number"),
    ("choice", "Bronze", "names none of the options A, B"),
    ("choice", True, "names none of the options"),
    ("choice", 99, "names none of the options"),
    ("json", "{1}", "not JSON"),
]


def read(tmp_path, verifier, answer, **columns):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "Q?", "answer": answer, **columns}) + "\n")
    return questions(DataConfig(sources=(FileSource(str(path), verifier=verifier),)), 0, print)[0]


@pytest.mark.parametrize(("verifier", "reference", "written", "right", "wrong"), READ)
def test_a_reference_is_what_a_model_would_write(
    tmp_path, verifier, reference, written, right, wrong
):
    """The text that `compass data` answers with earns the reward."""
    answer = read(tmp_path, verifier, reference).answer
    assert answer == written
    for text, verdict in ((right, RIGHT), (answer, RIGHT), (wrong, WRONG)):
        assert judged(verifier, f"<answer>{text}</answer>", reference).reward == verdict.reward


@pytest.mark.parametrize(("verifier", "reference", "message"), REFUSED)
def test_any_other_reference_is_refused_with_its_row(tmp_path, verifier, reference, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl, line 1, field 'answer': .*{message}"):
        read(tmp_path, verifier, reference)


def test_the_rows_of_published_sets_can_earn(tmp_path):
    """Skywork-OR1's and Search-R1's, in verl's columns."""
    turns = [{"role": "user", "content": "1 + 1?"}]
    for verifier, truth, answer in (("math", '["2"]', "2"), ("exact", SEARCH, "Paris")):
        path = tmp_path / f"{verifier}.jsonl"
        row = {"prompt": turns, "reward_model": {"ground_truth": truth, "style": "rule"}}
        path.write_text(json.dumps(row) + "\n")
        source = FileSource(str(path), verifier=verifier)
        (question,) = questions(DataConfig(sources=(source,)), 0, print)
        assert question.answer == answer
        reference = json.loads(question.row)["answer"]
        assert judged(verifier, f"<answer>{answer}</answer>", reference) == RIGHT


def test_an_option_is_compared_with_the_options_of_its_row(tmp_path):
    assert read(tmp_path, "choice", "gold", options=["iron", "gold"]).answer == "B"
    with pytest.raises(DataError, match="'tin' names none of the options A, B"):
        read(tmp_path, "choice", "tin", options=["iron", "gold"])


def test_a_text_after_four_hashes_is_the_reference():
    assert texts("so\n#### 72") == texts(["#### 72"]) == ("72",)
    with pytest.raises(ValueError, match="no reference answer: write one"):
        texts(None)
