"""Programs that a model wrote, in the real sandbox: right ones pass; hostile ones get the expected
score, do no harm and change no other score."""

import json
import os
import signal
import subprocess
import sys
import venv

import pytest
from corpus_programs import GOOD, PROGRAMS
from test_hostile import assert_nothing_is_left, guarded, places  # noqa: F401
from test_hostile import prompt as prompt_of
from test_score import drain

from benchmarks import gym
from compass_jax.base.records import Score
from compass_jax.config import ConfigError, DataConfig, FileSource, RewardConfig
from compass_jax.devices.processes import guards
from compass_jax.rewards.checks import Check, Graded, build
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.verifiers import program

# Starting a program runs code between fork and exec. jax warns about that if an earlier test
# imported it; workers do not import jax.
pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")
DATA = DataConfig(sources=(FileSource("rows.jsonl", verifier="code", answer_field=""),))
ROW = {"tests": ["assert f(20) == 22"], "seconds": 1.5, "memory_mb": 400}
NOTHING = Graded(0.0, {}, False)


def fenced(program):
    return f"So:\n```python\n{program}```"


def judged(response, **row):
    return build(Check("code"), "answer")(row, response)


@pytest.fixture(scope="module")
def scorer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPASS_TOKEN", "secret")
        with Scorer(RewardConfig(workers=1, timeout_s=9.0), DATA) as scorer:
            scorer.wait_ready()
            yield scorer


@guarded
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_hostile_program_gets_what_it_must(name, scorer, places):  # noqa: F811
    text, expected = PROGRAMS[name]
    before = scorer._workers[0].process.pid
    scorer.submit("row", prompt_of(entry=ROW), fenced(text.format(**places)))
    scorer.submit("right", prompt_of(entry=ROW), fenced(GOOD))
    scorer.submit("wrong", prompt_of(entry=ROW), fenced("def f(x): return x + 3\n"))
    got = drain(scorer)
    assert got["row"].known and got["row"].reward in (
        (0.0, 1.0) if expected is None else (expected,)
    )
    assert got["right"] == Score(1.0, True) and got["wrong"] == Score(0.0, True)
    assert_nothing_is_left(scorer, places, before)


def test_without_its_own_filter_a_program_kills_another(places, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as victim:
        text = PROGRAMS["kills another"][0].format(**places | {"me": victim.pid})
        assert judged(fenced(text), **ROW).reward == 0.0 and victim.poll() is None
        monkeypatch.setattr(guards, "signal_nobody_else", lambda: None)
        assert judged(fenced(text), **ROW).reward == 1.0 and victim.wait(5) == -signal.SIGKILL


def test_a_machine_without_a_guard_refuses_programs():
    missing = {guards.LANDLOCK: "not in this kernel"}
    with (
        Scorer(RewardConfig(timeout_s=9.0), DATA, missing=missing) as scorer,
        pytest.raises(
            VerifierError, match=r"'code' runs programs .* no Landlock: .*sandbox = 'off'"
        ),
    ):
        scorer.wait_ready()
    with Scorer(RewardConfig(timeout_s=9.0, sandbox="off"), DATA, missing=missing) as scorer:
        scorer.submit(0, prompt_of(entry=ROW), fenced(GOOD))
        assert drain(scorer)[0] == Score(1.0, True)


def test_a_python_that_cannot_run_in_the_sandbox_is_told_before_a_response_gets_a_zero(
    monkeypatch, tmp_path
):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    assert program.can_run()
    monkeypatch.setattr(sys, "executable", str(broken))
    assert not program.can_run()


@guarded
def test_programs_run_on_the_judges_python_where_only_its_owner_may_enter(tmp_path, monkeypatch):
    """A home folder is often closed to others, and root's programs run as the user "nobody"."""
    home = tmp_path / "home"
    venv.create(home / "env")
    (site,) = (home / "env" / "lib").glob("python*/site-packages")
    site.joinpath("all.pth").write_text("\n".join(x for x in sys.path if os.path.isdir(x)))
    home.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(home / "env" / "bin" / "python"))
    text = (
        "import json, sys\ndef f(x): return [sys.prefix, json.__file__.startswith(sys.base_prefix)]"
    )
    test = f"assert f(0) == {[str(home / 'env'), True]}"
    with Scorer(RewardConfig(timeout_s=9.0), DATA) as scorer:
        scorer.submit(0, prompt_of(entry=ROW | {"tests": [test]}), fenced(text))
        assert drain(scorer)[0] == Score(1.0, True)


SCRIPTS = {
    "closes its folder": "os.chmod('.', 0)",
    "removes its folder": "shutil.rmtree(os.getcwd())",
    "closes it and forks": "os.chmod('.', 0); os.fork() or os._exit(0)",
    "removes its program and forks": "os.remove('program.py'); os.mkdir('program.py'); os.fork()",
    "fills its folder": "[open(str(n), 'wb').write(bytes(10**7)) for n in range(99)]",
    "makes deep folders": "os.makedirs('d/' * 1000)",
}


@guarded
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that_damages_its_folder_is_known(name, scorer, places):  # noqa: F811
    text = f"import os, shutil\nprint(4, flush=True)\n{SCRIPTS[name]}\n"
    row = {"inputs": ["1", "2", "3"], "outputs": ["3", "3", "3"], "seconds": 4.0}
    before = scorer._workers[0].process.pid
    scorer.submit("row", prompt_of(entry=row), fenced(text))
    scorer.submit("right", prompt_of(entry=ROW), fenced(GOOD))
    got = drain(scorer)
    assert got["row"] == Score(0.0, True) and got["right"] == Score(1.0, True)
    assert_nothing_is_left(scorer, places, before)


