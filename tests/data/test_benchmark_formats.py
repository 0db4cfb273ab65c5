"""Rows of published evaluation sets, written after each set's documentation: their questions, and
whether the verifier finds the reference right.
"""

import json
import re

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from compass_jax.base.records import Prompt
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.rewards.checks import votes
from compass_jax.rewards.score import Scorer

MATH = {
    "problem": "What is $1+1$?",
    "level": "Level 2",
    "type": "Prealgebra",
    "solution": r"Adding gives \boxed{3-1}, that is $\boxed{2}$.",
}
MATH_500 = {
    "problem": "What is $1+1$?",
    "solution": r"It is \boxed{2}.",
    "answer": "2",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
HUMAN_EVAL = {
    "task_id": "HumanEval/53",
    "prompt": 'def add(x: int, y: int):\n    """Add two numbers x and y"""\n',
    "entry_point": "add",
    "canonical_solution": "    return x + y\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
}
MBPP = {
    "task_id": 2,
    "text": "Write a function to double a number.",
    "code": "def double(n):\n    return math.floor(2 * n)",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0"],
    "test_setup_code": "import math",
    "challenge_test_list": [],
}
SANITISED = {
    "source_file": "Benchmark Questions Verification V2.ipynb",
    "task_id": 2,
    "prompt": "Write a function to double a number.",
    "code": MBPP["code"],
    "test_imports": ["import math"],
    "test_list": MBPP["test_list"],
}
IFEVAL = {
    "key": 1000,
    "prompt": "Write a riddle. Do not use any commas.",
    "instruction_id_list": ["punctuation:no_comma"],
    "kwargs": [{"num_words": None}],
}
BFCL = {
    "id": "simple_python_3",
    "question": [[{"role": "user", "content": "Area of a triangle, base 10, height 5?"}]],
    "function": [
        {
            "name": "triangle_area",
            "description": "The area of a triangle.",
            "parameters": {
                "type": "dict",
                "properties": {"base": {"type": "integer"}, "height": {"type": "integer"}},
                "required": ["base", "height"],
            },
        }
    ],
}
TRUTH = {
    "id": "simple_python_3",
    "ground_truth": [{"triangle_area": {"base": [10], "height": [5]}}],
}
CALL = '<tool_call>{"name": "triangle_area", "arguments": {"base": 10, "height": 5}}</tool_call>'
METALS = ["iron", "gold", "tin", "lead"]
MMLU = {"question": "Which is Au?", "subject": "chemistry", "choices": METALS, "answer": 1}
MMLU_PRO = {
    "question_id": 70,
    "question": "Which is Au?",
    "options": METALS,
    "answer": "B",
    "answer_index": 1,
    "category": "chemistry",
}
ARC = {
    "id": "Mercury_1",
    "question": "Which is Au?",
    "choices": {"text": METALS, "label": ["1", "2", "3", "4"]},
    "answerKey": "2",
}
MMMLU = {
    "Question": "Welches ist Au?",
    **dict(zip("ABCD", METALS)),
    "Answer": "B",
    "Subject": "chemistry",
}
LETTERED = "A. iron\nB. gold\nC. tin\nD. lead"

# name -> (row, verifier, words of the prompt, reference, a right response, a wrong one, labels)
SETS = {
    "MATH": (MATH, "math", "What is", "2", r"\boxed{2}", r"\boxed{3}",
             ("domain/Prealgebra", "difficulty/Level 2")),
    "MATH_500": (MATH_500, "math", "What is", "2", r"\boxed{2}", r"\boxed{3}",
                 ("domain/Algebra", "difficulty/1")),
    "AIME_24": ({"ID": "2024-I-1", "Problem": "How long?", "Solution": "Long.", "Answer": 204},
                "math", "How long?", "204", r"\boxed{204}", r"\boxed{24}", ()),
    "AIME_25": ({"problem": "How long?", "answer": "070"}, "math", "How long?", "070",
                r"\boxed{70}", r"\boxed{7}", ()),
    "GSM8K": ({"question": "How many?", "answer": "24 and 48.\n#### 72"}, "math", "How many?", "72",
              r"\boxed{72}", r"\boxed{24}", ()),
    "HumanEval": (HUMAN_EVAL, "code", "Complete this Python function", "    return x + y\n",
                  "```python\n    return y + x\n```", "```python\n    return x\n```", ()),
    "MBPP": (MBPP, "code", "assert double(2) == 4", MBPP["code"],
             f"```python\n{MBPP['code']}\n```", "```python\ndef double(n):\n    return n\n```", ()),
    "MBPP_sanitised": (SANITISED, "code", "assert double(2) == 4", MBPP["code"],
                       f"```python\n{MBPP['code']}\n```", "```python\ndef double(n): return n\n```",
                       ()),
    "IFEval": (IFEVAL, "instructions", "Write a riddle", "", "What has keys?", "Keys, locks", ()),
    "BFCL": (BFCL | TRUTH, "tools", "Area of a triangle", None, CALL, CALL.replace("10", "9"),
             ("domain/simple_python",)),
    "MMLU": (MMLU, "choice", LETTERED, "B", "Answer: B", "Answer: A", ("domain/chemistry",)),
    "MMLU_Pro": (MMLU_PRO, "choice", LETTERED, "B", "Answer: B", "Answer: C",
                 ("domain/chemistry",)),
    "ARC": (ARC, "choice", LETTERED, "B", "<answer>gold</answer>", "Answer: D", ()),
    "mmmlu_DE-DE": (MMMLU, "choice", LETTERED, "B", "Answer: B", "Answer: A",
                    ("domain/chemistry", "language/DE-DE")),
}  # fmt: skip


def question_of(folder, row, verifier, name="set.jsonl", **settings):
    """Returns the question of a file with this one row, and the notices."""
    path, notices = folder / name, []
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps(row) + "\n")
    source = FileSource(str(path), verifier=verifier, **settings)
    (question,) = questions(DataConfig(sources=(source,)), 0, notices.append)
    return question, notices


