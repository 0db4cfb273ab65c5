"""A user's objective, one class in a file outside the package: it trains, and errors in it are
reported.
"""

import dataclasses
import json
import re
from pathlib import Path

import pytest
from evolve import evolve
from logged import lines
from tiny_run import tiny_run
from worded import override

from compass_jax.commands.cli import main
from compass_jax.config import (
    Advantage,
    ConfigError,
    Correction,
    DataConfig,
    FileSource,
    Objective,
    OptimConfig,
    RewardConfig,
    RLConfig,
    RLStage,
    ZeroVarianceConfig,
    named_correction,
    seam_class,
)
from compass_jax.config.io import config_from_json, config_to_json, differences
from compass_jax.config.seam import ComponentFailed
from compass_jax.config.verifiers import below_zero
from compass_jax.experience.step_policies.plain import Plain
from compass_jax.rl.advantages.shrunk import Shrunk
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.training.hooks.base import HookFailed
from compass_jax.training.rl import run_rl

MINE = """
from dataclasses import dataclass

import jax.numpy as jnp

from compass_jax.config import Advantage, Correction, Objective, StepPolicy
from compass_jax.rl.grouping import per_row
from compass_jax.rl.objectives.inputs import token_mean
from compass_jax.rl.surrogate import Surrogate


@dataclass(frozen=True)
class Reinforce(Objective):
    scale: float = 1.0

    def surrogate(self, inputs):
        logp = jnp.where(inputs.mask, inputs.logp, 0.0)
        value = self.scale * jnp.where(inputs.mask, inputs.advantage, 0.0) * logp
        return Surrogate(value, jnp.ones_like(logp), jnp.zeros_like(inputs.mask), {})

    def weights(self, inputs):
        return token_mean(inputs)


@dataclass(frozen=True)
class Half(Objective):
    def surrogate(self, inputs):
        return inputs


@dataclass(frozen=True)
class BestOfGroup(Advantage):
    below: float = 1.0

    def responses(self, inputs):
        return inputs.reward - self.below * per_row(inputs.statistics.high, inputs.group)


@dataclass(frozen=True)
class Nameless(Advantage):
    pass


class Undecorated(Advantage):
    below: float = 1.0

    def responses(self, inputs):
        return inputs.reward


@dataclass(frozen=True)
class RootRatio(Correction):
    power: float = 0.5

    def weights(self, inputs):
        return inputs.ratio**self.power


@dataclass(frozen=True)
class TornAdvantage(Advantage):
    def responses(self, inputs):
        return inputs.rewards


@dataclass(frozen=True)
class TornCorrection(Correction):
    def weights(self, inputs):
        return inputs.rewards


@dataclass(frozen=True)
class TornPolicy(StepPolicy):
    def missing(self, inputs):
        return inputs.rewards.torn

    def chosen(self, inputs):
        return []


def write_step(step, groups, metrics):
    with open("steps.txt", "a") as file:
        print(step, len(groups), len(groups[0].rollouts), metrics["reward/mean"], file=file)


def broken(step, groups, metrics):
    raise KeyError("no such metric")


class Thawed:
    pass
"""


