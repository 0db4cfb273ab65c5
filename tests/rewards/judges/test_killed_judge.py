"""`kill -9` while a judge's request is open: the restarted command repeats only the questions
without a verdict, and ends with the results of an undisturbed run."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import quick_compile
from judged import served
from logged import numbers

WAIT_S = 200.0
TESTS = Path(__file__).parents[2]
ASKS = """
import sys
import numpy as np
from judged import settings
from compass_jax.base.records import Prompt
from compass_jax.rewards.judges.endpoint import Pooled
from compass_jax.rewards.judges.judging import Judge, Verdicts

prompt = Prompt(1, 0, "x", "Which?", np.zeros(1, np.int32), "5", '{"answer": "5"}')
judge = Judge("answer", Pooled(settings(sys.argv[1], requests=2, timeout_s=60)), Verdicts("."))
for n in range(8):
    judge.submit(n, prompt, f"text {n}")
got = {}
while judge.outstanding:
    got |= {n: (x.reward, x.known) for n, x in judge.collect(None)}
print(sorted(got.items()))
judge.close()
"""
CONFIG = """
import dataclasses
from judged import settings
from tiny_run import tiny_run
from compass_jax.config import FileSource


def open_questions():
    base = tiny_run()
    source = FileSource("ROWS", label="open", verifier="judge")
    data = dataclasses.replace(base.data, sources=(source,), heldout_frac=0.0, eval_prompts=0)
    judge = settings("ENDPOINT", requests=2, timeout_s=100)
    rewards = dataclasses.replace(base.rewards, judge=judge)
    return dataclasses.replace(base, data=data, rewards=rewards)
"""


class Holding:
    """A judge whose verdict follows from the question. It does not answer request number `hold`."""

    def __init__(self):
        self.hold, self.held, self.released = -1, threading.Event(), threading.Event()

    def __call__(self, number, body):
        if number == self.hold:
            self.held.set()
            self.released.wait(WAIT_S)
        text = body["messages"][1]["content"].encode()
        return ("Better", "Tie", "Worse")[hashlib.blake2b(text).digest()[0] % 3]


def environment():
    """Returns an environment with one CPU device and few optimisations of the compiler."""
    left_out = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "COV_CORE_")
    out = {name: text for name, text in os.environ.items() if not name.startswith(left_out)}
    out |= quick_compile.asked(out) | {"JAX_PLATFORMS": "cpu"}
    return out | {"PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}"}


def finish(command, folder):
    """Runs the command to its end; returns its output."""
    folder.mkdir(exist_ok=True)
    options = {"env": environment(), "cwd": folder, "text": True}
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def kill_while_held(command, folder, judge, hold):
    """Kills the command while its request number `hold` is open."""
    judge.hold = hold
    folder.mkdir(exist_ok=True)
    options = {"env": environment(), "cwd": folder, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)
    try:
        assert judge.held.wait(WAIT_S) and process.poll() is None
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        judge.released.set()


def questions(requests):
    return [body["messages"][1]["content"] for body in requests]


def known(folder):
    """Returns the number of verdicts on disk."""
    lines = (folder / "verdicts.jsonl").read_text().splitlines()
    assert all(json.loads(line)["verdict"] in (1, 0, -1) for line in lines)
    assert len({json.loads(line)["asked"] for line in lines}) == len(lines)
    return len(lines)


def prove(command, folders, hold):
    """Runs `command(folder)` undisturbed, and again with a kill at half of its requests; returns
    the outputs of both. `hold` answers the requests.
    """
    undisturbed, killed = folders
    undisturbed_command, killed_command = command(undisturbed), command(killed)
    with served(hold) as (at, seen):
        first = finish([*undisturbed_command, at], undisturbed.parent / "first")
        expected = questions(seen.requests)
        total = len(expected)
        assert len(set(expected)) == total == known(undisturbed)
        folder = killed.parent / "second"
        kill_while_held([*killed_command, at], folder, hold, total + total // 2)
        time.sleep(0.3)  # the server reads the last requests of the killed process
        verdict_count = known(killed)
        assert 0 < verdict_count < total
        killed_run = questions(seen.requests)[total:]
        second = finish([*killed_command, at], folder)
        resumed_run = questions(seen.requests)[total + len(killed_run) :]
    assert len(resumed_run) == total - verdict_count, (
        "no verdict that was written is asked for again"
    )
    assert set(killed_run) | set(resumed_run) == set(expected), "and none is lost"
    assert len(set(killed_run) & set(resumed_run)) == len(killed_run) - verdict_count, (
        "those that were open are"
    )
    assert known(killed) == total
    return first, second


def test_a_judge_that_is_killed_asks_again_what_has_no_verdict(tmp_path):
    (tmp_path / "asks.py").write_text(ASKS)
    command = [sys.executable, str(tmp_path / "asks.py")]
    first, second = prove(
        lambda folder: command, (tmp_path / "first", tmp_path / "second"), Holding()
    )
    assert first == second and "True" in first


@pytest.mark.slow
def test_a_run_that_is_killed_while_its_judge_reasons_ends_as_an_undisturbed_one(tmp_path):
    rows = [{"prompt": f"open {n}?", "answer": "No."} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config_text = CONFIG.replace("ROWS", str(tmp_path / "rows.jsonl"))
    (tmp_path / "starts.py").write_text(
        "import pathlib, subprocess, sys\n"
        f"config = pathlib.Path({str(tmp_path / 'open_questions.py')!r})\n"
        f"config.write_text({config_text!r}.replace('ENDPOINT', sys.argv[2]))\n"
        "sys.argv = ['compass', 'train', str(config), '--run-dir', sys.argv[1]]\n"
        "from compass_jax.commands.cli import main\n"
        "sys.exit(main())\n"
    )
    folders = (tmp_path / "undisturbed", tmp_path / "killed")
    start = [sys.executable, str(tmp_path / "starts.py")]
    prove(lambda folder: [*start, str(folder)], folders, Holding())
    expected = numbers(folders[0])
    assert len(expected) == 2 and len({row["loss"] for row in expected}) == 2
    assert numbers(folders[1]) == expected
