"""Stages in the configuration: their settings at each step, invalid stages, and the round trip
through JSON."""

import dataclasses

import pytest
from evolve import evolve
from tiny_run import tiny_run
from worded import override

from compass_jax.config import ConfigError, RLStage, ZeroVarianceConfig
from compass_jax.config.curriculum import Stage, at_step, largest_stage, stage_at
from compass_jax.config.io import config_from_json, config_to_json, differences
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.gspo import Gspo


def largest_stage_of(config):
    return largest_stage(config.rl, config.rollout)


def at_step_of(config, done):
    """Returns the configuration of a step."""
    rl, rollout = at_step(config.rl, config.rollout, done)
    return dataclasses.replace(config, rl=rl, rollout=rollout)


HALVES = ((0.0, 0.5, 0.5), (0.5, 1.0, 0.5))
STAGES = (
    RLStage(0, HALVES, max_new_tokens=8),
    RLStage(3, group_size=6, learning_rate=1e-3, objective=Gspo()),
    RLStage(7, HALVES, group_size=8),
)


def config_with(stages=STAGES, **rl):
    config = tiny_run()
    settings = dict(steps=10, stages=stages) | rl
    return evolve(config, rl={**settings})


def test_a_step_has_the_settings_of_the_last_stage_that_has_begun():
    config = config_with()
    config.validate_for_rl()
    configs = [at_step_of(config, done) for done in range(11)]
    assert [c.rollout.max_new_tokens for c in configs] == [8] * 3 + [16] * 8
    assert [c.rl.group_size for c in configs] == [4] * 3 + [6] * 4 + [8] * 4
    assert [c.rl.optim.learning_rate for c in configs] == [1e-2] * 3 + [1e-3] * 4 + [1e-2] * 4
    assert [type(c.rl.objective) for c in configs] == [Espo] * 3 + [Gspo] * 4 + [Espo] * 4
    assert all(c.rl.stages == () and c.rl.steps == 10 for c in configs)
    # No other setting changes.
    changed = {key for c in configs for key in differences(dataclasses.replace(config), c)}
    assert {key for key in changed if not key.startswith("rl.stages")} <= {
        "rollout.max_new_tokens",
        "rl.group_size",
        "rl.optim.learning_rate",
        *(f"rl.objective.{x.name}" for o in (Espo, Gspo) for x in dataclasses.fields(o)),
        "rl.objective.name",
    }


def test_where_a_run_stands_among_its_stages():
    rl = config_with().rl
    stages = [stage_at(rl, done) for done in range(11)]
    assert [s.number for s in stages] == [0] * 3 + [1] * 4 + [2] * 4
    assert [s.end for s in stages] == [3] * 3 + [7] * 4 + [10] * 4
    assert stages[0].mix == HALVES and stages[3].mix == () and stages[0].total == 3
    short = dataclasses.replace(rl, steps=7)  # the last stage never begins
    assert [stage_at(short, done)[:2] for done in (6, 7)] == [(1, 7)] * 2
    cut = dataclasses.replace(rl, steps=5)
    assert stage_at(cut, 4)[:2] == (1, 5)
    assert stage_at(tiny_run().rl, 1) == Stage(end=2)
    plain = dataclasses.replace(rl, stages=(RLStage(), RLStage(2, group_size=8)))
    assert stage_at(plain, 0).mix is None


def test_a_run_without_stages_is_as_it_is():
    config = tiny_run()
    assert at_step_of(config, 1) == config
    assert largest_stage_of(config) == (config.rl, config.rollout)


def test_the_largest_stage_is_what_a_device_needs_room_for():
    """Stages with 56 and 48 positions share the bucket of 56, so that samples and new tokens
    decide: 8 samples of 16 tokens, or 4 of 8.
    """
    seventh = at_step_of(config_with(), 7)
    assert largest_stage_of(config_with()) == (seventh.rl, seventh.rollout)
    longer = (RLStage(0, group_size=6), RLStage(1, max_new_tokens=72, group_size=4))
    assert largest_stage_of(config_with(longer))[1].max_new_tokens == 72


def test_stages_are_written_and_read_and_set_on_the_command_line():
    config = config_with()
    assert config_from_json(config_to_json(config)) == config
    changed = override(config, ["--rl.stages.1.group-size", "12", "--rl.stages.2.after-steps", "8"])
    assert changed.rl.stages[1].group_size == 12 and changed.rl.stages[2].after_steps == 8
    assert changed.rl.stages[1].objective == Gspo() and changed.rl.stages[0].mix == HALVES


@pytest.mark.parametrize(
    ("stages", "rl", "words"),
    [
        ((RLStage(1),), {}, "they begin after 1 steps"),
        ((RLStage(), RLStage(3), RLStage(3)), {}, "they begin after 0, 3, 3 steps"),
        ((RLStage(), RLStage(3), RLStage(2)), {}, "each other one later"),
        ((RLStage(mix=((0.5, 0.5, 1.0),)),), {}, "from 0.5 to 0.5 holds no pass rate"),
        ((RLStage(mix=((0.5, 0.2, 1.0),)),), {}, "from 0.5 to 0.2 holds no pass rate"),
        (
            (RLStage(), RLStage(1, ((0.0, 0.5, 0.5), (0.4, 1.0, 0.5)))),
            {},
            r"rl.stages\[1\].mix: a band begins at 0.4 before the one ahead of it ends, at 0.5",
        ),
        ((RLStage(mix=((0.0, 0.5, 0.5), (0.5, 1.0, 0.4))),), {}, "shares sum to 0.9"),
        ((RLStage(mix=((0.0, 0.5, 0.0), (0.5, 1.0, 1.0))),), {}, "must be positive"),
        ((RLStage(mix=((0.0, 1.5, 1.0),)),), {}, "1.5: must be at most 1"),
        ((RLStage(mix=((0.0, 1.0),)),), {}, "must have 3 values"),
        ((RLStage(mix=((0.0, float("nan"), 1.0),)),), {}, "must be a finite number"),
        ((RLStage(group_size=1),), {}, "group_size = 1: must be at least 2"),
        ((RLStage(learning_rate=0.0),), {}, "learning_rate = 0.0: must be positive"),
        ((RLStage(max_new_tokens=0),), {}, "max_new_tokens = 0: must be positive"),
        ((RLStage(max_new_tokens=17),), {}, "rl.buckets end at 56 tokens, a rollout may have 57"),
        (
            (RLStage(), RLStage(2, group_size=8)),
            {"zero_variance": ZeroVarianceConfig(rl_zvp=True, grow_to=8)},
            r"rl.stages\[1\] = .*grow_to = 8 does not exceed rl.group_size = 8",
        ),
        (
            (RLStage(mix=HALVES),),
            {"zero_variance": ZeroVarianceConfig(rl_zvp=True, curriculum=True)},
            "rl.zero_variance.curriculum and the mix of a stage",
        ),
        ((RLStage(), RLStage(1, objective=Gspo(kl_coef=0.1))), {}, "the reference policy is kept"),
    ],
)
def test_stages_that_cannot_be_are_refused_by_name(stages, rl, words):
    with pytest.raises(ConfigError, match=words):
        config_with(stages, **rl).validate_for_rl()
