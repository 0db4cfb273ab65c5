"""Partial rollouts: samples that are unfinished at the end of a step continue in the next one. None
is lost or repeated, and every token keeps the version of its policy.
"""

from typing import NamedTuple

import numpy as np
import pytest
import variants
from logged import lines
from variants import limit_lengths

from compass_jax.config import ConfigError, ZeroVarianceConfig, named_correction
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.training.rl import run_rl

# a learning rate that does not change the weights, so that samples depend on their keys alone
STILL = 1e-12


@pytest.fixture(autouse=True)
def limited_lengths(monkeypatch):
    limit_lengths(monkeypatch)


def configured(directory, learning_rate=1e-2, **rl):
    """Returns the configuration of a run with partial rollouts."""
    return variants.configured("partial", directory, learning_rate, **rl)


def groups(directory):
    """Returns the logged groups as (question, its samples' texts and rewards), sorted."""
    return sorted(
        (row["prompt"], str([(s["response"], s["reward"]) for s in row["samples"]]))
        for row in lines(directory, "rollouts")
    )


class StepSnapshot(NamedTuple):
    """The groups that a step takes from the buffer, with their routes on the host, and the samples
    that stay in the buffer.
    """

    groups: list
    routes: np.ndarray
    prompts: list  # those in flight in the next step
    done: list
    paused: dict  # key -> (rollout, routes)


def watched(monkeypatch):
    """Returns a list to which each step will append a snapshot."""
    real, out = ExperienceBuffer.step_groups, []

    def step_groups(self):
        groups = real(self)
        routes = self.routes_of(groups)
        # on the device the next rollout will overwrite them
        rows = None if self.routes.rows is None else np.array(self.routes.rows)
        samples = [x for group in self.open for x in self.samples_of(group)]
        done = [x.rollout for x in samples if x.done]
        paused = {
            x.rollout.key: (x.rollout, None if rows is None else rows[x.rollout.row])
            for x in samples
            if not x.done
        }
        host_routes = None if routes is None else np.array(routes)
        out.append(StepSnapshot(groups, host_routes, self.open, done, paused))
        return groups

    monkeypatch.setattr(ExperienceBuffer, "step_groups", step_groups)
    return out


GROWING = {"zero_variance": ZeroVarianceConfig(rl_zvp=True, grow_to=8), "group_size": 2}


@pytest.mark.parametrize(
    "rl",
    [
        pytest.param({}, id="plain"),
        pytest.param(GROWING, id="growing", marks=pytest.mark.slow),
        pytest.param({"replay": "R2", "one_step_off": True}, id="one step off"),
    ],
)
def test_the_same_groups_are_trained_on_as_without_each_once(tmp_path, monkeypatch, rl):
    """If the weights do not change, a sample that is cut, carried and continued is the sample that
    an ordinary run draws at once.
    """
    run_rl(configured(tmp_path / "ordinary", STILL, partial_prompts=0, **rl))
    gathered = watched(monkeypatch)
    run_rl(configured(tmp_path / "partial", STILL, **rl))
    assert (
        groups(tmp_path / "partial") == groups(tmp_path / "ordinary")
        and len(groups(tmp_path / "partial")) == 12
    )
    assert [len(step.prompts) for step in gathered] == [3, 3, 0]
    # samples were cut; not only complete groups stayed in the buffer
    assert all(step.paused for step in gathered[:-1])
    for step, row in zip(gathered, lines(tmp_path / "partial"), strict=True):
        assert row["metrics"]["rollout/carried_groups"] == len(step.prompts)
        left = [*step.done, *(rollout for rollout, _ in step.paused.values())]
        assert row["metrics"]["rollout/carried_tokens"] == sum(r.response_length for r in left)


def test_a_token_keeps_the_version_the_log_prob_and_the_routes_with_which_it_was_sampled(
    tmp_path, monkeypatch
):
    gathered = watched(monkeypatch)
    run_rl(configured(tmp_path))
    cut, mixed = {}, 0
    for number, step in enumerate(gathered):
        capacity = len(step.routes) // len(step.groups)
        for g, group in enumerate(step.groups):
            for r in group.rollouts:
                versions = r.versions[len(r.prompt.tokens) :]
                assert (np.diff(versions) >= 0).all() and versions[-1] <= number
                earlier, routes = cut.get(r.key, (None, None))
                if earlier is None:
                    continue
                n, mixed = len(earlier.tokens), mixed + (versions[0] < versions[-1])
                assert (
                    len(r.tokens) > n
                    and (r.versions[n:] == number).all()
                    and (r.versions[:n] < number).all()
                )
                for name in ("tokens", "logp", "entropy", "versions"):
                    np.testing.assert_array_equal(getattr(r, name)[:n], getattr(earlier, name))
                row = g * capacity + r.sample
                np.testing.assert_array_equal(step.routes[row, : n - 1], routes[: n - 1])
        cut = step.paused
    assert mixed >= 2
    for number, (step, row) in enumerate(zip(gathered, lines(tmp_path), strict=True)):
        ages = [
            number - v
            for g in step.groups
            for r in g.rollouts
            for v in r.versions[len(r.prompt.tokens) :]
        ]
        assert row["metrics"]["staleness"] == pytest.approx(np.mean(ages)) and row["metrics"][
            "staleness_max"
        ] == max(ages)
    assert lines(tmp_path)[1]["metrics"]["staleness_max"] == 1


def test_a_step_does_not_wait_for_its_longest_group(tmp_path, monkeypatch):
    """Samples of other groups are not decoded to their end: the rollout of the first step stops
    with samples in its slots.
    """
    gathered = watched(monkeypatch)
    run_rl(configured(tmp_path, steps=2))
    unfinished = [rollout for rollout, _ in gathered[0].paused.values()]
    assert unfinished and all(0 < r.response_length < 16 for r in unfinished)
    assert len(unfinished) + len(gathered[0].done) < 3 * 4  # and some had not begun


BAD = {
    "correction": ({"correction": named_correction("off")}, "rl.correction to"),
    "dynamic": (
        {"zero_variance": ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)},
        "dynamic sampling",
    ),
    "too many": ({"partial_prompts": 5}, "0..rl.prompts_per_step = 4"),
    "negative": ({"partial_prompts": -1}, "partial_prompts = -1: must be >= 0"),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_what_does_not_go_together_is_refused(tmp_path, bad):
    rl, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        run_rl(configured(tmp_path, **rl))
