"""Checks that misbehave on command, for the workers of test_score: the response says how."""

import ctypes
import os
import sys
import time


def obey(row: dict, response: str) -> float:
    """The response's number, or what its first word says."""
    word, _, rest = response.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "spin":
        while True:
            pass
    elif word == "exit":
        os._exit(3)
    elif word == "segfault":
        ctypes.string_at(0)
    elif word == "quit":
        sys.exit("done")
    elif word == "raise":
        raise RuntimeError(f"cannot check {row['answer']}")
    elif word == "memory":
        return float(len(bytearray(2**36)))
    elif word == "nan":
        return float("nan")
    elif word == "pid":
        return float(os.getpid())
    elif word == "jax":
        return float("jax" in sys.modules)
    else:
        return float(word)
    return -1.0
