"""A page, or another file, for which a full disk has no room: the error is one line, and no partial
file remains."""

import errno
import json
from pathlib import Path

import pytest

from compass_jax.commands.cli import main
from compass_jax.runs.logfile import LogError, LogFile
from compass_jax.runs.rundir import write_atomically


def full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    row = {"stage": "rl", "step": 1, "metrics": {"reward/mean": 0.5}}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return folder


@pytest.mark.parametrize("fails", ["write", "replace"])
def test_a_report_leaves_no_temporary_file(run, tmp_path, monkeypatch, capsys, fails):
    out = tmp_path / "out"
    out.mkdir()
    (out / "page.html").write_text("before")

    def half(self, data):
        with open(self, "wb") as file:
            file.write(data[:100])
        full()

    if fails == "write":
        monkeypatch.setattr(Path, "write_bytes", half)
    else:
        monkeypatch.setattr("os.replace", full)
    assert main(["report", str(run), "--out", str(out / "page.html")]) == 2
    assert "page.html cannot be written: No space left on device" in capsys.readouterr().err
    assert [x.name for x in out.iterdir()] == ["page.html"]
    assert (out / "page.html").read_text() == "before"
    assert [x.name for x in run.iterdir()] == ["metrics.jsonl"]


def test_a_file_that_is_replaced_stays_as_it_was(tmp_path, monkeypatch):
    file = tmp_path / "summary.json"
    write_atomically(file, "before")
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomically(file, "after")
    assert file.read_text() == "before" and list(tmp_path.iterdir()) == [file]


def test_a_log_that_is_cut_stays_as_it_was(tmp_path, monkeypatch):
    log = LogFile(tmp_path / "metrics.jsonl", "rl")
    log.append([{"stage": "rl", "step": step} for step in (1, 2)])
    log.close()
    before = (tmp_path / "metrics.jsonl").read_bytes()
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(LogError, match="No space"):
        log.keep_until(1, 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_rows_of_a_pipeline_leave_no_temporary_file(tmp_path, monkeypatch):
    from compass_jax.apps.pipeline.work import rows

    code = tmp_path / "rows.py"
    code.write_text("def rows():\n    yield {'a': 1}\n    raise OSError(28, 'No space left')\n")
    folder = tmp_path / "stage"
    folder.mkdir()
    with pytest.raises(OSError, match="No space"):
        rows(folder, function=f"{code}:rows")
    assert list(folder.iterdir()) == []
