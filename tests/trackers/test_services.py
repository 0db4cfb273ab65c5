"""The real packages of Weights & Biases and trackio: offline, resumed, killed, without a login and
without a server. The tests need the extras `wandb` and `trackio`."""

import glob
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from logging_run import value

from compass_jax.trackers.opened import _installed
from compass_jax.trackers.services import offline_steps, run_id

HERE = Path(__file__).parent
NAMES = {"reward/mean", "lr"}  # the value that is not finite is left out


def needs(package):
    return pytest.mark.skipif(
        not _installed(package), reason=f"{package} is not installed: pip install -e '.[{package}]'"
    )


@pytest.fixture
def run(tmp_path):
    """Returns a function that runs logging_run.py, isolated from the user's settings, and returns
    its output.
    """
    plain = {k: x for k, x in os.environ.items() if not k.startswith(("WANDB", "TRACKIO"))}
    folders = {"HOME": str(tmp_path / "home"), "TRACKIO_DIR": str(tmp_path / "trackio")}
    (tmp_path / "home").mkdir()

    def call(*words, **environment):
        process = subprocess.run(
            [sys.executable, str(HERE / "logging_run.py"), str(tmp_path / "run"), *words],
            env=plain | folders | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        status = -signal.SIGKILL if "kill" in words else 0
        assert process.returncode == status, process.stderr
        return process.stdout

    return call


def wandb_rows(run_dir):
    """Returns {step: {name: value}} from all files that wandb wrote in a run directory."""
    from compass_jax.trackers.services import offline_records

    rows = {}
    for file in sorted(glob.glob(f"{run_dir}/trackers/wandb/offline-run-*/*.wandb")):
        for record in offline_records(Path(file)):
            if record.HasField("history"):
                items = {
                    "/".join(x.nested_key) or x.key: json.loads(x.value_json)
                    for x in record.history.item
                }
                assert items["_step"] == record.history.step.num not in rows
                rows[items["_step"]] = {k: x for k, x in items.items() if k[0] != "_"}
    return rows


def trackio_rows(folder):
    """Returns {(name of the run, step): {name: value}} in the order of the database."""
    (file,) = glob.glob(f"{folder}/trackio/compass_jax.db")
    with sqlite3.connect(file) as base:
        rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
    assert len({(name, step) for name, step, _ in rows}) == len(rows)
    return {(name, step): json.loads(metrics) for name, step, metrics in rows}


def expected(last):
    return {s: {k: value(s)[k] for k in NAMES} for s in range(1, last + 1)}


@needs("wandb")
def test_wandb_offline_has_each_step_once_over_a_stop_a_kill_and_a_resume(run, tmp_path):
    offline = {"WANDB_MODE": "offline"}
    output = run("wandb", "1", "3", **offline)
    assert "Weights & Biases: offline; send it by wandb sync" in output
    assert wandb_rows(tmp_path / "run") == expected(3)
    tracker_id = run_id(tmp_path / "run" / "trackers", "wandb", "rl")
    # The checkpoint was at step 2, so that step 3 is repeated.
    run("wandb", "3", "5", **offline)
    assert wandb_rows(tmp_path / "run") == expected(5)
    # The kill loses the steps that wandb has in memory; they come from metrics.jsonl.
    run("wandb", "6", "7", "kill", **offline)
    run("wandb", "8", "8", **offline)
    assert wandb_rows(tmp_path / "run") == expected(8)
    assert run_id(tmp_path / "run" / "trackers", "wandb", "rl") == tracker_id
    folders = glob.glob(f"{tmp_path}/run/trackers/wandb/offline-run-*")
    assert len(folders) == 4 and all(folder.endswith(tracker_id) for folder in folders)
    assert not (tmp_path / "home" / ".netrc").exists()


@needs("wandb")
@pytest.mark.parametrize(
    ("key", "why"),
    [({}, "nobody is logged in: type wandb login"), ({"WANDB_API_KEY": "a" * 40}, "authenticate")],
)
def test_without_a_login_or_a_server_the_run_goes_on_and_says_so_once(run, tmp_path, key, why):
    output = run("wandb", "1", "4", WANDB_BASE_URL="http://127.0.0.1:9", **key)
    assert why in output and output.count("the run goes on without it") == 1
    assert "Traceback" not in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


@needs("trackio")
def test_trackio_has_each_step_once_over_a_stop_a_kill_and_a_resume(run, tmp_path):
    run("trackio", "1", "3")
    tracker_id = run_id(tmp_path / "run" / "trackers", "trackio", "rl")
    run("trackio", "3", "5")
    run("trackio", "6", "7", "kill")
    run("trackio", "7", "8")
    rows = {(f"own-rl-{tracker_id}", step): row for step, row in expected(8).items()}
    assert trackio_rows(tmp_path) == rows


@needs("trackio")
def test_trackio_without_its_server_keeps_the_steps_and_the_run_goes_on(run, tmp_path):
    server = {"TRACKIO_SERVER_URL": "http://127.0.0.1:9", "TRACKIO_WRITE_TOKEN": "x"}
    output = run("trackio", "1", "3", **server)
    closed = float(re.search(r"closed in ([\d.]+) s", output)[1])
    assert closed < 60 and "Traceback" not in output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@needs("wandb")
def test_a_file_of_wandb_that_is_cut_gives_the_steps_before_the_cut(run, tmp_path):
    run("wandb", "1", "9", WANDB_MODE="offline")
    (file,) = glob.glob(f"{tmp_path}/run/trackers/wandb/offline-run-*/*.wandb")
    assert list(offline_steps(Path(file))) == list(range(1, 10))
    data = Path(file).read_bytes()
    cut = tmp_path / "cut.wandb"
    readings = []
    for size in range(0, len(data), 97):
        cut.write_bytes(data[:size])
        readings.append(list(offline_steps(cut)))
    assert all(steps == list(range(1, len(steps) + 1)) for steps in readings)
    assert readings[0] == [] and len(readings[-1]) >= 8
