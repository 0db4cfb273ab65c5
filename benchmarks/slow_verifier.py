"""A verifier that waits: what a judge behind a network, a sandbox or a compiler costs. Imports no
jax, so that workers start at once.
"""

import time

from compass_jax.verifiers.extract import extract_answer

WAIT_S = 0.05


def wait(row: dict, response: str) -> float:
    """1.0 where the text in the last answer tag is the reference, after WAIT_S."""
    time.sleep(WAIT_S)
    return at_once(row, response)


def at_once(row: dict, response: str) -> float:
    """The same without waiting."""
    return float(extract_answer(response, "answer") == row["answer"].strip())
