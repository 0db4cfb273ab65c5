"""Settings that have no effect: a notice names each, and the shipped configurations have none
except those that are listed here with a reason.
"""

import dataclasses
from pathlib import Path

import pytest
from evolve import evolve
from replaying import GroupReplay
from tiny_run import tiny_run

from compass_jax.apps.pipeline.stages import Pipeline
from compass_jax.apps.pipeline.work import rl
from compass_jax.commands.configured import load_config, load_config_as
from compass_jax.config import (
    EvalConfig,
    EvalSet,
    OptimConfig,
    ProceduralSource,
    RLStage,
    ScalarJudgeConfig,
    ShapingConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rollout.drafts import Lenient
from compass_jax.training.idle_settings import idle_settings, idle_stages


def idle_settings_of(config, *args, **options):
    """Calls `idle_settings` with what it reads of a run's settings."""
    return idle_settings(config.rl, config.policy, config.scored, *args, **options)


ROOT = Path(__file__).parents[2]
PODS = sorted((ROOT / "configs").glob("*x*x*.py")) + sorted((ROOT / "configs").glob("*_16x16.py"))
PIPELINES = [
    ROOT / "configs" / f"{name}.py" for name in ("compass_max_tiny_cpu", "smollm2_135m_cpu")
]
SHIPPED = sorted({*(ROOT / "configs").glob("*.py")} - {*PIPELINES})
TIS = named_correction("tis")
REPLAYING = {
    "hooks": (GroupReplay(groups=4),),
    "zero_variance": ZeroVarianceConfig(rl_zvp=False),
}
# the settings of shipped configurations that have no effect, each with a reason
REASONS = {
    "router_replay_cpu": {
        "rl.correction.name": "the experiment sets rollout.quantize and rollout.dtype, row by row"
    }
}


def config_with(rollout=None, data=None, **rl):
    base = tiny_run()
    parts = {
        "rl": {"updates_per_rollout": 2, **rl},
        "rollout": rollout or {},
        "data": data or {},
    }
    changed = {k: dataclasses.replace(getattr(base, k), **v) for k, v in parts.items()}
    return dataclasses.replace(base, **changed)


def named_settings(config):
    """Returns the settings that the notices name."""
    return [
        text.split(" = ")[0].split(":")[0]
        for text in idle_settings(config.rl, config.policy, config.scored, 10_000, 5)
    ]


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_each_setting_of_a_shipped_configuration_acts(file, monkeypatch):
    """The notices are those on the configuration's devices: a pod's have an 8-bit type."""
    monkeypatch.setattr("compass_jax.training.idle_settings.kind_for", lambda chip: "int8")
    named = named_settings(load_config(str(file)).validate_for_rl())
    assert set(named) == REASONS.get(file.stem, {}).keys()


@pytest.mark.parametrize("file", PIPELINES, ids=lambda file: file.stem)
def test_each_setting_of_a_shipped_pipelines_rl_acts(file):
    stages = [x for x in load_config_as(str(file), Pipeline).stages if x.function is rl]
    assert len(stages) == (1 if "smollm2" in file.stem else 2)
    assert {stage.name: named_settings(stage.settings["run"]) for stage in stages} == {
        stage.name: [] for stage in stages
    }


def test_there_are_as_many_pod_configurations_as_the_tests_expect():
    assert len(set(PODS)) == 7 and set(PODS) < set(SHIPPED)


@pytest.mark.parametrize("file", sorted(set(PODS)), ids=lambda file: file.stem)
def test_a_pod_configuration_has_the_whole_recipe(file):
    """The recipe is that of arXiv 2512.07710: several updates, ESPO, R3, 8-bit rollouts with TIS,
    growth, shaping, and selection or a mix of difficulties from a filter's pass rates.
    """
    config = load_config(str(file)).validate_for_rl()
    rl, dense = config.rl, not config.model.moe_layers
    assert rl.updates_per_rollout > 1 and isinstance(rl.objective, Espo)
    assert rl.replay == ("off" if dense else "R3")
    assert config.rollout.quantize == "auto" and rl.correction.name == "tis"
    assert rl.zero_variance.rl_zvp and rl.zero_variance.grow_to > rl.group_size
    assert rl.shaping.length_penalty > 0 and rl.shaping.repetition_penalty > 0
    chosen = rl.zero_variance.posterior or any(stage.mix for stage in rl.stages)
    assert chosen and (rl.zero_variance.posterior or config.data.keep_file)
    judged = [source.verifier == "judge" for source in config.data.sources]
    assert any(judged) == ("phase2" in file.stem) == (config.rewards.judge is not None)


@pytest.mark.parametrize(
    ("acts", "idle"),
    [
        (dict(correction=TIS, rollout={"quantize": "int8"}), dict(correction=TIS)),
        (dict(correction=TIS, rollout={"kv_quantize": "int8"}), dict(correction=TIS)),
        (dict(correction=TIS, rollout={"dtype": "bfloat16"}), dict(correction=TIS)),
        (dict(correction=TIS, partial_prompts=1), dict(correction=TIS)),
        (dict(correction=TIS, one_step_off=True), dict(correction=TIS)),
        (dict(correction=TIS, **REPLAYING), dict(correction=TIS)),
    ],
)
def test_a_correction_of_what_is_the_same_is_told(acts, idle):
    assert named_settings(config_with(**acts)) == []
    assert named_settings(config_with(**idle)) == ["rl.correction.name"]


@pytest.mark.parametrize(
    ("penalty", "setting", "value"),
    [
        ("length_penalty", "length_free_tokens", 8),
        ("repetition_penalty", "repetition_ngram", 2),
        ("overlong_penalty", "overlong_buffer_tokens", 4),
    ],
)
def test_shaping_that_takes_nothing_off_is_told(penalty, setting, value):
    shaping = ShapingConfig(**{setting: value})
    assert named_settings(config_with(shaping=shaping)) == [f"rl.shaping.{setting}"]
    assert (
        named_settings(config_with(shaping=dataclasses.replace(shaping, **{penalty: 0.05}))) == []
    )


def test_growth_of_groups_whose_rewards_are_never_equal_is_told():
    grown = config_with(zero_variance=ZeroVarianceConfig(grow_to=8))
    judge = ScalarJudgeConfig("weights")
    scalar = evolve(grown, rewards={"judge": judge})
    assert named_settings(grown) == [] == named_settings(scalar)  # its sources have other verifiers
    sources = tuple(dataclasses.replace(s, verifier="judge") for s in grown.data.sources)
    data = dataclasses.replace(grown.data, sources=sources)
    assert named_settings(dataclasses.replace(scalar, data=data)) == ["rl.zero_variance.grow_to"]
    screened = evolve(config_with(data={"sources": sources}, step_policy=Screening(n0=2)))
    assert named_settings(screened) == []
    assert named_settings(evolve(screened, rewards={"judge": judge})) == ["rl.step_policy.name"]
    by_groups = config_with(
        data={"sources": sources},
        optim=OptimConfig(rate_by_groups=True),
        zero_variance=ZeroVarianceConfig(),
    )
    assert named_settings(by_groups) == []
    told = named_settings(evolve(by_groups, rewards={"judge": judge}))
    assert [x.partition(":")[0] for x in told] == ["rl.optim.rate_by_groups"]
    mixed = (*sources, ProceduralSource("products"))
    data = dataclasses.replace(grown.data, sources=mixed)
    assert named_settings(dataclasses.replace(scalar, data=data)) == []


def test_drafts_of_prompts_that_are_never_visited_again_are_told():
    config = config_with(steps=10, drafts=Lenient())
    assert [
        x.split(" = ")[0] for x in idle_settings(config.rl, config.policy, config.scored, 40, 5)
    ] == ["rl.drafts.name"]
    assert idle_settings(config.rl, config.policy, config.scored, 39, 5) == []
    sources = tuple(dataclasses.replace(x, repeat=2) for x in config.data.sources)
    assert idle_settings_of(evolve(config, data={"sources": sources}), 80, 5) == []


def test_a_warm_up_longer_than_the_run_and_an_evaluation_of_nothing_are_told():
    optim = dataclasses.replace(tiny_run().rl.optim, warmup_steps=20)
    (text,) = idle_settings_of(config_with(steps=10, optim=optim), 100, 3)
    assert "rl.optim.warmup_steps = 20: the run has 20 updates" in text
    assert named_settings(config_with(steps=11, optim=optim)) == []
    assert named_settings(config_with(eval_every=1, data={"eval_prompts": 0})) == ["rl.eval_every"]
    assert named_settings(config_with(eval_every=1)) == []
    (source,) = tiny_run().data.sources
    sets = {"eval_prompts": 0, "eval_sets": (EvalSet("own", (source,)),)}
    assert named_settings(config_with(eval_every=1, data=sets)) == []
    for data, expected in (({"eval_prompts": 0}, ["evaluation.at"]), (sets, []), ({}, [])):
        config = dataclasses.replace(config_with(data=data), evaluation=EvalConfig(at=(1,)))
        assert named_settings(config) == expected


def test_an_evaluation_after_a_step_that_never_comes_is_told():
    config = dataclasses.replace(config_with(steps=9), evaluation=EvalConfig(at=(3, 9, 10, 40)))
    (text,) = idle_settings(config.rl, config.policy, config.scored, 100, 3)
    assert text == (
        "evaluation.at = (3, 9, 10, 40): the run ends after 9 steps (rl.steps) and never comes to"
        " 10, 40; leave out what lies beyond, or raise rl.steps"
    )
    assert (
        named_settings(dataclasses.replace(config_with(steps=40), evaluation=config.evaluation))
        == []
    )


def test_stages_that_never_begin_or_change_nothing_are_told():
    stages = (RLStage(), RLStage(3), RLStage(5, group_size=8), RLStage(9, group_size=6))
    short_run, long_run = config_with(steps=9, stages=stages), config_with(steps=10, stages=stages)
    assert [text.split(":")[0] for text in idle_stages(short_run.rl)] == [
        "rl.stages[1]",
        "rl.stages[3]",
    ]
    assert "it has 0 steps" in idle_stages(short_run.rl)[1]
    (text,) = idle_stages(long_run.rl)
    assert text.startswith("rl.stages[1]: it has the settings of the stage before it")


def test_a_guard_whose_window_is_longer_than_the_run_is_told():
    (source,) = tiny_run().data.sources
    audited = {"sources": (dataclasses.replace(source, gold="exact"),)}
    assert named_settings(config_with(steps=15, data=audited)) == ["rl.guard.window"]
    assert named_settings(config_with(steps=16, data=audited)) == []
    assert named_settings(config_with(steps=15)) == []
