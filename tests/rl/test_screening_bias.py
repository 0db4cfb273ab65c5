"""The expected gradient of a bandit under screening, over all sequences of draws, compared with
that of full groups. For every advantage the direction is that of the true gradient and the weights
are those in Screening's docstring; for every objective the weights are the same.
"""

import itertools
from math import comb, sqrt
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jitted import objective_of
from jitted import prepare as prepare_update

from compass_jax.base.records import Score
from compass_jax.config import RLConfig, ZeroVarianceConfig
from compass_jax.experience.step_policies.inputs import StepInputs
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.advantages.grpo import STD_EPSILON, GrpoAdvantage
from compass_jax.rl.advantages.maxrl import MaxRL
from compass_jax.rl.advantages.rloo import Rloo
from compass_jax.rl.group_advantage import group_advantage
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.prepare import RewardScale, UpdateRows

pytestmark = pytest.mark.usefixtures("x64")

N, N0 = 5, 2
RIGHT = np.array([1.0, 0.0, 0.0])  # the reward of each of three arms
STRICT = Screening(n0=N0, min_chance=1.0, min_chance_hard=1.0)
BY_CHANCE = Screening(n0=N0, min_chance=0.7, min_chance_hard=0.4)  # hard groups continue

# advantage -> f(k, n): a group's estimate, in units of grad p / (p (1 - p)), with k right of n
ADVANTAGES = {
    "rloo": (Rloo(), lambda k, n: k * (n - k) / (n * (n - 1))),
    "grpo": (
        GrpoAdvantage(),
        lambda k, n: (s := sqrt(k * (n - k)) / n) ** 2 / (s + STD_EPSILON),
    ),
    "maxrl": (MaxRL(), lambda k, n: (n - k) / n if k else 0.0),
}


def size(policy, rewards):
    """Returns the number of samples of a group with these first rewards."""
    scores = [Score(float(x), True) for x in rewards]
    prompt = SimpleNamespace(predicted=(1.0, 1.0))
    buffer = SimpleNamespace(scores=lambda key: scores, prompts={(0, 0): prompt})
    sampling = RLConfig(group_size=N, step_policy=policy).validate("rl").sampling
    return policy.grow(StepInputs(buffer, sampling, False), (0, 0))


def sequences(policy, arms):
    """Returns every sequence of N arms, and the number of draws that screening makes of each."""
    every = np.array(list(itertools.product(range(arms), repeat=N)))
    sizes = {first: size(policy, RIGHT[list(first)]) for first in np.ndindex(*[arms] * N0)}
    return every, np.array([sizes[tuple(row[:N0])] for row in every])


def expected_gradient(advantage, every, sizes, logits):
    """Returns E[1/N sum_i A_i grad log pi(y_i)] over all sequences."""
    arms, p = len(logits), np.exp(logits) / np.exp(logits).sum()
    group = np.where(np.arange(N) < sizes[:, None], np.arange(len(every))[:, None], -1)
    reward, rows = RIGHT[every].ravel(), jnp.asarray(group.ravel(), jnp.int32)
    known = jnp.ones(reward.size, bool)
    values, _ = group_advantage(advantage, jnp.asarray(reward), known, rows, len(every))
    values = np.where(group >= 0, np.asarray(values).reshape(group.shape), 0.0)
    scores = np.eye(arms)[every] - p  # grad log pi of a softmax
    each = np.einsum("gi,gia->ga", values, scores) / sizes[:, None]
    return p[every].prod(1) @ each


