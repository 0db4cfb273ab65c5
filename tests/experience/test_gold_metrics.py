"""Inverted pairs by label: the same pairs as in the overall share, each counted for its label."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from tiny import make_prompt

from compass_jax.base.records import GOLD, Group, StepArrays
from compass_jax.experience.metrics import label_inversion
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.prepare import Prepared
from compass_jax.rl.shaping import inversion


def test_the_shares_by_label_add_up_to_the_share_of_all():
    rng = np.random.default_rng(0)
    b, labels = 36, ("a", "b", "a", "c", "c", "d")
    group = np.repeat(np.arange(6, dtype=np.int32), 6)
    gold = rng.integers(0, 3, b).astype(np.float32)
    gold[[1, 7]], gold[30:] = np.nan, 1.0
    mask = np.arange(5) < rng.integers(1, 6, (b, 1))
    mask[2] = False
    advantage = rng.normal(size=(b, 5)).astype(np.float32)
    prepared = Prepared(np.where(mask, advantage, 7.0), mask * 1.0, mask, None)
    arrays = StepArrays(*(None,) * 7, group, columns={GOLD: gold})
    groups = [
        Group(dataclasses.replace(make_prompt(i, 3), label=label), (), ())
        for i, label in enumerate(labels)
    ]
    mean = prepared.of_responses()
    assert np.isnan(mean[~mask.any(1)]).all()
    metrics = label_inversion(groups, arrays, mean)
    expected, wrong, pairs = {}, 0, 0
    for label in "abc":
        inverted = [
            (gold[i] - gold[j]) * (advantage[i][mask[i]].mean() - advantage[j][mask[j]].mean()) < 0
            for i in range(b)
            for j in range(i)
            if group[i] == group[j] and labels[group[i]] == label and gold[i] != gold[j]
            if np.isfinite(gold[[i, j]]).all() and mask[i].any() and mask[j].any()
        ]
        expected[f"advantage/{label}/inversion_frac"] = np.mean(inverted)
        wrong, pairs = wrong + sum(inverted), pairs + len(inverted)
    assert metrics == pytest.approx(expected), "d's answers are worth the same: it has no pair"
    filled, known = np.nan_to_num(gold), np.isfinite(gold)
    together = inversion(*map(jnp.asarray, (filled, known, prepared.advantage, mask, group)))
    share = finalize_diagnostics(together)["advantage/inversion_frac"]
    assert float(share) == pytest.approx(wrong / pairs) and pairs > 10 > 0 < wrong
    assert label_inversion(groups, dataclasses.replace(arrays, columns={}), mean) == {}
