"""Dynamic sampling: rounds until enough groups vary, what is dropped is counted and remembered, a
stop in any round loses nothing.
"""

import dataclasses

import numpy as np
import pytest
from logged import lines, numbers
from stops import stop_at_sample
from tiny_run import tiny_run

from compass_jax.config import ConfigError, ZeroVarianceConfig
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint

DYNAMIC = ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True, dynamic_batch=2, dynamic_rounds=3)


def test_dynamic_sampling_and_rl_zvp_exclude_each_other():
    with pytest.raises(
        ConfigError, match=r"dynamic_sampling drops the uniform groups that rl_zvp learns from"
    ):
        ZeroVarianceConfig(dynamic_sampling=True).validate()
    with pytest.raises(ConfigError, match=r"dynamic_rounds = 0: must be positive"):
        dataclasses.replace(DYNAMIC, dynamic_rounds=0).validate()


# ---- real runs -----------------------------------------------------------------------------------


def configured(directory):
    config = tiny_run("odd_verifiers:seldom")
    zero = dataclasses.replace(DYNAMIC, dynamic_batch=2, dynamic_rounds=4)
    rl = dataclasses.replace(config.rl, group_size=2, prompts_per_step=4, zero_variance=zero)
    return dataclasses.replace(
        config, run_dir=str(directory), rl=rl, data=dataclasses.replace(config.data, eval_prompts=0)
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dynamic")
    run_rl(configured(directory))
    return directory


def test_a_run_trains_on_groups_that_vary_and_counts_every_token(undisturbed):
    rounds = []
    for row in lines(undisturbed, "metrics"):
        m, groups = (
            row["metrics"],
            [g for g in lines(undisturbed, "rollouts") if g["step"] == row["step"]],
        )
        filled = m.get("zero_variance/dynamic_filled_groups", 0)
        assert sum(np.ptp([s["reward"] for s in g["samples"]]) > 0 for g in groups) == 4 - filled
        trained = sum(s["tokens"] for g in groups for s in g["samples"])
        dropped = m["zero_variance/dynamic_dropped_tokens"]
        assert m["waste/tokens_generated"] == trained + dropped and dropped > 0
        uniform = sum(
            s["tokens"]
            for g in groups
            for s in g["samples"]
            if np.ptp([x["reward"] for x in g["samples"]]) == 0
        )
        assert m["waste/frac_none"] == pytest.approx(
            (dropped + uniform) / (trained + dropped), rel=1e-6
        )
        assert (
            m["zero_variance/dynamic_dropped_groups"] == 8 * m["zero_variance/dynamic_rounds"] - 4
        )
        assert m["policy/ratio_dev_max"] == 0  # the routes that moved are those of the samples
        assert m["replay/unset_frac"] == 0 and m["mismatch/logp_abs_diff"] < 1e-5
        rounds.append(m["zero_variance/dynamic_rounds"])
    assert max(rounds) > 1  # or the test would not show what it says


@pytest.mark.parametrize("sample", [3, 36])
def test_sigterm_in_a_round_loses_nothing(undisturbed, tmp_path, monkeypatch, sample):
    """At the given sample of the run: in the first round (16 samples, which fill the first step),
    and in the second step's second one, when groups were kept and dropped."""
    stop_at_sample(monkeypatch, sample)
    assert run_rl(configured(tmp_path))["stopped"]
    pending = checkpoint.read_meta(tmp_path)["pending"]
    rounds = len(pending["prompts"]) // 8 - 1  # finished ones
    assert rounds == (sample > 16)
    assert len(pending["dropped"]) + len(pending["kept"]) == 8 * rounds
    assert not run_rl(configured(tmp_path))["stopped"]
    assert lines(tmp_path, "rollouts") == lines(undisturbed, "rollouts")
    for mine, theirs in zip(numbers(tmp_path), numbers(undisturbed), strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-7, err_msg=name)
