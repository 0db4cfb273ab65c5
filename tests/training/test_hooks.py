"""Hooks: their order, their errors and their states by name."""

import dataclasses

import pytest
from logged import lines
from tiny_run import tiny_run

from compass_jax.base.errors import CompassError
from compass_jax.config import apply
from compass_jax.training import step as programs
from compass_jax.training.hooks.base import Hook, HookFailed, Hooks, StepRecord
from compass_jax.training.rl import run_rl


class Recorder(Hook):
    """Records its calls; raises in the method `broken`."""

    def __init__(self, name, calls, broken="", error=KeyError):
        self.name, self.calls, self.broken, self.error = name, calls, broken, error
        self.count = 0

    def on_groups(self, step):
        self._record("on_groups")

    def on_metrics(self, step):
        self._record("on_metrics")
        self.count += 1

    def state(self):
        return {"count": self.count} if self.count else {}

    def restore(self, state, number):
        self.count = state["count"]

    def _record(self, method):
        self.calls.append((self.name, method))
        if method == self.broken:
            raise self.error("reward/x")


def test_hooks_are_called_in_their_order():
    calls: list = []
    hooks = Hooks([Recorder(name, calls) for name in "cab"])
    hooks.call(Hook.on_groups, StepRecord(1, [], None))
    hooks.finish(Hook.on_metrics, StepRecord(1, [], None))
    assert calls == [(x, "on_groups") for x in "cab"] + [(x, "on_metrics") for x in "cab"]


def test_an_error_before_the_update_ends_the_step_with_the_hook_s_name():
    calls: list = []
    hooks = Hooks([Recorder(name, calls, "on_groups" * (name == "a")) for name in "cab"])
    with pytest.raises(HookFailed, match=r"^a: on_groups failed: KeyError: .reward/x"):
        hooks.call(Hook.on_groups, StepRecord(1, [], None))
    assert calls[-1] == ("a", "on_groups")  # b was not called


def test_an_error_after_the_update_is_the_step_s_failure():
    """The weights have changed by then: the step is logged and saved before the run ends."""
    hooks, step = Hooks([Recorder("a", [], "on_metrics")]), StepRecord(3, [], None)
    hooks.finish(Hook.on_metrics, step)
    assert isinstance(step.failure, HookFailed) and "a: on_metrics failed" in str(step.failure)


def test_an_error_of_this_package_keeps_its_class():
    class Refused(CompassError):
        pass

    hooks = Hooks([Recorder("a", [], "on_groups", Refused)])
    with pytest.raises(Refused):
        hooks.call(Hook.on_groups, StepRecord(1, [], None))


def test_states_are_restored_by_name_and_others_are_told():
    counted = Recorder("a", [])
    counted.count = 4
    states = Hooks([Recorder("b", []), counted]).state()
    assert states == {"a": {"count": 4}}
    a, fresh, told = Recorder("a", []), Recorder("new", []), []
    fresh.count = 1
    Hooks([fresh, a]).restore({**states, "gone": {"count": 2}}, 7, told.append)
    assert a.count == 4
    assert [("'new', which begins anew" in x, "'gone'" in x) for x in told] == [
        (True, False),
        (False, True),
    ]


def test_two_hooks_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two have one name: a, a"):
        Hooks([Recorder("a", []), Recorder("a", [])])


def test_a_step_that_is_repeated_begins_with_the_states_from_before_it():
    """An interruption saves the states from before on_groups; after the update they are new."""

    class Counter(Recorder):
        def before_rollout(self, number):
            self.count += 100

        def on_groups(self, step):
            self.count += 1

    def resumed(states):
        hook = Counter("a", [])
        hooks = Hooks([hook])
        hooks.restore(states, 0, pytest.fail)
        return hooks, hook

    hook, step = Counter("a", []), StepRecord(1, [], None)
    hooks = Hooks([hook])
    hooks.begin_rollout(1)
    hooks.begin_step(step)
    hooks, hook = resumed(hooks.state())  # interrupted before the update
    assert hook.count == 100
    hooks.begin_rollout(1)  # the rollout had begun
    hooks.begin_step(step)
    hooks.end_step(step)
    assert hooks.state()["a"] == {"count": 102} and resumed(hooks.state())[1].count == 102


def test_all_hooks_see_a_finished_step_though_one_fails():
    calls: list = []
    hooks = Hooks([Recorder("a", calls, "on_metrics"), Recorder("b", calls)])
    step = StepRecord(1, [], None)
    hooks.end_step(step)
    assert calls == [("a", "on_metrics"), ("b", "on_metrics")] and "a:" in str(step.failure)


HALVING = """from compass_jax.config import StepHook


class Halving(StepHook):
    def on_groups(self, step, state):
        if step.number > 1:
            step.scale_rate(0.5)
"""


def test_a_hook_changes_the_learning_rate_of_a_step_and_compiles_nothing(tmp_path):
    file = tmp_path / "halving.py"
    file.write_text(HALVING)
    config = dataclasses.replace(tiny_run("odd_verifiers:coin"), run_dir=str(tmp_path / "run"))
    compiled = programs.apply._cache_size()
    run_rl(apply(config, {"rl.hooks": [f"{file}:Halving"], "rl.steps": 3}))
    rates = [row["metrics"]["lr"] for row in lines(tmp_path / "run", "metrics")]
    assert rates == pytest.approx([1e-2, 5e-3, 5e-3])
    assert programs.apply._cache_size() <= compiled + 1


@pytest.mark.parametrize("factor", [-1.0, float("nan"), float("inf")])
def test_a_factor_that_no_rate_can_have_is_refused(factor):
    step = StepRecord(1, [])
    with pytest.raises(ValueError, match="factor of the learning rate is"):
        step.scale_rate(factor)
    assert step.rate == 1
