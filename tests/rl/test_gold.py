"""Gold labels: inverted pairs are counted against them if there are any, and they change nothing
else.
"""

import itertools

import jax
import numpy as np
import pytest
from evolve import evolve
from jitted import prepare_rows
from tiny_run import tiny_run

from compass_jax.config import RLConfig, TaskSource
from compass_jax.training.programs import training_programs

REWARD = [1.0, 2.0, 0.0, 0.0, 1.0, 0.5, 1.0, 0.0, 1.0]
GOLD = [0.0, 1.0, 2.0, 0.0, 1.0, np.nan, 1.0, 0.0, 0.0]
KNOWN = [True] * 7 + [False, True]
GROUP = [0, 0, 0, 1, 1, 1, 2, 2, 2]
LENGTHS = [3, 1, 4, 2, 2, 3, 1, 4, 2]


def run(reward, known, group, gold=None):
    """Returns the prepared rows and their metrics."""
    mask = np.arange(5) < np.asarray(LENGTHS[: len(reward)])[:, None]
    labels = {} if gold is None else {"gold": gold}
    options = {"right_at": 2.0, "wrong_at": -1.0, "max_new_tokens": 5}
    return prepare_rows(mask, None, reward, known, group, RLConfig(), **options, **labels)


def share_inverted(reward, known, group, gold):
    """Returns the share of a group's pairs with (gold_i - gold_j)(A_i - A_j) < 0 among those with
    unequal gold labels; A is the group-relative advantage of the known rewards.
    """
    reward, gold, group = (np.asarray(x, np.float64) for x in (reward, gold, group))
    advantage = np.zeros(len(reward))
    for g in set(group):
        rows = np.flatnonzero((group == g) & known)
        known_rewards = reward[rows]
        advantage[rows] = (known_rewards - known_rewards.mean()) / (known_rewards.std() + 1e-6)
    pairs = [
        (i, j)
        for i, j in itertools.combinations(np.flatnonzero(known), 2)
        if group[i] == group[j] and np.isfinite(gold[[i, j]]).all() and gold[i] != gold[j]
    ]
    return np.mean([(gold[i] - gold[j]) * (advantage[i] - advantage[j]) < 0 for i, j in pairs])


def test_rewards_that_invert_two_of_three_pairs_give_two_thirds():
    three = REWARD[:3], KNOWN[:3], GROUP[:3]
    assert share_inverted(*three, GOLD[:3]) == 2 / 3
    _, metrics = run(*three, GOLD[:3])
    assert metrics["advantage/inversion_frac"] == pytest.approx(2 / 3)
    assert run(*three)[1]["advantage/inversion_frac"] == 0, "against the rewards none is inverted"


def test_unknown_labels_and_unknown_rewards_are_in_no_pair():
    expected = share_inverted(REWARD, KNOWN, GROUP, GOLD)
    assert expected == 2 / 5
    _, metrics = run(REWARD, KNOWN, GROUP, GOLD)
    assert metrics["advantage/inversion_frac"] == pytest.approx(expected)
    unlabelled = run(REWARD, KNOWN, GROUP, [np.nan] * 9)[1]
    assert unlabelled["advantage/inversion_frac"] == 0


def test_labels_change_nothing_that_is_trained_on():
    (plain, before), (labelled, after) = run(REWARD, KNOWN, GROUP), run(REWARD, KNOWN, GROUP, GOLD)
    jax.tree.map(np.testing.assert_array_equal, plain, labelled)
    changed = {name for name in before | after if before[name] != after[name]}
    assert changed == {"advantage/inversion_frac"}


@pytest.mark.parametrize("gold", ["", "exact"])
def test_the_compiled_program_takes_labels_where_a_source_has_them(gold):
    config = tiny_run()
    source = TaskSource("tasks:task", gold=gold)
    config = evolve(config, data={"sources": (source,)})
    model = type("NoMesh", (), {"placement": None})
    inputs = next(iter(training_programs(config.learner, model, None, None))).arguments[0]
    rows = config.rl.prompts_per_step // config.rl.updates_per_rollout * config.rl.capacity
    shapes = {name: column.shape for name, column in inputs.columns.items()}
    assert shapes == ({"gold": (rows,)} if gold else {})
