"""The process that checks answers: `python -m compass_jax.rewards.worker CONNECTION LIFELINE` (two file descriptors).

It imports what the checks need, says ready, and then answers each batch of tasks one by one, in order:

    parent -> (checks, tag, timeout_s)  once
    worker -> ("ready", "")             or ("failed", traceback)
    parent -> [Task, ...]               when all earlier answers have come
    worker -> ("begun", "")             it has them: dying now is the first task's doing
    worker -> (reward, "")              for each; or (None, why) if the check raised

Only `rewards/score.py` starts it. Nothing here may import jax: a worker is started anew after every hang.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection

from compass_jax.rewards.verifiers import Task, build

MEMORY_BYTES = 8 * 2**30  # of address space: an answer like 9**9**9**9 must not take the machine's memory
DETAIL_CHARS = 2000


def _limit_memory() -> None:
    import resource

    with contextlib.suppress(ValueError, OSError):  # not every system can, and a lower limit may be in force
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def _die_with_parent(lifeline: int) -> None:
    """The parent never writes: the read returns when the parent is gone, however it went, even while a check runs."""

    def wait() -> None:
        os.read(lifeline, 1)
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _answer(score, task: Task) -> tuple[float | None, str]:
    try:
        reward = score(task)
        if not math.isfinite(reward):
            return None, f"the check returned {reward}"
        return reward, ""
    except BaseException:  # a check may even call exit()
        return None, traceback.format_exc()[-DETAIL_CHARS:]


def serve(connection: Connection) -> None:
    """Answers until the parent closes the connection."""
    try:
        checks, tag, timeout_s = connection.recv()
        scores = [build(check, tag) for check in checks]
    except EOFError:
        return
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        return
    connection.send(("ready", ""))
    with contextlib.suppress(EOFError, OSError):
        while True:
            tasks = connection.recv()
            connection.send(("begun", ""))
            for task in tasks:
                # the parent kills far earlier; this ends an orphan in native code (a regular expression) that lets no thread run
                signal.setitimer(signal.ITIMER_PROF, 2 * timeout_s + 60)
                connection.send(_answer(scores[task.source], task))


def main() -> None:
    """Ctrl-C and SIGTERM reach the whole process group; the parent decides then, and the worker follows it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _limit_memory()
    _die_with_parent(int(sys.argv[2]))
    serve(Connection(int(sys.argv[1])))


if __name__ == "__main__":
    main()
