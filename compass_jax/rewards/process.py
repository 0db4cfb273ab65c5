"""A worker process as the scorer holds it: its channel, and what it was sent and has not judged."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections import deque
from typing import Any

from compass_jax.children import module_command
from compass_jax.rewards.channel import Channel
from compass_jax.rewards.checks import Response
from compass_jax.rewards.detect import environment

END_LIMIT_S = 15.0


class Worker:
    """A process, its channel, and the responses it was sent and has not judged (the first is the
    one it is on).
    """

    def __init__(self, setup: dict[str, Any]):
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = os.pipe()
        numbers = str(theirs.fileno()), str(lifeline)
        command = module_command("compass_jax.rewards.worker", *numbers)
        # not multiprocessing: its children import the program's main module, and with it jax
        kept = (theirs.fileno(), lifeline)
        null = subprocess.DEVNULL
        self.process = subprocess.Popen(
            command,
            pass_fds=kept,
            env=environment(bool(setup["guards"])),
            stdin=null,
            stdout=null,
            start_new_session=True,
        )
        theirs.close()
        os.close(lifeline)
        self.channel = Channel(ours)
        self.held: deque[tuple[int, Response]] = deque()
        self.answered = 0  # responses of this batch
        self.ready = False
        self.begun = False  # it has received the batch
        self.since = time.monotonic()  # when it began what it is doing
        self.channel.send(setup)

    def send(self, responses: list[Response]) -> None:
        """Hands over the texts of `self.held`."""
        self.answered = 0
        self.begun = False
        self.since = time.monotonic()
        self.channel.send(responses)

    def kill(self) -> int:
        """Ends it and all that it started, and returns its exit code. May be called twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)  # it ends its descendants, and then itself
            self._lifeline = -1
        try:
            code = self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.channel.close()
        return code
