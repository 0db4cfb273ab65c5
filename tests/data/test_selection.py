"""The prompts that a curriculum skips: chances computed by hand, and the same ones after a
restart.
"""

import json

import numpy as np
import pytest

from compass_jax.base.records import Outcome, Prompt
from compass_jax.config import RewardConfig, SelectionConfig
from compass_jax.data.difficulty import PassRates
from compass_jax.data.selection import CurriculumSelector
from compass_jax.data.selectors import prompt_selector
from compass_jax.data.stream import PromptStream

PROMPTS = [Prompt(i, 0, "", f"q{i}", np.array([i], np.int32), "") for i in range(40)]


def test_switched_off_it_is_the_stream_and_a_batch_is_always_full():
    selector, stream, plain = (
        prompt_selector(SelectionConfig(), 8, RewardConfig(), 1),
        PromptStream(PROMPTS, 1),
        PromptStream(PROMPTS, 1),
    )
    selector.update([(p, Outcome(4, 4.0, 40, "easy", 4)) for p in PROMPTS], 0.0)
    assert not selector.acts
    assert [p.id for p in selector.next_batch(stream, 50)] == [
        p.id for p in plain.next_batch(50)
    ] and selector.skipped == 0


# ---- the curriculum ------------------------------------------------------------------------------

LABELLED = [
    Prompt(
        i, 0, ("solved", "frontier", "hopeless", "new")[i % 4], f"q{i}", np.array([i], np.int32), ""
    )
    for i in range(40)
]
SHARES = {"solved": 1.0, "frontier": 0.5, "hopeless": 0.0}


def curriculum(samples=8, steps=30):
    """Returns a curriculum that has seen half of the prompts of three labels, `steps` times."""
    selector = prompt_selector(SelectionConfig(curriculum=True), samples, RewardConfig(), 5)
    assert isinstance(selector, CurriculumSelector) and selector.acts
    for _ in range(steps):
        selector.update(
            [
                (p, Outcome(8, 8 * SHARES[p.label], 80, "", 8))
                for p in LABELLED[:20]
                if p.label in SHARES
            ],
            0.0,
        )
    return selector


def test_a_prompt_comes_with_the_chance_that_its_group_varies():
    """The chances are computed by hand from 1 - p^8 - (1 - p)^8: p is the label's rate, and after a
    group of eight right answers (8 * 1 + 8 * the label's rate) / 16.
    """
    selector = curriculum()
    unseen = {p.label: selector.chance(p) for p in LABELLED[20:]}
    assert unseen == {
        "solved": 0.05,
        "hopeless": 0.05,
        "frontier": pytest.approx(1 - 2 * 0.5**8),
        "new": pytest.approx(1 - 2 * 0.5**8),
    }
    frontier = next(p for p in LABELLED if p.label == "frontier")
    before = selector._rates.of_label(frontier)
    selector.update([(frontier, Outcome(8, 8.0, 80, "easy", 8))], 0.0)
    label = selector._rates.of_label(frontier)
    assert before == 0.5 < label
    p = (8 + 8 * label) / 16
    assert selector.chance(frontier) == pytest.approx(1 - p**8 - (1 - p) ** 8)


def test_it_follows_a_policy_that_learns_and_skips_what_is_hopeless_before_it_was_tried():
    selector, stream = curriculum(), PromptStream(LABELLED, 5)
    labels = [p.label for _ in range(100) for p in selector.next_batch(stream, 4)]
    share = {label: labels.count(label) / len(labels) for label in (*SHARES, "new")}
    assert (
        share["hopeless"] < 0.06
        and share["solved"] < 0.06
        and share["frontier"] + share["new"] > 0.9
    )
    for _ in range(30):  # the hopeless prompts are now solved every second time
        selector.update(
            [(p, Outcome(8, 4.0, 80, "", 8)) for p in LABELLED if p.label == "hopeless"], 0.0
        )
    assert selector.chance(LABELLED[22]) > 0.95


def test_groups_without_a_verdict_teach_it_nothing_and_rewards_count_on_their_own_scale():
    rewards = RewardConfig(right_at=1.0, wrong_at=-1.0, smallest_gap=0.5)
    selector = CurriculumSelector(8, PassRates(rewards), 0)
    selector.update([(LABELLED[0], Outcome(0, 0.0, 80, "", 8))], 0.0)
    assert (
        selector.chance(LABELLED[0]) == pytest.approx(1 - 2 * 0.5**8) and selector.metrics() == {}
    )
    selector.update([(LABELLED[0], Outcome(4, -2.0, 80, "", 8))], 0.0)
    assert selector.metrics() == {"curriculum/solved": pytest.approx(0.25)}


def test_a_curriculum_goes_on_after_a_restart():
    selector = curriculum()
    restored = curriculum(steps=0)
    restored.restore(json.loads(json.dumps(selector.state())))
    assert [restored.chance(p) for p in LABELLED] == [
        selector.chance(p) for p in LABELLED
    ] and restored.metrics() == selector.metrics()
