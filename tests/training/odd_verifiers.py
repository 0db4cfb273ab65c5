"""Verifiers for the loop's tests, whose verdict depends on the bytes of the response."""

import hashlib
import os
import time


def _draw(response: str) -> int:
    return hashlib.blake2b(response.encode(), digest_size=4).digest()[0] % 8


def coin(row: dict, response: str) -> float:
    """Returns 1 for half of all responses."""
    return float(_draw(response) < 4)


def treacherous(row: dict, response: str) -> float:
    """Hangs, crashes or raises on three responses of eight."""
    kind = _draw(response)
    if kind == 5:
        time.sleep(60)
    if kind == 6:
        os._exit(3)
    if kind == 7:
        raise RuntimeError("no verdict")
    return float(kind < 3)


def seldom(row: dict, response: str) -> float:
    """Returns 1 for one response of eight, so that many groups are all wrong."""
    return float(_draw(response) == 3)
