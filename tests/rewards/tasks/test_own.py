"""A verifier and a task outside the package: both train, and their faults are reported with a
place."""

import dataclasses
import json

import numpy as np
import pytest
from logged import lines
from tiny_run import tiny_run

from compass_jax.base.records import Prompt, Score
from compass_jax.commands.cli import main
from compass_jax.config import ConfigError, DataConfig, FileSource, RewardConfig, TaskSource
from compass_jax.config.io import config_from_json, config_to_json
from compass_jax.data.files import DataError
from compass_jax.data.questions import questions
from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.faults import NEVER, VerifierError
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import encode_row
from compass_jax.training.rl import run_rl

VERIFIER = '''
def score(row, response):
    """Half of the letters are "right"; the truth is an object in a column of its own."""
    right = sum(map(ord, response)) % row["truth"]["of"] < row["truth"]["below"]
    return {"reward": float(right), "long": 1.0 if len(response) > 3 else 0.0}
'''
TASK = """
from compass_jax.rewards.tasks import Task


def prompts(seed):
    for n in range(30):
        yield {
            "prompt": [{"role": "user", "content": f"Say {n}."}],
            "truth": ("tuple", n),
            "domain": "odd" if n % 2 else "even",
            "difficulty": n % 3,
        }


def judge(row, response):
    assert row["truth"][0] == "tuple"
    return float(sum(map(ord, response)) % 2)


judge.range = (0, 1)
task = Task(prompts, judge)
"""

PROMPT = Prompt(1, 0, "x", "q", np.zeros(1, np.int32), "")


def drain(scorer):
    got = {}
    while scorer.outstanding:
        got.update(scorer.collect(block=True))
    return got


def with_source(source, directory, **data):
    config = tiny_run()
    data = {"sources": (source,), "eval_prompts": 0, **data}
    return dataclasses.replace(
        config, run_dir=str(directory), data=dataclasses.replace(config.data, **data)
    )


