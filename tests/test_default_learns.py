"""The tasks of benchmarks/default_learns.py: their rewards judge what they say, and every prompt
occurs once."""

import json
import runpy

import pytest

from benchmarks import default_learns

RESPONSES = {
    "problems": ("3 + 4 = 7.", "It was 7 and now it is 8."),
    "count": ("A dog ran very far away today.", "A dog ran\nvery far away today."),
    "review": ("It is positive.", "Positive, not negative"),
    "sort": ("Sorted:\napple, banana, river", "apple, river, banana"),
}
ANSWERS = {"problems": "7", "count": "7", "sort": "apple, banana, river", "review": "positive"}


@pytest.mark.parametrize("task", default_learns.TASKS)
def test_a_task_has_1200_different_prompts_and_a_reward_that_reads_the_answer(task, tmp_path):
    default_learns.write_task(tmp_path, task)
    rows = [json.loads(line) for line in (tmp_path / f"{task}.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == 1200
    score = runpy.run_path(str(tmp_path / f"{task}.py"))["score"]
    right, wrong = RESPONSES[task]
    assert (score(right, ANSWERS[task]), score(wrong, ANSWERS[task])) == (1.0, 0.0)
    assert score("", ANSWERS[task]) == 0.0


def test_problems_have_the_answers_of_their_sentences():
    """Reads the numbers of each sentence back and computes its answer by its words."""
    rng = default_learns.random.Random(1)
    for _ in range(200):
        text, answer = default_learns.problem(rng)
        x, y = (int(n) for n in default_learns.re.findall(r"\d+", text))
        assert int(answer) == (x - y if "gives" in text else x + y), text


def test_a_setting_without_a_value_is_refused():
    with pytest.raises(SystemExit, match=r"--set rl.steps: must be NAME=VALUE"):
        default_learns.main(["--model", ".", "--set", "rl.steps", "--minutes", "0"])
