"""`prepare` as a whole. Its parts are tested by value in other files; these tests check how it
combines them.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref
from jitted import prepare

from compass_jax.base.records import SAMPLED, TRUNCATED
from compass_jax.config import (
    RLConfig,
    ShapingConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.rl.advantages.grpo import GrpoAdvantage
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.rloo import Rloo
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.prepare import RewardScale, UpdateRows
from compass_jax.rl.zero_variance import SIGNALS

RL_ZVP = {"objective": Espo(), "zero_variance": ZeroVarianceConfig(rl_zvp=True)}
ENTROPIES = RLConfig(**RL_ZVP)


def run(toy, config, entropy=None, dtype=jnp.float64, function=prepare, group_size=None, **columns):
    scale = RewardScale(1.0, 0.0, max_new_tokens=16, group_size=group_size)
    rows = UpdateRows(
        jnp.asarray(toy.mask),
        jnp.asarray(toy.reward, dtype),
        jnp.asarray(toy.known),
        jnp.asarray(toy.group, jnp.int32),
        jnp.asarray(toy.old_entropy if entropy is None else entropy, dtype),
        columns={name: jnp.asarray(column) for name, column in columns.items()},
    )
    jitted = functools.partial(function, n_groups=toy.n_groups, config=config, scale=scale)
    return jax.jit(jitted)(rows)


@pytest.mark.parametrize("rl_zvp", [True, False])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_advantages_are_the_verifiers_or_entropys(rl_zvp, normalize_std, x64):
    toy = ref.make_toy(seed=8)
    config = RLConfig(
        advantage=GrpoAdvantage(normalize_std),
        objective=Espo(),
        zero_variance=ZeroVarianceConfig(rl_zvp, 0.2),
    )
    p, _ = run(toy, config)
    trained = toy.mask & toy.known[:, None]
    expected = np.where(trained, ref.advantage(toy, normalize_std)[:, None], 0)
    if rl_zvp:
        expected = expected + ref.rl_zvp(toy, 1.0, 0.0, 0.2)
    np.testing.assert_allclose(p.advantage, expected, rtol=1e-9, atol=1e-15)
    np.testing.assert_array_equal(p.mask, trained)
    np.testing.assert_array_equal(np.asarray(p.weight) > 0, trained)
    np.testing.assert_array_equal(np.asarray(p.entropy_group) >= 0, trained)


@pytest.mark.parametrize("drafted", [0, 1])
def test_account_of_the_tokens(x64, drafted):
    """The account leaves out the first tokens of each response if they came from a draft."""
    toy = ref.make_toy(seed=9)
    sampled = toy.mask & (np.cumsum(toy.mask, axis=1) > drafted)
    columns = {SAMPLED: sampled} if drafted else {}
    prepared, diagnostics = run(toy, ENTROPIES, **columns)
    jax.tree.map(np.testing.assert_array_equal, prepared, run(toy, ENTROPIES)[0])
    metrics = {k: float(v) for k, v in finalize_diagnostics(diagnostics).items()}
    tokens = sampled.sum(1)
    total = tokens.sum()
    kind = {}
    for g in range(toy.n_groups):
        r = toy.reward[(toy.group == g) & toy.known]
        kind[g] = (
            "verifier_signal"
            if np.ptp(r) > 1e-6
            else "entropy_signal"
            if r[0] in (0, 1)
            else "none"
        )
    expected = dict.fromkeys(SIGNALS, 0.0)
    for i, g in enumerate(toy.group):
        if g >= 0:
            expected[kind[g] if toy.known[i] else "none"] += tokens[i] / total
    assert {k: metrics[f"waste/frac_{k}"] for k in expected} == pytest.approx(expected)
    assert metrics["waste/tokens_generated"] == total and expected["entropy_signal"] > 0
    assert drafted or expected["none"] > 0
    assert (
        0 < metrics["zero_variance/rate_all_right"] < 1
        and 0 < metrics["zero_variance/rate_all_wrong"] < 1
    )


def test_only_espo_has_entropy_groups():
    toy = ref.make_toy(seed=10)
    for objective in (Grpo(), Gspo()):
        p, _ = run(toy, RLConfig(**RL_ZVP | {"objective": objective}), dtype=jnp.float32)
        assert p.entropy_group is None and p.weight.dtype == p.advantage.dtype == jnp.float32


def test_garbage_outside_the_mask_and_in_unknown_rewards_is_ignored(x64):
    toy = ref.make_toy(seed=11)
    clean = run(toy, ENTROPIES)
    entropy = np.where(toy.mask & toy.known[:, None], toy.old_entropy, np.nan)
    dirty = run(
        dataclasses.replace(toy, reward=np.where(toy.known, toy.reward, np.nan)),
        ENTROPIES,
        entropy,
    )
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(dirty))


def test_no_tokens_at_all():
    toy = ref.make_toy(seed=12)
    toy.mask[:] = False
    p, metrics = run(toy, ENTROPIES, dtype=jnp.float32)
    assert (
        not np.any(p.advantage)
        and not np.any(p.weight)
        and np.all(np.asarray(p.entropy_group) == -1)
    )
    assert finalize_diagnostics(metrics)["waste/frac_none"] == 0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RLConfig(**RL_ZVP, shaping=ShapingConfig(repetition_penalty=0.1)),
            r"rl\.shaping\.repetition_penalty = 0\.1 needs repetition",
        ),
        (
            RLConfig(**RL_ZVP, correction=named_correction("tis")),
            r"rl\.correction\.name = 'tis' needs old_logp, recomputed, and rollout_logp",
        ),
    ],
)
def test_what_a_stage_needs_must_be_given(config, message):
    toy = ref.make_toy(seed=14)
    with pytest.raises(ValueError, match=message):
        run(toy, config, dtype=jnp.float32)
    # the length penalty needs no argument: the mask has the lengths
    run(toy, RLConfig(**RL_ZVP, shaping=ShapingConfig(length_penalty=0.1)), dtype=jnp.float32)


def test_shapes_are_checked(unchecked):
    toy = ref.make_toy(seed=13)
    with pytest.raises(
        ValueError, match=r"prepare: old_entropy has shape \[14, 3\], expected \[14 12\]"
    ):
        # without the runtime check of annotations
        run(toy, ENTROPIES, np.zeros((14, 3)), jnp.float32, function=inspect.unwrap(prepare))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["reward", "old_logp", "rollout_logp", "ref_logp", "old_entropy"])
def test_what_is_not_finite_is_unknown_and_reaches_no_loss(name, bad, x64):
    """The response is treated as if its reward were unknown: bit for bit, and by the float64
    reference.
    """
    toy = ref.make_toy(seed=16)
    row = int(np.flatnonzero(toy.known & (toy.group == 2) & (toy.mask.sum(1) > 2))[0])
    arrays = {
        field: np.array(getattr(toy, field))
        for field in ("reward", "old_logp", "rollout_logp", "ref_logp", "old_entropy")
    }
    known = toy.known.copy()
    known[row] = False
    config = RLConfig(
        objective=Grpo(kl_coef=0.1),
        correction=named_correction("tis"),
        zero_variance=ZeroVarianceConfig(rl_zvp=False),
    )

    def prepared(arrays, known):
        rest = {k: jnp.asarray(arrays[k]) for k in ("old_logp", "rollout_logp", "ref_logp")}
        rows = UpdateRows(
            jnp.asarray(toy.mask),
            jnp.asarray(arrays["reward"]),
            jnp.asarray(known),
            jnp.asarray(toy.group, jnp.int32),
            jnp.asarray(arrays["old_entropy"]),
            **rest,
        )
        scale = RewardScale(right_at=1.0, wrong_at=0.0, max_new_tokens=16)
        return prepare(rows, n_groups=toy.n_groups, config=config, scale=scale)

    expected = prepared(arrays, known)
    spoilt = {field: x.copy() for field, x in arrays.items()}
    spoilt[name][row if name == "reward" else (row, np.flatnonzero(toy.mask[row])[1])] = bad
    got = prepared(spoilt, toy.known)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    without = dataclasses.replace(toy, known=known)
    advantage = np.where(toy.mask & known[:, None], ref.advantage(without)[:, None], 0)
    np.testing.assert_allclose(got[0].advantage, advantage, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("objective", [Grpo(), Gspo(), Espo()], ids=lambda x: x.name)
def test_a_truncated_answer_counts_in_its_group_and_is_not_trained(objective, x64):
    """Its reward is in the mean and the deviation of its group; its tokens are in no denominator,
    as those of a sample whose reward is unknown (DAPO, arXiv 2503.14476, section 3.4).
    """
    toy = ref.make_toy(seed=8)
    config = RLConfig(objective=objective)
    cut = toy.known & (np.arange(len(toy.known)) % 3 == 0)
    assert cut.any() and (toy.known & ~cut).any()
    trained = toy.mask & (toy.known & ~cut)[:, None]
    masked, diagnostics = run(toy, config, **{TRUNCATED: cut})
    response = ref.advantage(toy, objective.divides_by_std)
    np.testing.assert_allclose(
        masked.advantage, np.where(trained, response[:, None], 0), rtol=1e-9, atol=1e-15
    )
    unknown, _ = run(dataclasses.replace(toy, known=toy.known & ~cut), config)
    np.testing.assert_array_equal(masked.mask, trained)
    np.testing.assert_array_equal(masked.weight, unknown.weight)
    np.testing.assert_allclose(np.sum(masked.weight), 1, rtol=1e-12)
    metrics = finalize_diagnostics(diagnostics)
    shares = [float(x) for name, x in metrics.items() if name.startswith("waste/frac_")]
    np.testing.assert_allclose(sum(shares), 1, rtol=1e-12)
    assert float(metrics["waste/frac_none"]) >= toy.mask[cut].sum() / toy.mask.sum() - 1e-12


PREDICTING = {
    "predicted": (Predicted(), ref.predicted),
    "shrunk": (Shrunk(strength=0.7), lambda toy: ref.shrunk(toy, 0.7)),
}
predicting = pytest.mark.parametrize("name", PREDICTING)


def shares(diagnostics):
    """Returns the shares of the tokens by their signal, which sum to 1."""
    metrics = finalize_diagnostics(diagnostics)
    parts = {name: float(metrics[f"waste/frac_{name}"]) for name in SIGNALS}
    np.testing.assert_allclose(sum(parts.values()), 1, rtol=1e-12)
    return parts


@predicting
def test_equal_rewards_and_single_ones_teach_by_their_surprise(name, x64):
    """A token has the prediction's signal where its group does not vary and its reward is known."""
    advantage, reference = PREDICTING[name]
    toy = ref.make_toy(seed=9)
    lonely = np.flatnonzero((toy.group == 3) & toy.known)[1:]
    toy.known[lonely] = False
    prepared, diagnostics = run(toy, RLConfig(advantage=advantage), **toy.columns)
    trained = toy.mask & toy.known[:, None]
    expected = np.where(trained, reference(toy)[:, None], 0)
    np.testing.assert_allclose(prepared.advantage, expected, rtol=1e-9, atol=1e-12)
    assert (np.abs(expected).max(1) > 0)[trained.any(1)].all()
    varied = toy.known & (toy.group == 2)
    tokens, total = toy.mask.sum(1), toy.mask[toy.group >= 0].sum()
    parts = shares(diagnostics)
    assert parts["verifier_signal"] == pytest.approx(tokens[varied].sum() / total)
    others = toy.known & (toy.group >= 0) & ~varied
    assert parts["prediction_signal"] == pytest.approx(tokens[others].sum() / total)
    assert parts["none"] == pytest.approx(tokens[~toy.known].sum() / total) and parts["none"] > 0
    assert parts["entropy_signal"] == parts["shaping_signal"] == 0