def judged(cases):
    """Returns the rewards of (question, verifier, response), in order, from real workers, since
    programs run only in them.
    """
    kinds = list(dict.fromkeys(verifier for _, verifier, _ in cases))
    sources = tuple(
        FileSource("any.jsonl", verifier=x, verifier_args={"seconds": 60.0} if x == "code" else {})
        for x in kinds
    )
    scores = {}
    with Scorer(RewardConfig(timeout_s=120.0), DataConfig(sources=sources)) as scorer:
        for n, (question, verifier, response) in enumerate(cases):
            tokens = np.zeros(1, np.int32)
            fields = (question.label, question.text, tokens, question.answer, question.row)
            scorer.submit(n, Prompt(n, kinds.index(verifier), *fields), response)
        while len(scores) < len(cases):
            scores.update(scorer.collect(block=True))
    assert all(score.known for score in scores.values()), scores
    return [scores[n].reward for n in range(len(cases))]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", SETS)
def test_each_set_is_asked_as_its_documentation_says(tmp_path, name, ending):
    row, verifier, words, answer, _, _, labels = SETS[name]
    question, notices = question_of(tmp_path, row, verifier, f"{name}.{ending}")
    assert words in question.text and notices[0].startswith(f"{name}.{ending}: ")
    assert answer is None or question.answer == answer
    assert set(question.labels) == set(labels)


def test_each_set_is_judged_by_its_verifier(tmp_path):
    cases = []
    for name, (row, verifier, _, _, right, wrong, _) in SETS.items():
        question, _ = question_of(tmp_path, row, verifier, f"{name}.jsonl")
        cases += [(question, verifier, right), (question, verifier, wrong)]
    rewards = judged(cases)
    for name, right, wrong in zip(SETS, rewards[::2], rewards[1::2], strict=True):
        assert right == 1 and wrong < 1, name


