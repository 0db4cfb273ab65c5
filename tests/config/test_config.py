"""Settings that cannot be used are refused when they are loaded, by their names on the command
line; and every setting has an effect."""

import ast
import dataclasses

import pytest
from evolve import evolve
from house_rules import sources
from settings_read import Reads
from tiny_run import tiny_run

import compass_jax.config as config_module
from compass_jax.config import (
    ConfigError,
    RLConfig,
    Seam,
    ShapingConfig,
    ZeroVarianceConfig,
    named_correction,
    seam_class,
)
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate
from compass_jax.rl.objectives.gspo import Gspo

NAN = float("nan")
REFUSED = {
    "alpha": (Espo(alpha=0.0), r"rl\.objective\.alpha = 0\.0: must be positive"),
    "alpha below zero": (Espo(alpha=-0.02), r"alpha = -0\.02"),
    "alpha that is no number": (Espo(alpha=NAN), r"alpha = nan"),
    "floor": (Espo(floor=0.0), r"floor = 0\.0: must be positive"),
    "lower clip": (Grpo(clip_low=-0.2), r"rl\.objective\.clip_low = -0\.2: must be >= 0"),
    "upper clip": (Gspo(clip_high=-1e-4), r"rl\.objective\.clip_high = -0\.0001: must be >= 0"),
    "bound of cispo": (Cispo(ratio_max=1.0), r"ratio_max = 1\.0: must be above 1"),
    "dual clip": (Grpo(dual_clip=0.9), r"dual_clip = 0\.9: must be 0 or above 1"),
    "clip that espo ignores": (
        Espo(clip_low=0.2),
        r"clip_low/high = 0\.2/0\.0004: espo does not use them without fixed_clip",
    ),
    "falling quantiles": (
        Espo(quantiles=(0.8, 0.5)),
        r"quantiles = \(0\.8, 0\.5\): must increase strictly",
    ),
    "equal quantiles": (Espo(quantiles=(0.5, 0.5)), r"quantiles = \(0\.5, 0\.5\)"),
    "a quantile of one": (Espo(quantiles=(0.5, 1.0)), r"inside \(0, 1\)"),
    "KL": (Espo(kl_coef=-0.1), r"kl_coef = -0\.1"),
    "cap of TIS": (
        named_correction("tis", cap=0.5),
        r"rl\.correction\.cap = 0\.5: must be at least 1",
    ),
    "range of IcePop": (
        named_correction("icepop", ratio_range=(1.5, 5.0)),
        r"ratio_range = \(1\.5, 5\.0\): must enclose 1",
    ),
    "range of sequences": (
        named_correction("sequence", ratio_range=(0.9, 0.99)),
        r"ratio_range = \(0\.9, 0\.99\): must enclose 1",
    ),
    "alpha of RL-ZVP": (
        ZeroVarianceConfig(rl_zvp_alpha=0.0),
        r"rl_zvp_alpha = 0\.0: must be positive \(rl_zvp=False switches it off\)",
    ),
    "two selections": (
        ZeroVarianceConfig(curriculum=True, posterior=True),
        r"curriculum and rl\.zero_variance\.posterior both decide",
    ),
    "growth that cannot be": (
        RLConfig(group_size=8, step_policy=None, zero_variance=ZeroVarianceConfig(grow_to=8)),
        r"grow_to = 8 does not exceed rl\.group_size = 8",
    ),
    "a group of one": (
        RLConfig(group_size=1),
        r"group_size = 1: a group-relative advantage needs at least 2",
    ),
    "updates": (
        RLConfig(prompts_per_step=6, updates_per_rollout=4),
        r"prompts_per_step = 6 is not a multiple of rl\.updates_per_rollout = 4",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_out_of_their_range_are_refused(case):
    config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        config.validate()


def test_settings_that_are_used_are_not_refused():
    for objective in (
        Espo(clip_low=0.01, clip_high=0.02, fixed_clip=True),
        Cispo(),
        Espo(quantiles=()),
        dapo_surrogate(clip_high=0.3, dual_clip=3.0),
    ):
        objective.validate()


@pytest.mark.parametrize(
    ("shaping", "message"),
    [
        (
            ShapingConfig(length_penalty=0.05, length_free_tokens=16),
            r"length_free_tokens = 16 is not below .*= 16: .*length_penalty could",
        ),
        (
            ShapingConfig(repetition_penalty=0.05, repetition_ngram=16),
            r"repetition_ngram = 16 is not below .*rl\.shaping\.repetition_penalty could",
        ),
    ],
)
def test_a_penalty_that_contradicts_its_own_threshold_is_refused(shaping, message):
    base = tiny_run()
    with pytest.raises(ConfigError, match=message):
        evolve(base, rl={"shaping": shaping}).validate_for_rl()
    idle = dataclasses.replace(shaping, length_penalty=0.0, repetition_penalty=0.0)
    evolve(base, rl={"shaping": idle}).validate_for_rl()


def test_all_stages_can_be_on_at_once():
    """The stages agree with each other: each takes the groups that earlier stages left uniform."""
    base = tiny_run()
    zero_variance = ZeroVarianceConfig(rl_zvp=True, posterior=True, grow_to=8)
    rl = dataclasses.replace(
        base.rl,
        zero_variance=zero_variance,
        shaping=ShapingConfig(length_penalty=0.05, repetition_penalty=0.02),
    )
    data = dataclasses.replace(base.data, keep_file="pass_rates.jsonl")
    dataclasses.replace(base, rl=rl, data=data).validate_for_rl()


def test_no_setting_is_ignored():
    """Code outside the validation reads each field of each configuration class, from a value of
    that class.
    """
    reads = Reads([ast.parse(text) for text in sources("compass_jax").values()])
    built_in = [seam_class(base, name) for base in Seam.__subclasses__() for name in base.classes]
    classes = [x for x in vars(config_module).values() if dataclasses.is_dataclass(x)] + built_in
    fields = {
        (c.__name__, field.name)
        for c in classes
        for field in dataclasses.fields(c)
        if field.name in c.__annotations__  # not inherited
    }
    assert len(classes) > 16 and len(built_in) >= 8
    assert sorted(fields - reads.of_fields) == []


def test_a_field_of_another_class_is_no_read():
    text = """
class A:
    steps: int
    every: int
    def validate(self):
        check(self.every)
class B:
    every: int
class Run:
    a: A
    b: B | None
class Loop:
    def __init__(self, run: Run):
        self.a, self.b = run.a, run.b
def go(loop: Loop, other):
    part = replace(loop.b, every=2)
    return [other.steps for part in (part,) if part.every] + [loop.a.steps]
"""
    fields = Reads([ast.parse(text)]).of_fields
    assert {("A", "steps"), ("B", "every")} <= fields and ("A", "every") not in fields


def test_a_run_directory_is_a_path_not_a_bucket():
    with pytest.raises(
        ConfigError, match=r"run_dir = 'gs://b/run1': must be a path; mount the bucket"
    ):
        dataclasses.replace(tiny_run(), run_dir="gs://b/run1").validate()