def test_a_strength_of_0_leaves_equal_rewards_without_a_signal(x64):
    toy = ref.make_toy(seed=9)
    shrunk, rloo = (
        run(toy, RLConfig(advantage=advantage), **toy.columns | {"first": toy.group >= 0})
        for advantage in (Shrunk(strength=0.0, normalise=False), Rloo())
    )
    np.testing.assert_allclose(shrunk[0].advantage, rloo[0].advantage, rtol=1e-12, atol=1e-15)
    assert shares(shrunk[1]) == shares(rloo[1]) and shares(rloo[1])["prediction_signal"] == 0


@predicting
def test_tokens_of_a_group_that_shaping_tells_apart_have_shapings_signal(name, x64):
    toy = ref.make_toy(seed=9)
    shaping = ShapingConfig(length_penalty=0.1)
    config = RLConfig(advantage=PREDICTING[name][0], shaping=shaping)
    _, diagnostics = run(toy, config, **toy.columns)
    right, total = (toy.group == 0) & toy.known, toy.mask.sum()
    parts = shares(diagnostics)
    assert parts["shaping_signal"] == pytest.approx(toy.mask[right].sum() / total)
    wrong = (toy.group == 1) & toy.known
    assert parts["prediction_signal"] >= toy.mask[wrong].sum() / total - 1e-12


