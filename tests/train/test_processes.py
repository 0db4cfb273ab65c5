"""RL in two processes of four devices each: the numbers of one process, what is left when one is killed, and a stop that reaches one of them."""

import signal
import time

import numpy as np
import pytest
from logged import lines, numbers
from processes import Job

from compass_jax.weights import checkpoint

MESH = ("--mesh.fsdp", "2", "--mesh.expert", "2", "--mesh.tensor", "2")
OTHER = ("--mesh.fsdp", "4", "--mesh.context", "2")


def compare(found, expected):
    assert len(found) == len(expected) > 0
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-5, atol=1e-5, err_msg=name)


def run(folder, compiled, count, *options):
    """A whole run; its directory."""
    folder.mkdir()
    with Job(folder, compiled, count, *options) as job:
        job.finish()
    return job.directory


def same_samples(first, second):
    return [row["samples"] for row in lines(first, "rollouts")] == [row["samples"] for row in lines(second, "rollouts")]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, compiled):
    """Four steps in one process of eight devices."""
    return run(tmp_path_factory.mktemp("one") / "whole", compiled, 1, *MESH, "--data.eval-prompts", "0")


def test_a_stop_and_a_kill_in_one_of_two_processes(tmp_path, compiled, undisturbed):
    """Two processes: SIGTERM to the second, the same command; SIGKILL to the second; on in one process, on another mesh."""
    command = (tmp_path, compiled, 2, *MESH, "--data.eval-prompts", "0")
    with Job(*command) as job:
        job.wait_for(lambda: checkpoint.latest(job.directory) == 1)
        time.sleep(0.3)  # into the next rollout
        job.send(1, signal.SIGTERM)
        job.finish()
        assert "stopped on request" in job.log(0) and "stopped" not in job.log(1)
        reached = job.steps()
        assert 1 <= reached < 4 and checkpoint.latest(job.directory) == reached
    with Job(*command) as job:
        job.wait_for(lambda: job.steps() > reached)
        job.send(1, signal.SIGKILL)
        started = time.monotonic()
        codes = job.codes()
        assert time.monotonic() - started < 30 and codes[1] == -signal.SIGKILL and codes[0] != 0
        for number in (0, 1):
            assert f"process {number} of 2 (pid {job.processes[number].pid} on " in job.log(number)
            assert "the same command, in every process, goes on from the last checkpoint" in job.log(number)
    with Job(tmp_path, compiled, 1, *OTHER, "--data.eval-prompts", "0") as job:
        job.finish()
    compare(numbers(job.directory), numbers(undisturbed))
    assert same_samples(job.directory, undisturbed)
