"""A verifier that does what the answer says, for the workers of `answers`; hostile ones are what
somebody's verifier may do by mistake.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time


def obey(row: dict, response: str):
    """1 for "right", 0 for "wrong"; other words name what goes amiss."""
    word = response.strip()
    if word in ("right", "wrong"):
        return float(word == "right")
    return _DEEDS[word](row["answer"])


def _write(answer: str) -> float:
    for number in range(3, 40):
        with contextlib.suppress(OSError):
            os.write(number, b"x" * 5000 + b"\n" + b'{"reward": 1.0}\n')
    return 0.0


def _close(answer: str) -> float:
    os.closerange(0, 60)
    return 0.0


def _child(answer: str) -> float:
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
    return 0.0


def _child_returns(answer: str) -> float:
    os.fork()
    return 1.0


def _detached(answer: str) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
    return 0.0


def _deaf(answer: str) -> float:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM, signal.SIGPROF):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(1)


def _patch(answer: str) -> float:
    from compass_jax.rewards import checks

    sys.modules[__name__].obey = lambda row, response: 1.0
    checks.extract_answer = lambda response, tag: "right"
    return 0.0


def _spin(answer: str) -> float:
    while True:
        pass


def _memory(answer: str) -> float:
    return float(len(bytearray(2**36)))


def _loud(answer: str) -> float:
    print("x" * 2_000_000)
    sys.stderr.write("y" * 200_000)
    return 0.0


def _elsewhere(answer: str) -> float:
    os.chdir("/")
    sys.path.clear()
    os.environ.clear()
    return 0.0


def _thread(answer: str) -> float:
    threading.Thread(target=time.sleep, args=(300,)).start()
    return 0.0


def _raise(error: BaseException):
    def deed(answer: str) -> float:
        raise error

    return deed


_DEEDS = {
    "write": _write,
    "close": _close,
    "child": _child,
    "child returns": _child_returns,
    "detached": _detached,
    "deaf": _deaf,
    "patch": _patch,
    "spin": _spin,
    "memory": _memory,
    "loud": _loud,
    "elsewhere": _elsewhere,
    "thread": _thread,
    "exit": lambda a: os._exit(0),
    "exit 3": lambda a: os._exit(3),
    "sys.exit": lambda a: sys.exit(0),
    "segfault": lambda a: os.kill(os.getpid(), signal.SIGSEGV),
    "stop": lambda a: os.kill(os.getpid(), signal.SIGSTOP),
    "kill its parent": lambda a: os.kill(os.getppid(), signal.SIGKILL),
    "kill its group": lambda a: os.killpg(0, signal.SIGKILL),
    "raise": _raise(RuntimeError("no")),
    "interrupt": _raise(KeyboardInterrupt()),
    "recursion": lambda a: _DEEDS["recursion"](a),
    "nan": lambda a: float("nan"),
    "inf": lambda a: float("inf"),
    "none": lambda a: None,
    "text": lambda a: "1",
    "complex": lambda a: 1j,
    "list": lambda a: [1.0],
    "huge": lambda a: 10**400,
    "bytes": lambda a: b"1",
}
# What each deed may give: a number that is known, or no verdict (None).
MAY = {name: {None} for name in _DEEDS} | {
    "write": {0.0, None},
    "close": {0.0, None},
    "child": {0.0, None},
    "child returns": {1.0, None},
    "detached": {0.0, None},
    "patch": {0.0, None},
    "loud": {0.0, None},
    "elsewhere": {0.0, None},
    "thread": {0.0, None},
    "text": {None},
    "list": {None},
}
