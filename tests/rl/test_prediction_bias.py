"""The expected gradient of a bandit under advantages that compare with a prediction, over all
sequences of draws, in float64: unbiased for groups of a fixed size, and a positive multiple of the
true gradient where the rewards of the first round decide on the number of samples.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import objective_of
from jitted import prepare as prepare_update

from compass_jax.base.records import CONCENTRATION, FIRST, PREDICTED
from compass_jax.config import RLConfig, ZeroVarianceConfig
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.group_advantage import group_advantage
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.prepare import RewardScale, UpdateRows

pytestmark = pytest.mark.usefixtures("x64")

N, N0 = 5, 2
BINARY, GRADED = np.array([1.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.3])  # rewards of three arms
LOGITS = {"even": np.array([0.3, -0.4, 1.0]), "hard": np.array([-3.0, 0.1, 0.5])}
ADVANTAGES = {
    "predicted": Predicted(normalise=False),
    "shrunk": Shrunk(normalise=False),
    "shrunk by a third": Shrunk(1 / 3, normalise=False),
    "shrunk by 40": Shrunk(40.0, normalise=False),
    "rloo": Shrunk(0.0, normalise=False),
}
PREDICTIONS = [(0.5, 2.0), (0.03, 1.2), (0.9, 20.0)]  # p_hat and concentration
SEQUENCES = np.array(list(itertools.product(range(3), repeat=N)))


def columns_of(prediction, first):
    """Returns the columns of every row, [sequences * N]."""
    rate, concentration = (np.full(SEQUENCES.size, x) for x in prediction)
    arrays = {PREDICTED: rate, CONCENTRATION: concentration, FIRST: first.ravel()}
    return {name: jnp.asarray(x) for name, x in arrays.items()}


def truth(rewards, logits):
    """Returns the probability of each sequence, grad log pi of each arm, and grad E[R]."""
    p = np.exp(logits) / np.exp(logits).sum()
    scores = np.eye(3) - p
    return p[SEQUENCES].prod(1), scores, p * rewards @ scores


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_groups_of_a_fixed_size_are_unbiased(name, prediction):
    """E[sum_i A_i grad log pi_i] = N grad E[R], whatever was predicted, and with unknown rewards
    the same for the known ones.
    """
    group = jnp.asarray(np.repeat(np.arange(len(SEQUENCES)), N), jnp.int32)
    columns = columns_of(prediction, np.ones(SEQUENCES.shape, bool))
    for rewards, logits, unknown in itertools.product(
        (BINARY, GRADED), LOGITS.values(), ([], [1], [0, 1, 2, 4])
    ):
        known = ~np.isin(np.arange(N), unknown)
        if name == "rloo" and known.sum() < 2:
            continue
        values, _ = group_advantage(
            ADVANTAGES[name],
            jnp.asarray(rewards[SEQUENCES].ravel()),
            jnp.asarray(np.tile(known, len(SEQUENCES))),
            group,
            len(SEQUENCES),
            columns=columns,
        )
        chance, scores, true = truth(rewards, logits)
        each = np.einsum("gi,gia->ga", np.reshape(values, SEQUENCES.shape), scores[SEQUENCES])
        np.testing.assert_allclose(chance @ each, known.sum() * true, rtol=0, atol=1e-12)


def rule(kind, rewards):
    """Returns the number of samples after these first rewards."""
    if kind == "varied":
        return N if max(rewards) > min(rewards) else N0
    if kind == "all wrong stops":
        return N if max(rewards) > 0 else N0
    if kind == "the first is right":
        return N if rewards[0] == 1 else N0 + 1 if rewards[1] == 1 else N0
    draws = np.random.default_rng(np.round(100 * np.array(rewards)).astype(int))
    return int(draws.integers(N0, N + 1))  # any rule


OBJECTIVES = {
    "grpo": Grpo(),
    "dapo": dapo_surrogate(),
    "dr_grpo": dr_grpo(),
    "gspo": Gspo(),
    "cispo": Cispo(),
    "espo": Espo(),
}


def update_of(advantage, objective, rewards, logits, sizes, prediction, group_size=N):
    """Returns (the old log-probs, prepared rows) of an update whose groups are all sequences."""
    config = RLConfig(
        advantage=advantage, objective=objective, zero_variance=ZeroVarianceConfig(posterior=True)
    ).algorithm
    sampled = np.arange(N) < sizes[:, None]
    group = np.where(sampled, np.arange(len(SEQUENCES))[:, None], -1).ravel()
    mask = jnp.asarray(sampled.reshape(-1, 1))
    logp = jnp.log(jnp.asarray(np.exp(logits) / np.exp(logits).sum()))[SEQUENCES].reshape(-1, 1)
    first = np.broadcast_to(np.arange(N) < N0, SEQUENCES.shape)
    rows = UpdateRows(
        mask,
        jnp.asarray(rewards[SEQUENCES].ravel()),
        jnp.ones(len(group), bool),
        jnp.asarray(group, jnp.int32),
        jnp.ones(mask.shape),
        columns=columns_of(prediction, first),
    )
    scale = RewardScale(1.0, 0.0, max_new_tokens=1, group_size=group_size)
    return logp, prepare_update(rows, n_groups=len(SEQUENCES), config=config, scale=scale)[0]


def expectation(per_row, objective, rewards, logits, sizes):
    """Returns the expected gradient of a group from the derivatives with respect to the log-probs
    of `update_of`. A mean over all tokens (DAPO, CISPO) counts as one over N tokens a group, since
    the prompts of an update share its denominator.
    """
    chance, scores, _ = truth(rewards, logits)
    groups = len(SEQUENCES) if objective.averages_groups else sizes.sum() / N
    each = groups * np.asarray(per_row).reshape(SEQUENCES.shape)
    return chance @ np.einsum("gi,gia->ga", each, scores[SEQUENCES])


RULES = ("varied", "all wrong stops", "the first is right", "any")


def sizes_and_weight(kind, rewards, logits):
    """Returns the size of each sequence's group, and w = (n0 + E[number of later samples]) / N."""
    chance, _, true = truth(rewards, logits)
    sizes = np.array([rule(kind, list(rewards[row[:N0]])) for row in SEQUENCES])
    assert len(set(sizes)) > 1
    return sizes, (N0 + chance @ (sizes - N0)) / N, true


