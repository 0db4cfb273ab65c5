"""Pass rates of prompts from a filter, from labels and from the run; prompts drawn by band: the
shares, bands with too few prompts, and the draws after a restart.
"""

import json

import numpy as np
import pytest

from compass_jax.base.records import Outcome, Prompt
from compass_jax.config import RewardConfig, SelectionConfig
from compass_jax.config.curriculum import Stage
from compass_jax.data.difficulty import Measured, PassRates, band_of, distance, label_of
from compass_jax.data.selection import BandSelector
from compass_jax.data.selectors import prompt_selector
from compass_jax.data.stream import PromptStream

MIX = ((0.0, 0.3, 0.2), (0.3, 0.7, 0.5), (0.7, 1.0, 0.3))


def prompt(i, label="maths", **more):
    return Prompt(i, 0, label, f"q{i}", np.array([i], np.int32), "", **more)


PROMPTS = [prompt(i) for i in range(60)]
RATES = [(0.0, 0.125, 0.5, 0.5, 0.875, 1.0)[i % 6] for i in range(60)]  # 20 of each band
FILTERED = [Measured(p, 8 * r, 8.0) for p, r in zip(PROMPTS, RATES, strict=True)]


def selector(mix=MIX, measured=FILTERED, number=0):
    band_selector = prompt_selector(
        SelectionConfig(), 8, RewardConfig(), 0, Stage(number, 9, mix, 3), measured
    )
    assert isinstance(band_selector, BandSelector) and band_selector.acts
    return band_selector


def bands(prompts):
    return [band_of(MIX, RATES[p.id]) for p in prompts]


def test_a_pass_rate_belongs_to_the_band_that_begins_at_it_and_1_to_the_last():
    indices = [band_of(MIX, rate) for rate in (0.0, 0.29, 0.3, 0.69, 0.7, 1.0)]
    assert indices == [0, 0, 1, 1, 2, 2]
    gap = ((0.1, 0.4, 0.5), (0.6, 0.9, 0.5))
    assert [band_of(gap, rate) for rate in (0.0, 0.5, 0.9, 1.0)] == [None] * 4
    assert [distance(gap[0], rate) for rate in (0.0, 0.2, 0.5)] == pytest.approx([0.1, 0, 0.1])


def test_a_label_is_that_of_the_source_with_the_difficulty_of_the_row():
    row = prompt(1, labels=("domain/algebra", "difficulty/3", "language/en"))
    assert label_of(row) == "maths/3" and label_of(prompt(1)) == "maths"


def test_a_pass_rate_is_the_prompts_own_then_its_labels_then_one_half():
    """The numbers are computed by hand: each new group halves the weight of the earlier ones."""
    rates = PassRates(RewardConfig(), 0.5, [Measured(PROMPTS[0], 6.0, 8.0)])
    assert rates(PROMPTS[0]) == 0.75 == rates(PROMPTS[1])  # the prompt's rate, and its label's
    assert rates(prompt(1, "new")) == 0.5
    rates.update([(PROMPTS[0], Outcome(4, 1.0, 40, "", 4))])
    assert rates(PROMPTS[0]) == (0.5 * 6 + 1) / (0.5 * 8 + 4)
    # a filter's rate of a label counts as 8 samples, discounted by 0.9 a step
    assert rates(PROMPTS[1]) == pytest.approx((0.9 * 6 + 1) / (0.9 * 8 + 4))
    rates.update([(PROMPTS[0], Outcome(0, 0.0, 40, "", 4))])  # no verdict
    assert rates(PROMPTS[0]) == 0.5


@pytest.mark.parametrize("size", [1, 7, 10])
def test_each_band_has_its_share_to_within_one_prompt_after_every_batch(size):
    band_selector, stream, drawn = selector(), PromptStream(PROMPTS, 3), []
    band_selector.tell = pytest.fail
    for _ in range(40):
        drawn += bands(band_selector.next_batch(stream, size))
        for i, (*_, share) in enumerate(MIX):
            assert abs(drawn.count(i) - share * len(drawn)) < 1


