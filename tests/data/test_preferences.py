"""Pairs of answers as people write them, and what is no pair."""

import json

import pytest

from compass_jax.data.files import DataError
from compass_jax.data.preferences import read_preferences


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*texts):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        (
            {"prompt": "q", "candidate": "a", "anchor": "b", "verdict": "Worse"},
            ("q", "a", "b", -1),
        ),
        (
            {"question": "q", "candidate": "a", "anchor": "b", "verdict": " tie"},
            ("q", "a", "b", 0),
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, ("q", "a", "b", 1)),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tie": True}, ("q", "a", "b", 0)),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "verdict": "tie"}, ("q", "a", "b", 0)),
        ({"prompt": chat("q"), "chosen": chat("a"), "rejected": chat("b")}, ("q", "a", "b", 1)),
        ({"chosen": chat("q", "a"), "rejected": chat("q", "b")}, ("q", "a", "b", 1)),
        (
            {"chosen": chat("q", "x", "r", "a"), "rejected": chat("q", "x", "r", "b")},
            ("user: q\nassistant: x\nuser: r", "a", "b", 1),
        ),
    ],
)
def test_the_forms_of_a_pair(tmp_path, row, wanted):
    (found,) = read_preferences(write(tmp_path / "pairs.jsonl", row))
    assert found[:4] == wanted and found.where.endswith("pairs.jsonl, line 1")


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "q"}, "line 2: a preference has candidate, anchor and verdict, or chosen and"),
        ({"prompt": "q", "candidate": "a", "anchor": "b"}, "verdict is None; write Better, Tie"),
        (
            {"prompt": "q", "candidate": "a", "anchor": "b", "verdict": "good"},
            "verdict is 'good'; write Better, Tie or Worse",
        ),
        ({"prompt": "q", "chosen": "a", "rejected": "b", "tie": 1}, "tie is 1; write true"),
        ({"chosen": "a", "rejected": "b"}, "no prompt: write one"),
        ({"chosen": chat("q", "a"), "rejected": chat("p", "b")}, "begin with other messages"),
        ({"prompt": "q", "chosen": 7, "rejected": "b"}, "chosen is neither a text nor messages"),
        ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, "prompt is neither"),
    ],
)
def test_what_is_no_pair_is_named_with_its_line(tmp_path, row, told):
    good = {"prompt": "q", "chosen": "a", "rejected": "b"}
    with pytest.raises(DataError, match=told):
        list(read_preferences(write(tmp_path / "pairs.jsonl", good, row)))