@predicting
def test_rewards_alone_decide_the_advantage(name, x64):
    """The plan of an update's rows is made before any of them is scored."""
    toy = ref.make_toy(seed=9)
    config = RLConfig(advantage=PREDICTING[name][0])
    assert config.zero_advantage_is_idle
    before, after = (
        jax.device_get(run(toy, config, entropy, **toy.columns)[0])
        for entropy in (np.zeros(toy.mask.shape), toy.old_entropy)
    )
    np.testing.assert_array_equal(before.advantage, after.advantage)
    assert not before.without_gradient()[toy.known & toy.mask.any(1) & (toy.group >= 0)].any()


@pytest.mark.parametrize("masks_truncated", [False, True])
@pytest.mark.parametrize("objective", [Grpo(), Gspo(), dapo_surrogate()], ids=lambda x: str(x.name))
@predicting
def test_each_sample_weighs_the_same_in_groups_of_two_and_four(
    name, objective, masks_truncated, x64
):
    """Advantage times weight of a token, over that of a group of rl.group_size: a half of the
    mean over groups comes back where a group has half of the samples.
    """
    toy = ref.make_toy(seed=3, groups=4, samples=4, unknown_reward=False)
    toy.mask[:] = np.arange(12) == 4  # a token each
    late = (toy.group == 1) & ~toy.columns["first"]
    toy.known[late] = False
    columns = dict(toy.columns)
    if masks_truncated:
        columns[TRUNCATED] = np.zeros(len(toy.known), bool)
        columns[TRUNCATED][np.flatnonzero(toy.group == 2)[0]] = True
    config = RLConfig(advantage=PREDICTING[name][0], objective=objective)
    prepared, _ = run(toy, config, group_size=4, **columns)
    factor = np.asarray(prepared.advantage * prepared.weight).sum(1)
    trained = np.asarray(prepared.mask).any(1)
    ratio = factor[trained] / PREDICTING[name][1](toy)[trained]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-9)
    if objective.averages_groups:
        np.testing.assert_allclose(ratio, 1 / 16, rtol=1e-9)
