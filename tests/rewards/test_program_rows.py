"""Rows of LeetCodeDataset, BigCodeBench and KodCode in their own columns: a right program earns 1
and a wrong one less, or the row is refused before the run."""

import json

import pytest
from program_rows import BIG_CODE_BENCH, KODCODE, LEETCODE
from test_hostile import guarded
from test_hostile import prompt as prompt_of
from test_program_verdicts import fenced, judged
from test_score import drain

from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.data.questions import questions
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import decode_row
from compass_jax.rewards.verifiers import program_files
from compass_jax.rewards.verifiers.kinds import code

pytestmark = [
    pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning"),
]
SETS = {"LeetCode": LEETCODE, "BigCodeBench": BIG_CODE_BENCH, "KodCode": KODCODE}
ROWS = {f"{kind}: {name}": row for kind, rows in SETS.items() for name, row in rows.items()}


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    packages = program_files.package_files(["numpy", "sympy"])[0]
    monkeypatch.setattr(program_files, "_importable", packages)


def read(row, tell=str):
    with open("rows.jsonl", "w") as file:
        file.write(json.dumps(row) + "\n")
    source = FileSource("rows.jsonl", verifier="code")
    (question,) = questions(DataConfig(sources=(source,)), 0, tell)
    return question


def test_there_are_40_rows():
    assert len(ROWS) >= 40


@pytest.mark.parametrize("name", ROWS)
def test_a_right_program_earns_1_or_the_row_is_refused(name, tmp_path, monkeypatch):
    row, wrong, refused = ROWS[name]
    columns = decode_row(read(row).row)
    (fault,) = code.row_faults([columns])
    assert refused in fault and bool(fault) == bool(refused), fault
    if not refused:
        columns.pop("response", None)
        columns["seconds"] = 20.0
        for folder, text in {"right": columns["solution"], "wrong": wrong}.items():
            (tmp_path / folder).mkdir()
            monkeypatch.chdir(tmp_path / folder)  # as in a worker, each response has a folder
            reward = judged(fenced(text), **columns).reward
            assert reward == 1.0 if folder == "right" else reward < 1.0


@guarded
def test_workers_judge_the_rows_in_their_sandbox():
    data = DataConfig(sources=(FileSource("rows.jsonl", verifier="code"),))
    rows = {name: (read(row).row, wrong) for name, (row, wrong, no) in ROWS.items() if not no}
    with Scorer(RewardConfig(workers=2, timeout_s=60.0), data) as scorer:
        for name, (row, wrong) in rows.items():
            columns = decode_row(row) | {"seconds": 30.0}
            for part, text in (("right", columns["solution"]), ("wrong", wrong)):
                scorer.submit((name, part), prompt_of(entry=columns), fenced(text))
        scores = drain(scorer)
    assert all(score.known for score in scores.values())
    assert {name for (name, part), x in scores.items() if x.reward == 1} == {*rows}
    assert all(x.reward < 1 for (_, part), x in scores.items() if part == "wrong")


@pytest.mark.parametrize("kind", SETS)
def test_each_set_is_recognised_by_its_columns(kind):
    row = next(iter(SETS[kind].values()))[0]
    notices = []
    question = read(row, notices.append)
    assert notices[0].startswith(f"rows.jsonl: {kind} rows")
    columns = decode_row(question.row)
    assert question.text == columns["prompt"] and columns["solution"] in row.values()


def test_a_rows_own_program_that_fails_refuses_the_row():
    row = {"tests": ["assert f(1) == 3", "assert f(2) == 5"], "solution": "def f(x): return x + 2"}
    (fault,) = code.row_faults([row])
    assert "its own program (column 'solution') fails test 2 of 2" in fault
    assert code.row_faults([{**row, "tests": row["tests"][:1]}]) == [""]
    scripts = {"inputs": ["1\n"], "outputs": ["1"], "solution": "print(input())"}
    assert code.row_faults([scripts]) == [""]
    assert "fails test 1 of 1" in code.row_faults([{**scripts, "outputs": ["2"]}])[0]
