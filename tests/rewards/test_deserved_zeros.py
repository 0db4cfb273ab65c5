"""Responses that make their own check slow, large or impossible: they score 0, and are not left
out."""

import json

import pytest
from test_hostile import guarded
from test_hostile import prompt as prompt_of
from test_program_verdicts import fenced
from test_score import drain

from compass_jax.base.records import Score
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.environment import Environment, EnvironmentFault, Turn

# Values of a set of 42,000 integers that all have the same hash.
COLLIDING = "[n * (2**61 - 1) for n in range(42000)]"
WRITTEN = (
    "import json, os\ndef f(x):\n"
    " line = json.dumps({'value': VALUE, 'after': []}).encode() + b'\\n'\n"
    " for n in range(3, 9):\n"
    "  try:\n   left = line\n"
    "   while left: left = left[os.write(n, left):]\n"
    "  except OSError: pass\n"
)
ADDED = "xs = f(20)\nassert sum(set(xs)) == 3"
SLOW = {
    "a set": ("assert f(20) == {1}", WRITTEN.replace("VALUE", f"{{'set': {COLLIDING}}}")),
    "the keys of a dict": (
        "assert f(20) == {1: 1}",
        WRITTEN.replace("VALUE", f"{{'dict': [[n, 0] for n in {COLLIDING}]}}"),
    ),
    "a list that the test makes a set": (ADDED, f"def f(x): return {COLLIDING}\n"),
    "a count that the test goes through": (
        "assert [x for x in range(f(20)) if x > 10**15] == []",
        "def f(x): return 10**18\n",
    ),
    "a pattern": (
        "import re\nassert re.fullmatch(f(20), 'a' * 40 + 'b')",
        "def f(x): return '(a*)*c'\n",
    ),
    "a nested value": (
        "assert f(20) == 22",
        WRITTEN.replace("json.dumps", "(lambda d: '[' * 300000)").replace("VALUE", "0"),
    ),
    "a value of an unknown form": ("assert f(20) == 22", WRITTEN.replace("VALUE", "{'what': 1}")),
    "arguments of an unknown form": (
        "f([1])\nassert f([1]) == 22",
        WRITTEN.replace("VALUE", "22").replace("[]}", "5}"),
    ),
    "an exception of an unknown form": (
        "try: f(1)\nexcept ValueError: pass\nelse: assert 0",
        WRITTEN.replace("'value': VALUE", "'raised': {'ValueError': 1}, 'args': 5"),
    ),
    "seconds beyond the check's": ("assert f(20) == 22", "def f(x):\n while True: pass\n"),
}


@guarded
@pytest.mark.parametrize("name", SLOW)
def test_a_program_that_keeps_its_test_busy_gets_0(name, scorer):
    test, text = SLOW[name]
    row = {"tests": [test], "seconds": 60.0 if "beyond" in name else 1.5}
    scorer.submit("row", prompt_of(entry=row), fenced(text))
    scorer.submit("next", prompt_of(entry={"tests": ["assert f(1)"]}), fenced("def f(x): return 1"))
    got = drain(scorer)
    assert got["row"] == Score(0.0, True) and got["next"] == Score(1.0, True)


@guarded
def test_what_it_passed_before_counts(scorer):
    row = {"tests": ["assert f(1) == 1", f"assert sum({ADDED[5:10]}) == 3"], "seconds": 1.5}
    row["tests"][1] = "assert len(set(f(20))) == 3"
    text = f"def f(x): return 1 if x == 1 else {COLLIDING}\n"
    scorer.submit("row", prompt_of(entry=row), fenced(text))
    assert drain(scorer)["row"] == Score(0.5, True)


@pytest.fixture(scope="module")
def scorer():
    data = DataConfig(sources=(FileSource("rows.jsonl", verifier="code", answer_field=""),))
    with Scorer(RewardConfig(workers=1, timeout_s=4.0), data) as scorer:
        scorer.wait_ready()
        yield scorer


def test_an_own_environment_that_answers_each_call_has_a_verdict():
    def step(state, text):
        return Turn([{"role": "tool", "content": "no"}] * len(text.split()), 0.25)

    environment = Environment(lambda row: None, step)
    assert environment({}, json.dumps(["a b c"]))["says"]
    assert environment({}, json.dumps(["a " * 5000])) == {"reward": 0.25, "turns": 1.0, "says": ""}
    loud = Environment(
        lambda row: None, lambda *_: Turn([{"role": "tool", "content": "x" * 20_000}])
    )
    with pytest.raises(EnvironmentFault, match="said 20,031 characters at once"):
        loud({}, json.dumps(["a"]))