def test_a_verifier_that_cannot_judge_a_set_is_an_error_that_names_the_right_one(tmp_path):
    for name, (row, verifier, *_) in SETS.items():
        if verifier != "math":
            where = r"data\.sources\[0\]\.verifier to " + re.escape(repr(verifier))
            with pytest.raises(DataError, match=where):
                question_of(tmp_path, row, "math", f"{name}.jsonl")


def test_columns_that_are_named_are_read_as_they_are(tmp_path):
    named = {"prompt_field": "question", "answer_field": "answer"}
    question, _ = question_of(tmp_path, MMLU_PRO, "exact", **named)
    assert (question.text, question.answer) == ("Which is Au?", "B")


def test_possible_answers_of_bfcl_may_lie_in_their_folder(tmp_path):
    (tmp_path / "possible_answer").mkdir()
    name = "BFCL_v4_simple_python.jsonl"
    (tmp_path / "possible_answer" / name).write_text(json.dumps(TRUTH) + "\n")
    question, _ = question_of(tmp_path, BFCL, "tools", name)
    assert len(question.tools) == 1
    irrelevant, _ = question_of(tmp_path, BFCL, "tools", "BFCL_v4_irrelevance.jsonl")
    pairs = [(question, CALL), (irrelevant, "No tool fits."), (irrelevant, CALL)]
    assert judged([(x, "tools", response) for x, response in pairs]) == [1, 1, 0]


@pytest.mark.parametrize(
    ("row", "verifier", "message"),
    [
        (MATH | {"solution": "It is 2."}, "math", r"set.jsonl, line 1: .*'solution' holds no"),
        (MATH | {"solution": None}, "math", r"line 1: 'solution' is null"),
        (MBPP | {"test_list": []}, "code", r"line 1: .*'test_list' must be a list"),
        (BFCL, "tools", r"no field 'ground_truth', and there is no .*possible_answer"),
        (BFCL | TRUTH | {"question": BFCL["question"] * 2}, "tools", r"has 2 turns"),
        (BFCL | TRUTH | {"function": [{"name": "f"}]}, "tools", r"documents it: 'description'"),
        (MMLU | {"answer": 4}, "choice", r"line 1: .*the answer 4 is none of the 4 options"),
        (MMLU_PRO | {"answer": "K"}, "choice", r"the answer 'K' is none of the 4 options"),
        (MMLU | {"choices": ["one"], "answer": 0}, "choice", r"has 1 options"),
        (MMLU | {"choices": "iron or gold"}, "choice", r"the options must be a list of texts"),
        (MMLU | {"question": " "}, "choice", r"the question is empty"),
    ],
)  # fmt: skip
def test_rows_that_are_not_as_documented_are_named_with_their_place(
    tmp_path, row, verifier, message
):
    with pytest.raises(DataError, match=message):
        question_of(tmp_path, row, verifier)


def test_equal_answers_are_equal_votes(tmp_path):
    """The source's verifier decides: numbers are equal by value, letters by the chosen option; code
    has no votes.
    """
    tag = RewardConfig().answer_tag
    for verifier, row, groups in (
        ("math", MATH, [("<answer>1/2</answer>", r"\boxed{0.50}"), (r"\boxed{x+1}",), ("2",)]),
        ("numeric", {"question": "q", "answer": "3"}, [("#### 3 km", "#### 3.0"), ("#### 4",)]),
        ("choice", MMLU, [("Answer: B", "<answer>gold</answer>"), ("Answer: C",), ("who knows",)]),
    ):
        question, _ = question_of(tmp_path, row, verifier)
        (vote,) = votes(DataConfig(sources=(FileSource("a.jsonl", verifier=verifier),)), tag)
        vote_sets = [{vote(question, response) for response in group} for group in groups]
        assert all(len(one) == 1 for one in vote_sets)
        assert len(set.union(*vote_sets)) == len(groups)
        assert (None in vote_sets[-1]) == (verifier != "numeric")
    assert votes(DataConfig(sources=(FileSource("a.jsonl", verifier="code"),)), tag) == [None]
