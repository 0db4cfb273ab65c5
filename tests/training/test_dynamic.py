"""Dynamic sampling, and screening in rounds: rounds until enough groups vary, and the count of the
dropped tokens.
"""

import dataclasses

import numpy as np
import pytest
from logged import lines
from variants import DYNAMIC

from compass_jax.config import ConfigError, ZeroVarianceConfig


def test_dynamic_sampling_and_rl_zvp_exclude_each_other():
    with pytest.raises(
        ConfigError, match=r"dynamic_sampling drops the uniform groups that rl_zvp learns from"
    ):
        ZeroVarianceConfig(rl_zvp=True, dynamic_sampling=True).validate()
    with pytest.raises(ConfigError, match=r"dynamic_rounds = 0: must be positive"):
        dataclasses.replace(DYNAMIC, dynamic_rounds=0).validate()


@pytest.mark.parametrize(("variant", "drawn"), [("dynamic", 8), ("rounds", 4)])
def test_a_run_trains_on_groups_that_vary_and_counts_every_token(undisturbed, variant, drawn):
    """`drawn` is the number of prompts of a round; screening has groups of two sizes."""
    directory, rounds = undisturbed(variant)[0], []
    for row in lines(directory, "metrics"):
        m, groups = (
            row["metrics"],
            [g for g in lines(directory, "rollouts") if g["step"] == row["step"]],
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
        shares = ("verifier_signal", "shaping_signal", "entropy_signal", "none")
        assert sum(m[f"waste/frac_{name}"] for name in shares) == pytest.approx(1, rel=1e-6)
        all_groups = drawn * m["zero_variance/dynamic_rounds"]
        assert m["zero_variance/dynamic_dropped_groups"] == all_groups - 4
        assert m["policy/ratio_dev_max"] == 0  # the moved routes are those of the samples
        assert m["replay/unset_frac"] == 0 and m["mismatch/logp_abs_diff"] < 1e-5
        rounds.append(m["zero_variance/dynamic_rounds"])
    assert max(rounds) > 1  # otherwise no group was sampled in a second round