@pytest.fixture
def user_file(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    return f"{tmp_path}/mine.py"


def test_an_objective_and_an_advantage_of_a_users_file_train(user_file, tmp_path):
    config = evolve(tiny_run("odd_verifiers:coin"), run_dir=str(tmp_path / "run"), rl={"steps": 2})
    words = ["--rl.objective", f"{user_file}:Reinforce", "--rl.objective.scale", "2.0"]
    words += ["--rl.advantage", f"{user_file}:BestOfGroup", "--rl.advantage.below", "0.5"]
    config = override(config, words)
    assert config.rl.objective == seam_class(Objective, f"{user_file}:Reinforce")(scale=2.0)
    assert config.rl.advantage == seam_class(Advantage, f"{user_file}:BestOfGroup")(below=0.5)
    assert config_from_json(config_to_json(config)) == config
    run_rl(config)
    norms = [row["metrics"]["grad_norm"] for row in lines(tmp_path / "run", "metrics")]
    assert len(norms) == 2 and min(norms) > 0
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["rl"]
    assert saved["objective"]["name"].endswith("mine.py:Reinforce")


def test_a_correction_of_one_class_in_a_users_file_trains(user_file, tmp_path):
    config = tiny_run("odd_verifiers:coin")
    rl = dataclasses.replace(config.rl, steps=2)
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"), rl=rl)
    words = ["--rl.correction", f"{user_file}:RootRatio", "--rl.correction.power", "0.25"]
    config = override(config, [*words, "--rollout.dtype", "bfloat16"])
    assert config.rl.correction == named_correction(f"{user_file}:RootRatio", power=0.25)
    assert config_from_json(config_to_json(config)) == config
    run_rl(config)
    weights = [
        row["metrics"]["correction/weight_mean"] for row in lines(tmp_path / "run", "metrics")
    ]
    assert len(weights) == 2 and all(0 < abs(x - 1) < 0.1 for x in weights)


@pytest.mark.parametrize(
    ("setting", "name", "method"),
    [
        ("rl.advantage", "TornAdvantage", "responses"),
        ("rl.correction", "TornCorrection", "weights"),
        ("rl.step_policy", "TornPolicy", "missing"),
    ],
)
def test_an_error_in_a_users_class_is_said_with_file_line_and_step(
    user_file, tmp_path, setting, name, method
):
    config = evolve(tiny_run("odd_verifiers:coin"), run_dir=str(tmp_path / "run"))
    with pytest.raises(ComponentFailed) as caught:
        run_rl(override(config, [f"--{setting}", f"{user_file}:{name}"]))
    before, _, body = MINE.partition(f"class {name}(")
    line = (before + body.partition("return")[0]).count("\n") + 1
    place = re.escape(f"step 1: {setting}.name = '{user_file}:{name}', line {line}: {method}")
    assert re.match(rf"{place} failed: AttributeError: .*; mend it, then run", str(caught.value))
    cause = caught.value.__cause__.__cause__
    assert isinstance(cause, AttributeError)


@pytest.mark.parametrize("name", Correction.classes)
def test_every_correction_is_written_and_read_again(name):
    config = override(tiny_run(), ["--rl.correction", name])
    assert config.rl.correction.name == name and config.rl.correction.acts == (name != "off")
    assert config_from_json(config_to_json(config)) == config


def test_a_callback_gets_each_step_with_its_groups_and_metrics(user_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_run("odd_verifiers:coin")
    rl = dataclasses.replace(config.rl, steps=2)
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"), rl=rl)
    run_rl(dataclasses.replace(config, callbacks=(f"{user_file}:write_step",)))
    rows = [line.split() for line in (tmp_path / "steps.txt").read_text().splitlines()]
    logged = [row["metrics"]["reward/mean"] for row in lines(tmp_path / "run", "metrics")]
    assert [int(row[0]) for row in rows] == [1, 2]
    assert {(int(row[1]), int(row[2])) for row in rows} == {(rl.prompts_per_step, rl.group_size)}
    assert [float(row[3]) for row in rows] == pytest.approx(logged)


def test_a_callback_that_fails_ends_the_run_with_its_name(user_file, tmp_path):
    config = tiny_run("odd_verifiers:coin")
    config = dataclasses.replace(config, run_dir=str(tmp_path / "run"))
    with pytest.raises(HookFailed, match=r"mine\.py:broken failed after step 1: KeyError"):
        run_rl(dataclasses.replace(config, callbacks=(f"{user_file}:broken",)))
    with pytest.raises(ConfigError, match="has no write_stp; did you mean write_step"):
        run_rl(dataclasses.replace(config, callbacks=(f"{user_file}:write_stp",)))
    with pytest.raises(ConfigError, match="callbacks = 'print': must be module:name or"):
        dataclasses.replace(config, callbacks=("print",)).validate()


def test_an_advantage_that_cannot_be_used_is_refused_with_status_2(user_file, capsys):
    for name, message in (
        (
            "rlo",
            "no such advantage; take one of grpo, rloo, reinforce_pp, maxrl, predicted, shrunk",
        ),
        (f"{user_file}:Reinforce", "is no subclass of compass_jax.config.Advantage"),
        (f"{user_file}:Nameless", "has no responses(inputs); define it"),
        (f"{user_file}:Undecorated", "is no frozen dataclass; write @dataclass(frozen=True)"),
    ):
        status, text = refused(["--rl.advantage", name], capsys)
        assert status == 2 and message in text and "Traceback" not in text, text
    words = ["--rl.advantage", "maxrl", "--rewards.wrong-at", "-1"]
    status, text = refused(words, capsys)
    assert status == 2 and "rewards.wrong_at = -1.0: take another advantage" in text
    words = ["--rl.advantage", "maxrl", "--rl.shaping.overlong-penalty", "0.25"]
    status, text = refused(words, capsys)
    assert status == 2 and "overlong_penalty = 0.25 is taken from rewards of 0" in text


PREDICTION = {"posterior": True, "rl_zvp": False}
CONTRADICTIONS = [  # settings under rl, and rl.zero_variance, with the message
    ({}, {"posterior": False}, "each would be 0.5; switch rl.zero_variance.posterior on"),
    ({}, {"posterior": False, "curriculum": True}, "nothing predicts any"),
    ({}, {"rl_zvp": True}, "rl.zero_variance.rl_zvp with rl.advantage.name = '{name}': both give"),
    ({}, {"dynamic_sampling": True}, "drops the uniform groups that rl.advantage.name = '{name}'"),
    ({"step_policy": Plain(rounds=2)}, {}, "further rounds of prompts drop the uniform groups"),
    ({"optim": OptimConfig(rate_by_groups=True)}, {}, "rl.optim.rate_by_groups counts groups"),
    ({"permute_rewards": True}, {}, "rl.permute_rewards with rl.advantage.name = '{name}'"),
]


@pytest.mark.parametrize(("settings", "zero", "message"), CONTRADICTIONS)
@pytest.mark.parametrize("name", ["predicted", "shrunk"])
def test_settings_that_contradict_a_prediction_are_refused_by_name(name, settings, zero, message):
    advantage = seam_class(Advantage, name)()
    rl = RLConfig(
        advantage=advantage, step_policy=None, zero_variance=ZeroVarianceConfig(**PREDICTION)
    ).validate("rl")
    changed = dataclasses.replace(
        rl, **settings, zero_variance=ZeroVarianceConfig(**PREDICTION | zero)
    )
    with pytest.raises(ConfigError, match=re.escape(message.format(name=name))):
        changed.validate("rl")


def test_a_prediction_works_in_stages_and_not_with_a_mix_of_difficulties():
    """A stage may change the size of groups and the objective."""
    config = tiny_run()
    rl = dataclasses.replace(
        config.rl,
        advantage=Shrunk(),
        zero_variance=ZeroVarianceConfig(**PREDICTION),
        stages=(RLStage(), RLStage(1, group_size=8, objective=dapo_surrogate())),
    )
    dataclasses.replace(config, rl=rl).validate_for_rl()
    mixed = dataclasses.replace(rl, stages=(RLStage(mix=((0.0, 1.0, 1.0),)),))
    with pytest.raises(ConfigError, match=r"rl\.zero_variance\.posterior and the mix of a stage"):
        dataclasses.replace(config, rl=mixed).validate_for_rl()


def test_a_shrunk_advantage_without_a_prediction_is_no_contradiction_to_rl_zvp():
    """With a strength of 0 groups of equal rewards have no advantage, as with rloo."""
    zero = ZeroVarianceConfig(**PREDICTION | {"rl_zvp": True})
    RLConfig(advantage=Shrunk(strength=0.0), zero_variance=zero).validate("rl")
    with pytest.raises(ConfigError, match=r"rl\.advantage\.strength = -1\.0: must be >= 0"):
        RLConfig(advantage=Shrunk(strength=-1.0)).validate("rl")


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ({"math": 1.0, "format": -0.2}, "data.sources[0] gives rewards down to -0.2"),
        ("signed", "data.sources[0] gives rewards down to -1"),
        ({"math": 1.0, "format": 0.2}, ""),
        ("judge", ""),
        ("plain", ""),
    ],
)
def test_maxrl_refuses_settings_with_rewards_below_zero(tmp_path, verifier, message):
    file = tmp_path / "mine.py"
    file.write_text(
        "def plain(prompt, response):\n    return 1.0\n"
        "def signed(prompt, response):\n    return 1.0\n"
        "signed.range = (-1, 1)\n"
    )
    verifier = f"{file}:{verifier}" if verifier in ("signed", "plain") else verifier
    sources = DataConfig(sources=(FileSource("rows.jsonl", verifier=verifier),)).keyed_sources()
    assert below_zero(sources, RewardConfig(), 0.0) == message


