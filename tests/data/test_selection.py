"""Which prompts are skipped: rates against the formula, the chances by hand, the same choices after a restart."""

import json

import numpy as np
import pytest

from compass_jax.config import ConfigError, ZeroVarianceConfig
from compass_jax.data.selection import PromptSelector
from compass_jax.data.stream import PromptStream
from compass_jax.records import Prompt

ON = ZeroVarianceConfig(select=True)
BATCHES = 120
PROMPTS = [Prompt(i, 0, "", f"q{i}", np.array([i], np.int32), "") for i in range(40)]


def streaks(selector, z, kind="easy", epoch=0.0):
    for _ in range(z):
        selector.update([(p, kind) for p in PROMPTS], epoch)


@pytest.mark.parametrize(("z", "expected"), [(0, 1.0), (1, 0.5), (2, 0.25), (3, 0.125), (20, 0.01)])
def test_a_streak_of_z_is_kept_with_p_to_the_z_but_never_below_one_percent(z, expected):
    selector, stream = PromptSelector(ON, seed=3), PromptStream(PROMPTS, 3)
    streaks(selector, z)
    seen = 0
    for _ in range(BATCHES):
        selector.next_batch(stream, 4)
        seen += 4 + selector.skipped
    kept = 4 * BATCHES / seen
    if expected == 0.01:  # after a whole pass the rest is taken as it comes
        assert 4 / 44 <= kept < 4 / 36
    else:
        assert kept == pytest.approx(expected, abs=0.05)


def test_a_varied_group_ends_a_streak_and_another_kind_starts_a_new_one():
    selector = PromptSelector(ON, seed=0)
    one = PROMPTS[0]
    for kinds, expected in ((["easy"] * 3, ["easy", 3]), (["easy", "easy", ""], ["", 0]), (["hard", "hard", "easy"], ["easy", 1])):
        fresh = PromptSelector(ON, seed=0)
        for kind in kinds:
            fresh.update([(one, kind)], 0.0)
        assert fresh.state()["streak"]["0"] == expected
    assert selector.state()["streak"] == {}


def test_the_chances_move_towards_the_targets_from_the_second_epoch_on():
    selector = PromptSelector(ON, seed=0)
    results = [(p, "easy" if i < 4 else "hard" if i < 10 else "") for i, p in enumerate(PROMPTS)]  # 10% and 15%
    selector.update(results, 0.9)
    assert selector.state()["chance"] == {"easy": 0.5, "hard": 0.5}
    selector.update(results, 1.0)
    assert selector.state()["chance"] == {"easy": 0.49, "hard": 0.51}  # 10% >= 1/12: skip more; 15% < 1/6: skip less
    for _ in range(200):
        selector.update(results, 2.0)
    assert selector.state()["chance"] == {"easy": 0.05, "hard": 0.95}


def test_switched_off_it_is_the_stream_and_a_batch_is_always_full():
    selector, stream, plain = PromptSelector(ZeroVarianceConfig(), 1), PromptStream(PROMPTS, 1), PromptStream(PROMPTS, 1)
    streaks(selector, 5)
    assert [p.id for p in selector.next_batch(stream, 50)] == [p.id for p in plain.next_batch(50)] and selector.skipped == 0


def test_a_restart_makes_the_same_choices():
    def batches(selector, stream, n):
        return [[(p.id, p.visit) for p in selector.next_batch(stream, 8)] for _ in range(n)]

    selector, stream = PromptSelector(ON, seed=7), PromptStream(PROMPTS, 7)
    streaks(selector, 2, "hard", epoch=2.0)
    batches(selector, stream, 3)
    saved = json.loads(json.dumps([selector.state(), stream.state()]))
    expected = batches(selector, stream, 5)
    again, place = PromptSelector(ON, seed=7), PromptStream(PROMPTS, 7)
    again.restore(saved[0])
    place.restore(saved[1])
    assert batches(again, place, 5) == expected
    assert batches(PromptSelector(ON, seed=8), PromptStream(PROMPTS, 7), 5) != expected


def test_targets_outside_zero_and_one_are_refused():
    with pytest.raises(ConfigError, match=r"select_targets = \(0.1, 1.0\)"):
        ZeroVarianceConfig(select_targets=(0.1, 1.0)).validate()
