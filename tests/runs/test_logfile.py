"""Logs that lack lines or cannot be written: the error is one line; no step is lost silently."""

import errno
import io
import json
import os
import threading

import pytest
from rich.console import Console
from test_telemetry import lines, read_events

from compass_jax.runs.logfile import LogError
from compass_jax.runs.telemetry import Telemetry
from compass_jax.runs.trackers import board


def quiet():
    return Console(file=io.StringIO(), width=2000)


def logged(path, steps, **options):
    """Runs `steps` steps; returns the cursor that a checkpoint after the last step holds."""
    with Telemetry(path, 9, "rl", console=quiet(), **options) as telemetry:
        for step in range(1, steps + 1):
            telemetry.log(step, {"x": step})
            telemetry.log_rollouts(step, [{"sample": 1}, {"sample": 2}])
        return json.loads(json.dumps(telemetry.state()))


def test_what_a_checkpoint_counts_is_on_the_disk_before_it(tmp_path, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")) or real(fd)
    )
    logged(tmp_path, 2)
    expected = [str(tmp_path / f"{name}.jsonl") for name in ("metrics", "rollouts")]
    assert [file for file in synced if file in expected] == expected


def test_lines_that_the_checkpoint_counts_and_the_log_lacks_end_a_resume_unless_that_is_said(
    tmp_path,
):
    """The first two of five lines are lost, and steps 6 and 7 come after the checkpoint: steps 3 to
    5 stay, and no step is logged twice.
    """
    logged(tmp_path, 7)
    cursor = {"metrics": 5, "rollouts": 10, "step": 5}
    for name, lost_lines in (("metrics", 2), ("rollouts", 4)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[lost_lines:]))
    text = "metrics.jsonl lacks 2 of the 5 lines up to step 5"
    with pytest.raises(LogError, match=f"{text}.* or add --lost-log"):
        Telemetry(tmp_path, 9, "rl", console=quiet()).restore(cursor)
    with Telemetry(tmp_path, 9, "rl", console=quiet(), lost_log=True) as telemetry:
        telemetry.restore(cursor)
        output = telemetry.console.file.getvalue()
        assert text in output and "rollouts.jsonl lacks 4 of the 10" in output
        telemetry.log(6, {"x": 6})
        cursor = telemetry.state()
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [3, 4, 5, 6]
    # The checkpoint now accounts for the lost lines, so that no message repeats.
    with Telemetry(tmp_path, 9, "rl", console=quiet()) as telemetry:
        telemetry.restore(cursor)


def test_a_full_disk_is_one_line_with_the_path_and_the_room(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    telemetry = Telemetry(tmp_path, 9, "rl", console=quiet())
    telemetry.log(1, {"x": 1})
    monkeypatch.setattr(os, "fsync", full)
    message = (
        r"^.*metrics.jsonl cannot be written \([\d,]+ bytes free there\): No space left on device$"
    )
    with pytest.raises(LogError, match=message), telemetry:
        telemetry.state()


def test_a_check_that_fails_comes_before_anything_is_written(tmp_path):
    class Gone(RuntimeError):
        pass

    def check():
        raise Gone

    telemetry = Telemetry(tmp_path, 9, "rl", console=quiet(), check=check)
    for act in (
        lambda: telemetry.log(1, {}),
        lambda: telemetry.log_rollouts(1, [{}]),
        telemetry.state,
    ):
        with pytest.raises(Gone):
            act()
    assert not any(tmp_path.iterdir())


def test_a_wall_clock_that_jumps_hangs_nothing(tmp_path, monkeypatch):
    """The clock jumps a year back, a year forward, and to 1970: every event is written, and no
    thread waits for a time that never comes.
    """
    threads = threading.active_count()
    clock = [1.8e9]
    monkeypatch.setattr("time.time", lambda: clock[0])
    with Telemetry(tmp_path, 9, "rl", console=quiet()) as telemetry:
        for step, now in enumerate([1.8e9, 1.8e9 - 3e7, 1.8e9 + 3e7, 0.0], 1):
            clock[0] = now
            telemetry.log(step, {"x": step})
            assert threading.active_count() == threads
    assert [step for step, tag, _ in read_events(tmp_path / "tb" / "rl") if tag == "x"] == [
        1,
        2,
        3,
        4,
    ]


@pytest.mark.parametrize("fault", ["no folder", "full"])
def test_tensorboard_that_cannot_be_written_is_said_once_and_the_run_goes_on(
    tmp_path, monkeypatch, fault
):
    if fault == "no folder":
        (tmp_path / "tb").write_text("")
    with Telemetry(tmp_path, 9, "rl", console=quiet()) as telemetry:
        telemetry.log(1, {"x": 1})
        if fault == "full":

            def refuse(self):
                raise OSError(errno.ENOSPC, "No space left on device")

            monkeypatch.setattr("tensorboardX.record_writer.RecordWriter.flush", refuse)
        for step in (2, 3):
            telemetry.log(step, {"x": step})
        output = telemetry.console.file.getvalue()
    assert (
        output.count("cannot be written") == 1 and output.count("the run goes on without them") == 1
    )
    assert len(lines(tmp_path / "metrics.jsonl")) == 3


def test_a_resumed_run_hides_the_steps_that_are_done_again(tmp_path):
    """TensorBoard drops events from the purged step on."""
    for _ in range(2):
        tensorboard = board.Board(tmp_path, print, 2)
        for step in (2, 3):
            tensorboard.log(step, {"x": step})
        tensorboard.close()
    assert len(list(tmp_path.iterdir())) == 2
    assert sorted(event for event in read_events(tmp_path)) == sorted(
        [(2, "x", 2.0), (3, "x", 3.0)] * 2
    )
