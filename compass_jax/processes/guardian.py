"""The outer process of a worker: `python -m MODULE CHANNEL LIFELINE`, started by `start.Child`.

The guardian forks a child that does the work, in separate namespaces if the machine supports them.
It then waits until the child ends or the lifeline closes. The lifeline is a pipe that closes when
the process that started the worker ends, for any reason. The guardian then kills all descendants,
removes the folder, and exits like the child.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NoReturn

from compass_jax.processes import guards
from compass_jax.processes.channel import Channel

END_LIMIT_S = 10.0


def run(serve: Callable[[Channel, Any, str], None]) -> None:
    """Runs `serve(channel, setup, folder)` in a child.

    The first value on the channel is `setup`, a mapping whose "guards" are those of the child.
    `folder` is empty. SIGINT and SIGTERM are ignored: the process that started the worker handles
    them.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    descriptor, lifeline = map(int, sys.argv[1:3])
    channel = Channel(descriptor, os.dup(descriptor), limit=sys.maxsize)
    try:
        setup = channel.receive()
    except EOFError:
        return
    folder = tempfile.mkdtemp(prefix="compass-check-")
    guards.adopt_orphans()
    missing = guards.separate(setup["guards"])
    child = os.fork()
    if child:
        channel.close()
        _wait(child, lifeline, folder)
    os.close(lifeline)
    guards.die_with_parent()
    if missing:
        channel.send(["failed", f"guards that were there are missing: {missing}"])
    else:
        serve(channel, setup, folder)


def _wait(child: int, lifeline: int, folder: str) -> NoReturn:
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(
        lifeline, select.POLLIN
    )  # carries no bytes; it becomes readable when it is closed
    if descriptor not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    guards.kill_descendants(time.monotonic() + END_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        if code != -signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
