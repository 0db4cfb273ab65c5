"""Logs in parts, where an append downloads the file and a close uploads it."""

import builtins
import io
import json

import numpy as np
import pytest
from rich.console import Console

from compass_jax.apps.pipeline.mine import mine_file
from compass_jax.runs import logfile
from compass_jax.runs.logfile import is_on_bucket, log_parts
from compass_jax.runs.report.metrics import read_metrics
from compass_jax.runs.report.samples import read_groups, read_samples
from compass_jax.runs.telemetry import Telemetry

SAMPLE = {"response": "5", "reward": 1.0, "tokens": 1, "outcome": "ok", "truncated": False}
GROUP = {"prompt": "2 + 3?", "answer": "5", "label": "sum", "samples": [SAMPLE]}
TOKENS = {"group": 0, "means": {}, "samples": [{"sample": 0, "text": ["5"], "logp": [-1.0]}]}


def telemetry(folder, part_steps, steps=500):
    console = Console(file=io.StringIO())
    return Telemetry(folder, steps, "rl", console=console, trackers=(), part_steps=part_steps)


def write(folder, part_steps, first=1, last=500, every=10):
    """Logs steps, with a checkpoint `every` few; returns the last checkpoint's cursor."""
    with telemetry(folder, part_steps) as writer:
        if first > 1:
            writer.restore({"metrics": first - 1, "rollouts": first - 1, "step": first - 1})
        for step in range(first, last + 1):
            writer.log(step, {"x": step})
            writer.log_rollouts(step, [GROUP])
            writer.log_tokens(step, [TOKENS])
            if step % every == 0:
                writer.state()
        return writer.state()


@pytest.fixture
def bucket(monkeypatch):
    """Counts the bytes that a bucket's mount downloads for appends."""
    downloaded = []

    def charged(path, mode="r", *rest, **options):
        file = builtins.open(path, mode, *rest, **options)  # noqa: SIM115
        if mode == "ab":
            downloaded.append(file.tell())
        return file

    monkeypatch.setattr(logfile, "open", charged, raising=False)
    return downloaded


def size(folder):
    return sum(x.stat().st_size for x in folder.glob("*.jsonl"))


def test_appends_to_a_bucket_cost_no_more_than_twice_the_log(tmp_path, bucket):
    """In one file the cost grows with the square of the steps: 24 times the log here."""
    costs = []
    for steps in (50, 0):
        bucket.clear()
        write(tmp_path / str(steps), steps)
        costs.append(sum(bucket) / size(tmp_path / str(steps)))
    assert costs[0] < 2.1 and costs[1] > 20
    assert size(tmp_path / "50") == size(tmp_path / "0")
    assert len(log_parts(tmp_path / "50" / "rollouts.jsonl")) == 10


def test_readers_read_parts_as_one_file(tmp_path):
    folders = [tmp_path / name for name in ("parts", "whole")]
    for folder, steps in zip(folders, (50, 0), strict=True):
        write(folder, steps, last=120)
    series = [read_metrics(folder / "metrics.jsonl")["x"] for folder in folders]
    np.testing.assert_array_equal(*[np.stack(x) for x in series])
    assert len(series[0][0]) == 120
    for read in (lambda x: list(read_groups(x)), lambda x: read_samples(x, "rl", 1_000_000)):
        assert read(folders[0]) == read(folders[1])
    assert len(read_samples(folders[0], "rl", 1_000_000)[0]) == 120
    mined = [mine_file(str(folder / "rollouts.jsonl"), 1, 30) for folder in folders]
    assert mined[0] == mined[1]


@pytest.mark.parametrize("step", [30, 50, 60, 100, 110])
def test_a_resume_removes_later_steps_and_other_sizes_go_on(tmp_path, step):
    """The run was killed in step 120; the parts of its second life have other sizes."""
    write(tmp_path, 50, last=120)
    write(tmp_path, 20, first=step + 1, last=130)
    steps = read_metrics(tmp_path / "metrics.jsonl")["x"][0]
    np.testing.assert_array_equal(steps, np.arange(1, 131))
    assert [x["step"] for x in read_groups(tmp_path)] == list(range(1, 131))


def test_a_missing_part_is_missing_lines(tmp_path):
    cursor = write(tmp_path, 50, last=120)
    (tmp_path / "metrics.00000050.jsonl").unlink()
    with pytest.raises(logfile.LogError, match="lacks 50 of the 120 lines up to step 120"):
        telemetry(tmp_path, 50).restore(json.loads(json.dumps(cursor)))


def test_a_bucket_is_known_by_its_mount(tmp_path):
    mounts = tmp_path / "mounts"
    mounts.write_text(
        "/dev/root / ext4 rw 0 0\nmy-bucket /gcs fuse.gcsfuse rw 0 0\nx /gcs/local ext4 rw 0 0\n"
    )
    on = {x: is_on_bucket(tmp_path / x, mounts) for x in ("/gcs/run", "/gcs", "/gcs/local/a", "/b")}
    assert on == {"/gcs/run": True, "/gcs": True, "/gcs/local/a": False, "/b": False}
