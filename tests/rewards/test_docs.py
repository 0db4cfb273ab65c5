"""The examples of docs/rewards.md run: sources validate, functions judge in real workers."""

import re
from pathlib import Path

import pytest
from test_weighted import prompt, scored

from compass_jax.config import DataConfig, FileSource, RewardConfig, TaskSource
from compass_jax.data.questions import questions
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.verifiers.find import kinds

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def block(word):
    return next(text for text in BLOCKS if word in text)


def test_every_line_of_the_first_example_is_a_source_that_validates():
    sources = [eval(line, {"FileSource": FileSource}) for line in BLOCKS[0].strip().splitlines()]
    assert len(sources) == 5
    DataConfig(sources=tuple(sources)).validate()


def test_the_table_has_every_usual_verifier_with_its_arguments():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", TEXT, re.MULTILINE))
    for name, said in kinds().items():
        assert all(f"`{one}`" in rows[name] for one in said.takes)


@pytest.mark.parametrize("name", ["score", "score_many", "score_later"])
def test_the_functions_judge(name, tmp_path):
    (tmp_path / "m.py").write_text(block(f"def {name}("))
    source = FileSource("rows.jsonl", verifier=f"{tmp_path}/m.py:{name}")
    got = scored(source, ["7", "8"], prompt="x", answer=7)
    assert [(got[t].reward, got[t].known) for t in ("7", "8")] == [(1.0, True), (0.0, True)]
    assert ("short" in got["7"].components) == (name == "score")


def test_the_task_gives_prompts_and_judges(tmp_path):
    (tmp_path / "t.py").write_text(block("task = Task("))
    data = DataConfig(sources=(TaskSource(f"{tmp_path}/t.py:task"),))
    assert questions(data, 0)[0].text == "Write a word of 2 letters."
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        scorer.submit(0, prompt(letters=2), "<think>a</think><answer>b</answer>")
        scorer.submit(1, prompt(letters=2), "ab")
        got = {}
        while scorer.outstanding:
            got.update(scorer.collect(block=True))
    assert (got[0].reward, got[1].reward) == (0.2, 1.0)
