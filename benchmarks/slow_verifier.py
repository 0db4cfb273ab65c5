"""A verifier that waits: what a judge behind a network, a sandbox or a compiler costs. Imports nothing, so that workers start at once."""

import time

WAIT_S = 0.05


def wait(response: str, answer: str) -> float:
    """1.0 where the response is the reference answer, after WAIT_S."""
    time.sleep(WAIT_S)
    return at_once(response, answer)


def at_once(response: str, answer: str) -> float:
    """The same without waiting."""
    return float(response.strip() == answer.strip())
