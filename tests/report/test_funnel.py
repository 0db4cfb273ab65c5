"""Where the tokens of a run went: every token in one part, as the metrics say."""

import numpy as np
import pytest

from compass_jax.report.funnel import cumulative_tokens, token_funnel


def series(**metrics):
    """Steps 1, 2, ...; a metric given as a dict has some of them alone."""
    found = {}
    for name, values in metrics.items():
        pairs = values.items() if isinstance(values, dict) else enumerate(values, 1)
        steps, numbers = zip(*pairs, strict=True)
        found[name.replace("__", "/")] = np.asarray(steps), np.asarray(numbers, float)
    return found


RUN = dict(
    waste__tokens_generated=[1000, 2000],
    waste__frac_verifier_signal=[0.5, 0.25],
    waste__frac_shaping_signal=[0.1, 0],
    waste__frac_entropy_signal=[0.2, 0.25],
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
    group_replay__groups=[0, 2],
    group_replay__tokens=[0, 90],
    waste__filter_tokens=[700, 700],
    waste__tokens_drafted={2: 300},
)


def test_the_parts_are_the_tokens_that_the_metrics_say():
    found = token_funnel(series(**RUN))
    assert found["generated"] == 3000 and found["filter"] == 700 and found["drafted"] == 300
    assert (found["verifier"], found["shaping"], found["entropy"]) == (1000, 100, 700)
    assert found["dropped"] == 400 and found["unknown"] == 100
    assert found["silent"] == 3000 - 1000 - 100 - 700 - 400 - 100
    # what the metrics call none: dropped, unknown and silent
    assert found["dropped"] + found["unknown"] + found["silent"] == 0.2 * 1000 + 0.5 * 2000


def test_each_stage_says_what_it_skipped_rescued_taught_and_cost():
    stages = {x.pop("name"): x for x in token_funnel(series(**RUN))["stages"]}
    none = {"skipped": None, "rescued": None, "taught": None, "cost": 0}
    assert stages == {
        "Offline filter": {**none, "cost": 700},
        "Selection": {**none, "skipped": 7},
        "Dynamic sampling": {**none, "skipped": 3, "cost": 400},
        "Growth": {**none, "rescued": 1, "cost": 150},
        "Screening": {**none, "skipped": 7, "rescued": 2, "cost": 130},
        "Replay of groups": {**none, "rescued": 2, "taught": 90},
        "Shaping": {**none, "taught": 100},
        "RL-ZVP (entropy)": {**none, "taught": 700},
    }
    plain = {name: RUN[name] for name in ("waste__tokens_generated", "waste__frac_none")}
    assert token_funnel(series(**plain))["stages"] == []


@pytest.mark.parametrize("bad", [[np.nan, 2000], {2: 2000}])
def test_a_step_without_a_finite_count_is_left_out(bad):
    found = token_funnel(series(**{**RUN, "waste__tokens_generated": bad}))
    assert found["generated"] == 2000 and found["verifier"] == 500


def test_a_run_that_never_counted_its_tokens_has_no_funnel():
    assert token_funnel(series(reward__mean=[1, 2])) is None
    assert token_funnel(series(waste__tokens_generated=[np.nan, np.nan])) is None


def test_tokens_are_added_up_to_each_step_and_the_filter_comes_first():
    assert cumulative_tokens(series(**RUN), [1, 2]) == [1700, 3700]
    assert cumulative_tokens(series(**RUN), [2]) == [3700]
    assert cumulative_tokens(series(reward__mean=[1]), [1]) == []
