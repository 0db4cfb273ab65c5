"""The learner as a library, in ten lines around arrays of any origin; and its micro-batches, in
which routes stay with their tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from tiny import COMPUTE, MODEL, UNSET

from compass_jax.base.records import CONCENTRATION, EARLIER, FIRST, PREDICTED, StepArrays
from compass_jax.config import (
    AlgorithmConfig,
    ConfigError,
    LearnerConfig,
    LogConfig,
    OptimConfig,
    RLConfig,
    RolloutConfig,
    RunConfig,
    UpdatesConfig,
    ZeroVarianceConfig,
)
from compass_jax.config.algorithm import RLZVPConfig
from compass_jax.config.sampling import ResamplingConfig
from compass_jax.model.moe import empty_routes
from compass_jax.model.routes import put_routes
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.bucketing import MicroBatch
from compass_jax.rl.corrections.sequence import SequenceMask
from compass_jax.rl.corrections.tis import Tis
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.prepare import Prepared
from compass_jax.rl.row_plan import RowPlan
from compass_jax.rl.zero_variance import waste_of_dropped
from compass_jax.training import step
from compass_jax.training.learner import Learner
from compass_jax.training.scored import (
    Scored,
    device_rows,
    score_account,
    sequences,
    update_batch,
)
from compass_jax.training.trace import TokenTrace

NO_PLAN = RowPlan([], False, np.zeros(0, bool), None)
CONFIG = RunConfig(
    "library",
    MODEL,
    compute=COMPUTE,
    rollout=RolloutConfig(prompt_buckets=(4,), max_new_tokens=8),
    rl=RLConfig(
        prompts_per_step=4,
        group_size=4,
        updates_per_rollout=2,
        replay="off",
        buckets=(12,),
        objective=Grpo(),
        step_policy=None,
        zero_variance=ZeroVarianceConfig(rl_zvp=True),
        optim=OptimConfig(learning_rate=0.01),
    ),
)


def samples(seed, rows=16):
    """Returns a rollout without an engine: four prompts with four samples and one right answer
    each.
    """
    rng = np.random.default_rng(seed)
    lengths = rng.integers(6, 13, rows).astype(np.int32)
    mask = (np.arange(12) >= 3) & (np.arange(12) < lengths[:, None])
    tokens = np.where(np.arange(12) < lengths[:, None], rng.integers(2, 40, (rows, 12)), 0)
    return StepArrays(
        tokens=tokens.astype(np.int32),
        lengths=lengths,
        mask=mask,
        rollout_logp=np.where(mask, -3.0, 0.0).astype(np.float32),
        reward=(np.arange(rows) % 4 == 0).astype(np.float32),
        known=np.ones(rows, bool),
        repetition=np.zeros(rows, np.float32),
        group=np.repeat(np.arange(rows // 4, dtype=np.int32), 4),
    )


def test_ten_lines_around_a_learner_train_a_model_on_arrays_of_any_origin():
    model = Transformer(CONFIG.model, CONFIG.compute)
    params = init_params(CONFIG.model, CONFIG.compute, jax.random.key(0))
    learner = Learner.start(CONFIG.learner, model, params)
    right, logps = samples(0).reward > 0, []
    for _ in range(2):
        scored = learner.score(samples(0))
        logps.append((scored.old_logp * scored.arrays.mask).sum(1))
        for rows in learner.updates:
            metrics = learner.update(scored, rows)
    assert int(learner.state.step) == 4
    first, later = (x[right].mean() - x[~right].mean() for x in logps)
    assert later > first + 0.1  # right answers are likelier than they were
    assert metrics["policy/ratio_dev_max"] > 0 and metrics["grad_norm"] > 0
    with pytest.raises(ValueError, match="rows 0:6 do not cover whole groups of 4 rows"):
        learner.update(scored, slice(0, 6))


def test_the_whole_rollout_trains_as_its_updates_one_by_one():
    config = evolve(CONFIG, rl={"epochs": 2})

    def learner():
        params = init_params(config.model, config.compute, jax.random.key(0))
        return Learner.start(config.learner, Transformer(config.model, config.compute), params)

    full, parts = learner(), learner()
    metrics = full.train(samples(0), [waste_of_dropped(5)])
    scored = parts.score(samples(0))
    losses = [parts.update(scored, rows)["loss"] for _ in range(2) for rows in parts.updates]
    jax.tree.map(np.testing.assert_array_equal, full.state, parts.state)
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert metrics["waste/tokens_generated"] == samples(0).mask.sum() + 5


def account(arrays, training_logp):
    """Returns the mismatch metrics of a rollout whose sampled tokens have the log-prob -3."""
    logp = np.where(arrays.mask, training_logp, 0.0).astype(np.float32)
    parts = score_account(
        Scored(arrays, None, logp, np.zeros_like(logp), None, NO_PLAN), counts_idle=False
    )
    metrics = {name: float(x) for name, x in finalize_diagnostics(parts).items()}
    return {name: x for name, x in metrics.items() if name.startswith("mismatch/")}


def test_the_mismatch_of_samples_of_earlier_steps_is_apart():
    arrays = samples(0)
    earlier = np.arange(16) % 4 >= 2
    logp = np.where(earlier[:, None], -4.0, -3.0)
    separate = account(dataclasses.replace(arrays, columns={EARLIER: earlier}), logp)
    assert separate["mismatch/kl_k3"] == separate["mismatch/extreme_frac"] == 0
    assert separate["mismatch/ess"] == 1 and separate["mismatch/logp_abs_diff"] == 0
    assert separate["mismatch/earlier/logp_abs_diff"] == pytest.approx(1)
    assert separate["mismatch/earlier/extreme_frac"] == 1
    together = account(arrays, logp)
    assert together["mismatch/extreme_frac"] > 0.3  # an alarm over a healthy rollout
    assert not any(name.startswith("mismatch/earlier") for name in together)
    # a fault of the other samples is not hidden by them, and a step without any logs neither
    faulty = account(
        dataclasses.replace(arrays, columns={EARLIER: earlier}),
        np.where(earlier[:, None], -3, -4),
    )
    assert faulty["mismatch/extreme_frac"] == 1 and faulty["mismatch/earlier/extreme_frac"] == 0
    fresh = account(dataclasses.replace(arrays, columns={EARLIER: np.zeros(16, bool)}), logp)
    assert fresh == together


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_trace_has_the_numbers_whose_means_the_metrics_are(epochs):
    """The trace has all rows. A row is in one update an epoch, and its ratio is that of the last
    epoch.
    """
    config = evolve(CONFIG, rl={"epochs": epochs})
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
    trace, arrays = TokenTrace(range(16)), samples(0)
    metrics = learner.train(arrays, trace=trace)
    mask, values = trace.mask, trace.values
    np.testing.assert_array_equal(mask, arrays.mask)
    assert values["entropy"][mask].mean() == pytest.approx(metrics["entropy_nats"], rel=1e-5)
    gap = np.abs(values["logp_diff"])[mask].mean()
    assert gap == pytest.approx(metrics["mismatch/logp_abs_diff"], rel=1e-5)
    np.testing.assert_allclose((values["logp"] - values["logp_diff"])[mask], -3.0, atol=1e-5)
    right = arrays.reward > 0
    assert (values["advantage"][right][mask[right]] > 0).all()
    assert (values["advantage"][~right][mask[~right]] < 0).all()
    if epochs == 1:
        assert (values["ratio"][:8] == 1).all()  # those of the first update
        deviation = np.abs(values["ratio"] - 1)[mask].max()
        assert deviation == pytest.approx(metrics["policy/ratio_dev_max"], rel=1e-4)
        clipped = values["clipped"][mask].mean()
        assert clipped == pytest.approx(metrics["policy/clip_frac"], abs=1e-6)
    else:
        assert np.abs(values["ratio"][:8] - 1)[mask[:8]].max() > 0.01
        # clipped: where the advantage pushes on beyond the range
        ratio, up = values["ratio"], values["advantage"] > 0
        out = np.where(up, ratio > 1.2, ratio < 0.8) & mask
        np.testing.assert_array_equal(values["clipped"] > 0, out)


def test_a_trace_of_some_rows_has_those_of_all_and_no_ratio_where_it_is_one():
    def traced(rows, **rl):
        config = evolve(CONFIG, rl={**rl})
        params = init_params(config.model, config.compute, jax.random.key(0))
        learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
        trace = TokenTrace(rows)
        metrics = learner.train(samples(0), trace=trace)
        return trace.values, {k: v for k, v in metrics.items() if "time" not in k and "/s" not in k}

    full, metrics = traced(range(16))
    some, some_metrics = traced([3, 9, 4])
    del metrics["train/tokens_per_s"], some_metrics["train/tokens_per_s"]
    assert metrics == some_metrics and set(some) == set(full) and "ratio" in some
    for name, values in some.items():
        np.testing.assert_array_equal(values, full[name][[3, 9, 4]])
    assert "ratio" not in traced(range(16), updates_per_rollout=1)[0]


@dataclasses.dataclass(frozen=True)
class ByBatchEntropy(Grpo):
    """A GRPO objective that groups tokens by the mean entropy of all responses."""

    combines_responses = True

    def groups(self, old_entropy, mask):
        mean = jnp.sum(jnp.where(mask, old_entropy, 0.0)) / jnp.sum(mask).astype(old_entropy.dtype)
        return jnp.where(mask, (old_entropy > mean).astype(jnp.int32), -1)

    def weights(self, inputs):
        return super().weights(inputs) * (1 + inputs.entropy_group.astype(inputs.dtype))


@dataclasses.dataclass(frozen=True)
class Undeclared(ByBatchEntropy):
    """The same, which says that it does not combine responses."""

    combines_responses = False


WITHOUT_ENTROPY = ZeroVarianceConfig(rl_zvp=False)  # groups of equal rewards have no gradient
SETTINGS = {
    "grpo": {},
    "espo-entropy": {"objective": Espo(), "zero_variance": ZeroVarianceConfig(rl_zvp=True)},
    "tis": {"correction": Tis()},
    "sequence": {"correction": SequenceMask()},
    "reference": {"objective": Grpo(kl_coef=0.1)},
    "balanced": {"objective": Grpo(router_aux_coef=0.1)},
    "R3": {"replay": "R3"},
    "two-epochs": {"epochs": 2},
    "one-update": {"updates_per_rollout": 1},
    "by-batch-entropy": {"objective": ByBatchEntropy()},
    "idle": {"zero_variance": WITHOUT_ENTROPY},
    "idle-by-batch-entropy": {
        "zero_variance": WITHOUT_ENTROPY,
        "objective": ByBatchEntropy(),
        "updates_per_rollout": 1,
    },
    "idle-R3-two-epochs": {"zero_variance": WITHOUT_ENTROPY, "replay": "R3", "epochs": 2},
    "predicted-R3": {"advantage": Predicted(), "zero_variance": WITHOUT_ENTROPY, "replay": "R3"},
    "shrunk-two-epochs": {"advantage": Shrunk(), "zero_variance": WITHOUT_ENTROPY, "epochs": 2},
}


def trained(monkeypatch, one_pass, change=None, rows=samples, **rl):
    """Returns a learner that has trained on two rollouts, its metrics, and the number of its
    forward passes.
    """
    config = evolve(CONFIG, rl={"micro_batch_tokens": 24, **rl})
    params = init_params(config.model, config.compute, jax.random.key(0))
    params = params if change is None else change(params)
    learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
    learner._fuses &= one_pass
    passes, real = [], step.forward_and_pullback

    def forward(*args):
        passes.append(args)
        return real(*args)

    monkeypatch.setattr(step, "forward_and_pullback", forward)
    metrics = [learner.train(rows(seed)) for seed in (0, 1)]
    monkeypatch.undo()
    untimed = [
        {k: v for k, v in m.items() if not k.startswith("time/") and "per_s" not in k}
        for m in metrics
    ]
    return learner, untimed, len(passes)


def recorded(seed):
    """Returns `samples` with two groups of equal rewards, with routes, some of them unset, and with
    predicted pass rates.
    """
    arrays = samples(seed)
    rng = np.random.default_rng(seed)
    routes = np.array(empty_routes(MODEL, 16, 12))
    experts = np.argsort(rng.random((*routes.shape[:-1], MODEL.mixture.experts)), axis=-1)
    routes[:, :7] = experts[:, :7, :, : routes.shape[-1]]
    reward = arrays.reward.copy()
    reward[:4], reward[8:12] = 0, 1
    predicted = np.repeat(np.array([0.1, 0.4, 0.8, 0.5], np.float32), 4)
    columns = {PREDICTED: predicted, CONCENTRATION: np.full(16, 3.0, np.float32)}
    columns[FIRST] = np.arange(16) % 4 < 2
    return dataclasses.replace(arrays, routes=jnp.asarray(routes), reward=reward, columns=columns)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_pass_of_the_first_update_scores_its_rows(monkeypatch, name):
    """The results are those of two passes bit for bit, with one forward pass less for each
    micro-batch of the update.
    """
    separate, expected, many = trained(monkeypatch, False, rows=recorded, **SETTINGS[name])
    joined, actual, few = trained(monkeypatch, True, rows=recorded, **SETTINGS[name])
    combines = "by-batch-entropy" in name
    assert actual == expected and joined._fuses != combines
    jax.tree.map(np.testing.assert_array_equal, joined.state, separate.state)
    np.testing.assert_array_equal(joined.advantage, separate.advantage)
    first = len(joined._unscored(recorded(0)).plan.updates[0].trained)
    assert first > 1 and many - few == (0 if combines else 2 * first)


def test_each_row_is_prepared_once_more_while_it_is_scored(monkeypatch):
    """The tokens that are prepared do not grow with the number of micro-batches: twice those of the
    first update, besides a third time in a run's first rollout, and once those of the second.
    """
    config = evolve(CONFIG, rl={"micro_batch_tokens": 24})
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
    rows, real = [], step.prepare
    monkeypatch.setattr(
        step, "prepare", lambda x, **options: rows.append(len(x.mask)) or real(x, **options)
    )
    learner.train(samples(0))
    assert rows == [2, 2, 2, 2, 8, 8, 8]
    rows.clear()
    learner.train(samples(1))
    assert rows == [2, 2, 2, 2, 8, 8]


def test_an_objective_that_combines_responses_and_says_otherwise_is_refused():
    """The first update of a run finds it, before the parameters change."""
    config = evolve(CONFIG, rl={"micro_batch_tokens": 24, "objective": Undeclared()})
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
    with pytest.raises(ConfigError, match=r"Undeclared.*combines_responses = False, and the"):
        learner.train(recorded(0))
    jax.tree.map(np.testing.assert_array_equal, learner.params, params)


@dataclasses.dataclass(frozen=True)
class Cautious(Grpo):
    """A GRPO objective that does not declare that its gradient needs an advantage."""

    needs_advantage = False


@pytest.mark.parametrize("settings", [{}, {"replay": "R2"}, {"packed_row_tokens": 24}], ids=str)
@pytest.mark.parametrize("one_pass", [True, False])
def test_groups_of_equal_rewards_have_no_backward_pass(monkeypatch, settings, one_pass):
    """The parameters are those of an update with a backward pass. Two of the four groups vary."""
    common = {"zero_variance": WITHOUT_ENTROPY, "updates_per_rollout": 1, **settings}
    common["optim"] = OptimConfig(name="optax:sgd", learning_rate=0.1)
    backward, pull = [], step.pull
    monkeypatch.setattr(step, "pull", lambda *args: backward.append(1) or pull(*args))
    results = []
    for objective in (Cautious(), Grpo()):
        backward.clear()
        config = evolve(CONFIG, rl={"micro_batch_tokens": 24, "objective": objective, **common})
        params = init_params(config.model, config.compute, jax.random.key(0))
        model = Transformer(config.model, config.compute)
        learner = Learner.start(config.learner, model, params)
        learner._fuses &= one_pass
        metrics = learner.train(recorded(0))
        results.append((learner.params, len(backward), metrics))
    (expected, every, before), (params, few, metrics) = results
    assert few <= every // 2 + 1 and few < every
    lengths = recorded(0).lengths
    assert metrics["train/idle_frac"] == pytest.approx(
        (lengths[:4].sum() + lengths[8:12].sum()) / lengths.sum()
    )
    assert "train/idle_frac" not in before
    assert metrics["loss"] == pytest.approx(before["loss"], abs=1e-7)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params, expected)
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), params, init_params(
        config.model, config.compute, jax.random.key(0)))  # fmt: skip
    assert max(jax.tree.leaves(moved)) > 1e-4


LAYOUTS = {  # settings, and those with which the parameters are the same
    "packed": ({"packed_row_tokens": 24}, {}),
    "R2": ({"replay": "R2", "updates_per_rollout": 1}, {"updates_per_rollout": 1}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("advantage", [Predicted(), Shrunk()], ids=lambda x: str(x.name))
def test_with_a_prediction_every_row_has_a_gradient_however_rows_are_laid_out(advantage, layout):
    """Two of the four groups have equal rewards. Each update is normalised over its own rewards."""
    common = {"advantage": advantage, "zero_variance": WITHOUT_ENTROPY, "micro_batch_tokens": 24}
    common["optim"] = OptimConfig(name="optax:sgd", learning_rate=0.1)
    learners = []
    for settings in LAYOUTS[layout]:
        config = evolve(CONFIG, rl={**common, **settings})
        params = init_params(config.model, config.compute, jax.random.key(0))
        learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
        scored, arrays = learner.score(recorded(0)), recorded(0)
        metrics = learner.train(arrays)
        assert metrics["train/idle_frac"] == 0 and not np.isclose(learner.advantage, 0).any()
        for entropy, values, mask in zip(
            learner.entropy, scored.old_entropy, arrays.mask, strict=True
        ):
            assert entropy == pytest.approx(values[mask].mean(), rel=1e-5)
        for rows in learner.updates:
            of_update = learner.advantage[rows]
            assert of_update.mean() == pytest.approx(0, abs=1e-6)
            assert of_update.std() == pytest.approx(1, abs=1e-3)
        shares = [metrics[f"waste/frac_{x}_signal"] for x in ("verifier", "prediction")]
        assert min(shares) > 0.4 and sum(shares) == pytest.approx(1)
        learners.append(learner)
    actual, expected = learners
    np.testing.assert_array_equal(actual.advantage, expected.advantage)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), actual.params, expected.params
    )


def test_most_rows_without_an_advantage_are_not_scored(monkeypatch):
    """One micro-batch of them, evenly spaced, and the traced rows are scored. The parameters are
    the same, and the metrics are those of the scored rows.
    """
    rl = {"zero_variance": WITHOUT_ENTROPY, "updates_per_rollout": 1, "micro_batch_tokens": 24}
    config, arrays = evolve(CONFIG, rl=rl), recorded(0)
    reward = arrays.reward.copy()
    reward[4:8] = 1  # of four groups one varies
    arrays = dataclasses.replace(arrays, reward=reward)
    params = init_params(config.model, config.compute, jax.random.key(0))

    def learner(reads_idle):
        result = Learner.start(config.learner, Transformer(config.model, config.compute), params)
        result._reads_idle = reads_idle
        return result

    passes, real = [], step.score
    monkeypatch.setattr(step, "score", lambda *a, **k: passes.append(1) or real(*a, **k))
    trace = TokenTrace([3, 15])
    few, every = learner(False), learner(True)
    metrics = few.train(arrays, trace=trace)
    assert len(passes) == 2
    expected = every.train(arrays)
    assert len(passes) == 2 + 6
    jax.tree.map(np.testing.assert_array_equal, few.state, every.state)
    full = learner(True).score(arrays)
    for name, values in (("entropy", full.old_entropy), ("logp", full.old_logp)):
        np.testing.assert_array_equal(trace.values[name], values[[3, 15]])
    entropy, mask = full.old_entropy.astype(np.float64), arrays.mask
    idle = np.array([*range(12)])
    scored = np.array([0, 3, 6])
    estimate = entropy[12:][mask[12:]].sum()
    estimate += entropy[scored][mask[scored]].sum() * mask[idle].sum() / mask[scored].sum()
    assert metrics["entropy_nats"] == pytest.approx(estimate / mask.sum(), rel=1e-5)
    rows = [*scored, 12, 13, 14, 15]
    gap = np.abs(full.old_logp - arrays.rollout_logp)[rows][mask[rows]].mean()
    assert metrics["mismatch/logp_abs_diff"] == pytest.approx(gap, rel=1e-5)
    assert expected["mismatch/logp_abs_diff"] != pytest.approx(gap, rel=1e-3)
    assert metrics["train/idle_frac"] == expected["train/idle_frac"]


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_idle_rows_fill_the_last_micro_batch_with_a_gradient(groups):
    """Micro-batches have 8 rows, or 4 or 2: no new shape has to be compiled."""
    config = evolve(
        CONFIG,
        rl={
            "zero_variance": WITHOUT_ENTROPY,
            "updates_per_rollout": 1,
            "micro_batch_tokens": 8 * 12,
        },
    )
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
    arrays = samples(0)
    reward = np.where(np.arange(16) < 4 * groups, arrays.reward, 0).astype(np.float32)
    scored = learner._unscored(dataclasses.replace(arrays, reward=reward), every=True)
    trained, idle = scored.plan.updates[0].trained, scored.plan.updates[0].idle
    assert [len(micro.rows) for micro in [*trained, *idle]] == [8, 8]
    assert len(trained) == (1 if groups < 3 else 2)
    rows = np.concatenate([micro.rows for micro in trained])
    assert set(range(4 * groups)) <= set(rows.tolist()) and np.all(rows >= 0)


def learner_with(**rl):
    config = evolve(CONFIG, rl=rl)
    params = init_params(config.model, config.compute, jax.random.key(0))
    return Learner.start(config.learner, Transformer(config.model, config.compute), params)


WRONG = np.zeros(16, np.float32)  # all rewards equal


def test_where_all_groups_are_equal_no_update_is_applied():
    """The gradient of each of the two updates is that of one micro-batch, and 0."""
    learner = learner_with(zero_variance=WITHOUT_ENTROPY, micro_batch_tokens=24)
    arrays = dataclasses.replace(samples(0), reward=WRONG)
    metrics = learner.train(arrays)
    assert learner.version == 0 and metrics["grad_norm"] == 0
    assert metrics["zero_gradient_updates"] == 2 and metrics["skipped_updates"] == 0
    trained = arrays.lengths[[0, 1, 8, 9]].sum()
    assert metrics["train/idle_frac"] == pytest.approx(1 - trained / arrays.lengths.sum())


def test_momentum_does_not_move_the_weights_where_no_group_has_an_advantage():
    optim = OptimConfig(learning_rate=0.01, weight_decay=0.1)
    learner = learner_with(zero_variance=WITHOUT_ENTROPY, optim=optim)
    assert learner.train(samples(0))["zero_gradient_updates"] == 0
    before = jax.device_get((learner.state.params, learner.version))
    assert learner.train(dataclasses.replace(samples(1), reward=WRONG))["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, (learner.state.params, learner.version), before)
    # one update of two has groups that vary
    half = np.where(np.arange(16) < 8, samples(2).reward, 0).astype(np.float32)
    metrics = learner.train(dataclasses.replace(samples(2), reward=half))
    assert metrics["zero_gradient_updates"] == 1 and learner.version == 3


@pytest.mark.parametrize("objective", [Grpo(kl_coef=0.1), Grpo(router_aux_coef=0.1)], ids=str)
def test_a_penalty_moves_the_weights_without_an_advantage(objective):
    learner = learner_with(zero_variance=WITHOUT_ENTROPY, objective=objective)
    learner.train(samples(0))
    metrics = learner.train(dataclasses.replace(samples(1), reward=WRONG))
    assert metrics["zero_gradient_updates"] == 0 and learner.version == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"zero_variance": ZeroVarianceConfig(rl_zvp=True)},
        {"objective": Grpo(kl_coef=0.1)},
        {"objective": Grpo(router_aux_coef=0.1)},
        {"objective": Cautious()},
    ],
    ids=str,
)
def test_rows_with_another_gradient_are_not_idle(changes):
    config = evolve(CONFIG, rl={"zero_variance": WITHOUT_ENTROPY, **changes})
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
    assert not learner._unscored(recorded(0)).plan.idle.any()


def test_a_response_without_finite_log_probs_is_left_out_in_one_pass_too(monkeypatch):
    """It changes the weights of the others in its update, so their gradient is computed again."""

    def change(params):
        return {**params, "embed": params["embed"].at[41].set(jnp.nan)}

    def rows(seed):
        arrays = samples(seed)
        arrays.tokens[5, 4] = 41
        return arrays

    separate, expected, _ = trained(monkeypatch, False, change, rows)
    joined, actual, _ = trained(monkeypatch, True, change, rows)
    assert joined._fuses and actual[0]["skipped_updates"] > 0
    np.testing.assert_equal(actual, expected)
    jax.tree.map(np.testing.assert_array_equal, joined.state, separate.state)


def test_progress_counts_the_micro_batches_of_scoring_and_of_every_update():
    config = evolve(CONFIG, rl={"epochs": 2})
    params = init_params(config.model, config.compute, jax.random.key(0))
    learner, calls = (
        Learner.start(config.learner, Transformer(config.model, config.compute), params),
        [],
    )
    learner.progress = lambda done, total: calls.append((done, total))
    arrays = samples(0)
    learner.train(arrays)
    first, second = (len(x.trained) for x in learner._unscored(arrays).plan.updates)
    count = 2 * first + 3 * second  # the first update scores its own rows
    assert calls == [(n, count) for n in range(1, count + 1)] and count > 3


def routes(length=12):
    """Returns routes in which row r, token t, layer l has the experts r and 10 t + l."""
    r, t, layer = np.meshgrid(np.arange(4), np.arange(length), np.arange(2), indexing="ij")
    return jnp.asarray(np.stack([r, 10 * t + layer], axis=-1).astype(np.uint8))


@pytest.mark.parametrize("length", [6, 10, 15])
def test_a_micro_batch_takes_rows_of_everything_alike_and_pads_with_nothing(length):
    """The rows are those of the second update (from row 2), in another order, with a padding row;
    they are shorter or longer than the routes.
    """
    rng = np.random.default_rng(0)
    arrays = samples(1, 4)
    local = {name: rng.random((2, 12)).astype(np.float32) for name in ("advantage", "weight")}
    prepared = Prepared(
        local["advantage"],
        local["weight"],
        arrays.mask[2:] & (np.arange(12) != 6),
        rng.integers(0, 3, (2, 12)).astype(np.int32),
    )
    old = rng.random((2, 4, 12)).astype(np.float32)
    scored = Scored(arrays, routes(), old[0], old[1], None, NO_PLAN)
    micro = MicroBatch(length, np.array([3, -1, 2]))
    inputs = sequences(arrays, micro, scored.routes)
    batch = update_batch(scored, micro, inputs, prepared, offset=2)

    def expected(rows, fill=0):
        wide = np.pad(rows, ((0, 0), (0, max(0, length - 12))), constant_values=fill)[:, :length]
        return np.stack([wide[0], np.full_like(wide[0], fill), wide[1]])

    for name, values in (("tokens", arrays.tokens), ("old_logp", old[0]), ("old_entropy", old[1])):
        np.testing.assert_array_equal(getattr(batch, name), expected(values[[3, 2]]), err_msg=name)
    for name in ("advantage", "weight", "mask", "entropy_group"):
        np.testing.assert_array_equal(
            getattr(batch, name),
            expected(np.asarray(getattr(prepared, name))[[1, 0]]),
            err_msg=name,
        )
    np.testing.assert_array_equal(batch.lengths, [arrays.lengths[3], 0, arrays.lengths[2]])
    padded_routes = np.asarray(routes())[[3, 2], :length]
    padded_routes = np.pad(
        padded_routes,
        ((0, 0), (0, length - padded_routes.shape[1]), (0, 0), (0, 0)),
        constant_values=UNSET,
    )
    np.testing.assert_array_equal(np.asarray(batch.routes)[[0, 2]], padded_routes)
    assert np.all(np.asarray(batch.routes)[1] == UNSET) and batch.ref_logp is None
    assert sequences(arrays, micro, None)[2] is None  # live


@pytest.mark.parametrize("length", [6, 15])
def test_recorded_routes_go_to_their_rows_and_padding_rows_nowhere(length):
    micro = MicroBatch(length, np.array([2, -1, 0]))
    new = np.random.default_rng(0).integers(100, 200, (3, length, 2, 2)).astype(np.uint8)
    after = np.asarray(put_routes(routes(), device_rows(micro, routes()), jnp.asarray(new)))
    expected, width = np.array(routes()), min(length, 12)
    expected[2, :width], expected[0, :width] = new[0, :width], new[2, :width]
    np.testing.assert_array_equal(after, expected)


def test_settings_that_no_update_needs_compile_nothing_again():
    def train(**changes):
        config = dataclasses.replace(
            evolve(CONFIG, rl=changes), log=LogConfig(groups=changes.get("steps", 4))
        )
        params = init_params(config.model, config.compute, jax.random.key(0))
        learner = Learner.start(config.learner, Transformer(config.model, config.compute), params)
        learner.train(samples(0))
        programs = (step._objective_gradient, step.prepare, step.forward_and_pullback)
        return [program._cache_size() for program in programs]

    compiled = train()
    assert train(save_every=7, eval_every=3, steps=55, partial_prompts=1) == compiled
    assert train(objective=Grpo(clip_high=0.3)) != compiled


def test_a_projection_has_its_own_settings_only():
    rl = RLConfig(group_size=16, zero_variance=ZeroVarianceConfig(rl_zvp_alpha=0.3, grow_to=64))
    assert rl.algorithm == AlgorithmConfig(zero_variance=RLZVPConfig(rl_zvp_alpha=0.3))
    assert rl.sampling.capacity == rl.capacity == 64
    assert type(rl.sampling.zero_variance) is ResamplingConfig
    assert hash(rl.algorithm) == hash(dataclasses.replace(rl, save_every=9, steps=7).algorithm)


def test_a_learner_refuses_updates_of_unequal_numbers_of_groups():
    config = LearnerConfig(updates=UpdatesConfig(updates_per_rollout=3))
    with pytest.raises(ConfigError, match="16 is not a multiple"):
        Learner.start(config, Transformer(MODEL, COMPUTE), None)
    low = LearnerConfig(updates=UpdatesConfig(epochs=0))
    with pytest.raises(ConfigError, match=r"updates\.epochs = 0: must be positive"):
        Learner.start(low, Transformer(MODEL, COMPUTE), None)
