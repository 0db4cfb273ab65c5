"""Former names of modules: a saved configuration that has one is the present configuration, and a
user's file that imports one is refused with the present name."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import pytest
from tiny_run import tiny_run

import compass_jax
from compass_jax.config import ConfigError, TaskSource
from compass_jax.config.former import MODULES, PACKAGE, present_name
from compass_jax.config.io import config_to_json, differences, read_config
from compass_jax.config.named import load
from compass_jax.runs.rundir import RunDir

SUMS = "configs.tiny_tasks.lessons:sums"


def test_every_module_of_the_table_has_moved():
    folder = Path(compass_jax.__file__).parent
    for former, present in MODULES.items():
        assert importlib.util.find_spec(f"{PACKAGE}.{present}") is not None, present
        path = folder / former.replace(".", "/")
        assert not path.with_suffix(".py").exists() and not any(path.rglob("*.py")), former


@pytest.mark.parametrize(
    "former,present",
    [
        (f"compass_jax.{SUMS}", f"compass_jax.commands.{SUMS}"),
        ("compass_jax.verifiers.base:Kind", "compass_jax.config.kinds:Kind"),
        ("compass_jax.verifiers.answers:read", "compass_jax.rewards.verifiers.answers:read"),
        ("compass_jax.samplers", "compass_jax.rollout.remote"),
        ("compass_jax.data.human_eval:problems", "compass_jax.data.human_eval:problems"),
        (f"compass_jax.commands.{SUMS}", f"compass_jax.commands.{SUMS}"),
        ("my_tasks.configs:sums", "my_tasks.configs:sums"),
        ("compass_jax", "compass_jax"),
        ("math", "math"),
    ],
)
def test_a_name_is_read_as_the_present_one(former, present):
    assert present_name(former) == present == present_name(present)


def test_a_run_that_was_saved_under_former_names_is_opened_again(tmp_path):
    base = tiny_run()
    sources = (TaskSource(f"compass_jax.commands.{SUMS}", label="sums"),)
    data = dataclasses.replace(base.data, sources=sources)
    config = dataclasses.replace(base, run_dir=str(tmp_path), data=data)
    text = config_to_json(config)
    former = text.replace("compass_jax.commands.configs.", "compass_jax.configs.")
    assert former != text
    (tmp_path / "config.json").write_text(former)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert differences(read_config(tmp_path), config) == {}
    with RunDir(config) as run:
        assert run.before is not None
    assert json.loads((tmp_path / "config.json").read_text()) == json.loads(text)


def test_a_file_that_imports_a_former_name_is_told_the_present_one(tmp_path, monkeypatch):
    monkeypatch.setitem(MODULES, "attic", "rewards.tasks")
    file = tmp_path / "my_task.py"
    file.write_text("from compass_jax.attic import Task\n\ntask = None\n")
    with pytest.raises(ConfigError, match=r"line 1: .*it is compass_jax\.rewards\.tasks now"):
        load(f"{file}:task", "data.sources[0].task")
