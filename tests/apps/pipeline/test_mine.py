"""Preferences mined from a policy's groups."""

import json

import pytest

from compass_jax.apps.pipeline.mine import mine_file
from compass_jax.data.files import DataError
from compass_jax.data.preferences import read_preferences


def sample(response, reward, gold=None, truncated=False, form=None):
    components = {"gold": gold, "judge_form": form}
    components = {name: x for name, x in components.items() if x is not None}
    return {
        "response": response,
        "reward": reward,
        "truncated": truncated,
        "components": components,
    }


def mined(tmp_path, *samples, per_group=2, last_steps=0, answer="right"):
    """Returns the rows mined from one group, which two steps have logged, as (candidate, anchor,
    verdict).
    """
    file = tmp_path / "rollouts.jsonl"
    group = {"prompt": "Q?", "answer": answer, "samples": samples}
    file.write_text("".join(json.dumps({"step": n, **group}) + "\n" for n in (1, 2)))
    rows = mine_file(str(file), per_group, last_steps)
    assert all(row.pop("prompt") == "Q?" for row in rows)
    return [tuple(row.values()) for row in rows]


def test_a_bad_answer_with_a_high_reward_is_worse_than_the_reference_and_than_a_better_one(
    tmp_path,
):
    """ "hack" is the reward's mistake: it has the highest reward and the lowest label."""
    pairs = mined(
        tmp_path,
        sample("right", 0.5, 1.0),
        sample("hack", 1.0, 0.0),
        sample("half", 0.5, 0.5),
        sample("half", 0.5, 0.5),
    )
    assert pairs == [
        ("hack", "right", "Worse"),  # the reference, and also the text of the group's best answer
        ("right", "right", "Tie"),
    ]
    pairs = mined(
        tmp_path, sample("near", 0.5, 0.8), sample("hack", 1.0, 0.0), sample("x", 1.0, 0.5)
    )
    assert pairs == [
        ("hack", "right", "Worse"),
        ("hack", "near", "Worse"),  # the best answer that the reward ranks no higher
        ("x", "right", "Worse"),
        ("x", "near", "Worse"),
    ]


def test_where_the_reward_ranks_as_the_labels_do_no_two_answers_are_compared(tmp_path):
    pairs = mined(tmp_path, sample("right!", 1.0, 1.0), sample("half", 0.5, 0.5))
    assert pairs == [("right!", "right", "Tie"), ("half", "right", "Worse")]


def test_without_labels_stray_answers_are_worse_and_the_reference_itself_is_a_tie(tmp_path):
    pairs = mined(
        tmp_path,
        sample("on and on", 1.0, truncated=True),
        sample("no form", 0.9, form=1.0),
        sample("<think>so</think> right ", 0.8, form=0.0),
        sample("something else", 0.7),
        per_group=9,
    )
    assert pairs == [
        ("on and on", "right", "Worse"),
        ("no form", "right", "Worse"),
        (" right ", "right", "Tie"),  # without thoughts, as in a question to a judge
    ]


def test_the_last_steps_alone_and_the_rows_that_a_judge_reads(tmp_path):
    samples = sample("hack", 1.0, 0.0), sample("right", 0.0, 1.0)
    assert mined(tmp_path, *samples, per_group=1) == mined(
        tmp_path, *samples, per_group=1, last_steps=1
    )
    file, rows = tmp_path / "rollouts.jsonl", tmp_path / "pairs.jsonl"
    later = {"step": 3, "prompt": "P?", "answer": "a", "samples": [sample("b", 1.0, 0.0)]}
    file.write_text(file.read_text() + json.dumps(later) + "\n")
    one = mine_file(str(file), 2, 1)
    rows.write_text("".join(json.dumps(row) + "\n" for row in one))
    (pair,) = read_preferences(str(rows))
    assert pair[:4] == ("P?", "b", "a", -1)
    assert len(mine_file(str(file), 2, 2)) > 1


def test_a_file_of_other_rows_is_refused_with_its_line(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "Q?", "answer": "a"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl, line 1.*samples.*rollouts\.jsonl"):
        mine_file(str(file), 2)
