"""A user's reward: the right number gets 1, a near one gets a part."""

import re


def score(response, answer):
    """Returns a reward between 0 and 1. `answer` is the reference of the row; the distance of the
    response from it is logged as reward/error/mean.
    """
    matches = re.findall(r"<answer>\s*(-?\d{1,9})\s*</answer>", response)
    if not matches:
        return {"reward": 0.0, "error": 100.0, "extracted": False}
    error = abs(int(matches[-1]) - int(answer))
    return {"reward": 1.0 if error == 0 else 0.5 / (1 + error), "error": min(error, 100.0)}


score.range = (0, 1)  # a reward outside of it is an error, not a number
