"""Runs whose samples are episodes that a driver plays in a process of its own."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from episode_run import ENVIRONMENTS, episode_run
from logged import lines, numbers

from compass_jax.commands.cli import main
from compass_jax.config import ConfigError, DataConfig, EpisodeSource, ZeroVarianceConfig
from compass_jax.config.drafts import Drafts
from compass_jax.config.rl_stage import RLStage
from compass_jax.data.episodes import Command, episode_rows
from compass_jax.data.files import DataError
from compass_jax.devices.processes.start import environment, module_command
from compass_jax.experience.episodes.drivers import Driver
from compass_jax.experience.step_policies.partial import PartialRollouts
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.rl.corrections.tis import Tis
from compass_jax.runs.telemetry import Telemetry
from compass_jax.training.episodes import check_episodes
from compass_jax.training.loop import StepFailed
from compass_jax.training.rl import run_rl


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the folder and the result of a run of three steps that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return folder / "run", run_rl(episode_run(folder, steps=3))


def test_the_sampled_turns_are_trained_on_with_the_routes_of_the_rollout(whole):
    folder, result = whole
    assert result["steps"] == 3 and not math.isnan(result["evaluation"].avg_at_k)
    for row in numbers(folder):
        assert row["reward/unknown_frac"] == 0 and 1 <= row["episode/turns"] <= 3
        assert (row["episode/branches"], row["episode/dropped_tokens"]) == (1, 0)
        assert 0 <= row["truncated_frac"] <= row["episode/truncated_frac"] <= 1
        # R3 in float32: training finds the routes of the rollout, and so its log-probs
        assert row["mismatch/kl_k3"] < 1e-10 and row["replay/flip_frac"] == 0
        shares = [value for name, value in row.items() if name.startswith("waste/frac_")]
        assert sum(shares) == pytest.approx(1)
    groups = lines(folder, "rollouts")
    texts = [sample["response"] for group in groups for sample in group["samples"]]
    # the whole conversation, with what the environment said
    assert all("Count to" in text for text in texts)
    assert any("And " in text for text in texts)


def test_in_bfloat16_the_routes_of_the_rollout_bring_training_nearer_to_it(tmp_path):
    gaps = {}
    for replay in ("R3", "off"):
        folder = tmp_path / replay
        folder.mkdir()
        run_rl(episode_run(folder, replay=replay, rollout={"dtype": "bfloat16"}))
        gaps[replay] = np.mean([row["mismatch/kl_k3"] for row in numbers(folder / "run")])
    assert 0 < gaps["R3"] < gaps["off"] / 2


SETTINGS = {
    "screening and selection": {
        "group_size": 4,
        "step_policy": Screening(),
        "zero_variance": ZeroVarianceConfig(posterior=True),
    },
    "growth": {"zero_variance": ZeroVarianceConfig(grow_to=4)},
    "one step off": {"one_step_off": True, "correction": Tis()},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_acts_on_prompts_acts_on_episodes(tmp_path, name):
    run_rl(episode_run(tmp_path, steps=3, **SETTINGS[name]))
    rows = numbers(tmp_path / "run")
    assert len(rows) == 3
    for row in rows:
        assert row["reward/unknown_frac"] == 0
        # one step off, another policy sampled
        assert name == "one step off" or row["mismatch/kl_k3"] < 1e-6
    if name == "one step off":
        assert [row["staleness"] for row in rows] == [0, 1, 1]
    if name == "growth":
        assert sum(row["zero_variance/grown_groups"] for row in rows) > 0
    if name == "screening and selection":
        assert all("screening/stopped_frac" in row for row in rows)


def test_a_stage_with_longer_answers_has_longer_episodes(tmp_path):
    stages = (RLStage(max_new_tokens=128), RLStage(1))
    config = episode_run(tmp_path, rollout={"max_new_tokens": 384}, stages=stages)
    assert run_rl(config)["steps"] == 2
    first, second = (row["response_length/max"] for row in numbers(tmp_path / "run"))
    assert first < 128 + 128 < second <= 128 + 384


def stopped_in_step_2(monkeypatch):
    """Stops the run when a sample of step 2 has ended."""
    real, logged = Telemetry.log, []

    def log(self, step, *rest):
        logged.append(step)
        return real(self, step, *rest)

    monkeypatch.setattr(Telemetry, "log", log)
    from compass_jax.experience.buffer import ExperienceBuffer

    put = ExperienceBuffer.put

    def stop(self, rollout, done):
        put(self, rollout, done)
        if logged == [1]:
            logged.append(0)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ExperienceBuffer, "put", stop)


def test_a_stopped_run_goes_on_with_the_same_episodes(whole, tmp_path, monkeypatch):
    config = episode_run(tmp_path, steps=3)
    with monkeypatch.context() as patch:
        stopped_in_step_2(patch)
        assert run_rl(config)["stopped"]
    assert run_rl(config)["steps"] == 3
    expected, found = numbers(whole[0]), numbers(tmp_path / "run")
    assert len(expected) == len(found) == 3
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)
    texts = [
        [sample["response"] for group in lines(folder, "rollouts") for sample in group["samples"]]
        for folder in (whole[0], tmp_path / "run")
    ]
    assert texts[0] == texts[1]


def test_coroutines_are_awaited_and_a_failure_is_left_out_with_its_reason(tmp_path):
    source = {"timeout_s": 3.0, "options": (("asks", 2),)}
    run_rl(episode_run(tmp_path, "Failing", source=source, prompts_per_step=4, steps=2))
    samples = [
        sample for group in lines(tmp_path / "run", "rollouts") for sample in group["samples"]
    ]
    outcomes = {sample["outcome"] for sample in samples}
    assert {"ok", "error"} <= outcomes <= {"ok", "error", "timeout"}
    for row in numbers(tmp_path / "run"):
        assert 0 < row["reward/unknown_frac"] < 1
    log = next((tmp_path / "run" / "drivers").glob("*Failing.log")).read_text()
    assert "the shop is closed" in log  # with its traceback


def test_a_driver_that_dies_is_started_again(tmp_path):
    """Its episodes are played anew: the run is one in which nothing died."""
    rows = {}
    for name in ("undisturbed", "disturbed"):
        folder = tmp_path / name
        folder.mkdir()
        if name == "undisturbed":
            (folder / "died").touch()
        source = {"options": (("folder", str(folder)), ("asks", 2)), "label": "count"}
        assert run_rl(episode_run(folder, "Dying", source=source, steps=2))["steps"] == 2
        rows[name] = numbers(folder / "run")
        assert (folder / "died").exists()
    for row, other in zip(*rows.values(), strict=True):
        assert row.keys() == other.keys() and row["reward/unknown_frac"] == 0
        for name in row:
            np.testing.assert_allclose(other[name], row[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_step_of_errors_alone_stops_the_run_and_is_played_anew(tmp_path):
    sign = tmp_path / "sign"
    config = episode_run(tmp_path, "Closed", source={"options": (("sign", str(sign)),)})
    for _ in range(2):
        with pytest.raises(StepFailed, match=r"all 4 samples of a step failed.*shop is closed"):
            run_rl(config)
    sign.touch()
    assert run_rl(config)["steps"] == 2
    assert [row["reward/unknown_frac"] for row in numbers(tmp_path / "run")] == [0, 0]


REFUSED = {
    "none.py:Game": "none.py",
    f"{ENVIRONMENTS}:Gone": "has no Gone",
    f"{ENVIRONMENTS}:os": "it has no rows, reset, step",
    f"{ENVIRONMENTS}:Replayed": "it is an Environment of compass_jax.rewards.tasks",
    f"{ENVIRONMENTS}:Priced": "with options {}: missing a required argument: 'price'",
}


@pytest.mark.parametrize("env", REFUSED)
def test_an_environment_that_cannot_be_used_is_refused_by_name(env):
    with pytest.raises(DataError, match=REFUSED[env]) as caught:
        episode_rows(EpisodeSource(env), "data.sources[0]", 0)
    assert str(caught.value).count("env = ") == 1


def test_the_rows_are_read_in_a_process_of_their_own():
    source = EpisodeSource(f"{ENVIRONMENTS}:Counting")
    assert [row["n"] for row in episode_rows(source, "data.sources[0]", 0)] == list(range(12))


REFUSED_RUNS = {
    "samplers are other processes": ({}, True),
    "rl.drafts begin answers": ({"drafts": Drafts()}, False),
    "PartialRollouts carries unfinished": ({"step_policy": PartialRollouts()}, False),
}


@pytest.mark.parametrize("reason", REFUSED_RUNS)
def test_what_plays_no_episode_is_refused_by_name(tmp_path, reason):
    config, (changes, samplers) = episode_run(tmp_path), REFUSED_RUNS[reason]
    rl = dataclasses.replace(config.rl, **changes)
    check_episodes(config.data, config.rollout, config.rl, False)
    with pytest.raises(ConfigError, match=reason):
        check_episodes(config.data, config.rollout, rl, samplers)
    check_episodes(DataConfig(), config.rollout, rl, samplers)


def command(module):
    return Command(module_command(module), environment(passes_all=True))


BROKEN = {
    "no message": "print('hello')",
    "another message": "print('{\"hello\": 1}')",
    "a flood": "print('x' * 2**21)",
    "a status": "import sys; sys.exit('no tokens left')",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_driver_that_breaks_the_protocol_is_ended_with_its_last_words(tmp_path, name):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "broken_driver.py").write_text(f"{BROKEN[name]}\n")
    events = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        driver = Driver(command("broken_driver"), {}, tmp_path / "log", events.append)
        driver._process.wait(30)
        for _ in range(200):
            if events:
                break
            subprocess.run(["sleep", "0.05"], check=True)
    (ended,) = events
    expected = "status 1" if name == "a status" else "no message"
    assert expected in ended.reason
    assert ("no tokens left" in ended.reason) == (name == "a status")
    driver.close()


def test_a_driver_ends_with_all_that_it_started(tmp_path):
    folder = tmp_path / "code"
    folder.mkdir()
    code = "import subprocess, sys\np = subprocess.Popen(['sleep', '600'])\nprint(f'{p.pid}', file="
    code += "sys.stderr, flush=True)\nprint('{\"ready\": true}', flush=True)\nsys.stdin.read()\n"
    code += "p.wait()\n"
    (folder / "hanging_driver.py").write_text(code)
    events = []
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr("compass_jax.experience.episodes.drivers.END_S", 0.5)
        driver = Driver(command("hanging_driver"), {"a": 1}, tmp_path / "log", events.append)
        while not events:
            subprocess.run(["sleep", "0.05"], check=True)
        assert json.loads(json.dumps(events[0].message)) == {"ready": True}
        driver.close()
    child = int((tmp_path / "log").read_text().split()[0])
    state = Path(f"/proc/{child}/stat")
    # a killed process may still be scheduled once; without the kill it would sleep for 600 s
    for _ in range(100):
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail(f"the driver's child {child} still runs")


OWNER = """
import sys, time
from pathlib import Path
from compass_jax.config import EpisodeSource
from compass_jax.data.episodes import command_of, setup_of
from compass_jax.experience.episodes.drivers import Driver

