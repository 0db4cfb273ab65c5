"""The setting `trackers`: its valid values, trackers that are not installed, and the commands that
use it."""

import dataclasses
import importlib.util
import io
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import tiny_run
from worded import override

from compass_jax.commands.cli import main
from compass_jax.config import ConfigError
from compass_jax.config.io import config_from_json, config_to_json, flatten, to_plain
from compass_jax.runs.rundir import check_same_run
from compass_jax.runs.telemetry import Telemetry
from compass_jax.runs.trackers import opened
from compass_jax.runs.trackers.opened import check_trackers
from compass_jax.runs.trackers.services import Service, run_id
from compass_jax.training import rl, sft

CONFIG = str(Path(__file__).parents[2] / "tiny_run.py")


def test_the_setting_is_a_list_of_names_and_may_change_in_a_run():
    config = tiny_run()
    assert config.trackers == ("tensorboard",)
    more = override(config, ["--trackers", "tensorboard", "wandb"])
    assert more.trackers == ("tensorboard", "wandb")
    assert config_from_json(config_to_json(more)) == more
    check_same_run(flatten(config), flatten(more), "here")
    with pytest.raises(ConfigError, match=r"trackers\[0\] = 'wanbd'.*wandb"):
        dataclasses.replace(config, trackers=("wanbd",)).validate()


@pytest.mark.parametrize("words", [[], ["--dry-run"]])
@pytest.mark.parametrize("command", ["sft", "train"])
def test_a_tracker_that_is_not_installed_is_one_line_before_anything_is_written(
    words, command, tmp_path, monkeypatch, capsys
):
    monkeypatch.setitem(sys.modules, "trackio", None)
    run = tmp_path / "run"
    status = main([command, CONFIG, "--run-dir", str(run), "--trackers", "trackio", *words])
    message = capsys.readouterr().err
    assert status == 2 and message.count("\n") == 1
    assert f"compass {command}: trackers: trackio is not installed: pip install 'trackio" in message
    assert "or in a clone of the project pip install -e '.[trackio]'" in message
    assert not run.exists()


def test_a_folder_called_wandb_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert importlib.util.find_spec("wandb") is not None
    with pytest.raises(ConfigError, match="wandb is not installed"):
        check_trackers(("tensorboard", "wandb"))
    check_trackers(("tensorboard",))
    check_trackers(())


class Memory:
    def __init__(self):
        self.rows = ()

    def open(self, folder, stage, settings, tell):
        self.head = stage, settings["name"]
        return self, 0

    def log(self, numbers, step):
        self.rows += ((*self.head, step, numbers),)

    def finish(self):
        self.rows += ("end",)


def test_a_run_logs_to_all_its_trackers_under_the_names_and_steps_of_metrics_jsonl(
    tmp_path, monkeypatch
):
    memory = Memory()
    monkeypatch.setitem(opened.SERVICES, "trackio", Service("memory", memory.open))
    quiet = Console(file=io.StringIO())
    names = ("tensorboard", "trackio", "trackio")
    with Telemetry(
        tmp_path, 2, "rl", console=quiet, trackers=names, settings={"name": "mine"}
    ) as telemetry:
        telemetry.restore(None)
        for step in (1, 2):
            telemetry.log(step, {"reward/mean": 0.5 * step, "lr": float("nan")})
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    expected = [
        ("rl", "mine", x["step"], {k: v for k, v in x["metrics"].items() if v is not None})
        for x in lines
    ]
    assert memory.rows == (*expected, "end") and len(lines) == 2
    assert len(list((tmp_path / "tb" / "rl").iterdir())) == 1


def test_a_process_that_writes_nothing_and_a_run_without_trackers_log_to_none(tmp_path):
    quiet = Console(file=io.StringIO())
    for options in ({"writes": False}, {"trackers": ()}):
        with Telemetry(tmp_path, 2, "rl", console=quiet, **options) as telemetry:
            telemetry.restore(None)
            telemetry.log(1, {"x": 1.0})
        assert not (tmp_path / "tb").exists()


@pytest.mark.parametrize(("module", "run"), [(rl, "run_rl"), (sft, "run_sft")])
def test_the_run_hands_its_setting_on(tmp_path, monkeypatch, module, run):
    class Reached(Exception):
        pass

    received = {}

    def telemetry(*_, **options):
        received.update(options)
        raise Reached

    monkeypatch.setattr(module, "Telemetry", telemetry)
    monkeypatch.setattr(opened, "_installed", lambda name: True)
    config = dataclasses.replace(tiny_run(), run_dir=str(tmp_path), trackers=("wandb",))
    with pytest.raises(Reached):
        getattr(module, run)(config)
    assert received["trackers"] == ("wandb",) and received["settings"] == to_plain(config)


def test_a_tracker_of_ones_own_gets_each_step_once_over_a_resume(tmp_path):
    """The file is the one of docs/trackers.md."""
    page = (Path(__file__).parents[3] / "docs/trackers.md").read_text()
    code = page.split("# csv_tracker.py\n")[1].split("```")[0]
    (tmp_path / "csv_tracker.py").write_text(code)
    config = dataclasses.replace(tiny_run(), trackers=(f"{tmp_path}/csv_tracker.py:lines",))
    config.validate()
    check_trackers(config.trackers)
    quiet = Console(file=io.StringIO())
    for first, last in ((1, 3), (3, 4)):  # the second start repeats step 3
        options = {"console": quiet, "trackers": config.trackers}
        with Telemetry(tmp_path / "run", 4, "rl", **options) as telemetry:
            telemetry.restore(None if first == 1 else {"step": 2, "metrics": 2})
            for step in range(first, last + 1):
                telemetry.log(step, {"reward/mean": step / 4})
    lines = (tmp_path / "run/trackers/rl.csv").read_text().split()
    assert lines == ["1,0.25", "2,0.5", "3,0.75", "4,1.0"]
    with pytest.raises(ConfigError, match="trackers = 'no_such_module:lines'"):
        check_trackers(("no_such_module:lines",))


def test_an_id_is_the_run_directorys_and_the_stages(tmp_path):
    first = run_id(tmp_path / "a", "wandb", "rl")
    other_runs = [("a", "wandb", "sft"), ("a", "trackio", "rl"), ("b", "wandb", "rl")]
    assert first == run_id(tmp_path / "a", "wandb", "rl")
    assert len({first, *(run_id(tmp_path / x, y, z) for x, y, z in other_runs)}) == 4
    (tmp_path / "a" / "wandb-rl.id").write_text("\n")  # cut by a full disk
    assert len(run_id(tmp_path / "a", "wandb", "rl")) == 8
