"""The run directory: one writer, one configuration."""

import dataclasses
import os
import signal
import subprocess
import sys
import textwrap

import pytest
from plain_config import CONFIG, MODEL, SOURCES

from compass_jax.config import ConfigError, DataConfig, ModelConfig, RLConfig, RunConfig
from compass_jax.config.io import (
    config_from_json,
    config_to_json,
    differences,
    flatten,
    read_config,
)
from compass_jax.runs.rundir import (
    ConfigMismatch,
    NewFolderLock,
    RunDir,
    RunDirectoryGone,
    RunDirectoryInUse,
    staged,
)


def log_first_step(path):
    """Writes the log of one step."""
    (path / "metrics.jsonl").write_text('{"stage": "rl", "step": 1, "metrics": {}}\n')


def with_(config, **changes):
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    "config", [CONFIG, RunConfig("dense", ModelConfig("qwen3", 10, 8, 1, 1, 1, 8, 8), seed=7)]
)
def test_json_round_trip_is_exact(config):
    restored = config_from_json(config_to_json(config))
    assert restored == config
    assert repr(restored) == repr(config)  # 1 == 1.0 == True, but their representations differ


@pytest.mark.parametrize(
    "old,new,message",
    [
        ('"seed": 0', '"seed": "0"', r"seed = '0': the wrong type, it must be int"),
        ('"seed": 0', '"seed": true', r"seed = True: the wrong type, it must be int"),
        ('"seed": 0', '"sead": 0', r"sead: no such key; did you mean seed\?"),
        (
            '"group_size": 4',
            '"group_syze": 8',
            r"rl.group_syze: no such key; did you mean group_size\?",
        ),
        ('"group_size": 4', '"group_size": 4.5', r"rl.group_size = 4.5: the wrong type"),
        (
            '"replay": "R3"',
            '"replay": "R4"',
            r"rl.replay = 'R4': the wrong type, it must be Literal\['off', 'R2', 'R3'\]",
        ),
        (
            '"kind": "FileSource"',
            '"kind": "Url"',
            r"data.sources.1.kind = 'Url': must be one of ProceduralSource, FileSource",
        ),
        ('"vocab_size": 100,', "", r"model: vocab_size must be given"),
        ('"name": "x",', '"name": "x"', r"the configuration: not JSON"),
    ],
)
def test_json_that_cannot_be_read_is_named(old, new, message):
    text = config_to_json(CONFIG)
    assert old in text
    with pytest.raises(ConfigError, match=message):
        config_from_json(text.replace(old, new, 1))


def test_a_file_of_before_with_a_setting_that_did_nothing_is_read():
    text = config_to_json(CONFIG)
    old = text.replace('"sft": {', '"sft": {"eval_every": 7,', 1)
    assert old != text and config_from_json(old) == CONFIG
    with pytest.raises(ConfigError, match=r"data\.eval_every: no such key"):
        config_from_json(text.replace('"data": {', '"data": {"eval_every": 7,', 1))


def test_a_file_of_before_says_where_replay_of_groups_went_if_it_was_on():
    text = config_to_json(CONFIG)
    idle, on = (
        text.replace('"rl": {', f'"rl": {{"group_replay": {{"groups": {n}}},', 1) for n in (0, 8)
    )
    assert idle != text and config_from_json(idle) == CONFIG
    with pytest.raises(ConfigError, match=r"rl\.group_replay: it is the hook of examples"):
        config_from_json(on)


def test_differences_name_keys_as_the_command_line_does():
    other = with_(
        CONFIG,
        seed=3,
        rl=RLConfig(group_size=8),
        data=DataConfig((with_(SOURCES[0], size=51),)),
        model=with_(MODEL, moe=None),
    )
    changes = differences(CONFIG, other)
    assert (
        changes["seed"] == (0, 3)
        and changes["rl.group_size"] == (4, 8)
        and changes["data.sources.0.size"] == (50, 51)
    )
    assert changes["data.sources.1.path"] == ("a.jsonl", "absent") and changes["model.moe"] == (
        "absent",
        None,
    )
    rest = {k for k in changes if not k.startswith(("data.sources.1.", "model.moe."))}
    assert rest == {"seed", "rl.group_size", "data.sources.0.size", "model.moe"}
    assert flatten(CONFIG)["model.moe.dense_layers"] == (1,)
    assert differences(CONFIG, CONFIG) == {}


def at(path, config):
    return with_(config, run_dir=str(path))


def run_at(path, config):
    return RunDir(at(path, config))


def test_new_and_resumed(tmp_path):
    path = tmp_path / "runs" / "a"
    with run_at(path, CONFIG) as run:
        assert run.path == path and not run.resumed
        assert read_config(path) == at(path, CONFIG)
    with run_at(path, CONFIG) as run:
        assert not run.resumed  # it has no step yet
    log_first_step(path)
    longer = with_(
        CONFIG,
        rl=RLConfig(steps=500, save_every=9, eval_every=2),
        sft=with_(CONFIG.sft, steps=7),
        keep_checkpoints=9,
    )
    with run_at(path, longer) as run:
        assert run.resumed
    assert read_config(path) == at(path, longer)


