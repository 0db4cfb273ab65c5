"""Two runs at equal generated tokens, against sums done by hand."""

import json

import numpy as np
import pytest

from compass_jax.commands.comparison import (
    RecordError,
    comparison_rows,
    read_recorded,
    record_of,
    spending,
)


def series():
    """Three steps of 100, 300 and 200 tokens; half, a quarter and all of the groups vary."""
    values = {
        "waste/tokens_generated": [100, 300, 200],
        "groups/varied_frac": [0.5, 0.25, 1.0],
        "waste/frac_verifier_signal": [0.5, 0.2, 1.0],
        "waste/frac_shaping_signal": [0.1, 0.1, 0.0],
        "waste/frac_entropy_signal": [0.4, 0.1, 0.0],
        "waste/frac_none": [0.0, 0.6, 0.0],
    }
    return {name: (np.arange(1, 4), np.array(x, float)) for name, x in values.items()}


def test_tokens_are_split_by_their_signal_and_groups_count_by_step():
    whole = spending(series())
    assert whole.tokens == 600 and whole.uniform == pytest.approx(1 - 1.75 / 3)
    by_hand = {"verifier": 310 / 600, "shaping": 40 / 600, "entropy": 70 / 600, "none": 180 / 600}
    assert whole.signals == pytest.approx(by_hand) and sum(by_hand.values()) == pytest.approx(1)


@pytest.mark.parametrize(("most", "tokens"), [(1, 100), (100, 100), (101, 400), (400, 400)])
def test_a_run_is_taken_up_to_the_step_that_reaches_the_tokens(most, tokens):
    found = spending(series(), most)
    assert found.tokens == tokens
    assert found.signals["verifier"] == pytest.approx(0.5 if tokens == 100 else 110 / 400)


def test_a_record_gives_back_its_run_and_the_accuracy_between_two_evaluations(tmp_path):
    path = tmp_path / "record.json"
    runs = [record_of(3, series(), [(0, 0.2), (400, 0.4), (600, 0.3)])]
    path.write_text(json.dumps({"command": "c", "commit": "abc", "runs": runs}))
    for seed in (3, 4):  # there is no run of seed 4
        found = read_recorded(path, seed)
        assert found.seed == 3 and found.source == "c, commit abc"
        assert spending(found.series) == spending(series())
        assert found.accuracy_at(200) == pytest.approx(0.3)
        assert found.accuracy_at(500) == pytest.approx(0.35) and found.accuracy_at(1e9) == 0.3
    runs = spending(series()), spending(series(), 100)
    rows = comparison_rows(("this run", "GRPO"), runs, ((0.2, 0.5), (0.2, 0.25)), 4)
    assert rows[0] == {"": "generated tokens", "this run": "600", "GRPO": "100"}
    assert rows[1] == {"": "groups without variance", "this run": "42%", "GRPO": "50%"}
    assert rows[2] == {"": "tokens with the verifier's signal", "this run": "52%", "GRPO": "50%"}
    last = {"this run": "0.200 -> 0.500", "GRPO": "0.200 -> 0.250"}
    assert rows[-1] == {"": "accuracy, avg@4", **last}


@pytest.mark.parametrize("text", ["", "[]", '{"runs": []}', '{"runs": [{"seed": 0}]}'])
def test_what_is_no_record_is_named(tmp_path, text):
    path = tmp_path / "record.json"
    if text:
        path.write_text(text)
    with pytest.raises(RecordError, match=r"record\.json: not a record of runs"):
        read_recorded(path, 0)
