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

from compass_jax.runs.trackers.opened import _installed
from compass_jax.runs.trackers.services import run_id

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


def wandb_steps(run_dir):
    """Returns the steps in each file that wandb wrote in a run directory, and all rewards."""
    steps, rewards = [], set()
    for file in sorted(glob.glob(f"{run_dir}/trackers/wandb/offline-run-*/*.wandb")):
        data = Path(file).read_bytes()  # protocol buffers: a name, two bytes, its value as JSON
        steps.append(sorted({int(x) for x in re.findall(rb"_step\x82\x01.(\d+)", data, re.DOTALL)}))
        found = re.findall(rb"reward/mean\x82\x01.(\d\.\d+|\d)", data, re.DOTALL)
        rewards |= {float(x) for x in found}
    return steps, rewards


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
def test_wandb_offline_begins_a_further_file_of_the_same_run_at_each_start(run, tmp_path):
    offline = {"WANDB_MODE": "offline"}
    output = run("wandb", "1", "3", **offline)
    assert "Weights & Biases: offline; send it by wandb sync" in output
    tracker_id = run_id(tmp_path / "run" / "trackers", "wandb", "rl")
    # The checkpoint was at step 2, so that step 3 is repeated.
    run("wandb", "3", "5", **offline)
    run("wandb", "6", "7", "kill", **offline)
    run("wandb", "8", "8", **offline)
    steps, rewards = wandb_steps(tmp_path / "run")
    # The kill loses the steps that wandb has in memory.
    assert steps[:2] == [[1, 2, 3], [3, 4, 5]] and set(steps[2]) <= {6, 7} and steps[3] == [8]
    assert rewards == {value(step)["reward/mean"] for file in steps for step in file}
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
