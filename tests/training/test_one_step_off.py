"""One step off: the next rollout runs during the training, with the weights before it."""

import threading
import time

import pytest
import variants
from logged import lines, numbers

from compass_jax.config import ConfigError, named_correction
from compass_jax.rollout.collect import Collection
from compass_jax.training.learner import Learner
from compass_jax.training.optim import TrainingDiverged
from compass_jax.training.rl import run_rl


def configured(directory, **options):
    """Returns the configuration of a run one step off."""
    return variants.configured("one step off", directory, **options)


def responses(directory):
    """Returns {step: texts of the logged samples}."""
    out: dict[int, list[str]] = {}
    for row in lines(directory, "rollouts"):
        out.setdefault(row["step"], []).extend(sample["response"] for sample in row["samples"])
    return out


def test_the_second_rollout_is_of_the_first_weights_and_the_third_of_the_second(
    undisturbed, tmp_path
):
    """A run that hardly learns keeps the first weights: its second step has the same samples, its
    third has others.
    """
    run_rl(configured(tmp_path / "still", learning_rate=1e-12, one_step_off=False))
    run_rl(configured(tmp_path / "on_policy", one_step_off=False))
    off_policy, frozen, on_policy = (
        responses(undisturbed("one step off")[0]),
        responses(tmp_path / "still"),
        responses(tmp_path / "on_policy"),
    )
    assert off_policy[1] == frozen[1] == on_policy[1]
    assert off_policy[2] == frozen[2] != on_policy[2]
    assert off_policy[3] != frozen[3] and off_policy[3] != on_policy[3]
    rows = numbers(undisturbed("one step off")[0])
    assert [row["staleness"] for row in rows] == [0, 1, 1] and [
        row["policy_version"] for row in rows
    ] == [1, 2, 3]
    assert [row["staleness"] for row in numbers(tmp_path / "on_policy")] == [0, 0, 0]
    gaps = [row["mismatch/logp_abs_diff"] for row in rows]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-3  # the correction sees the policy's own change


def test_the_rollout_runs_while_the_training_does(tmp_path, monkeypatch):
    """The training of a step waits for the first finished sample of the next step, and would wait
    forever if that rollout came after the training.
    """
    sampled, real, train = threading.Event(), Collection._step, Learner.train

    def step(self):
        out = real(self)
        if out and threading.current_thread() is not threading.main_thread():
            sampled.set()
        return out

    def waiting(self, *args, **named):
        assert sampled.wait(120)
        return train(self, *args, **named)

    monkeypatch.setattr(Collection, "_step", step)
    monkeypatch.setattr(Learner, "train", waiting)
    result = run_rl(configured(tmp_path, steps=2))
    assert (
        result["steps"] == 2
        and sampled.is_set()
        and "time/rollout_wait_s" in lines(tmp_path)[0]["metrics"]
    )
    assert "time/rollout_wait_s" not in lines(tmp_path)[1]["metrics"]


def test_a_training_that_fails_does_not_wait_for_the_whole_rollout(tmp_path, monkeypatch):
    """The rollout ahead is slow and is abandoned at its next sample."""
    step, done = Collection._step, []

    def slow(self):
        finished = step(self)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(1.0)
            done.extend(finished)
        return finished

    def failing(self, *args, **named):
        raise TrainingDiverged("no number")

    monkeypatch.setattr(Collection, "_step", slow)
    monkeypatch.setattr(Learner, "train", failing)
    with pytest.raises(TrainingDiverged, match="no number"):
        run_rl(configured(tmp_path))
    assert len(done) < 16


def test_an_error_in_the_rollout_ahead_ends_the_run(tmp_path, monkeypatch):
    real = Collection._step

    def failing(self):
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("the device is gone")
        return real(self)

    monkeypatch.setattr(Collection, "_step", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_rl(configured(tmp_path))


def test_without_a_correction_it_is_refused(tmp_path):
    with pytest.raises(
        ConfigError,
        match=(
            r"rl\.one_step_off samples from the weights before the last updates: set"
            r" rl\.correction to"
        ),
    ):
        configured(tmp_path, correction=named_correction("off")).validate_for_rl()
