"""A user's step policy: it makes the same decisions after any stop, its state is in the checkpoint,
and an invalid return value is refused with the method's name.
"""

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from test_in_flight import CONFIGS, World, rl_config, run

from compass_jax.base.records import Outcome
from compass_jax.config import (
    ConfigError,
    RLConfig,
    SamplingConfig,
    StepPolicy,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.config.seam import ComponentFailed
from compass_jax.experience.step_policies.ask import MAX_DRAWN
from compass_jax.experience.step_policies.dynamic import DynamicSampling
from compass_jax.experience.step_policies.partial import PartialRollouts
from compass_jax.experience.step_policies.plain import Plain


@dataclass(frozen=True)
class Screening(StepPolicy):
    """A policy that draws two samples, and the others if the two differ; every step has one more
    round.
    """

    def missing(self, inputs):
        return 0 if inputs.open else inputs.sampling.prompts_per_step

    def grow(self, inputs, group):
        scores = inputs.scores(group)[:2]
        differ = len(scores) == 2 and len({score and score.reward for score in scores}) == 2
        return inputs.sampling.group_size if differ and None not in scores else 2

    def chosen(self, inputs):
        varied = [key for key in inputs.open if inputs.varies(key)]
        if inputs.drawn >= inputs.state.get("rounds", 1) * inputs.sampling.prompts_per_step:
            varied += [key for key in inputs.open if key not in varied]
        return varied[: inputs.needed]

    def next_state(self, inputs, chosen):
        rounds = inputs.state.get("rounds", 1)
        return {"rounds": rounds + (len(chosen) == inputs.needed)}

    def groups_in_flight(self, sampling):
        return 2 * sampling.prompts_per_step


@dataclass(frozen=True)
class VariedFirst(PartialRollouts):
    """Partial rollouts of groups that vary; complete uniform ones are dropped."""

    def missing(self, inputs):
        return self.groups_in_flight(inputs.sampling) - len(inputs.open) - len(inputs.buffer.kept)

    def chosen(self, inputs):
        return [key for key in inputs.complete if inputs.varies(key)][: inputs.needed]

    def dropped(self, inputs, chosen):
        return [key for key in inputs.complete if not inputs.varies(key)]


OWN = {
    "screening": RLConfig(prompts_per_step=3, group_size=4, step_policy=Screening()),
    "varied first": RLConfig(
        prompts_per_step=3,
        group_size=2,
        partial_prompts=2,
        step_policy=VariedFirst(),
        correction=named_correction("tis"),
    ),
}


@pytest.fixture(autouse=True)
def own_configs(monkeypatch):
    for name, config in OWN.items():
        monkeypatch.setitem(CONFIGS, name, config.validate("rl"))


def test_a_users_policy_decides_the_same_after_a_stop_at_any_sample():
    baseline = World("screening")
    expected = run(baseline)
    outcomes = [Outcome(*outcome) for step in expected for _, outcome in step[1]]
    assert {x.samples for x in outcomes} == {2, 4}
    assert all(x.reward_sum in (0, 2) for x in outcomes if x.samples == 2)
    drawn = [len(step[1]) for step in expected]
    assert drawn[0] == 3 and max(drawn) > 3  # the state permits more rounds in later steps
    for at in range(1, len(baseline.finished) + 1, 3):
        world = World("screening", stop_at=at)
        assert run(world) == expected, at
        assert Counter(world.finished) == Counter(baseline.finished)
    assert run(World("screening"), restart=lambda step, stopped: True) == expected


def test_a_policy_that_carries_groups_may_drop_complete_ones():
    expected = run(World("varied first"))
    for keys, results, _, _ in expected:
        chosen = {key[:2] for key in keys}
        assert len(chosen) == 3
        assert all(0 < outcome[1] < outcome[0] for key, outcome in results if key in chosen)
        assert all(outcome[1] in (0, outcome[0]) for key, outcome in results if key not in chosen)
    assert any(len(results) > 3 for _, results, _, _ in expected)
    assert run(World("varied first"), restart=lambda step, stopped: True) == expected


@dataclass(frozen=True)
class OneByOne(StepPolicy):
    """A policy that draws a prompt at a time, chooses all groups at the end and drops none."""

    def missing(self, inputs):
        return min(1, inputs.sampling.prompts_per_step - inputs.drawn)

    def chosen(self, inputs):
        return inputs.open if inputs.drawn == inputs.sampling.prompts_per_step else []

    def dropped(self, inputs, chosen):
        return []


def test_a_stop_before_a_decision_that_changes_nothing_is_no_failure(monkeypatch):
    config = RLConfig(prompts_per_step=3, group_size=2, step_policy=OneByOne())
    monkeypatch.setitem(CONFIGS, "one by one", config.validate("rl"))
    expected = run(World("one by one"))
    assert [len(step[0]) for step in expected] == [6, 6, 6]
    for at in range(1, 19):
        assert run(World("one by one", stop_at=at)) == expected, at


@dataclass(frozen=True)
class Wrong(StepPolicy):
    """A policy that draws three prompts and returns an invalid value from one method."""

    kind: str = ""

    def missing(self, inputs):
        usual = 3 if not inputs.drawn or self.kind == "endless" else 0
        return {"negative": -1, "many": 7, "float": 3.0}.get(self.kind, usual)

    def grow(self, inputs, group):
        return {"large": 3, "none": 0}.get(self.kind, 2)

    def chosen(self, inputs):
        if self.kind == "broken":
            raise KeyError("no such group")
        first = inputs.open[:1]
        return {
            "foreign": [(5, 5)],
            "twice": 2 * first,
            "idle": [],
            "endless": [],
        }.get(self.kind, inputs.open)

    def dropped(self, inputs, chosen):
        return {"both": chosen, "idle": []}.get(self.kind, super().dropped(inputs, chosen))

    def next_state(self, inputs, chosen):
        return {"state": {"groups": set(chosen)}, "nan": {"mean": float("nan")}}.get(self.kind, {})

    def counts(self, inputs, chosen):
        return {"words": {"a": "many"}, "pairs": [1], "inf": {"a": float("inf")}}.get(self.kind, {})


REFUSED = {
    "negative": "missing returned -1; it must be a number of prompts",
    "float": "missing returned 3.0; it must be a number of prompts",
    "many": "missing returned 7: 7 groups would be in flight, and groups_in_flight allows 3",
    "large": "grow returned 3; it must be in 1..2, the larger of rl.group_size and",
    "none": "grow returned 0; it must be in 1..2",
    "broken": "chosen failed: KeyError: 'no such group'",
    "foreign": "chosen returned (5, 5), which is no open group",
    "twice": "chosen returned a group twice",
    "idle": "missing returned 0 and chosen no group, while the step needs 3 more: it would"
    " never end",
    "endless": f"chosen left the step without 3 of its 3 groups after {3 * MAX_DRAWN} prompts",
    "both": "which chosen returned, too",
    "words": "counts returned {'a': 'many'}; it must be numbers by name",
    "pairs": "counts returned [1]; it must be numbers by name",
    "inf": "counts returned inf for 'a'",
    "state": "a checkpoint cannot hold it as JSON",
    "nan": "a checkpoint cannot hold it as JSON",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_policy_may_not_return_is_refused_with_its_method(kind, monkeypatch):
    if kind == "endless":
        monkeypatch.setattr("compass_jax.experience.step_policies.ask.MAX_DRAWN", 4)
    rl = RLConfig(prompts_per_step=3, group_size=2, step_policy=Wrong(kind))
    monkeypatch.setitem(CONFIGS, "wrong", rl)
    message = REFUSED[kind].replace(str(3 * MAX_DRAWN), "12")
    name = re.escape(f"rl.step_policy.name = {rl.policy.name!r}")
    with pytest.raises(ComponentFailed, match=name + ".*" + re.escape(message)):
        run(World("wrong"))


def test_a_group_that_is_not_complete_cannot_be_chosen(monkeypatch):
    @dataclass(frozen=True)
    class Hasty(PartialRollouts):
        def chosen(self, inputs):
            return [key for key in inputs.open if key not in inputs.complete][: inputs.needed]

    config = replace(CONFIGS["partial"], step_policy=Hasty())
    monkeypatch.setitem(CONFIGS, "hasty", config)
    with pytest.raises(ComponentFailed, match=r"not complete; take inputs\.complete"):
        run(World("hasty"))


@dataclass(frozen=True)
class Small(Screening):
    def groups_in_flight(self, sampling):
        return 2


def test_settings_that_a_policy_cannot_be_combined_with_are_refused():
    dynamic = ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)
    tis, partial = named_correction("tis"), {"partial_prompts": 2}
    for fields, message in (
        (dict(step_policy=Screening(), zero_variance=dynamic), "dynamic_sampling would have no"),
        (dict(step_policy=Screening(), correction=tis, **partial), "rl.partial_prompts would have"),
        (dict(step_policy=DynamicSampling()), "set rl.zero_variance.dynamic_sampling, whose"),
        (dict(step_policy=PartialRollouts()), "set rl.partial_prompts, the number of further"),
        (dict(step_policy=Small()), "groups_in_flight(sampling) returned 2; it must be at least"),
        (dict(step_policy="plain"), "the wrong type, it must be StepPolicy"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            RLConfig(**fields).validate("rl")

    @dataclass(frozen=True)
    class Carrying(Screening):
        carries: ClassVar[bool] = True

    with pytest.raises(ConfigError, match=r"continues samples in later steps.*set rl\.correction"):
        RLConfig(step_policy=Carrying()).validate("rl")
    RLConfig(step_policy=Carrying(), correction=tis).validate("rl")


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_dynamic_sampling_and_plain_in_rounds_are_one_policy(monkeypatch, rounds):
    """The same rounds of as many prompts as a step has give the same decisions."""
    settings = {"dynamic_sampling": True, "dynamic_batch": 1, "dynamic_rounds": rounds}
    usual = {"prompts_per_step": 3, "group_size": 2}
    configs = {
        "dynamic": rl_config(**usual, zero_variance=ZeroVarianceConfig(**settings)),
        "plain": rl_config(**usual, step_policy=Plain(rounds)),
    }
    results = []
    for name, config in configs.items():
        monkeypatch.setitem(CONFIGS, name, config.validate("rl"))
        steps = run(World(name))
        results.append([(keys, outcomes, versions) for keys, outcomes, _, versions in steps])
    assert results[0] == results[1]
    assert configs["plain"].groups_in_flight == configs["dynamic"].groups_in_flight
    assert configs["plain"].groups_in_flight == (6 if rounds > 1 else 3)


@pytest.mark.parametrize("name", ["plain", "dynamic", "partial"])
def test_the_other_settings_choose_the_policy(name):
    policy = CONFIGS[name].policy
    assert policy.name == name and policy == CONFIGS[name].sampling.policy
    assert replace(CONFIGS[name], step_policy=policy).validate("rl").policy == policy
    assert CONFIGS[name].groups_in_flight == {"plain": 3, "dynamic": 9, "partial": 5}[name]
    assert SamplingConfig().policy.name == "plain"
