"""Metrics on disk and on screen: exact after a kill, and readable for a person."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event

from compass_jax.runs.metric_table import PANELS, metric_help
from compass_jax.runs.progress import duration, progress_text
from compass_jax.runs.report import (
    ReportError,
    read_metrics,
    run_report,
    run_rows,
    summary_table,
)
from compass_jax.runs.screen import Screen
from compass_jax.runs.telemetry import Telemetry


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_events(folder):
    """Returns (step, tag, value) of every scalar in TensorBoard's files, whose records are uint64
    length, crc, data, crc.
    """
    events = []
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            events += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
            at += 16 + size
    return events


@pytest.fixture
def quiet():
    return Console(file=io.StringIO(), width=200)


def test_metrics_reach_all_places(tmp_path, quiet):
    with Telemetry(tmp_path, 2, "rl", console=quiet) as telemetry:
        telemetry.log(1, {"reward/mean": jnp.float32(0.5), "grad_norm": float("nan")})
        telemetry.log_rollouts(
            1, [{"prompt": "1+1", "reward": 1.0}, {"prompt": "2+2", "reward": 0.0}]
        )
        telemetry.log(2, {"reward/mean": 0.75, "grad_norm": 2.0})
    assert lines(tmp_path / "metrics.jsonl") == [
        {"stage": "rl", "step": 1, "metrics": {"reward/mean": 0.5, "grad_norm": None}},
        {"stage": "rl", "step": 2, "metrics": {"reward/mean": 0.75, "grad_norm": 2.0}},
    ]
    assert lines(tmp_path / "rollouts.jsonl")[1] == {
        "stage": "rl",
        "step": 1,
        "prompt": "2+2",
        "reward": 0.0,
    }
    events = read_events(tmp_path / "tb" / "rl")
    assert [e for e in events if e[1] == "reward/mean"] == [
        (1, "reward/mean", 0.5),
        (2, "reward/mean", 0.75),
    ]


def test_a_step_is_never_logged_twice(tmp_path, quiet):
    with Telemetry(tmp_path, 9, "sft", console=quiet) as telemetry:
        telemetry.log(1, {"sft/loss": 1.0})
    with Telemetry(tmp_path, 9, "rl", console=quiet) as telemetry:
        for step in (1, 2):
            telemetry.log(step, {"x": step})
            telemetry.log_rollouts(step, [{"sample": s} for s in range(2)])
        cursor = json.loads(json.dumps(telemetry.state()))
        telemetry.log(3, {"x": 99})
        telemetry.log_rollouts(3, [{"sample": 99}])
    # Another stage after it loses no line.
    with Telemetry(tmp_path, 9, "late", console=quiet) as telemetry:
        telemetry.log(1, {"y": 7})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"stage": "rl", "step": 4, "met')  # killed in the middle of a line
    with Telemetry(tmp_path, 9, "rl", console=quiet) as telemetry:
        telemetry.restore(cursor)
        assert telemetry.state() == cursor
        telemetry.log(3, {"x": 3})
    rows = [
        (x["stage"], x["step"], *x["metrics"].values()) for x in lines(tmp_path / "metrics.jsonl")
    ]
    assert rows == [
        ("sft", 1, 1.0),
        ("rl", 1, 1.0),
        ("rl", 2, 2.0),
        ("late", 1, 7.0),
        ("rl", 3, 3.0),
    ]
    assert [(x["step"], x["sample"]) for x in lines(tmp_path / "rollouts.jsonl")] == [
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    with Telemetry(tmp_path, 9, "rl", console=quiet) as telemetry:
        telemetry.restore(None)  # killed before the first checkpoint: from the beginning
    assert [x["stage"] for x in lines(tmp_path / "metrics.jsonl")] == ["sft", "late"]


def test_a_killed_process_loses_no_step(tmp_path):
    code = f"""
        import os, signal
        from compass_jax.runs.telemetry import Telemetry
        telemetry = Telemetry({str(tmp_path)!r}, 9, "rl")
        for step in range(1, 6):
            telemetry.log(step, {{"x": step}})
            telemetry.log_rollouts(step, [{{"step": step}}])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == -signal.SIGKILL, result.stderr
    assert [x["metrics"]["x"] for x in lines(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert len(lines(tmp_path / "rollouts.jsonl")) == 5


def test_progress_text():
    metrics = {
        "rollout/tokens_per_s": 100.0,
        "train/tokens_per_s": 2345.6,
        "reward/mean": 0.5,
        "zero_variance/rate_all_right": 0.25,
        "zero_variance/rate_all_wrong": 0.125,
        "waste/frac_verifier_signal": 0.625,
        "waste/frac_shaping_signal": 0.0,
        "waste/frac_entropy_signal": 0.335,
        "waste/frac_prediction_signal": 0.0,
        "waste/frac_none": 0.04,
        "policy/kl_k3": 1.5e-4,
        "lr": 1e-5,
    }
    signals = "verifier 62% entropy 34% none 4%"
    assert (
        progress_text(metrics, 200.0, 120)
        == f"2,346 tok/s  3 min 20 s left  reward 0.500  {signals}  kl 1.5e-04  lr 1.0e-05"
    )
    # If there is little room, the most important numbers stay.
    assert progress_text(metrics, 200.0) == (
        f"2,346 tok/s  3 min 20 s left  reward 0.500  {signals}"
    )
    assert progress_text(metrics, 200.0, 65) == f"3 min 20 s left  reward 0.500  {signals}"
    assert progress_text(metrics, 200.0, 20) == f"reward 0.500  {signals}"
    shaped = metrics | {"waste/frac_shaping_signal": 0.1}
    assert "verifier 62% shaping 10% entropy 34% none 4%" in progress_text(shaped, 200.0)
    predicted = metrics | {"waste/frac_prediction_signal": 0.2}
    assert "entropy 34% prediction 20% none 4%" in progress_text(predicted, 200.0)
    assert (
        progress_text({"sft/loss": 1.25, "zero_variance/rate_all_right": 0.25}, math.nan)
        == "loss 1.250"
    )
    assert [duration(x) for x in (0.4, 59.4, 59.6, 7500)] == [
        "0 s",
        "59 s",
        "1 min 00 s",
        "2 h 05 min",
    ]


def test_lines_without_a_terminal_are_few_and_end_with_the_last(tmp_path, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(
        "compass_jax.runs.telemetry.Screen", partial(Screen, clock=lambda: clock[0])
    )
    console = Console(file=io.StringIO(), width=200)
    with Telemetry(tmp_path, 30, "rl", every_s=10, console=console) as telemetry:
        telemetry.restore({"metrics": 0, "rollouts": 0, "step": 2})
        for step in range(3, 31):
            clock[0] += 3.0
            telemetry.log(step, {"lr": 0.5})
    printed = console.file.getvalue().splitlines()
    # 27 steps of 3 s remain; the steps before the resume do not count.
    assert printed[0] == "rl 3/30  1 min 21 s left  lr 5.0e-01"
    assert printed[1] == "rl 7/30  1 min 09 s left  lr 5.0e-01"
    assert printed[-1] == "rl 30/30  0 s left  lr 5.0e-01"
    assert [int(line.split()[1].split("/")[0]) for line in printed] == [
        3,
        7,
        11,
        15,
        19,
        23,
        27,
        30,
    ]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_gets_a_bar_and_notes_and_a_dumb_one_lines(tmp_path, monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    with Telemetry(tmp_path, 4, "rl", console=console) as telemetry:
        telemetry.screen.every_s = 0.0
        telemetry.log(1, {"reward/mean": 0.25})
        telemetry.note("saved [a]")
        telemetry.log(2, {"reward/mean": 0.5})
    output = console.file.getvalue()
    assert "1/4" in output and "saved [a]" in output and ("━" in output) is (term == "xterm")
    if term == "xterm":
        assert "2/4" in output and "reward 0.500" in output  # lines come every few seconds


def fake_run(path, steps=40):
    console = Console(file=io.StringIO())
    with Telemetry(path, steps, "rl", console=console) as telemetry:
        for step in range(1, steps + 1):
            share = step / steps
            waste = {"waste/frac_verifier_signal": share, "waste/frac_none": 1 - share}
            telemetry.log(
                step,
                {
                    "reward/mean": share,
                    "grad_norm": float("inf") if step == 5 else 1.0,
                    "response_length/mean": 10.0 * step,
                    **waste,
                },
            )
    return path / "metrics.jsonl"


def test_read_metrics_and_rows(tmp_path):
    metrics = fake_run(tmp_path)
    series = read_metrics(metrics, "rl")
    np.testing.assert_array_equal(series["reward/mean"][0], np.arange(1, 41))
    assert (
        np.isnan(series["grad_norm"][1][4])
        and np.isfinite(np.delete(series["grad_norm"][1], 4)).all()
    )
    rows = {row["metric"]: (row["first 10%"], row["last 10%"]) for row in run_rows(series)}
    assert rows["reward"] == (
        f"{(1 + 2 + 3 + 4) / 4 / 40:.3f}",
        f"{(37 + 38 + 39 + 40) / 4 / 40:.3f}",
    )
    assert "entropy, nats" not in rows
    with open(metrics, "a") as file:
        file.write('{"torn')
    assert len(read_metrics(metrics, "rl")["reward/mean"][0]) == 40
    with open(metrics, "a") as file:
        file.write("\n{}\n")
    with pytest.raises(ReportError, match="line 41: it is damaged"):
        read_metrics(metrics)


def test_summary_table_shows_values():
    console = Console(file=io.StringIO(), width=80)
    console.print(
        summary_table(
            [
                {"task": "sums", "avg@4": 0.123456, "prompts": 512},
                {"task": "all", "avg@4": 0.5, "prompts": 1024},
            ],
            "Held out",
        )
    )
    cells = [
        [cell.strip() for cell in line.strip("│").split("│")]
        for line in console.file.getvalue().splitlines()
        if line.startswith("│")
    ]
    assert cells == [["sums", "0.1235", "512"], ["all", "0.5", "1024"]]
    assert "Held out" in console.file.getvalue()


def test_run_report(tmp_path):
    fake_run(tmp_path)
    with Telemetry(tmp_path, 1, "eval", console=Console(file=io.StringIO())) as telemetry:
        telemetry.log(1, {"eval/all/avg_at_k": 0.5})  # not in the table
    console = Console(file=io.StringIO(), width=200)
    assert run_report([tmp_path], console=console) == tmp_path / "report.html"
    assert [x.name for x in tmp_path.glob("*.png")] == []
    assert "reward" in console.file.getvalue() and "avg_at_k" not in console.file.getvalue()
    with pytest.raises(ReportError, match="not the directory of a run"):
        run_report([tmp_path / "none"])


def test_the_table_of_a_run_shows_groups_that_are_equal_and_neither_right_nor_wrong():
    series = {"groups/between_frac": (np.arange(20), np.linspace(0, 0.95, 20))}
    row = {"metric": "groups between", "first 10%": "2.5%", "last 10%": "92.5%"}
    assert run_rows(series) == [row]
    panels = [panel for section in PANELS.values() for panel in section]
    (panel,) = (x for x in panels if any(line.metric in series for line in x.lines))
    assert panel.title == "Groups by reward"
    between, undecided = (metric_help(f"groups/{x}_frac").text for x in ("between", "undecided"))
    assert "neither right nor wrong" in between and "fewer than two" in undecided


def test_a_checkpoint_closes_the_files_and_the_next_line_opens_them(tmp_path, quiet):
    """A bucket's mount uploads a file when it is closed: the lines that a checkpoint counts must be
    uploaded with it.
    """

    def open_files():
        return {
            os.readlink(f"/proc/self/fd/{fd}")
            for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")
        }

    path = str(tmp_path / "metrics.jsonl")
    with Telemetry(tmp_path, 3, "rl", console=quiet) as telemetry:
        telemetry.log(1, {"loss": 1.0})
        assert path in open_files()
        assert telemetry.state()["metrics"] == 1 and path not in open_files()
        telemetry.log(2, {"loss": 0.5})
        assert [line["step"] for line in lines(tmp_path / "metrics.jsonl")] == [1, 2]
