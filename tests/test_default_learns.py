"""The tasks of benchmarks/default_learns.py: their rewards judge what they say, and every prompt
occurs once."""

import json
import runpy

import pytest

from benchmarks import default_learns

RESPONSES = {
    "review": ("It is positive.", "Positive, not negative"),
    "short": ("A dog ran far away.", "A dog ran very far away from here."),
    "age": ("Anna is 7, as Ben says.", "Anna is 7 and Ben is 8."),
}
ANSWERS = {"review": "positive", "short": "6", "age": "7"}


@pytest.mark.parametrize("task", default_learns.TASKS)
def test_a_task_has_1200_different_prompts_and_a_reward_that_reads_the_answer(task, tmp_path):
    default_learns.write_task(tmp_path, task)
    rows = [json.loads(line) for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 1200
    score = runpy.run_path(str(tmp_path / f"{task}.py"))["score"]
    right, wrong = RESPONSES[task]
    assert (score(right, ANSWERS[task]), score(wrong, ANSWERS[task])) == (1.0, 0.0)
    assert score("", ANSWERS[task]) == 0.0


def test_questions_of_ages_have_the_answers_of_their_sentences():
    """Reads each sentence back by its words."""
    rng = default_learns.random.Random(1)
    for _ in range(200):
        text, answer = default_learns.age(rng)
        told = dict(default_learns.re.findall(r"(\w+) is (\d+) years", text))
        (asked,) = default_learns.re.findall(r"How old is (\w+)\?", text)
        assert told[asked] == answer, text


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(SystemExit, match=r"--set rl.steps: must be NAME=VALUE"):
        default_learns.main(["--model", ".", "--set", "rl.steps", "--minutes", "0"])
