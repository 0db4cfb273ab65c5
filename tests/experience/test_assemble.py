"""Assembly of rollouts into arrays, row by row."""

import dataclasses

import numpy as np
import pytest
from tiny import EOS, make_prompt

from compass_jax.base.records import (
    CONCENTRATION,
    FIRST,
    GOLD,
    PREDICTED,
    TRUNCATED,
    Group,
    Rollout,
    Score,
)
from compass_jax.config import RLConfig
from compass_jax.experience.assemble import assemble, columns_of
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.advantages.predicted import Predicted

PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 5))]
RESPONSES = ((2, 4), (1, 3))  # generated tokens of each sample


def rollout(g, s):
    prompt, extra = PROMPTS[g], RESPONSES[g][s]
    n, row = len(prompt.tokens) + extra, g * 2 + s
    rng = np.random.default_rng(row)
    generated = np.arange(n) >= len(prompt.tokens)
    tokens = np.concatenate([prompt.tokens, rng.integers(2, 40, extra)]).astype(np.int32)
    tokens[-1] = EOS if row % 2 else 17
    logp, entropy = (np.where(generated, rng.random(n), 0).astype(np.float32) for _ in range(2))
    return Rollout(
        prompt, s, tokens, -logp, entropy, tokens[-1] != EOS, np.full(n, 3, np.int32), row
    )


ROLLOUTS = {g * 2 + s: rollout(g, s) for g in range(2) for s in range(2)}
SCORES = {
    0: Score(1.0, True),
    1: Score(0.0, False, "timeout"),
    2: Score(0.25, True),
    3: Score(-1.0, True),
}


SCORES_OF = (SCORES[0], SCORES[1])


@pytest.fixture
def arrays():
    groups = [
        Group(
            PROMPTS[g], (ROLLOUTS[2 * g], ROLLOUTS[2 * g + 1]), (SCORES[2 * g], SCORES[2 * g + 1])
        )
        for g in range(2)
    ]
    return assemble(groups, 2, 10, 2)


def test_each_row_holds_its_sample(arrays):
    for row, r in ROLLOUTS.items():
        n, start = len(r.tokens), len(r.prompt.tokens)
        for name, values in (("tokens", r.tokens), ("rollout_logp", r.logp)):
            np.testing.assert_array_equal(
                getattr(arrays, name)[row], np.pad(values, (0, 10 - n)), err_msg=name
            )
        np.testing.assert_array_equal(arrays.mask[row], [start <= t < n for t in range(10)])
    np.testing.assert_array_equal(arrays.lengths, [5, 7, 6, 8])
    np.testing.assert_array_equal(arrays.group, [0, 0, 1, 1])
    np.testing.assert_array_equal(arrays.reward, np.array([1, 0, 0.25, -1], np.float32))
    np.testing.assert_array_equal(arrays.known, [True, False, True, True])


def test_groups_of_different_sizes_keep_their_rows_and_leave_the_others_empty():
    """There are rows for three samples a group (row 3 g + c); one group has two samples, the other
    has one.
    """
    moved = [
        dataclasses.replace(ROLLOUTS[i], row=row, tokens=ROLLOUTS[i].tokens)
        for i, row in ((0, 0), (1, 1), (2, 3))
    ]
    arrays = assemble(
        [
            Group(PROMPTS[0], tuple(moved[:2]), (SCORES[0], SCORES[1])),
            Group(PROMPTS[1], (moved[2],), (SCORES[2],)),
        ],
        3,
        10,
        2,
    )
    np.testing.assert_array_equal(arrays.group, [0, 0, -1, 1, -1, -1])
    np.testing.assert_array_equal(arrays.lengths, [5, 7, 0, 6, 0, 0])
    assert (
        not arrays.mask[[2, 4, 5]].any()
        and not arrays.known[[2, 4, 5]].any()
        and arrays.mask[3].sum() == 1
    )


def test_gold_labels_come_from_the_scores_and_are_unknown_where_there_is_none():
    scores = (Score(1.0, True, components={"gold": 0.25}), Score(0.0, True))
    group = Group(PROMPTS[0], (ROLLOUTS[0], ROLLOUTS[1]), scores)
    assert GOLD not in assemble([group], 3, 10, 2).columns
    columns = columns_of(RLConfig(), labelled=True)
    gold = assemble([group], 3, 10, 2, columns=columns).columns[GOLD]
    np.testing.assert_array_equal(gold, np.array([0.25, np.nan, np.nan], np.float32))


def test_answers_that_were_cut_off_are_marked_where_the_setting_asks_for_it():
    group = Group(PROMPTS[0], (ROLLOUTS[0], ROLLOUTS[1]), SCORES_OF)
    assert ROLLOUTS[0].truncated and not ROLLOUTS[1].truncated
    assert (
        TRUNCATED not in assemble([group], 3, 10, 2, columns=columns_of(RLConfig(), True)).columns
    )
    columns = columns_of(RLConfig(mask_truncated=True), False)
    marked = assemble([group], 3, 10, 2, columns=columns).columns[TRUNCATED]
    np.testing.assert_array_equal(marked, [True, False, False])


@pytest.mark.parametrize(("policy", "first"), [(Screening(n0=2), 2), (None, 3)])
def test_the_prediction_of_a_prompt_and_its_first_round_are_columns_where_they_are_read(
    policy, first
):
    prompt = dataclasses.replace(PROMPTS[0], predicted=(3.0, 1.0))
    samples = tuple(
        dataclasses.replace(ROLLOUTS[0], prompt=prompt, sample=index) for index in range(3)
    )
    groups = [
        Group(prompt, samples, (SCORES[0],) * 3),
        Group(PROMPTS[1], (ROLLOUTS[2],), (SCORES[2],)),  # without a prediction
    ]
    rl = RLConfig(group_size=3, step_policy=policy)
    names = {PREDICTED, CONCENTRATION, FIRST}
    assert not names & set(columns_of(rl, False))
    columns = columns_of(dataclasses.replace(rl, advantage=Predicted()), False)
    assert set(columns) == names
    arrays = assemble(groups, 4, 10, 2, columns=columns).columns
    assert [arrays[x].dtype for x in (PREDICTED, CONCENTRATION, FIRST)] == ["f4", "f4", "?"]
    np.testing.assert_array_equal(arrays[PREDICTED], [0.75] * 3 + [0, 0.5, 0, 0, 0])
    np.testing.assert_array_equal(arrays[CONCENTRATION], [4] * 3 + [0, 2, 0, 0, 0])
    in_first_round = np.isin(np.arange(8), [*range(first), 4])
    np.testing.assert_array_equal(arrays[FIRST], in_first_round)