HUMAN_EVAL = {
    "setup": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """Sum."""\n',
    "test": "def check(f):\n    assert f([1, 2]) == 3\n    assert f([]) == 0\n",
    "entry_point": "total",
}
ECHO = {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10"]}
FUTURE = '"""Adds."""\nfrom __future__ import annotations\n'
TWO = ["assert f(1) == 3", "assert f(2) == 5"]


@pytest.mark.parametrize(
    ("row", "response", "reward"),
    [
        (HUMAN_EVAL, "    return sum(xs)\n", 1.0),
        (HUMAN_EVAL, "    pass\n", NOTHING),  # nothing that looks like a program
        (HUMAN_EVAL, fenced("def total(xs: List[int]):\n    return sum(xs)\n"), 1.0),
        (HUMAN_EVAL, fenced("def total(xs):\n    return max(xs)\n"), 0.0),
        (HUMAN_EVAL, fenced(f"{FUTURE}def total(xs: None | int):\n    return sum(xs)\n"), 1.0),
        (ECHO | {"setup": "import os"}, fenced(f"{FUTURE}print(3)\n"), 0.5),
        (ECHO | {"setup": FUTURE}, fenced(f"{FUTURE}print(3)\n"), 0.5),
        (ECHO, fenced(f"x = 1\n{FUTURE}print(3)\n"), 0.0),
        ({"tests": TWO}, fenced("def f(x): return 3\n"), 0.5),
        ({"tests": TWO, "credit": "all"}, fenced("def f(x): return 3\n"), 0.0),
        ({"tests": TWO, "credit": "all"}, fenced("def f(x): return 2 * x + 1\n"), 1.0),
        ({"tests": TWO}, "<answer>def f(x): return 2 * x + 1</answer>", 1.0),
        ({"tests": TWO}, fenced("x = 1\n") + fenced("def f(x): return 2 * x + 1\n"), 1.0),
        ({"tests": TWO}, fenced("def g(x): return 3\n"), 0.0),
        ({"tests": TWO}, fenced("def f(x) return 3\n"), 0.0),
        ({"tests": TWO}, "I cannot.", NOTHING),
        (ECHO, fenced("a, b = map(int, input().split())\nprint(a + b)\n"), 1.0),
        (ECHO, fenced("input()\nprint(3)\n"), 0.5),
        (ECHO, fenced("print(3); raise ValueError\n"), 0.0),
        (ECHO, fenced("while True: print('x' * 10**6)\n"), 0.0),
    ],
)
def test_a_program_gets_the_share_of_tests_that_it_passes(
    row, response, reward, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    expected = reward if isinstance(reward, Graded) else Graded(reward, {})
    assert judged(response, **row) == expected


PLAIN = """
def same(x): return x
def grown(xs, d):
    xs.append(9); d['k'] = (1, 2)
def squares(n):
    for i in range(n): yield i * i
def fails(): raise ZeroDivisionError('by nought')
"""


def test_values_arguments_and_errors_cross_as_they_are():
    tests = [
        "for x in (None, True, 1, 2.5, 'a', b'b', 1j, [1, [2]], (1, (2,)), {1: {2: 3}}, {4}):\n"
        "    assert same(x) == x and type(same(x)) is type(x)",
        "assert same(float('inf')) == float('inf') and same(float('nan')) != same(float('nan'))",
        "xs, d = [1], {}\ngrown(xs, d)\nassert xs == [1, 9] and d == {'k': (1, 2)}",
        "assert list(squares(4)) == [0, 1, 4, 9]",
        "try: fails()\nexcept ZeroDivisionError as e: assert str(e) == 'by nought'\nelse: assert 0",
        "assert same(x=3) == 3",
    ]
    for test in tests:
        assert judged(fenced(PLAIN), tests=[test]).reward == 1.0, test


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "the row has 0 tests, 0 inputs and 0 outputs"),
        ({"tests": ["assert 1"], "inputs": ["1"], "outputs": ["1"]}, "1 tests, 1 inputs"),
        ({"inputs": ["1"], "outputs": []}, "1 inputs and 0 outputs"),
    ],
)
def test_a_row_without_tests_is_an_error_and_no_zero(row, message):
    with pytest.raises(ValueError, match=message):
        judged(fenced(GOOD), **row)


@pytest.mark.parametrize(
    "arguments", [{"credit": "half"}, {"seconds": 0}, {"seconds": "3"}, {"memory_mb": -1}]
)
def test_arguments_that_cannot_be_are_refused(arguments):
    with pytest.raises(ConfigError, match=f"verifier_args: {next(iter(arguments))} = "):
        FileSource("r.jsonl", verifier="code", answer_field="", verifier_args=arguments).validate(
            "s"
        )


def test_processes_of_a_program_end_with_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert judged(fenced("def f(x):\n while True: pass\n"), tests=TWO, seconds=0.2).reward == 0
    assert len(os.listdir("/proc/self/fd")) == before


@guarded
def test_the_benchmark_counts_what_was_right_and_what_escaped(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gym", "--smoke"])
    gym.main()
    assert json.loads(capsys.readouterr().out) == {"hostile": "3/3", "escaped": 0}
    wrong = {"PROGRAMS": {"right": (GOOD, 1), "would be an escape": (GOOD, 0)}}
    monkeypatch.setattr(gym.runpy, "run_path", lambda path: wrong)
    with gym.scorer_of(1) as scorer:
        assert gym.hostile(scorer) == {"hostile": "1/2", "escaped": 1}
