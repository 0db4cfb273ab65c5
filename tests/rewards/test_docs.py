"""The examples of docs/rewards.md: their sources validate, and their functions judge in real
workers."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest
from howto_code import write_code
from test_weighted import prompt, scored

from compass_jax.commands.cli import main
from compass_jax.config import DataConfig, FileSource, ProceduralSource, RewardConfig, TaskSource
from compass_jax.config.kinds import kinds
from compass_jax.data.questions import questions
from compass_jax.rewards.score import Scorer

TEXT = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
WORDS = ("right", "wrong")
BLOCKS = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def block(word):
    return next(text for text in BLOCKS if word in text)


def test_every_line_of_the_first_example_is_a_source_that_validates():
    sources = [eval(line, {"FileSource": FileSource}) for line in BLOCKS[0].strip().splitlines()]
    assert len(sources) == 5
    DataConfig(sources=tuple(sources)).validate()


def test_the_table_has_every_usual_verifier_with_its_arguments():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", TEXT, re.MULTILINE))
    for name, kind in kinds().items():
        assert all(f"`{argument}`" in rows[name] for argument in kind.takes)


@pytest.mark.parametrize("name", ["score", "score_many", "score_later"])
def test_the_functions_judge(name, tmp_path):
    (tmp_path / "m.py").write_text(block(f"def {name}("))
    source = FileSource("rows.jsonl", verifier=f"{tmp_path}/m.py:{name}")
    got = scored(source, ["7", "8"], prompt="x", answer=7)
    assert [(got[t].reward, got[t].known) for t in ("7", "8")] == [(1.0, True), (0.0, True)]
    assert ("short" in got["7"].components) == (name == "score")


def test_the_task_of_its_page_gives_prompts_and_judges_by_weights(tmp_path):
    file = write_code("task.md", "letters.py", tmp_path)
    weighted = file.read_text().replace(", score)", ', {score: 1.0, "format": 0.2})')
    file.write_text(weighted)
    data = DataConfig(sources=(TaskSource(f"{file}:task"),))
    assert questions(data, 0)[0].text == "Write a word of 2 letters."
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        scorer.submit(0, prompt(letters=2), "<think>a</think><answer>b</answer>")
        scorer.submit(1, prompt(letters=2), "ab")
        got = {}
        while scorer.outstanding:
            got.update(scorer.collect(block=True))
    assert (got[0].reward, got[1].reward) == (0.2, 1.0)


def examples():
    """Returns, by verifier, the example of its section: a row, a right and a wrong response."""
    sections = re.findall(r"^#### `(\w+)`\n\n```json\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    return {name: json.loads(text) for name, text in sections}


def test_the_rows_of_the_sections_are_judged_as_they_say():
    """One run with one worker has every verifier, and each sample is judged by its own."""
    cases = examples()
    assert set(cases) == {*kinds(), "reasoning_gym"}
    sources = [
        ProceduralSource("chain_sum")
        if name == "reasoning_gym"
        else FileSource("r.jsonl", verifier=name)
        for name in cases
    ]
    data, scores = DataConfig(sources=tuple(sources)), {}
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for source, (name, case) in enumerate(cases.items()):
            question = dataclasses.replace(prompt(**case["row"]), source=source)
            for word in ("right", "wrong"):
                scorer.submit((name, word), question, case[word])
        while scorer.outstanding:
            scores.update(scorer.collect(block=True))
    expected = {(name, word): 1.0 if word == "right" else 0.0 for name in cases for word in WORDS}
    assert {key: score.reward for key, score in scores.items()} == expected
    assert all(score.known for score in scores.values())


def test_the_commands_judge_and_the_first_prints_what_stands_there(capsys):
    (text,) = re.findall(r"^```sh\n(compass try.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (printed,) = re.findall(r"^```text\n(row  .*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    outputs = []
    for line in text.splitlines():
        assert main(shlex.split(line)[1:]) == 0, line
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == printed
    assert ["reward      1\n" in out for out in outputs] == [False, True, False, True, True]
