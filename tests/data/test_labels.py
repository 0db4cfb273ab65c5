"""Labels of rows: values that are none are left out with a notice, and the row is used."""

import json

import pytest

from compass_jax.config import DataConfig, FileSource
from compass_jax.data.questions import questions


def labels(tmp_path, *rows):
    """Returns the labels of each row, and the notices about labels."""
    path, lines = tmp_path / "rows.jsonl", []
    rows = [{"prompt": f"{i} + 1?", "answer": "2", **row} for i, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pool = questions(DataConfig(sources=(FileSource(str(path)),)), 0, lines.append)
    assert len(pool) == len(rows)
    by_text = {question.text: list(question.labels) for question in pool}
    notices = [line for line in lines if "no label" in line]
    return [by_text[row["prompt"]] for row in rows], notices


@pytest.mark.parametrize(
    "value",
    [
        ["Math", "Algebra"],
        ["Mathematics -> Algebra", "Mathematics -> Number Theory -> Factorization"],
        {"name": "algebra"},
        [["algebra"]],
        [{"name": "algebra"}],
        "x" * 81,
        ["x" * 81],
        [1, 2],
    ],
)
def test_a_value_that_is_no_label_is_left_out_and_told_once(tmp_path, value):
    found, notices = labels(tmp_path, {"domain": "sets"}, {"domain": value}, {"domain": value})
    assert found == [["domain/sets"], [], []]
    (notice,) = notices
    assert "rows.jsonl, line 2, field 'domain'" in notice and "used without it" in notice


@pytest.mark.parametrize(
    ("value", "label"),
    [
        (["Math"], "Math"),
        ([3], "3"),
        ([0.5], "0.5"),
        ("Math", "Math"),
        (7, "7"),
        (["x" * 80], "x" * 80),
    ],
)
def test_the_only_entry_of_a_list_is_the_label(tmp_path, value, label):
    assert labels(tmp_path, {"difficulty": value}) == ([[f"difficulty/{label}"]], [])


@pytest.mark.parametrize("value", [None, "", [], {}, [""], [None]])
def test_nothing_is_no_label(tmp_path, value):
    assert labels(tmp_path, {"domain": value}) == ([[]], [])


def test_each_column_is_told(tmp_path):
    found, notices = labels(tmp_path, {"domain": ["a", "b"], "language": ["de", "en"]})
    assert found == [[]] and len(notices) == 2
