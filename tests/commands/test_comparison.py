"""Two runs side by side, checked with sums done by hand."""

import numpy as np
import pytest

from compass_jax.commands.demo import comparison_rows, difference_in_words


def series():
    """Returns metrics of three steps of 100, 300 and 200 tokens, in which half, a quarter and all
    of the groups vary.
    """
    values = {
        "waste/tokens_generated": [100, 300, 200],
        "groups/varied_frac": [0.5, 0.25, 1.0],
        "waste/frac_verifier_signal": [0.5, 0.2, 1.0],
        "waste/frac_shaping_signal": [0.1, 0.1, 0.0],
        "waste/frac_entropy_signal": [0.4, 0.1, 0.0],
        "waste/frac_none": [0.0, 0.6, 0.0],
    }
    return {name: (np.arange(1, 4), np.array(x, float)) for name, x in values.items()}


def test_the_rows_show_both_runs():
    first = {name: (steps[:1], x[:1]) for name, (steps, x) in series().items()}
    runs = {"this run": series(), "GRPO": first}
    rows = comparison_rows(runs, ((0.2, 0.5), (0.2, 0.25)), 4)
    assert rows[0] == {"": "generated tokens", "this run": "600", "GRPO": "100"}
    assert rows[1] == {"": "steps", "this run": "3", "GRPO": "1"}
    assert rows[2] == {"": "groups without variance", "this run": "42%", "GRPO": "50%"}
    assert rows[3] == {"": "tokens with the verifier's signal", "this run": "52%", "GRPO": "50%"}
    assert len(rows) == 8  # with all four signals
    last = {"this run": "0.200 -> 0.500", "GRPO": "0.200 -> 0.250"}
    assert rows[-1] == {"": "accuracy, avg@4", **last}


def test_a_signal_that_no_run_has_is_no_row():
    one = series()
    one["waste/frac_shaping_signal"][1][:] = 0
    names = [row[""] for row in comparison_rows({"this run": one, "GRPO": one}, ((0, 1),) * 2, 4)]
    assert "tokens with shaping's signal" not in names and "tokens with no signal" in names


@pytest.mark.parametrize(
    ("difference", "interval", "sentence"),
    [
        (0.05, [0.02, 0.08], "accuracy: 5.0 points above plain GRPO's (95% interval of the"),
        (-0.03, [-0.05, -0.01], "accuracy: 3.0 points below plain GRPO's"),
        (0.01, [-0.02, 0.04], "+4.0, 520 prompts, one seed): these prompts show no difference"),
        (0.0, [0.0, 0.0], "these prompts show no difference"),
        (None, [None, None], "the difference of the accuracies is not known"),
    ],
)
def test_the_difference_is_said_with_its_interval_and_without_a_winner_where_there_is_none(
    difference, interval, sentence
):
    words = difference_in_words({"difference": difference, "interval": interval, "prompts": 520})
    assert sentence in words
    assert ("no difference" in words) == (difference in (0.01, 0.0))
