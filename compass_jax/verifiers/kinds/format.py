"""The form of a response: thoughts, then an answer."""

from __future__ import annotations

from compass_jax.verifiers.base import Example, Kind


def judge(response: str, answer_tag: str, think_tag: str = "think") -> float:
    """1 for <think>...</think><answer>...</answer> and nothing else: each mark once, in this order,
    neither part empty. With an empty `answer_tag` the answer is what follows the thoughts.
    """
    marks = [f"<{think_tag}>", f"</{think_tag}>"]
    marks += [f"<{answer_tag}>", f"</{answer_tag}>"] if answer_tag else []
    if any(response.count(mark) != 1 for mark in marks):
        return 0.0
    rest, parts = response, []
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:
            return 0.0
        parts.append(before.strip())
    parts.append(rest.strip())
    wanted = [False, True, False, True, False] if answer_tag else [False, True, True]
    return float([bool(part) for part in parts] == wanted)


KIND = Kind(
    judge,
    "the response is <think>...</think><answer>...</answer> and nothing else",
    Example({}, "<think>so</think><answer>5</answer>", "<think>so</think> <answer>5</answer> bye"),
    answer=False,
    takes=("think_tag",),
    looks_for="",
)