def test_prompts_of_a_band_come_in_the_streams_order_and_all_of_them_within_a_pass():
    band_selector, stream = selector(), PromptStream(PROMPTS, 3)
    order = [p.id for p in PromptStream(PROMPTS, 3).next_batch(60)]
    chosen = band_selector.next_batch(stream, 10)
    places = [order.index(p.id) for p in chosen]
    assert places == sorted(places)
    assert band_selector.skipped == stream.position - 10 > 0
    assert band_selector.metrics() == {
        **{f"curriculum/band_{i}_share": s for i, (*_, s) in enumerate(MIX)},
        "curriculum/borrowed_prompts": 0,
    }


def test_what_a_band_lacks_comes_from_the_nearest_is_counted_and_told_once():
    """The shares of a batch of 30 are 6, 15 and 9 prompts, and band 1 has only four. The nearest
    prompts of other bands have the rates 0.125 and 0.875, which are equally far, then 0 and 1.
    """
    few = [p for p in PROMPTS if RATES[p.id] != 0.5 or p.id in (2, 3, 8, 9)]
    band_selector, stream, told = selector(), PromptStream(few, 3), []
    band_selector.tell = told.append
    chosen = band_selector.next_batch(stream, 30)
    assert len({p.id for p in chosen}) == 30
    counts = [bands(chosen).count(i) for i in range(3)]
    assert counts[1] == 4 and sum(counts) == 30
    borrowed = [RATES[p.id] for p in chosen[-11:]]
    assert set(borrowed) <= {0.125, 0.875}
    assert band_selector.metrics()["curriculum/borrowed_prompts"] == 11
    assert band_selector.metrics()["curriculum/band_1_share"] == pytest.approx(4 / 30)
    (line,) = told
    assert "has 11 fewer of pass rate 0.3 to 0.7 (band 1) than its share of 0.5" in line
    band_selector.next_batch(stream, 30)
    assert told == [line] and band_selector.metrics()["curriculum/borrowed_prompts"] == 22
    band_selector.update([], 1.0)
    assert band_selector.metrics() == {}


def test_a_batch_larger_than_the_data_is_filled_by_further_passes():
    band_selector, stream = selector(), PromptStream(PROMPTS[:6], 3)
    chosen = band_selector.next_batch(stream, 20)
    assert len(chosen) == 20 and len({p.key for p in chosen}) == 20


def test_a_stage_without_a_mix_takes_all_and_measures_them():
    band_selector, stream, plain = (
        selector((), ()),
        PromptStream(PROMPTS, 3),
        PromptStream(PROMPTS, 3),
    )
    assert band_selector.next_batch(stream, 50) == plain.next_batch(50)
    assert band_selector.skipped == 0 and band_selector.metrics() == {}
    band_selector.update([(PROMPTS[0], Outcome(8, 2.0, 80, "", 8))], 0.0)
    next_stage = selector(MIX, (), number=1)
    next_stage.restore(json.loads(json.dumps(band_selector.state())))
    assert next_stage._rates(PROMPTS[0]) == 0.25


def test_a_restart_draws_the_same_and_another_stage_counts_anew():
    band_selector, stream = selector(), PromptStream(PROMPTS, 3)
    band_selector.next_batch(stream, 7)
    band_selector.update([(p, Outcome(8, 8 * (p.id % 2), 80, "", 8)) for p in PROMPTS[:30]], 0.0)
    band_selector.next_batch(stream, 5)  # a stop in the middle of a step
    saved = json.loads(json.dumps([band_selector.state(), stream.state()]))
    restored, place = selector(measured=()), PromptStream(PROMPTS, 3)
    restored.restore(saved[0])
    place.restore(saved[1])
    assert restored.metrics() == band_selector.metrics() != {}
    for _ in range(6):
        expected = [p.key for p in band_selector.next_batch(stream, 4)]
        assert [p.key for p in restored.next_batch(place, 4)] == expected
    other = selector(number=1)
    other.restore(saved[0])
    assert other.state()["given"] == [0, 0, 0] and other.metrics() == {}


def test_without_a_mix_in_any_stage_the_other_selectors_are_used():
    stage = Stage(0, 9, None, 2)
    assert not prompt_selector(SelectionConfig(), 8, RewardConfig(), 0, stage).acts
