import re

import pytest
import reasoning_gym

from compass_jax.data.worked import known_datasets, worked_solution
from compass_jax.rewards.verifiers.extract import extract_answer

OPTIONS = {
    "chain_sum": [{}, {"min_terms": 1, "max_terms": 8, "max_digits": 5, "allow_negation": True}],
    "products": [{}, {"min_terms": 1, "max_terms": 4, "allow_negation": True}],
    "count_bits": [{}],
    "leg_counting": [{}, {"min_animals": 1, "max_animals": 2}],
}


@pytest.mark.parametrize("name", known_datasets())
def test_own_scorer_gives_full_marks(name):
    for options in OPTIONS[name]:
        dataset = reasoning_gym.create_dataset(name, seed=7, size=200, **options)
        for entry in dataset:
            text = worked_solution(name, entry)
            assert text.count("<answer>") == 1
            assert dataset.score_answer(extract_answer(text, "answer"), entry) == 1.0


@pytest.mark.parametrize("name", ["chain_sum", "products"])
def test_every_line_is_one_true_operation(name):
    for options in OPTIONS[name]:
        for entry in reasoning_gym.create_dataset(name, seed=3, size=200, **options):
            lines = worked_solution(name, entry).split("\n")[:-1]
            for line in lines:
                left, operator, right, result = re.fullmatch(
                    r"(-?\d+) ([-+*%]) (-?\d+) = (-?\d+)", line
                ).groups()
                assert eval(f"({left}) {operator} ({right})") == int(result)
            if lines:
                assert lines[-1].endswith(f" = {entry['answer']}")


def test_chain_sum_by_hand():
    entry = {"metadata": {"expression": "6 + 2 - 14 + -3"}, "answer": "-9"}
    assert (
        worked_solution("chain_sum", entry)
        == "6 + 2 = 8\n8 - 14 = -6\n-6 + -3 = -9\n<answer>-9</answer>"
    )


def test_other_tasks_by_hand():
    assert worked_solution(
        "products", {"metadata": {"expression": "12 * 304"}, "answer": "3648"}
    ) == ("12 * 300 = 3600\n12 * 4 = 48\n3600 + 48 = 3648\n<answer>3648</answer>")
    assert (
        worked_solution("count_bits", {"metadata": {"number": 6}, "answer": "2"})
        == "6 0\n3 1\n1 2\n<answer>2</answer>"
    )


def test_leg_counting_by_hand():
    entry = {"metadata": {"animals": {"human": 8, "sea slug": 2, "ant": 1}}, "answer": "22"}
    assert worked_solution("leg_counting", entry) == (
        "human: 8 * 2 = 16\nsea slug: 2 * 0 = 0\nant: 1 * 6 = 6\n16 + 0 + 6 = 22\n"
        "<answer>22</answer>"
    )
    single = {"metadata": {"animals": {"crab": 3}}, "answer": "30"}
    assert worked_solution("leg_counting", single) == "crab: 3 * 10 = 30\n<answer>30</answer>"