source, folder = EpisodeSource(sys.argv[1]), sys.argv[2]
arguments = {"folder": sys.argv[3]}
said = []
driver = Driver(
    command_of(source), setup_of(source, "play", tokenizer=arguments), Path(folder), said.append
)
while not said:
    time.sleep(0.05)
print(driver._process.pid, said[0].message, flush=True)
time.sleep(600)
"""


def test_a_killed_trainer_takes_its_driver_with_it(tmp_path):
    tokenizer = episode_run(tmp_path).data.tokenizer
    words = [f"{ENVIRONMENTS}:Counting", str(tmp_path / "log"), tokenizer]
    owner = subprocess.Popen(
        [*module_command("x")[:1], "-c", OWNER, *words],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(passes_all=True),
    )
    assert owner.stdout is not None
    with owner.stdout:
        driver, _, message = owner.stdout.readline().partition(" ")
    assert message.strip() == "{'ready': True}"
    owner.kill()
    owner.wait()
    state = Path(f"/proc/{driver}/stat")
    for _ in range(200):
        if not state.exists() or state.read_text().split(")")[1].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the driver outlived its trainer")


def test_compass_eval_plays_the_held_out_rows_of_a_run(whole):
    folder, _ = whole
    assert main(["eval", "--checkpoint", str(folder), "--out", str(folder / "again")]) == 0
    names = "evaluation/summary.json", "again/summary.json"
    run, again = (json.loads((folder / name).read_text())["sets"]["heldout"] for name in names)
    assert again == run and again["prompts"] == 2