def weight(f, p, policy):
    """Returns w(p) by the formula in Screening's docstring: E[f(K)] over the groups that
    continue.
    """
    total, q = 0.0, 1 - p
    for first, further in itertools.product(range(N0 + 1), range(N - N0 + 1)):
        if policy is not None and size(policy, [1] * first + [0] * (N0 - first)) < N:
            continue
        chance = comb(N0, first) * comb(N - N0, further) * p ** (first + further)
        total += chance * q ** (N - first - further) * f(first + further, N)
    return total / (p * q)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_bias_is_a_weight_of_the_prompt_and_never_a_direction(name):
    advantage, f = ADVANTAGES[name]
    full = np.full(len(RIGHT) ** N, N)
    for logits in (np.array([0.3, -0.4, 1.0]), np.array([-2.0, 0.1, 0.5]), np.array([3.0, 0, 0.2])):
        p = np.exp(logits) / np.exp(logits).sum()
        true = p[0] * (np.eye(3)[0] - p)  # grad of the pass rate p[0]
        for policy in (None, STRICT, BY_CHANCE):
            every, sizes = sequences(policy or STRICT, 3)
            sizes = full if policy is None else sizes
            gradient = expected_gradient(advantage, every, sizes, logits)
            np.testing.assert_allclose(gradient, weight(f, p[0], policy) * true, rtol=1e-9)
        weights = [weight(f, p[0], policy) for policy in (STRICT, BY_CHANCE, None)]
        assert 0 < weights[0] < weights[1] < weights[2]
        if name == "rloo":
            assert weights[2] == pytest.approx(1, abs=1e-12)


def test_the_numbers_of_the_docstring(monkeypatch):
    monkeypatch.setitem(globals(), "N", 8)
    monkeypatch.setitem(globals(), "N0", 4)
    policy = Screening(n0=4, min_chance=1.0, min_chance_hard=1.0)
    f = ADVANTAGES["rloo"][1]
    weights = {p: f"{weight(f, p, policy):.2f}" for p in (0.1, 0.3, 0.5, 0.7, 0.9)}
    assert weights == {0.1: "0.65", 0.3: "0.84", 0.5: "0.90", 0.7: "0.84", 0.9: "0.65"}
    for value in weights.values():
        assert value in Screening.__doc__


OBJECTIVES = {
    "grpo": Grpo(),
    "dapo": dapo_surrogate(),
    "dr_grpo": dr_grpo(),
    "gspo": Gspo(),
    "cispo": Cispo(),
    "espo": Espo(),
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_weights_are_those_of_every_objective(name):
    """The gradient is that of an update of one group, by `prepare` and the objective, averaged over
    all sequences of right and wrong.
    """
    config = RLConfig(
        objective=OBJECTIVES[name],
        advantage=Rloo(),
        zero_variance=ZeroVarianceConfig(rl_zvp=False),
    ).algorithm
    p = np.array([0.3, 0.7])
    every, sizes = sequences(STRICT, 2)
    logp = jnp.log(jnp.asarray(p))[jnp.asarray(every)][..., None]
    entropy = jnp.full((N, 1), float(-(p * np.log(p)).sum()))
    mask = jnp.ones((N, 1), bool)
    scale = RewardScale(right_at=1.0, wrong_at=0.0, max_new_tokens=1)

    @jax.jit
    def gradient(logp, reward, size):
        group = jnp.where(jnp.arange(N) < size, 0, -1)
        sampled = mask & (group >= 0)[:, None]
        known = jnp.ones(N, bool)
        rows = UpdateRows(sampled, reward, known, group, entropy)
        prepared, _ = prepare_update(rows, n_groups=1, config=config, scale=scale)

        def objective(x):
            return objective_of(x, logp, entropy, prepared, config.objective, 2)[0].sum()

        return jax.grad(objective)(logp)

    total = np.zeros(2)
    for row, arms, n in zip(logp, every, sizes, strict=True):
        each = np.asarray(gradient(row, jnp.asarray(RIGHT[arms]), jnp.asarray(n)))[:, 0]
        total += p[arms].prod() * (each @ (np.eye(2)[arms] - p))
    true = p[0] * (np.eye(2)[0] - p)
    expected = weight(ADVANTAGES["rloo"][1], p[0], STRICT) * true
    np.testing.assert_allclose(total, expected, rtol=1e-9)
