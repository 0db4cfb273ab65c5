"""A client's loop while its server is killed at random moments and started again: no update is
applied twice, and none is lost that was acknowledged as saved.
"""

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from served import saved
from tinkered import LEFT_OPEN, OPTIONS, ServiceClient, adam, datum_of, sampled, trained

pytestmark = [*LEFT_OPEN, pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]
START_S = 240


class Killed:
    """A server in a process, which a thread kills at random moments and starts again."""

    def __init__(self, folder, states, draw):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        words = [sys.executable, "-m", "compass_jax", "serve", str(folder), "--tinker"]
        words += ["--port", str(self.port), "--states", str(states)]
        for name, value in OPTIONS.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        self._words, self._draw, self.kills = words, draw, 0
        self._ended = threading.Event()
        self._start()

    def _start(self):
        self._process = subprocess.Popen(self._words, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}/api/v1/healthz").read()
                return
            time.sleep(0.2)
        raise TimeoutError("the server did not start")

    def kill_often(self, number):
        """Kills the server this many times."""
        for _ in range(number):
            if self._ended.wait(self._draw.uniform(3, 15)):
                return
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._start()
            self.kills += 1

    def close(self):
        """Ends the server and the thread."""
        self._ended.set()
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def killed(folder, states, number):
    """Yields a server that is killed meanwhile."""
    server = Killed(folder, states, random.Random(1))
    thread = threading.Thread(target=server.kill_often, args=(number,))
    try:
        yield server, thread
    finally:
        server.close()
        if thread.is_alive():
            thread.join()


def step(model, data):
    """Takes an update; returns (its version, the loss before it)."""
    passed = model.forward_backward(data, "importance_sampling")
    applied = model.optim_step(adam(1e-3))
    loss = passed.result().metrics["loss:sum"]
    return applied.result().metrics["policy_version"], loss


def test_kills_apply_no_update_twice_and_lose_none_that_was_saved(tmp_path, request):
    kills, losses, saves, recovered = request.config.getoption("--faults"), {}, [], 0
    folder = saved(tmp_path / "tiny")
    with killed(folder, tmp_path / "states", kills) as (server, thread):
        client = ServiceClient(base_url=f"http://127.0.0.1:{server.port}")
        model = trained(client)
        sampler = model.save_weights_and_get_sampling_client().result()
        data = [datum_of(x) for x in sampled(sampler)]
        version, path = 0.0, model.save_state("v0").result().path
        saves.append((path, version))
        step(model, data)  # compiles
        model = client.create_training_client_from_state_with_optimizer(path).result()
        thread.start()
        for number in itertools.count():
            if server.kills == kills:
                break
            try:
                if model is None:
                    path, version = saves[-1]
                    make = client.create_training_client_from_state_with_optimizer
                    model = make(path).result()
                    recovered += 1
                after, loss = step(model, data)
                assert after == version + 1, "an update was lost, or applied twice"
                assert losses.setdefault(version, loss) == loss
                version = after
                if number % 3 == 0:
                    path = model.save_state(f"v{int(version)}-{number}").result().path
                    saves.append((path, version))
            except AssertionError:
                raise
            except Exception as error:  # what the client raises after a kill
                print(type(error).__name__, str(error)[:150])
                model = None
        print(f"{server.kills} kills, {recovered} recoveries, {len(losses)} versions")
    assert os.path.isdir(tmp_path / "states") and len(losses) > 3
