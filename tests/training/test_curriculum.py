"""Runs in stages: each step has the settings of its stage; a changed schedule is refused."""

import dataclasses
import gc
import json
import math
import weakref
from types import SimpleNamespace

import pytest
from logged import lines
from variants import STAGES, configured

from compass_jax.config import RLStage, ZeroVarianceConfig, named_correction
from compass_jax.config.curriculum import at_step
from compass_jax.experience.accuracy import Evaluation
from compass_jax.runs.rundir import ConfigMismatch
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training import building
from compass_jax.training.evaluations import Evaluated, Evaluations
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint


def at_step_of(config, done):
    """Returns the configuration of a step."""
    rl, rollout = at_step(config.rl, config.rollout, done)
    return dataclasses.replace(config, rl=rl, rollout=rollout)


def staged(directory, **changed):
    """Returns the configuration of a run of four steps in two stages."""
    return configured("stages", directory, **changed)


def metrics(directory):
    return [row["metrics"] for row in lines(directory, "metrics")]


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    """Returns the directory of an undisturbed run, and its notices."""
    directory, notices = tmp_path_factory.mktemp("whole"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Telemetry, "note", lambda self, text: notices.append(text))
        result = run_rl(staged(directory))
    assert not result["stopped"] and result["steps"] == 4
    return directory, notices


def test_each_step_has_the_settings_of_its_stage(undisturbed_run):
    directory, notices = undisturbed_run
    step_metrics = metrics(directory)
    assert [m["curriculum/stage"] for m in step_metrics] == [0, 0, 1, 1]
    assert [m["lr"] for m in step_metrics] == pytest.approx([1e-2, 1e-2, 3e-3, 3e-3])
    assert ["espo/group_0/epsilon" in m for m in step_metrics] == [True, True, False, False]
    groups = lines(directory, "rollouts")
    sizes = {step: {len(g["samples"]) for g in groups if g["step"] == step} for step in range(1, 5)}
    assert sizes == {1: {4}, 2: {4}, 3: {6}, 4: {6}}
    longest = [m["response_length/max"] for m in step_metrics]
    assert longest[0] == longest[1] == 16 and longest[2] == longest[3] == 8
    # the count of updates continues: eight in all, two a step
    assert [m["policy_version"] for m in step_metrics] == [2, 4, 6, 8]
    assert [text.split(":")[0] for text in notices if text.startswith("stage ")] == [
        "stage 0 of 2 (from 0), to step 2",
        "stage 1 of 2 (from 0), to step 4",
    ]
    assert len(notices) == len(set(notices))
    assert sum(text.startswith("first rollout: ") for text in notices) == 1


def test_the_shares_of_the_bands_are_logged_and_what_a_band_lacks_is_told(undisturbed_run):
    """There is no rollout before the first step, so every prompt counts as half right."""
    directory, notices = undisturbed_run
    first = metrics(directory)[0]
    assert first["curriculum/band_0_share"] == 0 and first["curriculum/band_1_share"] == 1
    assert first["curriculum/borrowed_prompts"] == 1
    notice = next(text for text in notices if "rl.stages[0].mix" in text)
    assert "has 1 fewer of pass rate 0 to 0.5 (band 0) than its share of 0.25 asks for" in notice
    for later in metrics(directory)[2:]:  # two places each, of four
        hard, easy = (4 * later[f"curriculum/band_{i}_share"] for i in range(2))
        assert hard + easy == 4 and later["curriculum/borrowed_prompts"] == abs(hard - 2)


AHEAD = {
    "one step off": dict(one_step_off=True),
    "partial": dict(partial_prompts=2),
    "dynamic": dict(zero_variance=ZeroVarianceConfig(rl_zvp=False, dynamic_sampling=True)),
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", AHEAD)
def test_nothing_is_in_flight_between_two_stages_of_other_shapes(tmp_path, variant):
    """A rollout during the training, and carried samples, would have the old stage's sizes."""
    stages = (STAGES[0], dataclasses.replace(STAGES[1], after_steps=2))
    correction = named_correction("tis")
    config = staged(tmp_path, steps=3, stages=stages, correction=correction, **AHEAD[variant])
    assert run_rl(config)["steps"] == 3
    assert checkpoint.find(str(tmp_path), 2).meta()["pending"] is None
    carried = [m.get("rollout/carried_groups") for m in metrics(tmp_path)]
    assert carried == ([2, 0, 0] if variant == "partial" else [None] * 3)


def test_a_changed_schedule_is_refused_by_name(undisturbed_run):
    changed = (STAGES[0], dataclasses.replace(STAGES[1], group_size=8, learning_rate=None))
    with pytest.raises(ConfigMismatch) as error:
        run_rl(staged(undisturbed_run[0], stages=changed))
    assert "rl.stages.1.group_size: 6 in the run, 8 now" in str(error.value)
    assert "rl.stages.1.learning_rate: 0.003 in the run, None now" in str(error.value)


def test_a_stage_leaves_nothing_of_its_trainer(tmp_path, monkeypatch):
    """Otherwise the devices would hold the weights of two stages at the same time."""
    collected, real = [], building.RLTrainer

    def make_trainer(*args):
        collected.append(all(one() is None for one in trainers))
        trainer = real(*args)
        trainers.append(weakref.ref(trainer))
        return trainer

    trainers: list[weakref.ref] = []
    monkeypatch.setattr(building, "RLTrainer", make_trainer)
    gc.disable()
    try:
        run_rl(staged(tmp_path, steps=2, stages=(RLStage(), RLStage(1, group_size=6))))
    finally:
        gc.enable()
    assert collected == [True, True]


def test_the_last_evaluation_says_the_length_limit_of_its_stage(tmp_path, monkeypatch):
    """`compass compare` checks this limit, which is 8 tokens in this stage and 16 before it."""
    evaluation = Evaluation(2, 0, math.nan, math.nan, math.nan, 0)
    notices: list[str] = []
    trainer = SimpleNamespace(
        config=at_step_of(staged(tmp_path), 4),
        done_steps=4,
        telemetry=SimpleNamespace(note=notices.append),
        parts=SimpleNamespace(prompts=SimpleNamespace(evaluated=["a set"])),
    )
    evaluations = Evaluations(trainer)
    complete = Evaluated(4, evaluation, [], complete=True, average={})
    monkeypatch.setattr(evaluations, "_evaluate", lambda sets: complete)
    result = evaluations.last()
    summary = json.loads((tmp_path / "evaluation" / "summary.json").read_text())
    assert result is evaluation and notices == [evaluation.line()]
    assert summary["settings"]["max_new_tokens"] == 8 == STAGES[1].max_new_tokens
    assert summary["weights"] == f"{tmp_path}, step 4"
