"""A user's task in one file: its prompts, and the judgement of an answer."""

import random
import re

from compass_jax.rewards.tasks import Task


def prompts(seed):
    """Yields 200 chains of numbers; how many numbers a chain has is its difficulty."""
    rng = random.Random(seed)
    for n in range(200):
        numbers = [rng.randint(1, 9) for _ in range(2 + n % 3)]
        chain = " + ".join(map(str, numbers))
        yield {
            "prompt": f"State the final answer to the following arithmetic problem: {chain} =",
            "numbers": numbers,
            "difficulty": len(numbers),
        }


def judge(response, numbers):
    """Returns 1 for the sum, 0.2 for any number, 0 for none; `numbers` is the row's column."""
    match = re.search(r"<answer>\s*(-?\d{1,9})\s*</answer>", response)
    if not match:
        return {"reward": 0.0, "extracted": False}
    return 1.0 if int(match[1]) == sum(numbers) else 0.2


judge.range = (0, 1)
task = Task(prompts, judge)
