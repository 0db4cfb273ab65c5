"""The uses of a run's tokens: every token counts in one part, as the metrics say."""

import numpy as np
import pytest

from compass_jax.runs.report.funnel import cumulative_tokens, token_funnel


def series(**metrics):
    """Returns metrics over steps 1, 2, ...; a dict has values at the steps of its keys alone."""
    columns = {}
    for name, values in metrics.items():
        pairs = values.items() if isinstance(values, dict) else enumerate(values, 1)
        steps, numbers = zip(*pairs, strict=True)
        columns[name.replace("__", "/")] = np.asarray(steps), np.asarray(numbers, float)
    return columns


RUN = dict(
    waste__tokens_generated=[1000, 2000],
    waste__frac_verifier_signal=[0.5, 0.25],
    waste__frac_shaping_signal=[0.1, 0],
    waste__frac_entropy_signal=[0.2, 0.15],
    waste__frac_prediction_signal=[0, 0.1],
    waste__frac_none=[0.2, 0.5],
    reward__unknown_frac=[0.1, 0.0],
    zero_variance__dynamic_dropped_tokens=[0, 400],
    zero_variance__dynamic_dropped_groups=[0, 3],
    zero_variance__skipped_prompts=[2, 5],
    zero_variance__grow_tokens=[100, 50],
    zero_variance__grow_rescued_groups=[1, 0],
    screening__stopped_groups=[4, 3],
    screening__rescued_groups=[0, 2],
    screening__continued_tokens=[60, 70],
    earlier__groups=[0, 2],
    earlier__tokens=[0, 90],
    waste__filter_tokens=[700, 700],
    waste__tokens_drafted={2: 300},
)


def test_the_parts_are_the_tokens_that_the_metrics_say():
    funnel = token_funnel(series(**RUN))
    assert funnel["generated"] == 3000 and funnel["filter"] == 700 and funnel["drafted"] == 300
    assert (funnel["verifier"], funnel["shaping"], funnel["entropy"]) == (1000, 100, 500)
    assert funnel["prediction"] == 200
    assert funnel["dropped"] == 400 and funnel["unknown"] == 100
    assert funnel["silent"] == 3000 - 1000 - 100 - 500 - 200 - 400 - 100
    # The metrics' "none" covers dropped, unknown and silent tokens.
    assert funnel["dropped"] + funnel["unknown"] + funnel["silent"] == 0.2 * 1000 + 0.5 * 2000


def test_each_stage_says_what_it_skipped_rescued_taught_and_cost():
    stages = {x.pop("name"): x for x in token_funnel(series(**RUN))["stages"]}
    no_effect = {"skipped": None, "rescued": None, "taught": None, "cost": 0}
    assert stages == {
        "Offline filter": {**no_effect, "cost": 700},
        "Selection": {**no_effect, "skipped": 7},
        "Dynamic sampling": {**no_effect, "skipped": 3, "cost": 400},
        "Growth": {**no_effect, "rescued": 1, "cost": 150},
        "Screening": {**no_effect, "skipped": 7, "rescued": 2, "cost": 130},
        "Earlier groups": {**no_effect, "rescued": 2, "taught": 90},
        "Shaping": {**no_effect, "taught": 100},
        "RL-ZVP (entropy)": {**no_effect, "taught": 500},
        "Predicted pass rates": {**no_effect, "taught": 200},
    }
    plain = {name: RUN[name] for name in ("waste__tokens_generated", "waste__frac_none")}
    assert token_funnel(series(**plain))["stages"] == []


@pytest.mark.parametrize("bad", [[np.nan, 2000], {2: 2000}])
def test_a_step_without_a_finite_count_is_left_out(bad):
    funnel = token_funnel(series(**{**RUN, "waste__tokens_generated": bad}))
    assert funnel["generated"] == 2000 and funnel["verifier"] == 500


def test_a_run_that_never_counted_its_tokens_has_no_funnel():
    assert token_funnel(series(reward__mean=[1, 2])) is None
    assert token_funnel(series(waste__tokens_generated=[np.nan, np.nan])) is None


def test_tokens_are_added_up_to_each_step_and_the_filter_comes_first():
    assert cumulative_tokens(series(**RUN), [1, 2]) == [1700, 3700]
    assert cumulative_tokens(series(**RUN), [2]) == [3700]
    assert cumulative_tokens(series(reward__mean=[1]), [1]) == []
