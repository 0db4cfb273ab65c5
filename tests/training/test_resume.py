"""`kill -9` at random moments, each followed by the same command: every step's numbers are those of
the undisturbed run, once.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import quick_compile
from logged import numbers

from compass_jax.weights import checkpoint

TESTS = Path(__file__).parent.parent
CONFIG = """
import dataclasses
from tiny_run import tiny_run as base


def killed():
    config = base()
    return dataclasses.replace(
        config,
        trackers=(),
        data=dataclasses.replace(config.data, eval_prompts=0),
        rl=dataclasses.replace(
            config.rl, steps={steps}, updates_per_rollout=2, save_every={save_every}
        ),
    )
"""


def environment(quick):
    """One CPU device; `quick` compiles with few optimisations."""
    out = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS",) and not k.startswith("COV_")
    }
    out["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1" if quick else "0"
    return out | quick_compile.asked(out) | {"PYTHONPATH": str(TESTS), "JAX_PLATFORMS": "cpu"}


class Run:
    """One run directory and the command that makes or continues it."""

    def __init__(self, folder: Path, steps: int, save_every: int, quick: bool):
        folder.mkdir()
        (folder / "killed.py").write_text(CONFIG.format(steps=steps, save_every=save_every))
        self.directory, self.log = folder / "run", folder / "log.txt"
        self.command = [
            sys.executable,
            "-m",
            "compass_jax",
            "train",
            str(folder / "killed.py"),
            "--run-dir",
            str(self.directory),
        ]
        self.environment = environment(quick)

    def start(self) -> subprocess.Popen:
        log = open(self.log, "ab")  # noqa: SIM115 - the child's
        with log:
            return subprocess.Popen(
                self.command, env=self.environment, stdout=log, stderr=log, cwd=TESTS.parent
            )

    def finish(self) -> None:
        code = self.start().wait()
        assert code == 0, self.log.read_text()[-3000:]

    def logged(self) -> int:
        """Lines of metrics.jsonl so far."""
        file = self.directory / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def saved(self) -> int:
        """Step of the newest checkpoint."""
        return checkpoint.latest(self.directory) or 0

    def kill_after(self, steps: int, wait_s: float) -> None:
        """Starts the command and kills it `wait_s` after it logged its `steps`-th new step (0:
        after it took back what no checkpoint holds).
        """
        first, process, limit = self.saved(), self.start(), time.monotonic() + 200

        def wait_for(condition) -> None:
            while not condition(self.logged()):
                assert process.poll() is None and time.monotonic() < limit, (
                    f"{self.logged()} lines after {first}\n{self.log.read_text()[-3000:]}"
                )
                time.sleep(0.002)

        try:
            wait_for(lambda lines: lines <= first)
            wait_for(lambda lines: lines >= first + steps)
            time.sleep(wait_s)
            assert process.poll() is None, (
                "the run ended before it was killed: it has too few steps"
            )
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def prove(tmp_path, kills: int, steps: int, save_every: int, seed: int, quick: bool) -> None:
    """Kills at moments drawn from `seed`: the first after a step that no checkpoint holds, others
    before, in and between steps and saves.
    """
    undisturbed = Run(tmp_path / "undisturbed", steps, save_every, quick)
    undisturbed.finish()
    expected = numbers(undisturbed.directory)
    assert (
        len(expected) == steps
        and len({m["reward/mean"] for m in expected}) > 1
        and len({m["loss"] for m in expected}) == steps
    )

    run, rng = Run(tmp_path / "killed", steps, save_every, quick), random.Random(seed)
    for number in range(kills):
        left = steps - run.saved()
        new = 1 if number == 0 else rng.randint(0, min(save_every + 1, left - 2))
        run.kill_after(new, rng.uniform(0.0, 0.1))
    assert run.logged() < steps
    run.finish()
    found = numbers(run.directory)
    assert [(m["loss"], m["reward/mean"]) for m in found] == [
        (m["loss"], m["reward/mean"]) for m in expected
    ]
    assert found == expected
    samples = [
        (run.directory / "rollouts.jsonl").read_text(),
        (undisturbed.directory / "rollouts.jsonl").read_text(),
    ]
    assert samples[0] == samples[1]


def test_a_kill_changes_no_number(tmp_path):
    prove(tmp_path, kills=1, steps=4, save_every=2, seed=1, quick=True)


@pytest.mark.slow
def test_ten_kills_change_no_number(tmp_path):
    prove(tmp_path, kills=10, steps=30, save_every=2, seed=2, quick=False)
