"""Runs that are killed at random moments and resumed end with the numbers and the weights of an
undisturbed run.
"""

import os
import random
import signal
import time
from pathlib import Path

import pytest
from campaign_files import CONFIG, assert_same_tensors, exported_tensors
from commands_aside import Command
from logged import numbers

from compass_jax.commands.cli import main

STEPS, TIMEOUT_S = 12, 200
REWARD = f"{Path(__file__).with_name('odd_reward.py')}:odd"
# Two processes generated the rollout in which a kill came, so its slot occupancy differs.
NOT_COMPARED = ("time/", "memory/", "rollout/slot_occupancy", "rollout/preempted")
CORRECTED = ["--rl.correction", "tis"]
SCREENING = [
    *("--rl.step-policy", "screening", "--rl.step-policy.n0", "2", "--rl.group-size", "4"),
    *("--rl.step-policy.min-chance", "1", "--rl.zero-variance.posterior", "True"),
]
VARIANTS = {
    "plain": ["--rl.updates-per-rollout", "2"],
    "partial": [*CORRECTED, "--rl.partial-prompts", "1"],
    "dynamic": [
        *("--rl.zero-variance.dynamic-sampling", "True", "--rl.zero-variance.rl-zvp", "False"),
        *("--rl.zero-variance.dynamic-rounds", "2"),
    ],
    "growth": ["--rl.zero-variance.grow-to", "4"],
    "screening": SCREENING,
    "prediction": [
        *SCREENING,
        *("--rl.advantage", "shrunk", "--rl.zero-variance.rl-zvp", "False"),
    ],
    "drafts": ["--rl.drafts", "coupled"],
    "one_step_off": [*CORRECTED, "--rl.one-step-off", "True"],
    "replay": [
        *(*CORRECTED, "--rl.group-replay.groups", "4", "--rl.group-replay.max-age", "3"),
        *("--rl.group-replay.max-route-age", "1", "--rl.zero-variance.rl-zvp", "False"),
    ],
}
SIGNALS = {  # and the exit statuses that may follow
    signal.SIGKILL: (-9,),
    signal.SIGTERM: (143, -15),
    signal.SIGINT: (130, -2),
}


def start(variant, steps, folder):
    """Starts or resumes the run."""
    options = ["--rl.steps", str(steps), "--rl.save-every", "2"]
    options += ["--data.sources.0.verifier", REWARD]
    return Command(["train", CONFIG, *options, *VARIANTS[variant]], folder, "train")


def logged(folder):
    """Returns the number of steps in metrics.jsonl."""
    file = folder / "run" / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def is_saving(folder):
    """Tells whether a checkpoint is being written under a temporary name."""
    checkpoints = folder / "run" / "checkpoints"
    names = os.listdir(checkpoints) if checkpoints.exists() else []
    return any(not name.removeprefix("step_").isdigit() for name in names)


def children(pid):
    """Returns the process ids of the children, which are reward workers."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]


def kill_once(draw, variant, steps, folder):
    """Starts the run and kills it, or one of its workers, at a random moment."""
    command = start(variant, steps, folder)
    process, limit = command.process, time.monotonic() + TIMEOUT_S
    moment = draw.choice(["start", "step", "step", "save", "save", "worker"])
    after = logged(folder) + draw.randrange(1, 4)
    if moment == "start":
        time.sleep(draw.uniform(0.0, 6.0))
    while moment != "start" and process.poll() is None:
        reached = is_saving(folder) if moment == "save" else logged(folder) >= after
        if reached or time.monotonic() > limit:
            break
        time.sleep(0.001)
    time.sleep(draw.choice([0.0, 0.01, 0.1, 0.3]))
    workers = children(process.pid) if moment == "worker" and process.poll() is None else []
    if workers:
        os.kill(draw.choice(workers), signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 0.5))
        process.kill()
    number = signal.SIGKILL if workers else draw.choice(list(SIGNALS))
    process.send_signal(number)
    status = command.finish()
    # A run that had ended, or a worker's death that the run survived, is no failure.
    assert status in (*SIGNALS[number], 0), command.output()[-3000:]
    assert "Traceback" not in command.output(), command.output()[-3000:]


def finished(variant, steps, folder):
    """Runs to the end; returns the metrics without clocks, the weights and the samples."""
    command = start(variant, steps, folder)
    assert command.finish() == 0, command.output()[-3000:]
    assert main(["export-hf", str(folder / "run"), str(folder / "out")]) == 0
    metrics = [
        {name: value for name, value in row.items() if not name.endswith(("_s", "/mfu"))}
        for row in numbers(folder / "run", NOT_COMPARED)
    ]
    assert len(metrics) == steps
    samples = (folder / "run" / "rollouts.jsonl").read_text()
    return metrics, exported_tensors(folder / "out"), samples


def prove(draw, variant, kills, steps, files):
    """Compares a run that is killed `kills` times with an undisturbed run."""
    folders = [files / "undisturbed", files / "killed"]
    for folder in folders:
        folder.mkdir()
        for name in ("rows.jsonl", "tokenizer"):
            (folder / name).symlink_to(files / name)
    metrics, tensors, samples = finished(variant, steps, folders[0])
    assert len({row["grad_norm"] for row in metrics}) > 1
    assert any(row["groups/varied_frac"] > 0 for row in metrics)
    for _ in range(kills):
        kill_once(draw, variant, steps, folders[1])
    resumed_metrics, resumed_tensors, resumed_samples = finished(variant, steps, folders[1])
    assert resumed_metrics == metrics
    assert_same_tensors(resumed_tensors, tensors)
    if variant == "plain":
        assert resumed_samples == samples


def test_a_kill_changes_no_number(files):
    prove(random.Random(1), "plain", 1, 4, files)


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_kills_change_no_number(variant, files, request):
    kills, seed = (request.config.getoption(name) for name in ("--faults", "--fault-seed"))
    prove(random.Random(f"{seed} {variant}"), variant, kills, STEPS, files)
