"""The evaluation before the first step has at most as many answers as a step."""

import itertools

import pytest
from tiny import make_prompt

from compass_jax.data.prompts import PromptSet
from compass_jax.experience.evaluate import count_answers, start_sets


def sets_of(*sizes, k=4):
    prompts = [make_prompt(n, 3) for n in range(sum(sizes))]
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [
        PromptSet(f"set{i}", prompts[end - size : end], k, 1.0)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


@pytest.mark.parametrize(
    ("sizes", "counts"),
    [
        ((246,), [12]),  # 60 answers of 5 a prompt, at most 64
        ((12,), [12]),
        ((10, 90), [1, 11]),
        ((1, 1), [1, 1]),
        ((512, 1319, 30), [3, 9, 1]),
    ],
)
def test_the_sets_shrink_alike_to_the_answers_of_a_step(sizes, counts):
    sets = sets_of(*sizes)
    chosen = start_sets(sets, None, 64)
    assert [len(one.prompts) for one in chosen] == counts
    assert count_answers(chosen) <= 16 * 4 + 5 * (len(sizes) - 1)
    for one, whole in zip(chosen, sets, strict=True):
        places = [whole.prompts.index(prompt) for prompt in one.prompts]
        assert places == sorted(set(places)) and (one.name, one.k) == (whole.name, whole.k)
        # evenly, since prompts come in the order of their sources
        gaps = {b - a for a, b in itertools.pairwise(places)}
        assert not gaps or max(gaps) - min(gaps) <= 1
    assert start_sets(sets, None, 64) == chosen


def test_the_number_can_be_set():
    sets = sets_of(246, 30)
    assert start_sets(sets, 480, 64) == sets
    chosen = start_sets(sets, 40, 64)
    assert [len(one.prompts) for one in chosen] == [40, 30]
    assert start_sets([], None, 64) == []
