"""Partial rollouts: what is not finished with a step's groups goes on in the next. Nothing is lost
or comes twice, every token keeps its policy.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
from logged import lines, numbers
from stops import stop_after_step, stop_at_sample
from tiny_run import tiny_run

from compass_jax.config import ConfigError, CorrectionConfig, ZeroVarianceConfig
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.rollout.collect import Collection
from compass_jax.training.learner import Learner
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint

# a learning rate that leaves the weights as they are: samples then depend on their keys alone
STILL = 1e-12


def limit(self, n):
    """A random model hardly ever stops: samples of a prompt end after 7, 10, 13 or 16 tokens."""
    return len(self.prompts[n].tokens) + 16 - 3 * (self.prompts[n].id % 4)


def odd(patch):
    """Those limits."""
    patch.setattr(Collection, "_limit", limit)


@pytest.fixture(autouse=True)
def oddities(monkeypatch):
    odd(monkeypatch)


def configured(directory, rate=1e-2, **rl):
    config = tiny_run("odd_verifiers:coin")
    optim = dataclasses.replace(config.rl.optim, learning_rate=rate)
    rl = {
        "steps": 3,
        "correction": CorrectionConfig("tis"),
        "optim": optim,
        "partial_prompts": 3,
        **rl,
    }
    # a group and a half
    data, rollout = (
        dataclasses.replace(config.data, eval_prompts=0),
        dataclasses.replace(config.rollout, slots=6),
    )
    return dataclasses.replace(
        config,
        run_dir=str(directory),
        data=data,
        rollout=rollout,
        rl=dataclasses.replace(config.rl, **rl),
    )


def groups(directory):
    """Every logged group as (question, its samples' texts and rewards), sorted."""
    return sorted(
        (row["prompt"], str([(s["response"], s["reward"]) for s in row["samples"]]))
        for row in lines(directory, "rollouts")
    )


class Taken(NamedTuple):
    """What a step took from the buffer, and what it left there, its routes on the host."""

    groups: list
    routes: np.ndarray
    prompts: list  # that go on
    done: list
    paused: dict  # key -> (rollout, routes)


def watched(monkeypatch):
    """The list to which what each step takes will be appended."""
    real, out = ExperienceBuffer.step_groups, []

    def step_groups(self):
        groups, routes = real(self)
        # on the device the next rollout will overwrite them
        rows = None if self.routes.rows is None else np.array(self.routes.rows)
        samples = [x for group in self.open for x in self.begun(group)]
        done = [x.rollout for x in samples if x.done]
        paused = {
            x.rollout.key: (x.rollout, None if rows is None else rows[x.rollout.row])
            for x in samples
            if not x.done
        }
        held = None if routes is None else np.array(routes)
        out.append(Taken(groups, held, self.open, done, paused))
        return groups, routes

    monkeypatch.setattr(ExperienceBuffer, "step_groups", step_groups)
    return out


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        odd(patch)
        run_rl(configured(directory))
    return directory


GROWING = {"zero_variance": ZeroVarianceConfig(grow_to=8), "group_size": 2}


@pytest.mark.parametrize(
    "rl",
    [
        pytest.param({}, id="plain"),
        pytest.param(GROWING, id="growing", marks=pytest.mark.slow),
        pytest.param({"replay": "R2", "one_step_off": True}, id="one step off"),
    ],
)
def test_the_same_groups_are_trained_on_as_without_each_once(tmp_path, monkeypatch, rl):
    """At standing weights a sample that was cut, carried and continued is the sample that an
    ordinary run draws at once.
    """
    run_rl(configured(tmp_path / "ordinary", STILL, partial_prompts=0, **rl))
    gathered = watched(monkeypatch)
    run_rl(configured(tmp_path / "partial", STILL, **rl))
    assert (
        groups(tmp_path / "partial") == groups(tmp_path / "ordinary")
        and len(groups(tmp_path / "partial")) == 12
    )
    assert [len(step.prompts) for step in gathered] == [3, 3, 0]
    # samples were cut, and not only whole groups put back
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
                own = r.versions[len(r.prompt.tokens) :]
                assert (np.diff(own) >= 0).all() and own[-1] <= number
                was, routes = cut.get(r.key, (None, None))
                if was is None:
                    continue
                n, mixed = len(was.tokens), mixed + (own[0] < own[-1])
                assert (
                    len(r.tokens) > n
                    and (r.versions[n:] == number).all()
                    and (r.versions[:n] < number).all()
                )
                for name in ("tokens", "logp", "entropy", "versions"):
                    np.testing.assert_array_equal(getattr(r, name)[:n], getattr(was, name))
                row = g * capacity + r.sample
                np.testing.assert_array_equal(step.routes[row, : n - 1], routes[: n - 1])
        cut = step.paused
    assert mixed >= 2
    for number, (step, row) in enumerate(zip(gathered, lines(tmp_path), strict=True)):
        behind = [
            number - v
            for g in step.groups
            for r in g.rollouts
            for v in r.versions[len(r.prompt.tokens) :]
        ]
        assert row["metrics"]["staleness"] == pytest.approx(np.mean(behind)) and row["metrics"][
            "staleness_max"
        ] == max(behind)
    assert lines(tmp_path)[1]["metrics"]["staleness_max"] == 1


def test_a_step_does_not_wait_for_its_longest_group(tmp_path, monkeypatch):
    """Beyond the step's groups nothing is decoded to its end: the rollout of the first step stops
    with samples in its slots.
    """
    gathered = watched(monkeypatch)
    run_rl(configured(tmp_path, steps=2))
    begun = [rollout for rollout, _ in gathered[0].paused.values()]
    assert begun and all(0 < r.response_length < 16 for r in begun)
    assert len(begun) + len(gathered[0].done) < 3 * 4  # and some had not begun


@pytest.mark.parametrize("rl", [{}, {"one_step_off": True}], ids=["plain", "one step off"])
def test_a_run_that_died_repeats_its_steps_exactly(undisturbed, tmp_path, monkeypatch, rl):
    """Killed in the training of step 2; the checkpoint of step 1 has what was carried, and one step
    off the whole rollout ahead.
    """
    expected = undisturbed
    if rl:
        expected = tmp_path / "expected"
        run_rl(configured(expected, **rl))
    train, here = Learner.train, tmp_path / "killed"

    def dying(self, *args, **named):
        if int(self.state.step) == 1:
            raise KeyboardInterrupt
        return train(self, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "train", dying)
        with pytest.raises(KeyboardInterrupt):
            run_rl(configured(here, **rl))
    assert checkpoint.latest(here) == 1 and len(
        checkpoint.read_meta(here)["pending"]["prompts"]
    ) == (7 if rl else 3)
    assert run_rl(configured(here, **rl))["steps"] == 3
    assert numbers(here) == numbers(expected) and lines(here, "rollouts") == lines(
        expected, "rollouts"
    )


@pytest.mark.parametrize("number", [3, 20])
def test_a_stop_waits_for_the_rollout_that_it_meets_and_goes_on_exactly(
    undisturbed, tmp_path, monkeypatch, number
):
    """What a rollout cuts is decided by the ticks that its samples have run: one that went on from
    the middle would have other caches. No sample that the checkpoint has is drawn again.
    """
    with monkeypatch.context() as patch:
        stop_at_sample(patch, number)
        assert run_rl(configured(tmp_path))["stopped"]
    pending, real, again = checkpoint.read_meta(tmp_path)["pending"], Collection._step, []
    saved = {(prompt, index) for prompt, _, index, *_ in pending["scores"]}
    assert len(pending["prompts"]) == 7 and len(saved) >= 16

    def step(self):
        out = real(self)
        again.extend((r.prompt.id, r.sample) for r in out)
        return out

    monkeypatch.setattr(Collection, "_step", step)
    assert run_rl(configured(tmp_path))["steps"] == 3
    assert again and not saved & set(again)
    assert numbers(tmp_path) == numbers(undisturbed)
    assert lines(tmp_path, "rollouts") == lines(undisturbed, "rollouts")


def test_a_stop_between_steps_goes_on_exactly(undisturbed, tmp_path, monkeypatch):
    stop_after_step(monkeypatch, 1)
    assert run_rl(configured(tmp_path))["stopped"] and run_rl(configured(tmp_path))["steps"] == 3
    assert numbers(tmp_path) == numbers(undisturbed)


BAD = {
    "correction": ({"correction": CorrectionConfig("off")}, "rl.correction.name"),
    "dynamic": (
        {"zero_variance": ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)},
        "dynamic sampling",
    ),
    "temperature": (
        {"zero_variance": ZeroVarianceConfig(grow_to=8, grow_temperature=1.5)},
        "grow_temperature",
    ),
    "too many": ({"partial_prompts": 5}, "0..rl.prompts_per_step = 4"),
    "negative": ({"partial_prompts": -1}, "partial_prompts = -1: must be >= 0"),
}


@pytest.mark.parametrize("bad", list(BAD))
def test_what_does_not_go_together_is_refused(tmp_path, bad):
    rl, message = BAD[bad]
    with pytest.raises(ConfigError, match=message):
        run_rl(configured(tmp_path, **rl))
