"""Updates with replayed groups: their gradient against a float64 reference, the account of a step
by hand, and complete runs.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from logged import lines, numbers
from replaying import GroupReplay
from test_learner import CONFIG, recorded, samples
from test_step import F64
from tiny_run import tiny_run
from variants import VERIFIED
from worded import override

from compass_jax.base.records import EARLIER, Outcome
from compass_jax.commands.settings import settings
from compass_jax.config import (
    ConfigError,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.rl.advantages.predicted import Predicted
from compass_jax.rl.advantages.rloo import Rloo
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.corrections.tis import Tis
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.zero_variance import waste_of_dropped, waste_of_replaced
from compass_jax.runs.metric_table import metric_help
from compass_jax.training import step
from compass_jax.training.learner import Learner

STALE = np.repeat([False, True, False, True], 4)  # groups 1 and 3 are replayed
WHOLE = slice(0, 16)


def replayed(seed=0):
    """Returns `recorded` samples in which groups 1 and 3, which vary, come from earlier steps:
    their behaviour log-probs are of other policies, and the routes of group 1 are live.
    """
    arrays, rng = recorded(seed), np.random.default_rng([seed, 5])
    behaviour = np.where(STALE[:, None], -4 + rng.normal(0, 0.7, arrays.mask.shape), -3.0)
    routes = arrays.routes.at[4:8].set(255)
    return dataclasses.replace(
        arrays,
        rollout_logp=np.where(arrays.mask, behaviour, 0.0).astype(np.float32),
        routes=routes,
        columns={**arrays.columns, EARLIER: STALE},
    )


def learner_of(config=CONFIG, **rl):
    rl = {"correction": Tis(), "zero_variance": VERIFIED, "updates_per_rollout": 1} | rl
    config = evolve(config, rl=rl)
    params = init_params(config.model, config.compute, jax.random.key(0))
    return Learner.start(config.learner, Transformer(config.model, config.compute), params)


def decoupled(arrays, logp, old_logp):
    """Returns the derivative of GRPO's decoupled objective with respect to each token's log-prob
    (arXiv 2505.24298): per token min(r A, clip(r) A) with r = pi / pi_old, times the truncated
    weight min(pi_old / behaviour, 2), averaged over a response's tokens, the responses and the
    groups.
    """
    out = np.zeros(logp.shape)
    for g in range(4):
        rows = np.flatnonzero(arrays.group == g)
        reward = arrays.reward[rows].astype(np.float64)
        advantages = (reward - reward.mean()) / (reward.std() + 1e-6)
        for row, advantage in zip(rows, advantages, strict=True):
            tokens = np.flatnonzero(arrays.mask[row])
            for t in tokens:
                ratio = np.exp(logp[row, t] - old_logp[row, t])
                clipped = ratio > 1.2 if advantage > 0 else ratio < 0.8
                weight = min(np.exp(old_logp[row, t] - arrays.rollout_logp[row, t]), 2.0)
                share = 4 * len(rows) * len(tokens)
                out[row, t] = 0.0 if clipped else weight * ratio * advantage / share
    return out


def expected_gradient(learner, params, arrays, old_logp):
    """Returns (gradient of minus the decoupled objective at `params`, log-probs at `params`)."""
    tokens, lengths = jnp.asarray(arrays.tokens), jnp.asarray(arrays.lengths)

    def logp_of(params):
        return step.forward(learner.model, params, tokens, lengths, arrays.routes, 1.0)[0]

    logp, pull = jax.vjp(logp_of, params)
    logp = np.asarray(logp)
    cotangent = decoupled(arrays, logp, logp if old_logp is None else old_logp)
    return pull(jnp.asarray(-cotangent))[0], logp


def test_the_gradient_is_that_of_the_decoupled_objective(x64, monkeypatch):
    """The test compares, in float64, the first update, whose passes score the rows, too, and a
    second one on the same rows, in which ratios differ from one.
    """
    learner, updates = learner_of(evolve(CONFIG, compute=F64), replay="R3"), []
    arrays = replayed()
    for name in ("rollout_logp", "reward", "repetition"):
        setattr(arrays, name, getattr(arrays, name).astype(np.float64))
    take = learner.apply

    def record_take(grads):
        updates.append((grads, jax.tree.map(jnp.copy, learner.params)))
        return take(grads)

    monkeypatch.setattr(learner, "apply", record_take)
    first = learner._unscored(arrays)
    joined, _ = learner._first_gradient(learner._passes(first), [])
    scored = learner.score(arrays)
    np.testing.assert_array_equal(first.old_logp, scored.old_logp)
    for _ in range(2):
        metrics = learner.update(scored, WHOLE)
    assert metrics["policy/ratio_dev_max"] > 0.2 and 0 < metrics["policy/clip_frac"] < 1
    weights = np.exp(scored.old_logp - arrays.rollout_logp)[arrays.mask & STALE[:, None]]
    assert weights.min() < 0.7 and weights.max() > 2  # some are truncated
    old_logp = None
    for grads, params in updates:
        expected, logp = expected_gradient(learner, params, arrays, old_logp)
        old_logp = logp if old_logp is None else old_logp
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), grads, expected
        )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), joined, updates[0][0]
    )


def test_a_replayed_row_is_trained_on_and_generates_nothing():
    """The step has three sampled groups, one replayed group, one replaced group (all wrong, 30
    tokens), and 5 tokens of dropped groups.
    """
    arrays, flags = samples(0), np.repeat([False, False, True, False], 4)
    marked = dataclasses.replace(arrays, columns={EARLIER: flags})
    learner, unmarked = learner_of(replay="off"), learner_of(replay="off")
    replaced = [Outcome(4, 0.0, 30, "hard", 4)]
    metrics = learner.train(marked, [waste_of_dropped(5), waste_of_replaced(replaced)])
    plain = unmarked.train(arrays)
    sampled = arrays.mask[~flags].sum()
    assert metrics["waste/tokens_generated"] == sampled + 35
    assert metrics["waste/frac_verifier_signal"] == pytest.approx(sampled / (sampled + 35))
    assert metrics["waste/frac_none"] == pytest.approx(35 / (sampled + 35))
    assert metrics["zero_variance/rate_all_wrong"] == 0.25
    assert metrics["zero_variance/rate_all_right"] == 0
    jax.tree.map(np.testing.assert_array_equal, learner.state, unmarked.state)
    replayed_names = {name for name in metrics if name.startswith("mismatch/earlier/")}
    assert {name.rpartition("/")[2] for name in replayed_names} == {
        "logp_abs_diff",
        "kl_k3",
        "extreme_frac",
        "ess",
    }
    gaps = np.array([metrics[f"mismatch/{part}logp_abs_diff"] for part in ("", "earlier/")])
    counts = np.array([sampled, arrays.mask[flags].sum()])
    mean = (gaps * counts).sum() / counts.sum()
    assert mean == pytest.approx(plain["mismatch/logp_abs_diff"], rel=1e-5)


OBJECTIVES = {
    "grpo": {},
    "dapo": {"objective": dapo_surrogate()},
    "dr_grpo": {"objective": dr_grpo()},
    "gspo": {"objective": Gspo()},
    "cispo": {"objective": Cispo()},
    "espo": {"objective": Espo()},
    "reference": {"objective": Grpo(kl_coef=0.1)},
    "rloo": {"advantage": Rloo()},
    "predicted": {"advantage": Predicted()},
    "shrunk": {"advantage": Shrunk()},
    "icepop": {"correction": named_correction("icepop")},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_trains_on_replayed_rows(name):
    learner = learner_of(replay="R3", updates_per_rollout=2, **OBJECTIVES[name])
    before = jax.tree.map(np.asarray, learner.params)
    for seed in range(2):
        metrics = learner.train(replayed(seed))
        assert all(np.isfinite(x) for x in metrics.values()) and metrics["grad_norm"] > 0
    after = jax.tree.map(np.asarray, learner.params)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after))
    unchanged = jax.tree.map(np.array_equal, before, after)
    assert not all(jax.tree.leaves(unchanged)) and int(learner.state.step) == 4


def test_a_run_replays_groups_and_counts_the_tokens_that_it_sampled(undisturbed):
    directory, _ = undisturbed("replay")
    rows, groups = numbers(directory), lines(directory, "rollouts")
    assert all(metric_help(x) or x.startswith("group_replay/") for row in rows for x in row)
    assert rows[0]["earlier/groups"] == 0
    assert sum(row["earlier/groups"] for row in rows) >= 3
    traced = {(row["step"], row["group"]) for row in lines(directory, "tokens")}
    for step_number, row in enumerate(rows, 1):
        sampled = [x for x in groups if x["step"] == step_number]
        rewards = [{sample["reward"] for sample in x["samples"]} for x in sampled]
        tokens = sum(sample["tokens"] for x in sampled for sample in x["samples"])
        uniform = sum(len(of_group) == 1 for of_group in rewards)
        assert len(sampled) == 4 and row["waste/tokens_generated"] == tokens
        assert row["earlier/groups"] + row["group_replay/unfilled_groups"] == uniform
        assert row["zero_variance/rate_all_wrong"] == rewards.count({0.0}) / 4
        assert sum(of_step == step_number for of_step, _ in traced) == 4 - row["earlier/groups"]
        if row["earlier/groups"]:
            assert row["staleness_max"] >= row["group_replay/age"] >= 1
            assert row["mismatch/earlier/logp_abs_diff"] > 1e-4 > row["mismatch/logp_abs_diff"]
            # the log-probs of young groups are of their recorded routes, those of others live
            assert (row["replay/unset_frac"] > 0) == (row["staleness_max"] > 1)


@pytest.mark.slow
def test_tokens_that_drafts_gave_are_no_tokens_of_a_replaced_group(undisturbed):
    directory, _ = undisturbed("replay, drafts")
    rows, groups = numbers(directory), lines(directory, "rollouts")
    assert any(row["waste/tokens_drafted"] and row["earlier/groups"] for row in rows)
    for step_number, row in enumerate(rows, 1):
        samples = [x for one in groups if one["step"] == step_number for x in one["samples"]]
        sampled = sum(x["tokens"] for x in samples) - row["waste/tokens_drafted"]
        assert row["waste/tokens_generated"] == sampled


def test_all_groups_are_routed_live_where_no_routes_are_kept(undisturbed):
    rows = numbers(undisturbed("replay, live")[0])
    unset = [row["replay/unset_frac"] for row in rows]
    assert [x > 0 for x in unset] == [row["earlier/groups"] > 0 for row in rows]


def test_the_hook_is_named_on_the_command_line_by_its_file():
    name = GroupReplay(groups=8).name
    for words, groups in (([name], 16), ([json.dumps([{"name": name, "groups": 8}])], 8)):
        config = override(tiny_run(), ["--rl.correction", "tis", "--rl.hooks", *words])
        assert config.rl.hooks == (GroupReplay(groups=groups),)
        shown = {setting.key: setting.value for setting in settings(config)}  # by --dry-run
        assert shown["rl.hooks.0"] == name and shown["rl.hooks.0.groups"] == groups
    assert "rl.hooks" in {setting.key for setting in settings(tiny_run())}
    with pytest.raises(ConfigError, match=r"rl\.hooks"):
        override(tiny_run(), ["--rl.hooks", "[{"])


REFUSED = {
    "no correction": (
        {"correction": named_correction("off")},
        r"GroupReplay trains on tokens that older weights sampled: set rl\.corr",
    ),
    "rl_zvp": (
        {"zero_variance": ZeroVarianceConfig(rl_zvp=True)},
        r"GroupReplay replaces the uniform groups that rl\.zero_variance\.rl_zvp",
    ),
    "prediction": (
        {"advantage": Shrunk(), "zero_variance": ZeroVarianceConfig(posterior=True)},
        r"GroupReplay replaces the uniform groups that rl\.advantage\.name = 'shrunk' learns from",
    ),
    "too young": (
        {"updates_per_rollout": 4},
        r"max_age = 3: a step has 4 updates, so that no held group is younger than 4; raise it",
    ),
    "one step off": (
        {"one_step_off": True, "hooks": (GroupReplay(groups=8, max_age=1),)},
        r"max_age = 1: a step has 1 update, so that no held group is younger than 2",
    ),
    "routes too young": (
        {
            "updates_per_rollout": 2,
            "hooks": (GroupReplay(groups=4, max_age=4, max_route_age=1),),
        },
        r"max_route_age = 1: a step has 2 updates, so that no held group is younger than 2",
    ),
    "too many": (
        {"hooks": (GroupReplay(groups=13, max_age=3),)},
        r"groups = 13: only the groups of 3 steps, 12, are young enough for max_age = 3",
    ),
    "no routes": (
        {"replay": "R2", "hooks": (GroupReplay(groups=8, max_age=3, max_route_age=1),)},
        r"max_route_age = 1: with rl\.replay = 'R2' the rollout records no routes; set it to 0",
    ),
    "older routes": (
        {"hooks": (GroupReplay(groups=8, max_age=3, max_route_age=4),)},
        r"max_route_age = 4 exceeds max_age = 3",
    ),
    "zero": ({"hooks": (GroupReplay(groups=8, max_age=0),)}, "max_age = 0: must be posi"),
    "negative": ({"hooks": (GroupReplay(groups=-1),)}, "groups = -1: must be positive"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_cannot_act_are_refused(name):
    changes, message = REFUSED[name]
    settings = {
        "hooks": (GroupReplay(groups=8, max_age=3),),
        "zero_variance": VERIFIED,
        "correction": named_correction("tis"),
    }
    assert evolve(tiny_run().rl, **settings).validate()
    with pytest.raises(ConfigError, match=message):
        evolve(tiny_run().rl, **(settings | changes)).validate()
