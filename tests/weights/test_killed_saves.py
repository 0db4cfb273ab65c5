"""SIGKILL at random moments of background saves: no finished checkpoint is lost."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from jax import ShapeDtypeStruct
from saver import SHAPE

from compass_jax.weights import checkpoint, sound


def kill_at_random(process, draw):
    """Kills a child at a random moment. Returns the last value that it reported as on the disk."""
    process.stdin.write("\n")
    process.stdin.flush()
    values, child, timer = [0], 0, None
    for line in process.stdout:
        if line == "dead\n":
            break
        if line.startswith("child"):
            child = int(line.split()[1])
        else:
            values.append(int(line))
        if child and values[-1] > 0 and timer is None:
            delay = draw.random() * 0.5
            timer = threading.Timer(delay, os.kill, (child, signal.SIGKILL))
            timer.start()
    return max(values)


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_during_a_save_loses_no_earlier_checkpoint(tmp_path, kills):
    draw, started = random.Random(kills), time.monotonic()
    command = [sys.executable, str(Path(__file__).with_name("saver.py")), str(tmp_path)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    unfinished = 0
    with subprocess.Popen(command, env=environment, **pipes) as process:
        for _ in range(kills):
            on_disk = kill_at_random(process, draw)
            unfinished += bool(list((tmp_path / "checkpoints").glob("*.orbax-checkpoint-tmp*")))
            newest = checkpoint.find(tmp_path)
            value = newest.meta()["value"]
            assert value >= on_disk
            targets = {"x": ShapeDtypeStruct(SHAPE, np.int32)}
            step, arrays, _ = checkpoint.restore(newest, targets, subset=True)
            assert step == newest.manifest.step and (np.asarray(arrays["x"]) == value).all()
            steps = sound.steps(tmp_path)
            sound_steps = [x for x, path in steps.items() if not sound.examine(path).faults]
            # two checkpoints are kept, so the previous one is sound as well; only those due for
            # removal may be damaged
            assert sound_steps[-2:] == [step - 1, step] if step > 1 else sound_steps == [step]
            assert all(x in sound_steps for x in steps if x >= sound_steps[0])
        process.stdin.close()
    assert unfinished > kills // 10, "the kills did not meet saves"
    print(f"{kills} kills, {unfinished} within a save, {time.monotonic() - started:.0f} s")
