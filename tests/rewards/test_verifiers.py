import pytest
import reasoning_gym

from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.reasoning import reasoning_gym_score
from compass_jax.tasks.rows import decode_row, encode_row
from compass_jax.verifiers.extract import extract_answer
from compass_jax.verifiers.kinds.math import math_score


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("x <answer> 1 </answer> no, <answer>\n2\n</answer> done", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>a<answer>b</answer>", "b"),
        ("<answer></answer>", ""),
        ("<answer>5", None),
        ("5</answer>", None),
        ("</answer>5<answer>", None),
        ("the answer is 5", None),
        ("", None),
    ],
)
def test_extract_answer(response, answer):
    assert extract_answer(response, "answer") == answer


def test_no_tag_takes_everything():
    assert extract_answer(" 5 \n", "") == "5"


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("0.5", "1/2", 1.0),
        ("\\frac{1}{2}", "0.5", 1.0),
        ("$\\frac{2}{4}$", "\\frac12", 1.0),
        ("\\boxed{1/2}", "0.5", 1.0),
        ("1,000", "1000", 1.0),
        ("(x+1)^2", "x^2+2x+1", 1.0),
        ("x^2", "x^2+1", 0.0),
        ("3", "4", 0.0),
        ("", "4", 0.0),
        ("?!", "4", 0.0),
        ("paris ", "Paris", 1.0),
        ("pairs", "Paris", 0.0),
        ("B", "B", 1.0),
        ("C", "B", 0.0),
    ],
)
def test_math_score(answer, reference, score):
    assert math_score(answer, reference) == score


ENTRIES = [
    "chain_sum",
    "rearc",
    "count_bits",
    "word_ladder",
    "course_schedule",
    "group_anagrams",
    "mini_sudoku",
    "shortest_path",
    "maze",
]


@pytest.mark.parametrize("name", ENTRIES)
def test_entries_survive_json_and_keep_their_score(name):
    dataset = reasoning_gym.create_dataset(name, seed=11, size=3)
    for entry in dataset:
        assert decode_row(encode_row(entry)) == entry
        expected = dataset.score_answer(entry["answer"], entry)
        assert reasoning_gym_score(name, entry, entry["answer"]) == expected == 1.0


def test_codec_keeps_what_json_loses():
    value = {
        "a": (1, [2, (3,)]),
        "b": {1: "x", (2, 3): None},
        "c": {4, 5},
        "!tuple": [6],
        "d": {"!set": 1},
        "e": {},
    }
    assert decode_row(encode_row(value)) == value


def test_format_credit_is_no_credit_and_partial_credit_stays():
    entry = reasoning_gym.create_dataset("fraction_simplification", seed=1, size=1)[0]
    assert (
        reasoning_gym.create_dataset("fraction_simplification", seed=1, size=1).score_answer(
            "zzz", entry
        )
        == 0.01
    )
    assert reasoning_gym_score("fraction_simplification", entry, "zzz") == 0.0
    entry = reasoning_gym.create_dataset("spell_backward", seed=1, size=1)[0]
    half = entry["answer"][: len(entry["answer"]) // 2]
    assert reasoning_gym_score("spell_backward", entry, half) == pytest.approx(
        len(half) / len(entry["answer"])
    )


def test_unreadable_answer_is_wrong_but_unreadable_entry_raises():
    dataset = reasoning_gym.create_dataset("prime_factorization", seed=1, size=1)
    with pytest.raises(ValueError, match="invalid literal"):
        dataset.score_answer("zzz", dataset[0])
    assert reasoning_gym_score("prime_factorization", dataset[0], "zzz") == 0.0
    with pytest.raises(KeyError):
        reasoning_gym_score("chain_sum", {}, "5")


def test_options_reach_the_scorer():
    options = (("operators", ("+",)), ("max_terms", 3))
    entry = reasoning_gym.create_dataset(
        "basic_arithmetic", seed=1, size=1, operators=["+"], max_terms=3
    )[0]
    assert reasoning_gym_score("basic_arithmetic", entry, entry["answer"], options) == 1.0
    with pytest.raises(AssertionError):
        reasoning_gym_score("basic_arithmetic", entry, entry["answer"], (("max_terms", -1),))


def test_build_scores_missing_answers_zero():
    row = {"answer": "4"}
    math = build(Check("math", "answer"), "answer")
    assert math(row, "<answer>4</answer>").reward == 1.0
    assert math(row, "4").reward == 0.0
    assert build(Check("math", "answer"), "")(row, " 4 ").reward == 1.0
    assert build(Check("reasoning_gym", "chain_sum"), "answer")({}, "no").reward == 0.0
