"""The process that checks answers: `python -m compass_jax.rewards.worker SOCKET LIFELINE`.

It splits in two. The guardian waits until the scorer is gone or the other ends, and takes all
descendants with it. The other imports what the checks need, confines itself and answers (the lines
are described in channel.py): what decides by comparing it checks itself, what evaluates text or is
a user's own it checks in a child for each answer.

Only `rewards/score.py` starts it. Nothing here may import jax: it is started anew after a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from functools import partial
from typing import Any, NoReturn

from compass_jax.config import ConfigError
from compass_jax.rewards import guards, sandbox
from compass_jax.rewards.channel import line
from compass_jax.rewards.checks import Check, Response, Verifier, build
from compass_jax.tasks.rows import decode_row

DETAIL_CHARS = 2000


def _answer(verifier: Verifier, response: Response, zone: sandbox.Zone, seconds: float) -> list:
    """Reward or None, outcome, detail, components."""
    try:
        row = decode_row(response.row)
        value: Any = verifier.decide(row, response.text)
        if value is None and verifier.forked:
            found = zone.run(partial(verifier.judged, row, response.text), seconds)
            if found.outcome != "ok":
                return [None, found.outcome, found.detail[-DETAIL_CHARS:], {}]
            reward, components = found.value  # from the child: looked at again
            value = {**components, "reward": reward}
        elif value is None:
            value = verifier.verify(row=row, response=response.text)
        graded = verifier.graded(value)
        return [graded.reward, "ok", "", graded.components]
    except sandbox.SandboxError:
        raise
    except BaseException:
        return [None, "error", traceback.format_exc()[-DETAIL_CHARS:], {}]


def serve(connection: socket.socket, setup: dict[str, Any], folder: str) -> None:
    """Answers until the scorer closes the connection."""
    seconds = setup["timeout_s"]
    try:
        checks = [build(Check(*map(_tuples, check)), setup["tag"]) for check in setup["checks"]]
        zone = sandbox.enter(setup["guards"], folder, _imported())
        guards.limit_memory()
        guards.die_with_parent()  # again: the kernel forgets it where the user changes
    except ConfigError as error:
        connection.sendall(line(["refused", str(error)[-2 * DETAIL_CHARS :]]))
        return
    except BaseException:
        connection.sendall(line(["failed", traceback.format_exc()[-2 * DETAIL_CHARS :]]))
        return
    connection.sendall(line(["ready", ""]))
    with connection.makefile("rb") as lines, contextlib.suppress(OSError):
        for batch in lines:
            connection.sendall(line(["begun", ""]))
            for index, sent in enumerate(json.loads(batch)):
                response = Response(*sent)
                answer = _answer(checks[response.source], response, zone, seconds)
                connection.sendall(line([index, *answer]))


def _tuples(value: Any) -> Any:
    """JSON has lists where settings have tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _imported() -> set[str]:
    """Where modules lie, to be read by those that import the rest of themselves later."""
    files = [getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if "." not in n]
    return {*filter(os.path.isdir, sys.path), *(os.path.dirname(f) for f in files if f)}


def _first_line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows belongs to another reader."""
    text = bytearray()
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return b""
        text += part
    return bytes(text)


def _guard(child: int, lifeline: int, folder: str) -> NoReturn:
    """Ends when the child ends, or ends it when the scorer is gone; nobody is left then."""
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(lifeline, select.POLLIN)  # nobody writes: it is readable when its end is closed
    if descriptor not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    guards.kill_descendants(time.monotonic() + sandbox.END_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Ctrl-C and SIGTERM are for the scorer to decide about; the worker follows it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    text = _first_line(connection)
    if not text:
        return
    setup = json.loads(text)
    folder = tempfile.mkdtemp(prefix="compass-check-")
    guards.adopt_orphans()
    missing = guards.separate(setup["guards"])
    child = os.fork()
    if child:
        connection.close()
        _guard(child, lifeline, folder)
    os.close(lifeline)
    guards.die_with_parent()
    if missing:
        connection.sendall(line(["failed", f"guards that were there are missing: {missing}"]))
    else:
        serve(connection, setup, folder)


if __name__ == "__main__":
    main()