@pytest.mark.parametrize("kind", RULES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_screening_changes_the_length_of_a_gradient_and_never_its_direction(name, kind):
    """E[g] = w grad E[R], with w > 0 by the formula in Shrunk's docstring."""
    for rewards, (difficulty, logits) in itertools.product((BINARY, GRADED), LOGITS.items()):
        sizes, weight, true = sizes_and_weight(kind, rewards, logits)
        assert 0 < weight < 1
        for prediction in PREDICTIONS:
            _, p = update_of(ADVANTAGES[name], Grpo(), rewards, logits, sizes, prediction)
            # GRPO's ratio is 1 at the policy that sampled.
            got = expectation(p.advantage * p.weight, Grpo(), rewards, logits, sizes)
            np.testing.assert_allclose(got, weight * true, rtol=0, atol=1e-12)
        print(f"{name}, {kind}, {difficulty}, rewards {rewards.tolist()}: w = {weight:.4f}")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_has_this_gradient(name):
    objective, logits = OBJECTIVES[name], LOGITS["even"]
    sizes, weight, true = sizes_and_weight("the first is right", GRADED, logits)
    arguments = objective, GRADED, logits, sizes
    logp, p = update_of(Shrunk(normalise=False), *arguments, PREDICTIONS[2])

    def total(x):
        return objective_of(x, logp, jnp.ones(logp.shape), p, objective, 3)[0].sum()

    got = expectation(jax.jit(jax.grad(total))(logp), *arguments)
    np.testing.assert_allclose(got, weight * true, rtol=0, atol=1e-12)


def test_without_equal_weights_the_direction_changes():
    """The mean over a group's samples gives the samples of small groups more weight."""
    sizes, _, true = sizes_and_weight("the first is right", GRADED, LOGITS["even"])
    arguments = Grpo(), GRADED, LOGITS["even"], sizes
    for group_size, parallel in ((N, True), (None, False)):
        _, p = update_of(Shrunk(normalise=False), *arguments, PREDICTIONS[0], group_size)
        got = expectation(p.advantage * p.weight, *arguments)
        cosine = got @ true / np.linalg.norm(got) / np.linalg.norm(true)
        assert (1 - cosine < 1e-12) == parallel


def test_the_centring_takes_one_sample_of_the_gradient_of_an_update():
    """The mean over N rewards has a share 1 / N of a sample's own reward: of an update of one group
    the expected sum of (D_i - mean D) grad log pi_i is N - 1 times grad E[R].
    """
    columns = {PREDICTED: jnp.full(N, 0.25), CONCENTRATION: jnp.full(N, 2.0)}
    known, group = jnp.ones(N, bool), jnp.zeros(N, jnp.int32)

    def advantages(reward):
        return group_advantage(Predicted(), reward, known, group, 1, columns=columns)[0]

    reward = GRADED[SEQUENCES]
    values = np.asarray(jax.jit(jax.vmap(advantages))(jnp.asarray(reward)))
    divisor = reward.std(axis=1, keepdims=True) + 1e-4
    chance, scores, true = truth(GRADED, LOGITS["even"])
    total = chance @ np.einsum("gi,gia->ga", values * divisor, scores[SEQUENCES])
    np.testing.assert_allclose(total, (N - 1) * true, rtol=0, atol=1e-12)
