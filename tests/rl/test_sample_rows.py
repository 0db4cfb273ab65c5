"""Samples of several rows: advantages and weights are those of the same samples in one row each."""

import jax.numpy as jnp
import numpy as np
import pytest
from jitted import prepare

from compass_jax.base.records import CONCENTRATION, FIRST, GOLD, PREDICTED, SAMPLE, TRUNCATED
from compass_jax.config import AlgorithmConfig, ShapingConfig
from compass_jax.rl.advantages.grpo import GrpoAdvantage
from compass_jax.rl.advantages.maxrl import MaxRL
from compass_jax.rl.advantages.reinforce_pp import ReinforcePlusPlus
from compass_jax.rl.advantages.rloo import Rloo
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.grouping import sample_rows
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.prepare import RewardScale, UpdateRows

LENGTHS = np.array([4, 6, 3, 6, 5, 2, 6])  # of whole samples, two groups and a padding row
GROUP = np.array([0, 0, 0, 1, 1, 1, -1])
REWARD = np.array([1.0, 0.0, 0.25, 0.0, 1.0, 0.0, 0.0])
SPLIT = {1: 2, 3: 4, 4: 1}  # sample -> tokens of its first row; the others follow in a second one
# (sample, its first token, its last) of each row, in an order that mixes samples and groups
ROWS = [(3, 0, 4), (0, 0, 4), (1, 0, 2), (5, 0, 2), (6, 0, 6), (2, 0, 3), (1, 2, 6), (4, 0, 1)]
ROWS += [(3, 4, 6), (4, 1, 5)]
COLUMNS = {
    GOLD: np.array([1.0, 0.0, np.nan, 1.0, 0.0, np.nan, np.nan]),
    TRUNCATED: np.array([False, False, True, False, False, False, False]),
    PREDICTED: np.array([0.4] * 3 + [0.7] * 4),
    CONCENTRATION: np.array([3.0] * 7),
    FIRST: np.array([True, True, False, True, True, False, True]),
}


def rows_of(parts, several):
    """The arrays of rows, each (sample, start, stop) of a sample's tokens."""
    samples = [sample for sample, _, _ in parts]
    mask = np.array([[t < stop - start for t in range(6)] for _, start, stop in parts])
    mask &= (GROUP[samples] >= 0)[:, None]
    columns = {name: column[samples] for name, column in COLUMNS.items()}
    if several:
        columns[SAMPLE] = np.array([sample % 3 for sample in samples], np.int32)
        last = [stop == LENGTHS[sample] for sample, _, stop in parts]
        columns[TRUNCATED] = columns[TRUNCATED] & last  # where the answer was cut off
    entropy = np.zeros(mask.shape)
    return UpdateRows(
        jnp.asarray(mask),
        jnp.asarray(REWARD[samples]),
        jnp.asarray(GROUP[samples] >= 0),
        jnp.asarray(GROUP[samples], jnp.int32),
        jnp.asarray(entropy),
        repetition=jnp.asarray(0.1 * np.arange(7)[samples]),
        columns={name: jnp.asarray(column) for name, column in columns.items()},
    )


def prepared_by_token(parts, config, several):
    scale = RewardScale(1.0, 0.0, max_new_tokens=16, group_size=3)
    prepared, account = prepare(rows_of(parts, several), n_groups=2, config=config, scale=scale)
    tokens = {}
    for row, (sample, start, stop) in enumerate(parts):
        for t in range(start, stop):
            values = (prepared.advantage, prepared.weight, prepared.mask)
            tokens[sample, t] = tuple(float(x[row, t - start]) for x in values)
    return tokens, {name: float(x) for name, x in finalize_diagnostics(account).items()}


@pytest.mark.parametrize(
    "advantage", [GrpoAdvantage(), Rloo(), MaxRL(), ReinforcePlusPlus(), Shrunk(), Shrunk(0.0)]
)
@pytest.mark.parametrize("objective", [Grpo(), dapo_surrogate(), dr_grpo(), Cispo(), Gspo()])
@pytest.mark.parametrize("penalty", [0.0, 0.05])
def test_rows_of_a_sample_have_its_advantage_and_share_its_weight(
    advantage, objective, penalty, x64
):
    config = AlgorithmConfig(
        advantage=advantage,
        objective=objective,
        mask_truncated=True,
        shaping=ShapingConfig(length_penalty=penalty, repetition_penalty=penalty / 2),
    )
    whole = [(sample, 0, length) for sample, length in enumerate(LENGTHS)]
    expected, account = prepared_by_token(whole, config, several=False)
    tokens, found = prepared_by_token(ROWS, config, several=True)
    assert tokens.keys() == expected.keys() and any(weight for _, weight, _ in tokens.values())
    for place, values in expected.items():
        assert tokens[place] == pytest.approx(values, rel=1e-12, abs=1e-15), place
    assert found == pytest.approx(account, rel=1e-12, abs=1e-15)


def test_the_first_rows_of_samples_are_found():
    group, sample = jnp.array([1, 0, 1, -1, 0, 1, -1]), jnp.array([0, 2, 0, 0, 2, 1, 0])
    rows = sample_rows(group, sample, 2)
    np.testing.assert_array_equal(rows.first, [0, 1, 0, 3, 1, 5, 6])
    np.testing.assert_array_equal(rows.counted, [1, 1, 0, 1, 0, 1, 1])
    np.testing.assert_array_equal(rows.sum(jnp.arange(7)), [2, 5, 2, 3, 5, 5, 6])


def test_a_sample_with_a_row_that_is_not_finite_is_unknown(x64):
    config = AlgorithmConfig(advantage=Rloo(), objective=Grpo())
    rows = rows_of(ROWS, several=True)
    rows = rows._replace(old_entropy=rows.old_entropy.at[6, 0].set(np.nan))  # of sample 1
    scale = RewardScale(1.0, 0.0, max_new_tokens=16, group_size=3)
    prepared, _ = prepare(rows, n_groups=2, config=config, scale=scale)
    assert not prepared.mask[2].any() and not prepared.mask[6].any() and prepared.mask[1].any()
