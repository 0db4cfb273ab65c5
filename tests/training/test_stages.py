"""All stages of the zero-variance elimination in tiny runs: uniform groups grow, and the tokens
that this costs are counted.
"""

import numpy as np
import pytest
import variants
from logged import lines

from compass_jax.base.records import Score
from compass_jax.experience.growth import is_uniform


def configured(directory, **rl):
    """Returns the configuration of a run in which uniform groups grow."""
    return variants.configured("growing", directory, **rl)


@pytest.fixture(scope="module")
def grown(undisturbed):
    """Returns the directory of a run in which groups grow."""
    return undisturbed("growing")[0]


def test_uniform_is_judged_on_known_rewards():
    right, timeout = Score(1.0, True), Score(0.0, False)
    assert (
        is_uniform([right, right, timeout])
        and not is_uniform([right, timeout])
        and not is_uniform([right, Score(0.0, True)])
    )


def test_groups_that_are_uniform_grow_until_they_vary_and_the_others_do_not(grown):
    """Groups grow from 4 to 8 and to 12 samples; a size below 12 is the first at which the group
    varied.
    """
    groups, rows = lines(grown, "rollouts"), lines(grown, "metrics")
    sizes = [len(g["samples"]) for g in groups]
    assert set(sizes) <= {4, 8, 12} and len(set(sizes)) > 1 and max(sizes) > 4
    for group, size in zip(groups, sizes, strict=True):
        rewards = [s["reward"] for s in group["samples"]]
        before = {4: None, 8: 4, 12: 8}[size]
        assert size == 12 or np.ptp(rewards) > 0
        assert before is None or np.ptp(rewards[:before]) == 0
    for row in rows:
        step_groups, m = [g for g in groups if g["step"] == row["step"]], row["metrics"]
        larger = [g for g in step_groups if len(g["samples"]) > 4]
        assert m["zero_variance/grown_groups"] == len(larger)
        assert m["zero_variance/grow_rescued_groups"] == sum(
            np.ptp([s["reward"] for s in g["samples"]]) > 0 for g in larger
        )
        assert m["zero_variance/grow_tokens"] == sum(
            s["tokens"] for g in larger for s in g["samples"][4:]
        )
        assert m["waste/tokens_generated"] == sum(
            s["tokens"] for g in step_groups for s in g["samples"]
        )
        assert sum(
            m[f"waste/frac_{k}"]
            for k in ("verifier_signal", "shaping_signal", "entropy_signal", "none")
        ) == pytest.approx(1)
        assert (
            m["policy/ratio_dev_max"] == 0
            and m["advantage/inversion_frac"] == 0
            and 0 <= m["repetition_frac"] < 1
        )
        assert (
            m["correction/weight_mean"] == pytest.approx(1, abs=1e-5)
            and m["correction/dropped_frac"] == 0
        )