def test_another_configuration_is_refused_and_nothing_is_lost(tmp_path):
    with run_at(tmp_path, CONFIG):
        log_first_step(tmp_path)
    other = with_(CONFIG, rl=RLConfig(group_size=8, steps=9), seed=5)
    with pytest.raises(ConfigMismatch) as error, run_at(tmp_path, other):
        pass
    assert "seed: 0 in the run, 5 now" in str(
        error.value
    ) and "rl.group_size: 4 in the run, 8 now" in str(error.value)
    assert "rl.steps" not in str(error.value)
    assert read_config(tmp_path) == at(tmp_path, CONFIG)
    with run_at(tmp_path, CONFIG) as run:  # the refusal released the lock
        assert run.resumed


@pytest.mark.parametrize(
    "trained", ["metrics.jsonl", "rollouts.jsonl", "checkpoints/step_00000001"]
)
def test_a_directory_in_which_nothing_was_trained_is_taken_by_another_configuration(
    tmp_path, trained
):
    """A start that failed (a path with a typo) leaves its config.json and empty logs."""
    other = with_(CONFIG, seed=5)
    with run_at(tmp_path, CONFIG):
        (tmp_path / "metrics.jsonl").touch()
        (tmp_path / "checkpoints").mkdir()
    with run_at(tmp_path, other) as run:
        assert not run.resumed and read_config(tmp_path) == at(tmp_path, other)
    file = tmp_path / trained
    file.parent.mkdir(exist_ok=True)
    file.write_text("a line\n")
    with pytest.raises(ConfigMismatch, match="seed: 5 in the run, 0 now"), run_at(tmp_path, CONFIG):
        pass


def test_stages_have_directories_of_their_own_and_rl_starts_from_the_sft_beside_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert staged(with_(CONFIG, run_dir="a"), "rl") == with_(CONFIG, run_dir="a")
    assert staged(CONFIG, "sft") == with_(CONFIG, run_dir="runs/x/sft")
    random = staged(CONFIG, "rl")
    assert (random.run_dir, random.init_from) == ("runs/x/rl", "")
    (tmp_path / "runs/x/sft/checkpoints/step_00000001").mkdir(parents=True)
    tuned = staged(CONFIG, "rl")
    assert tuned == with_(CONFIG, run_dir="runs/x/rl", init_from="runs/x/sft")
    assert staged(with_(CONFIG, init_from="hf"), "rl").init_from == "hf"
    # RL that started from random weights continues from its own weights.
    with RunDir(random):
        log_first_step(tmp_path / "runs/x/rl")
    assert staged(CONFIG, "rl") == random


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    code = f"""
        import dataclasses, sys, time
        sys.path[:0] = {sys.path!r}
        from plain_config import CONFIG
        from compass_jax.runs.rundir import RunDir
        with RunDir(dataclasses.replace(CONFIG, run_dir={str(tmp_path)!r})):
            print("locked", flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        with (
            pytest.raises(RunDirectoryInUse, match=f"process {holder.pid} "),
            run_at(tmp_path, CONFIG),
        ):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with run_at(tmp_path, CONFIG):
        assert read_config(tmp_path) == at(tmp_path, CONFIG)


def test_of_many_settings_that_differ_the_first_ten_are_named(tmp_path):
    """An error must be short enough to read."""
    optim = dataclasses.replace(CONFIG.rl.optim, learning_rate=0.5, b1=0.5, b2=0.5, eps=0.5)
    optim = dataclasses.replace(optim, weight_decay=0.5, clip_grad_norm=0.5, max_bad_steps=7)
    rl = dataclasses.replace(CONFIG.rl, optim=optim, group_size=8, epochs=3, replay="R2")
    other = dataclasses.replace(CONFIG, rl=rl, seed=5)
    count = len(differences(CONFIG, other))
    with run_at(tmp_path, CONFIG):
        log_first_step(tmp_path)
    with pytest.raises(ConfigMismatch) as error, run_at(tmp_path, other):
        pass
    lines = str(error.value).splitlines()
    assert count == 11 and len(lines) == 13 and lines[-2] == "  and 1 more"


def test_no_run_directory_and_a_damaged_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: the configuration: not JSON"):
        read_config(tmp_path)


def test_two_exports_under_one_name_are_told_apart_and_leave_no_lock(tmp_path):
    out = tmp_path / "deep" / "hf"
    with NewFolderLock(out) as lock:
        lock.check()
        assert not out.exists()
        with (
            pytest.raises(RunDirectoryInUse, match=f"{out} is in use by process {os.getpid()}"),
            NewFolderLock(out),
        ):
            pass
        with NewFolderLock(out.with_name("other")):
            pass
    assert list(out.parent.iterdir()) == []


def test_a_path_that_cannot_be_a_run_directory_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    paths = {"File name too long": tmp_path / ("x" * 5000), "null byte": f"{tmp_path}/a\0b"}
    for message, path in (paths | {"cannot be written to": tmp_path / "file" / "run"}).items():
        with pytest.raises(ConfigError, match=message) as error, run_at(path, CONFIG):
            pass
        assert "\n" not in str(error.value) and len(str(error.value)) < 900


def test_a_run_notices_that_its_directory_was_removed(tmp_path):
    with run_at(tmp_path / "run", CONFIG) as run:
        run.check()
        (tmp_path / "run").rename(tmp_path / "elsewhere")
        with pytest.raises(RunDirectoryGone, match="run was removed or replaced"):
            run.check()