def rows_file(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_verifier_of_ones_own_trains_two_steps_and_its_parts_are_logged(tmp_path):
    (tmp_path / "my_rewards.py").write_text(VERIFIER)
    truth = {"of": 2, "below": 1}
    rows = [{"prompt": f"Say {n}.", "truth": truth, "name": f"row {n}"} for n in range(40)]
    path = rows_file(tmp_path / "rows.jsonl", rows)
    source = FileSource(path, answer_field="truth", verifier=f"{tmp_path}/my_rewards.py:score")
    run_rl(with_source(source, tmp_path / "run"))
    for row in lines(tmp_path / "run"):
        m = row["metrics"]
        assert 0 < m["reward/mean"] < 1 and m["reward/unknown_frac"] == 0
        assert 0 < m["reward/long/mean"] <= 1
    group = lines(tmp_path / "run", "rollouts")[0]
    assert group["answer"] == json.dumps(truth) and group["samples"][0]["components"].keys() == {
        "long"
    }


def test_a_task_in_one_file_trains_by_the_command_and_is_evaluated_by_label(tmp_path):
    (tmp_path / "my_tasks.py").write_text(TASK)
    (tmp_path / "config.py").write_text(
        "import dataclasses\n"
        "from compass_jax.config import TaskSource\n"
        "import tiny_run as tiny\n\n"
        "def mine():\n"
        "    config = tiny.tiny_run()\n"
        f"    source = TaskSource({str(tmp_path / 'my_tasks.py:task')!r}, label='words')\n"
        "    data = dataclasses.replace(config.data, sources=(source,), eval_prompts=6)\n"
        "    rl = dataclasses.replace(config.rl, eval_every=2)\n"
        "    return dataclasses.replace(config, data=data, rl=rl)\n"
    )
    out = tmp_path / "run"
    assert main(["train", str(tmp_path / "config.py"), "--run-dir", str(out)]) == 0
    assert [row["step"] for row in lines(out)] == [1, 2]
    assert 0 < lines(out)[0]["metrics"]["reward/mean"] < 1
    metric_names = {name for name in lines(out)[1]["metrics"] if name.startswith("eval/")}
    assert "eval/words/avg_at_k" in metric_names and {n.split("/")[1] for n in metric_names} >= {
        "domain",
        "difficulty",
    }


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (None, "score", "there is no file"),
        ("import nowhere_at_all", "score", r"m\.py, line 1: ModuleNotFoundError: No module named"),
        ("def score(:", "score", r"m\.py, line 1: SyntaxError"),
        ("def scores(row, response): ...", "score", "has no score; did you mean scores"),
        ("score = 3", "score", "a int, and no function; define it as `def score.prompt, response"),
        (
            "def score(prompt, answer): ...",
            "score",
            r"score\(prompt, answer\) cannot be called .it takes no response.; define it as",
        ),
        (
            "def score(row, response): ...\nscore.range = 1, 0",
            "score",
            "range is .1, 0.; it must be",
        ),
    ],
)
def test_a_verifier_that_cannot_be_used_is_refused_with_its_place(tmp_path, text, name, message):
    if text is not None:
        (tmp_path / "m.py").write_text(text + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        build(Check("function", f"{tmp_path}/m.py:{name}", key="data.sources[0].verifier"), "")
    assert str(error.value).startswith("data.sources[0].verifier = ") and "\n" not in str(
        error.value
    )


def test_a_module_that_is_nowhere_is_said_before_anything_is_written(tmp_path, capsys):
    (tmp_path / "config.py").write_text(
        "from tiny_run import tiny_run\n\ndef f():\n    return tiny_run('nowhere_at_all:score')\n"
    )
    assert main(["train", f"{tmp_path}/config.py", "--run-dir", f"{tmp_path}/run"]) == 2
    message = capsys.readouterr().err.strip()
    assert "\n" not in message and "data.sources[0].verifier = 'nowhere_at_all:score'" in message
    assert "there is no module nowhere_at_all" in message and not (tmp_path / "run").exists()


ANSWERS = """
def score(row, response):
    return {"nan": float("nan"), "text": "1", "none": None, "out": 1.5, "empty": {"format": 1.0},
            "odd": {"reward": 1.0, "verifier": 1.0},
            "row": row["missing"] if response == "row" else 0,
            "right": 1, "parts": {"reward": 0.5, "format": 1}}[response]


score.range = (0, 1)
"""


def test_what_is_no_reward_is_unknown_said_once_with_a_sample_and_ends_a_run_that_has_no_other(
    tmp_path, caplog
):
    (tmp_path / "m.py").write_text(ANSWERS)
    verifier = f"{tmp_path}/m.py:score"
    data = DataConfig(sources=(FileSource("unused.jsonl", verifier=verifier),))
    responses = ["right", "nan", "text", "none", "out", "empty", "odd", "row", "parts"]
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for text in responses:
            scorer.submit(text, PROMPT, text)
        scores = drain(scorer)
        assert scores["right"] == Score(1.0, True)
        assert scores["parts"] == Score(0.5, True, components={"format": 1.0})
        for text, detail in {
            "nan": "returned nan",
            "text": "returned '1'",
            "out": "reward 1.5 is outside its range",
            "empty": "has no 'reward'",
            "odd": "cannot be called 'verifier'",
            "row": "KeyError: 'missing'",
        }.items():
            assert (
                not scores[text].known
                and scores[text].outcome == "error"
                and detail in scores[text].detail
            )
        assert scores["none"] == Score(0.0, False, "unjudged", extracted=False)
        (warning,) = caplog.records
        assert f"{verifier!r} gave no verdict: " in warning.message and "nan" in warning.message
        for i in range(NEVER):
            scorer.submit(i, PROMPT, "out")
        assert len(drain(scorer)) == NEVER  # no error, because the verifier has judged before
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for i in range(NEVER):
            scorer.submit(i, PROMPT, "out")
        with pytest.raises(
            VerifierError, match=r"8 errors and no verdict; the last one: Value.*1.5"
        ):
            while True:
                scorer.collect(block=True)


MISSPELT = "\n\ndef score(response, answer, lettre):\n    return float(lettre in response)\n"


def test_a_misspelt_parameter_is_said_once_with_its_place_and_without_a_response(tmp_path, caplog):
    (tmp_path / "m.py").write_text(MISSPELT)
    key = f"{tmp_path}/m.py:score"
    data = DataConfig(sources=(FileSource("unused.jsonl", verifier=key),))
    row = encode_row({"prompt": "q", "answer": "a", "letter": "b"})
    prompt = dataclasses.replace(PROMPT, row=row)
    with Scorer(RewardConfig(timeout_s=20.0), data) as scorer:
        for i in range(NEVER):
            scorer.submit(i, prompt, "a paragraph")
        with pytest.raises(VerifierError) as error:
            while True:
                scorer.collect(block=True)
    assert str(error.value) == (
        f"data.sources[0].verifier = {key!r}: 8 errors and no verdict; the last one: score"
        f" ({tmp_path}/m.py, line 3) takes 'lettre', and the row has no such column; did you mean"
        " letter? (it has: prompt, answer, letter). Mend the verifier"
    )
    (warning,) = caplog.records
    assert "did you mean letter?" in warning.message and "paragraph" not in warning.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("task = 3", "it is a int; make it a compass_jax.rewards.tasks.Task"),
        ("task = Task([])", "prompts is a list; make it a function"),
        ("task = Task(lambda seed: [])", r"prompts\(0\) gave no row; a task needs one prompt"),
        ("task = Task(lambda seed: None)", r"t\.py: TypeError.*not iterable"),
        ("task = Task(lambda: [])", r"t\.py: TypeError"),
        ("task = Task(lambda seed: [1])", "row 1: a int; it must be a mapping"),
        ("task = Task(lambda seed: [{'prompt': 'x'}])", "row 1: no 'answer'.*prompt.; add it"),
        (
            "task = Task(lambda seed: [{'prompt': 'x', 'answer': '1', 'tools': 3}])",
            "'tools': must",
        ),
        ("task = Task(lambda seed: [{'prompt': 'x', 'z': b'1'}], print)", "column 'z' cannot be"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_with_its_place(tmp_path, body, message):
    (tmp_path / "t.py").write_text(f"from compass_jax.rewards.tasks import Task\n{body}\n")
    data = DataConfig(sources=(TaskSource(f"{tmp_path}/t.py:task"),))
    with pytest.raises((ConfigError, DataError), match=message):
        questions(data, 0)


def test_a_row_has_any_ground_truth_and_rows_with_another_truth_are_told(tmp_path):
    rows = [{"prompt": "q", "tests": tests} for tests in ([1, 2], [1, 2], {"a": None})]
    path = rows_file(tmp_path / "rows.jsonl", rows)
    source = FileSource(path, answer_field="", verifier="anything:score", label="x")
    notices = []
    (question,) = questions(DataConfig(sources=(source,)), 0, notices.append)
    assert json.loads(question.row) == rows[0] and [
        notice.split(": ")[1][:6] for notice in notices
    ] == [
        "1 rows",
        "1 rows",
    ]


def test_the_path_of_a_file_is_absolute_as_soon_as_it_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = with_source(FileSource("rows.jsonl", verifier="m.py:score"), "run")
    assert config.data.sources[0].verifier == f"{tmp_path}/m.py:score"
    monkeypatch.chdir("/")
    assert config_from_json(config_to_json(config)) == config
    for bad in ("m.py", "m:", ":f", "m:f:g", "a b:f"):
        with pytest.raises(
            ConfigError, match=r"data.sources\[0\].verifier = .* must be module:name"
        ):
            with_source(FileSource("rows.jsonl", verifier=bad), "run").validate()
