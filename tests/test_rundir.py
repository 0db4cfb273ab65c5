"""The run directory: one writer, one configuration."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from compass_jax.config import ConfigError, DataConfig, FileSource, ModelConfig, MoEConfig, ProceduralSource, RLConfig, RunConfig, SFTConfig
from compass_jax.config_io import config_from_json, config_to_json, differences, flatten
from compass_jax.rundir import ConfigMismatch, RunDir, RunDirectoryInUse, read_config

MODEL = ModelConfig("qwen3_moe", 100, 32, 2, 2, 1, 16, 64, moe=MoEConfig(8, 2, 32, dense_layers=(1,)))
SOURCES = (ProceduralSource("chain_sum", (("min_terms", 2), ("p", 0.5), ("on", True), ("r", ("a", (1, 2)))), 50), FileSource("a.jsonl"))
CONFIG = RunConfig("x", MODEL, data=DataConfig(SOURCES), sft=SFTConfig(procedural=(("chain_sum", 3, 1),)))


def with_(config, **changes):
    return dataclasses.replace(config, **changes)


@pytest.mark.parametrize("config", [CONFIG, RunConfig("dense", ModelConfig("qwen3", 10, 8, 1, 1, 1, 8, 8), seed=7)])
def test_json_round_trip_is_exact(config):
    again = config_from_json(config_to_json(config))
    assert again == config
    assert repr(again) == repr(config)  # 1 == 1.0 == True, their representations differ


@pytest.mark.parametrize(
    "old,new,message",
    [
        ('"seed": 0', '"seed": "0"', r"seed = '0': the wrong type, it must be int"),
        ('"seed": 0', '"seed": true', r"seed = True: the wrong type, it must be int"),
        ('"seed": 0', '"sead": 0', r"sead: no such key; did you mean seed\?"),
        ('"group_size": 8', '"group_syze": 8', r"rl.group_syze: no such key; did you mean group_size\?"),
        ('"group_size": 8', '"group_size": 8.5', r"rl.group_size = 8.5: the wrong type"),
        ('"replay": "R3"', '"replay": "R4"', r"rl.replay = 'R4': the wrong type, it must be Literal\['off', 'R2', 'R3'\]"),
        ('"kind": "FileSource"', '"kind": "Url"', r"data.sources.1.kind = 'Url': must be one of ProceduralSource, FileSource"),
        ('"vocab_size": 100,', "", r"model: vocab_size must be given"),
        ('"name": "x",', '"name": "x"', r"the configuration: not JSON"),
    ],
)
def test_json_that_cannot_be_read_is_named(old, new, message):
    text = config_to_json(CONFIG)
    assert old in text
    with pytest.raises(ConfigError, match=message):
        config_from_json(text.replace(old, new, 1))


def test_differences_name_keys_as_the_command_line_does():
    other = with_(CONFIG, seed=3, rl=RLConfig(group_size=4), data=DataConfig((with_(SOURCES[0], size=51),)), model=with_(MODEL, moe=None))
    found = differences(CONFIG, other)
    assert found["seed"] == (0, 3) and found["rl.group_size"] == (8, 4) and found["data.sources.0.size"] == (50, 51)
    assert found["data.sources.1.path"] == ("a.jsonl", "absent") and found["model.moe"] == ("absent", None)
    rest = {k for k in found if not k.startswith(("data.sources.1.", "model.moe."))}
    assert rest == {"seed", "rl.group_size", "data.sources.0.size", "model.moe"}
    assert flatten(CONFIG)["model.moe.dense_layers"] == (1,)
    assert differences(CONFIG, CONFIG) == {}


def test_new_and_resumed(tmp_path):
    path = tmp_path / "runs" / "a"
    with RunDir(path, CONFIG) as run:
        assert run.path == path and not run.resumed
        assert read_config(path) == CONFIG
    longer = with_(CONFIG, rl=RLConfig(steps=500, save_every=9, eval_every=2), sft=with_(CONFIG.sft, steps=7), keep_checkpoints=9, run_dir="b")
    with RunDir(path, longer) as run:
        assert run.resumed
    assert read_config(path) == longer


def test_another_configuration_is_refused_and_nothing_is_lost(tmp_path):
    with RunDir(tmp_path, CONFIG):
        pass
    other = with_(CONFIG, rl=RLConfig(group_size=4, steps=9), seed=5)
    with pytest.raises(ConfigMismatch) as error, RunDir(tmp_path, other):
        pass
    assert "seed: 0 in the run, 5 now" in str(error.value) and "rl.group_size: 8 in the run, 4 now" in str(error.value)
    assert "rl.steps" not in str(error.value)
    assert read_config(tmp_path) == CONFIG
    with RunDir(tmp_path, CONFIG) as run:  # the refusal gave the lock back
        assert run.resumed


def test_a_second_writer_is_refused_by_name(tmp_path):
    owner = f"in use by process {os.getpid()} on host {socket.gethostname()}"
    with RunDir(tmp_path, CONFIG), pytest.raises(RunDirectoryInUse, match=owner), RunDir(tmp_path, CONFIG):
        pass
    with RunDir(tmp_path, CONFIG):
        pass


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    code = f"""
        import sys, time
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from test_rundir import CONFIG, RunDir
        with RunDir({str(tmp_path)!r}, CONFIG):
            print("locked", flush=True)
            time.sleep(60)
    """
    holder = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(RunDirectoryInUse, match=f"process {holder.pid} "), RunDir(tmp_path, CONFIG):
            pass
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        holder.stdout.close()
    with RunDir(tmp_path, CONFIG) as run:
        assert run.resumed


def test_no_run_directory_and_a_damaged_config_are_named(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: the configuration: not JSON"):
        read_config(tmp_path)
