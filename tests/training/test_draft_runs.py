"""Runs with drafts over two passes: the samples of the second pass, and the count of its tokens."""

import dataclasses

import numpy as np
import pytest
from evolve import with_size
from logged import lines, numbers
from replaying import GroupReplay
from tiny_run import tiny_run

from compass_jax.config import ZeroVarianceConfig, named_correction
from compass_jax.rollout.drafts import Coupled, Lenient
from compass_jax.training.rl import run_rl

STILL = 1e-12  # a learning rate that does not change the weights


def two_passes(directory, learning_rate, **rl):
    """Runs four steps of four prompts, over eight prompts; returns metrics and groups by step."""
    config = tiny_run("odd_verifiers:coin")
    optim = dataclasses.replace(config.rl.optim, learning_rate=learning_rate)
    rl = dataclasses.replace(config.rl, steps=4, save_every=0, optim=optim, **rl)
    data = dataclasses.replace(with_size(config.data, 8), eval_prompts=0, heldout_frac=0.0)
    run_rl(dataclasses.replace(config, run_dir=str(directory), data=data, rl=rl))
    groups = {step: [] for step in range(1, 5)}
    for row in lines(directory, "rollouts"):
        groups[row["step"]].append(row)
    return numbers(directory), groups


def counted(groups):
    """Returns the tokens of a step's answers, and those that drafts gave."""
    samples = [x for group in groups for x in group["samples"]]
    return sum(x["tokens"] for x in samples), sum(x.get("drafted", 0) for x in samples)


@pytest.mark.parametrize("drafts", [Coupled(), Lenient()], ids=["coupled", "lenient"])
def test_where_the_policy_stands_still_the_second_pass_samples_nothing(tmp_path, drafts):
    metrics, groups = two_passes(tmp_path, STILL, drafts=drafts)
    for step, m in enumerate(metrics, 1):
        tokens, drafted = counted(groups[step])
        assert m["waste/tokens_drafted"] == drafted == (tokens if step > 2 else 0)
        assert m["waste/tokens_generated"] == tokens - drafted
        assert m["drafts/used"] == (16 if step > 2 else 0)
        assert m["mismatch/logp_abs_diff"] < 1e-5 and m["replay/unset_frac"] == 0
    assert [m["drafts/accepted_frac"] for m in metrics] == [0, 0, 1, 1]
    answers = [
        {row["prompt"]: [x["response"] for x in row["samples"]] for n in steps for row in groups[n]}
        for steps in ((1, 2), (3, 4))
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 8


@pytest.mark.parametrize(
    ("drafts", "rate"), [(Coupled(), 3e-4), (Lenient(), 1e-2)], ids=["coupled", "lenient"]
)
def test_where_the_policy_moves_the_second_pass_samples_less(tmp_path, drafts, rate):
    metrics, groups = two_passes(tmp_path, rate, drafts=drafts)
    for step, m in enumerate(metrics, 1):
        tokens, drafted = counted(groups[step])
        assert (m["waste/tokens_generated"], m["waste/tokens_drafted"]) == (
            tokens - drafted,
            drafted,
        )
        shares = [m[f"waste/frac_{x}_signal"] for x in ("verifier", "shaping", "entropy")]
        assert sum(shares) + m["waste/frac_none"] == pytest.approx(1)
        assert m["mismatch/logp_abs_diff"] < 1e-5 and m["staleness"] == 0
    sampled = [m["waste/tokens_generated"] for m in metrics]
    assert 0 < sum(sampled[2:]) < 0.6 * sum(sampled[:2])
    assert 0 < np.mean([m["drafts/accepted_frac"] for m in metrics[2:]]) < 1


TIS, UNIFORM = named_correction("tis"), ZeroVarianceConfig(rl_zvp=False)
GROWTH = ZeroVarianceConfig(rl_zvp=True, grow_to=8)
SETTINGS = {
    "replay": {
        "group_size": 2,
        "correction": TIS,
        "zero_variance": UNIFORM,
        "hooks": (GroupReplay(groups=4, max_age=4),),
    },
    "growth": {"group_size": 2, "zero_variance": GROWTH},
    "packed rows": {"packed_row_tokens": 112},
}


@pytest.mark.parametrize(
    "name", ["replay", *(pytest.param(x, marks=pytest.mark.slow) for x in list(SETTINGS)[1:])]
)
def test_the_account_is_of_sampled_tokens_with_other_settings_too(tmp_path, name):
    metrics, groups = two_passes(tmp_path, 1e-2, drafts=Coupled(), **SETTINGS[name])
    for step, m in enumerate(metrics, 1):
        tokens, drafted = counted(groups[step])
        assert m["waste/tokens_generated"] == tokens - drafted
        assert m["waste/tokens_drafted"] == drafted and (drafted > 0) == (step > 2)
    if name == "replay":
        assert sum(m["earlier/groups"] for m in metrics) > 0
    if name == "growth":
        assert sum(m["zero_variance/grow_tokens"] for m in metrics[2:]) > 0
