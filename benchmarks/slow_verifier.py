"""A verifier that waits, like a judge behind a network, a sandbox or a compiler. The module does
not import jax, so that workers start at once.
"""

import time

from compass_jax.rewards.verifiers.extract import extract_answer

WAIT_S = 0.05


def wait(row: dict, response: str) -> float:
    """Returns 1.0 if the text in the last answer tag is the reference, after WAIT_S."""
    time.sleep(WAIT_S)
    return at_once(row, response)


def at_once(row: dict, response: str) -> float:
    """Returns the same without waiting."""
    return float(extract_answer(response, "answer") == row["answer"].strip())
