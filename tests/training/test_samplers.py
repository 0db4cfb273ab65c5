"""Samplers in other processes: the run has the numbers of one process, also after kills."""

import signal
import subprocess
import sys
import time

import pytest
from logged import CLOCKS, numbers
from processes import PATIENCE_S, TESTS, Job, environment, free_port, write_config
from test_processes import compare, samples

from compass_jax.commands.configured import load_config
from compass_jax.rollout.remote.frames import KEY_VARIABLE
from compass_jax.training.rl import run_rl
from compass_jax.weights import checkpoint

KEY = "a key of more than sixteen characters"
ONE_STEP_OFF = "one_step_off=True"


class Samplers:
    """Samplers for a run; each is a list of its processes."""

    def __init__(self, folder, address):
        self.folder, self.address = folder, address
        self.processes: list[list[subprocess.Popen]] = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number in range(len(self.processes)):
            self.kill(number)

    def start(self, devices=1, count=1):
        """Starts one sampler of `count` processes with `devices` devices each; returns its
        number.
        """
        number, port, new = len(self.processes), free_port(), []
        for n in range(count):
            cluster_variables = {
                "COMPASS_COORDINATOR": f"127.0.0.1:{port}",
                "COMPASS_PROCESSES": str(count),
                "COMPASS_PROCESS_ID": str(n),
            }
            variables = environment(devices) | (cluster_variables if count > 1 else {})
            command = [sys.executable, "-m", "compass_jax", "sample", self.address]
            with (self.folder / f"sampler_{number}_{n}.txt").open("wb") as log:
                new.append(
                    subprocess.Popen(
                        command, env=variables, stdout=log, stderr=log, cwd=TESTS.parent
                    )
                )
        self.processes.append(new)
        return number

    def wait(self):
        """Waits until every sampler waits for the training."""
        limit = time.monotonic() + PATIENCE_S
        while not all("waiting" in self.log(n) for n in range(len(self.processes))):
            assert time.monotonic() < limit
            time.sleep(0.05)

    def log(self, number):
        """Returns the output of a sampler's first process."""
        return (self.folder / f"sampler_{number}_0.txt").read_text(errors="replace")

    def kill(self, number):
        """Kills every process of a sampler."""
        for process in self.processes[number]:
            process.kill()
            process.wait()

    def exit_codes(self):
        """Waits until all samplers have ended; returns the exit codes of their processes."""
        return [[p.wait(60) for p in group] for group in self.processes]


def undisturbed(folder, run="mesh=MeshConfig()", rl=ONE_STEP_OFF):
    """Runs the training in this process, one step off on one device; returns its directory."""
    import dataclasses

    folder.mkdir()
    config = load_config(str(write_config(folder, rl, run)))
    run_rl(dataclasses.replace(config, run_dir=str(folder / "run")))
    return folder / "run"


def sampled(directory):
    """Returns the samples without numbers that are rounded differently on another mesh."""
    return [(x["response"], x["reward"]) for x in samples(directory)]


@pytest.mark.slow
def test_two_and_two_in_lockstep_have_the_numbers_of_one_process(tmp_path, monkeypatch):
    """Two processes train, on four devices each; two samplers have two devices each."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address, folder = f"127.0.0.1:{free_port()}", tmp_path / "apart"
    folder.mkdir()
    run = "mesh=MeshConfig(fsdp=2, expert=2, tensor=2), rollout_mesh=MeshConfig(expert=2)"
    options = ("--samplers.address", address)
    with Samplers(folder, address) as samplers:
        samplers.start(devices=2)
        samplers.start(devices=2)
        with Job(folder, 2, *options, rl=ONE_STEP_OFF, run=run) as job:
            job.finish()
        assert samplers.exit_codes() == [[0], [0]]
    one = undisturbed(tmp_path / "one")
    compare(numbers(job.directory), numbers(one))
    assert sampled(job.directory) == sampled(one)
    assert [row["staleness"] for row in numbers(one)] == [0, 1, 1, 1]


@pytest.mark.slow
def test_a_lost_sampler_and_a_lost_training_change_nothing(tmp_path, monkeypatch):
    """Two samplers, one of them of two processes. It is killed, then the other one, so that the run
    waits; a new one comes. Then the training is killed, and the same command continues.
    """
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address, folder = f"127.0.0.1:{free_port()}", tmp_path / "apart"
    folder.mkdir()
    # AdamW turns a gradient of rounding alone into a whole step; eps keeps it small
    rl = f"{ONE_STEP_OFF}, steps=24, optim=replace(config.rl.optim, eps=1e-3)"
    options = ("--samplers.address", address)
    settings = {"rl": rl, "run": "mesh=MeshConfig(), rollout_mesh=MeshConfig(expert=2)"}
    with Samplers(folder, address) as samplers:
        pair, single = samplers.start(devices=1, count=2), samplers.start(devices=2)
        samplers.wait()
        with Job(folder, 1, *options, **settings) as job:
            job.wait_for(lambda: job.log(0).count("has joined") == 2 and job.steps() >= 3)
            samplers.kill(pair)
            job.wait_for(lambda: job.log(0).count("is lost") == 1 and job.steps() >= 6)
            samplers.kill(single)
            job.wait_for(lambda: job.log(0).count("is lost") == 2)
            time.sleep(2)
            reached = job.steps()
            assert reached < 20
            last = samplers.start(devices=1, count=2)
            job.wait_for(lambda: job.steps() >= reached + 3)
            job.send(0, signal.SIGKILL)
            job.codes()
        assert job.steps() < 24 and checkpoint.latest(job.directory)
        with Job(folder, 1, *options, **settings) as job:
            job.finish()
        assert "waiting for it" in samplers.log(last)
        assert [p.wait(60) for p in samplers.processes[last]] == [0, 0]
    one = undisturbed(tmp_path / "one", rl=rl)
    # samplers of one and of two devices round differently, which shows in small differences of
    # losses and in near ties of the router between the rollout's weights and the next ones
    left_out = (*CLOCKS, "guard/loss_spike", "replay/flip_frac")
    compare(numbers(job.directory, left_out), numbers(one, left_out))
    assert sampled(job.directory) == sampled(one)


@pytest.mark.slow
def test_without_lockstep_no_token_is_older_than_one_step(tmp_path, monkeypatch):
    """Samples continue with the weights that arrive while they run."""
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    address, folder = f"127.0.0.1:{free_port()}", tmp_path / "apart"
    folder.mkdir()
    # one slot for a rollout of 16 samples: new weights arrive several times meanwhile
    run = "mesh=MeshConfig(), rollout=replace(config.rollout, slots=1, tokens_per_call=1)"
    options = ("--samplers.address", address, "--samplers.lockstep", "False")
    with Samplers(folder, address) as samplers:
        samplers.start()
        with Job(folder, 1, *options, rl=f"{ONE_STEP_OFF}, steps=6", run=run) as job:
            job.finish()
        assert samplers.exit_codes() == [[0]]
    rows = numbers(job.directory)
    assert len(rows) == 6 and all(0 <= row["staleness_max"] <= 1 for row in rows)
    # fresher than in lockstep, where every token of a step has the weights before the last
    assert any(0 < row["staleness"] < 1 for row in rows[1:])
