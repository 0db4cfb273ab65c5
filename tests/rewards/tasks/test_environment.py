"""Environments, which answer the model's turns in the workers; a conversation in which one breaks
its contract is left out."""

import itertools
import json

import pytest

from compass_jax.base.records import Prompt
from compass_jax.config import ConfigError, DataConfig, RewardConfig, TaskSource
from compass_jax.data.questions import questions
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks import Environment, Task, Turn
from compass_jax.rewards.tasks.environment import MOST_CHARS, EnvironmentFault
from compass_jax.rewards.tasks.rows import encode_row
from compass_jax.rewards.tasks.task import load_task

# The answer to "again" is a different message for each number of turns.
OWN = """
import time
from compass_jax.rewards.tasks import Environment, Task, Turn


def prompts(seed):
    for n in range(9):
        yield {"prompt": f"Count to {n}.", "n": n}


def step(state, text):
    state["turns"] += 1
    if text == "hang":
        time.sleep(60)
    if text == "slow":
        time.sleep(0.4)
        return Turn([{"role": "tool", "content": "at last"}])
    if text == "raise":
        raise KeyError(text)
    if text == "nonsense":
        return Turn([{"role": "assistant", "content": "I am the model"}])
    if text == "again":
        return Turn([{"role": "tool", "content": str(state)}], 0.25, {"agains": state["turns"]})
    return Turn(reward=float(text == str(state["n"])))


counted = Task(prompts, Environment(lambda row: {"n": row["n"], "turns": 0}, step, turns=5))
mixed = Task(prompts, {counted.verify: 1.0, "length": 0.1})
"""


def echo(discount=None):
    def step(state, text):
        state.append(text)
        last = text == "end"
        return Turn([] if last else [{"role": "tool", "content": "".join(state)}], float(len(text)))

    return Environment(lambda row: [row["first"]], step, 4, discount)


def play(environment, *texts):
    return environment({"first": "0"}, json.dumps(texts))


def test_a_conversation_is_played_from_its_start_and_says_what_comes_next():
    verdict = play(echo(), "a", "b")
    assert json.loads(verdict.pop("says")) == [{"role": "tool", "content": "0ab"}]
    assert verdict == {"reward": 1.0, "turns": 2.0}
    assert play(echo(), "a", "b") == {**verdict, "says": play(echo(), "a", "b")["says"]}
    assert play(echo(), "a", "end")["says"] == ""


def test_rewards_are_the_last_turns_or_discounted():
    assert play(echo(), "a", "bbbbb", "end")["reward"] == 3.0
    assert play(echo(0.5), "a", "bbbbb", "end")["reward"] == 1 + 0.5 * 5 + 0.25 * 3
    assert play(echo(0.0), "a", "bbbbb", "end")["reward"] == 1.0


@pytest.mark.parametrize(("discount", "limits", "gap"), [(0.5, (0, 1), 0.5), (0.9, (-1, 1), 1.0)])
def test_gap_and_range_are_those_of_all_conversations(discount, limits, gap):
    """The test plays every conversation of at most three turns."""
    low, high = limits
    rewards = [low + i * gap for i in range(int((high - low) / gap) + 1)]

    def step(state, text):
        return Turn([{"role": "tool", "content": "on"}], float(text))

    environment = Environment(dict, step, 3, discount, turn_range=limits, turn_gap=gap)
    talks = [t for n in (1, 2, 3) for t in itertools.product(map(str, rewards), repeat=n)]
    totals = sorted({environment({}, json.dumps(talk))["reward"] for talk in talks})
    assert environment.gap == pytest.approx(min(b - a for a, b in itertools.pairwise(totals)))
    assert environment.range == pytest.approx((totals[0], totals[-1]))


def test_what_is_over_does_not_go_on():
    with pytest.raises(EnvironmentFault, match="over after turn 1 of 2"):
        play(echo(), "end", "a")


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "assistant", "content": "x"}],
        [{"role": "tool"}],
        [{"role": "tool", "content": 3}],
        [{"role": "tool", "content": "x", "tool_calls": "y"}],
        ["tool"],
        [{"role": "tool", "content": "x" * MOST_CHARS}],
    ],
)
def test_messages_of_no_form_are_refused(messages):
    with pytest.raises(EnvironmentFault):
        play(Environment(lambda row: None, lambda state, text: Turn(messages)), "a")


def test_a_step_gives_a_turn_and_its_limits_make_sense():
    with pytest.raises(EnvironmentFault, match="gave a float: make it a Turn"):
        play(Environment(lambda row: None, lambda state, text: 1.0), "a")
    ranges = ({"turn_gap": 0}, {"turn_gap": 3, "turn_range": (0, 2)}, {"turn_range": (1, 0)})
    discounted = {"turn_range": (1, 2), "discount": 0.5}
    for wrong in ({"turns": 0}, {"discount": 1.5}, *ranges, discounted):
        with pytest.raises(ValueError, match="must be"):
            Environment(lambda row: None, lambda state, text: Turn(), **wrong)


@pytest.fixture
def module_file(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return str(tmp_path / "own.py")


def test_prompts_know_their_turns_and_nothing_else_judges_a_conversation(module_file):
    config = DataConfig(sources=(TaskSource(f"{module_file}:counted"),))
    assert {question.turns for question in questions(config, 0)} == {5}
    assert Task(lambda seed: (), "math").turns == 0
    with pytest.raises(ConfigError, match="judges whole conversations"):
        load_task(f"{module_file}:mixed", "data.sources[0].task")


def test_workers_play_it_and_what_fails_costs_its_sample_alone(module_file):
    config = DataConfig(sources=(TaskSource(f"{module_file}:counted"),))
    conversations = [
        ["4"],
        ["again"],
        ["again", "again"],
        ["hang"],
        ["raise"],
        ["nonsense"],
        ["again", "4"],
    ]
    with Scorer(RewardConfig(timeout_s=1.0), config) as scorer:
        for key, texts in enumerate(conversations):
            prompt = Prompt(key, 0, "x", "q", None, "", encode_row({"n": 4}), turns=5)
            scorer.submit(key, prompt, json.dumps(texts))
        scores = {}
        while scorer.outstanding:
            scores.update(scorer.collect(block=True))
    outcomes = [scores[key].outcome for key in range(len(conversations))]
    assert outcomes == ["ok", "ok", "ok", "timeout", "error", "error", "ok"]
    assert [scores[key].reward for key in (0, 1, 2, 6)] == [1.0, 0.25, 0.25, 1.0]
    assert scores[2].components == {"agains": 2.0, "turns": 2.0}
    assert json.loads(scores[2].says) == [{"role": "tool", "content": "{'n': 4, 'turns': 2}"}]
    assert not any(scores[key].known or scores[key].says for key in (3, 4, 5))
    assert scores[0].says == scores[6].says == "" and scores[0].spent == scores[6].spent == 0


def test_the_share_of_its_time_that_an_environment_takes_is_told(module_file):
    config = DataConfig(sources=(TaskSource(f"{module_file}:counted"),))
    assert RewardConfig(timeout_s=2.0).conversation_limit_s == 8.0
    with Scorer(RewardConfig(timeout_s=9.0, conversation_s=0.2), config) as scorer:
        for key, text in enumerate(("slow", "slow", "4")):
            prompt = Prompt(key, 0, "x", "q", None, "", encode_row({"n": 4}), turns=5)
            scorer.submit(key, prompt, json.dumps([text]))
        scores = {}
        while scorer.outstanding:
            scores.update(scorer.collect(block=True))
    assert all(scores[key].known and 1.9 < scores[key].spent < 40 for key in (0, 1))
    assert scores[2].spent == 0