@pytest.mark.parametrize("name", Advantage.classes)
def test_every_advantage_is_written_and_read_again(name):
    config = override(tiny_run(), ["--rl.advantage", name])
    assert config.rl.advantage.name == name
    assert config_from_json(config_to_json(config)) == config


def refused(arguments, capsys):
    config = str(Path(__file__).parents[1] / "tiny_run.py")
    try:
        status = main(["train", config, "--dry-run", "--json", *arguments])
    except SystemExit as stop:
        status = stop.code
    return status, " ".join(capsys.readouterr().err.split())


def test_an_objective_that_cannot_be_used_is_refused_with_status_2(user_file, capsys):
    for name, message in (
        ("ppo", "no such objective; take one of grpo, gspo, cispo, espo, or name your own"),
        ("no_such_module:Mine", "there is no module no_such_module"),
        (f"{user_file}:Reinforc", "has no Reinforc; did you mean Reinforce?"),
        (f"{user_file}:Thawed", "is no subclass of compass_jax.config.Objective"),
        (f"{user_file}:Half", "has no weights(inputs); define it"),
    ):
        status, text = refused(["--rl.objective", name], capsys)
        assert status == 2 and message in text and "Traceback" not in text, text


def test_a_field_that_an_objective_does_not_have_is_refused_where_it_is_written(user_file, capsys):
    arguments = ["--rl.objective", f"{user_file}:Reinforce", "--rl.objective.alpha", "0.1"]
    status, text = refused(arguments, capsys)
    assert status == 2 and "rl.objective.alpha: no such setting" in text
    status, text = refused(["--rl.objective", "grpo", "--rl.objective.alpha", "0.1"], capsys)
    assert status == 2 and "rl.objective.alpha: no such setting" in text
    plain = json.loads(config_to_json(tiny_run()))
    plain["rl"]["objective"] = {"name": "grpo", "clip_hihg": 0.3}
    with pytest.raises(ConfigError, match=r"rl\.objective\.clip_hihg: no such key; did you mean"):
        config_from_json(json.dumps(plain))


@pytest.mark.parametrize(
    "objective", [Grpo(), dr_grpo(), Gspo(clip_low=0.1), Cispo(), Espo(quantiles=())]
)
def test_every_objective_is_written_and_read_again(objective):
    config = tiny_run()
    config = evolve(config, rl={"objective": objective})
    assert config_from_json(config_to_json(config)) == config
    assert "rl.objective.name" in differences(tiny_run(), config) or isinstance(objective, Espo)


def test_dapo_is_dapo_with_its_dynamic_sampling_and_its_overlong_penalty():
    rl = dapo(RLConfig(), max_new_tokens=20_480)
    assert (rl.objective.clip_low, rl.objective.clip_high, rl.objective.mean) == (
        0.2,
        0.28,
        "tokens",
    )
    assert rl.zero_variance.dynamic_sampling and not rl.zero_variance.rl_zvp
    assert (rl.shaping.overlong_penalty, rl.shaping.overlong_buffer_tokens) == (0.5, 4096)
    rl.validate()
    assert override(tiny_run(), ["--rl.objective", "dapo"]).rl == dapo(
        tiny_run().rl, tiny_run().rollout.max_new_tokens
    )
