"""The shop: each row can be solved in its number of calls, and only the final state counts."""

import hashlib
import json
import random
import subprocess
import sys

import pytest
from test_examples import EXAMPLES, commands

from compass_jax.commands.cli import main
from compass_jax.commands.configured import load_config
from compass_jax.rewards.tasks.environment import MOST_CHARS
from compass_jax.training.idle_settings import idle_settings
from examples.shop import shop
from examples.shop.shop import Call, calls_in

ROWS = list(shop.rows(0, shop.CALLS, 30))
PLAY = shop.task.verify
README = EXAMPLES / "shop" / "README.md"


def played(row, *texts):
    return PLAY(row, json.dumps(texts))


def right(row):
    return [m["content"] for m in shop.conversation(row) if m["role"] == "assistant"]


def row_of(kind, calls=1):
    return next(
        r for r in ROWS if r["difficulty"] == calls and any(g["kind"] == kind for g in r["goals"])
    )


def test_every_row_is_solved_by_as_many_calls_as_it_says():
    """A shorter prefix solves no row: its environment answers and waits for the next call."""
    assert {(r["difficulty"], r["language"]) for r in ROWS} == {
        (n, language) for n in shop.CALLS for language in shop.ITEMS
    }
    for row in ROWS:
        texts = right(row)
        assert len(texts) == row["difficulty"] + 1
        assert played(row, *texts)["reward"] == 1.0 and not played(row, *texts)["says"]
        early = played(row, *texts[:-2], "I give up.")
        assert early["reward"] == 0.0 and not early["says"]
        assert played(row, *texts[: len(texts) - 1])["says"]


def test_rows_follow_from_the_seed_and_are_distinct():
    repeat, other = (list(shop.rows(seed, shop.CALLS, 30)) for seed in (0, 1))
    assert repeat == ROWS
    prompts = {row["prompt"] for row in ROWS}
    assert (
        len(prompts) == len(ROWS)
        and len(prompts & {row["prompt"] for row in other}) < len(prompts) / 2
    )


def test_the_rows_are_those_of_the_measurements():
    """The raw results in benchmarks/results are of these requests and conversations."""
    text = json.dumps(list(shop.task.prompts(0)))
    digests = [hashlib.blake2b(x.encode(), digest_size=8).hexdigest() for x in (text, talks())]
    assert digests == ["f7a2970a3ea4beef", "bb344b84f7ac1111"]


def talks():
    return shop.cold_start(0, (1, 2), 100, 0.5)


def test_rewards_of_turns_sum_to_what_was_reached():
    row = row_of("buy", 8)
    texts = right(row)
    paid = [
        shop.rewarded_8.verify.play(row, texts[:k])[-1].reward for k in range(1, len(texts) + 1)
    ]
    assert sum(paid) == pytest.approx(1.0) and min(paid) == 0.0
    wrong = json.dumps({"buy": [row["goals"][0]["item"], 10]})
    harmed = shop.rewarded_8.verify.play(row, [*texts[:-1], wrong])[-1]
    assert harmed.reward < 0 and harmed.components["progress"] < 1


def test_one_call_too_many_or_another_argument_is_wrong():
    row = row_of("buy")
    item, n = row["goals"][0]["item"], row["goals"][0]["n"]
    good = json.dumps({"buy": [item, n]})
    assert played(row, good, "x")["reward"] == 1.0
    assert played(row, good, good, "x")["reward"] == 0.0
    assert played(row, json.dumps({"buy": [item, n + 1]}), "x")["reward"] == 0.0
    undone = json.dumps({"cancel": [json.loads(reply(row, good))]})
    assert played(row, good, undone, "x")["reward"] == 0.0


def reply(row, *texts):
    return json.loads(played(row, *texts)["says"])[-1]["content"]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{not json", "no JSON"),
        ("<tool_call>{}</tool_call>", "a name and arguments"),
        ('{"buy": 3}', "a name and arguments"),
        ('{"sell": []}', "no such tool"),
        ('{"buy": []}', "buy takes item, n, coupon"),
        ('{"buy": ["pen", 1, "", 4]}', "buy takes"),
        ('{"name": "buy", "arguments": {"item": "pen", "number": 1}}', "buy takes"),
        ('{"buy": ["pen", "2"]}', "n must be 1 or more"),
        ('{"buy": ["pen", true]}', "n must be 1 or more"),
        ('{"buy": ["pen", 999]}', "only"),
        ('{"buy": [["pen"], 1]}', "no such item"),
        ('{"buy": ["pen", 1, "C0"]}', "no such coupon"),
        ('{"cancel": [99]}', "no such order"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_a_call_that_cannot_be_made_says_why_and_changes_nothing(text, error):
    row = row_of("buy")
    assert error in json.loads(reply(row, text))["error"]
    assert played(row, text, *right(row))["reward"] == 1.0
    assert played(row, text)["errors"] == 1.0


def test_calls_are_read_in_every_form():
    arguments = {"item": "pen", "n": 2}
    block = json.dumps({"name": "buy", "arguments": arguments})
    call = Call("buy", arguments)
    assert calls_in(f"I buy.\n<tool_call>\n{block}\n</tool_call>") == [call]
    assert calls_in(f"<tool_call>{block}</tool_call> and <tool_call>{block}") == [call, call]
    assert calls_in(block) == [call] and calls_in(f"[{block}, {block}]") == [call, call]
    assert calls_in('{"buy": ["pen", 2]}') == [Call("buy", ["pen", 2])]
    assert calls_in("All is done.") == calls_in("") == []


def test_a_coupon_counts_once():
    row = row_of("coupon", 2)
    look, bought, _ = right(row)
    assert json.loads(reply(row, look, bought, bought))["error"] == "no such coupon"


def test_careless_clerks_look_nothing_up_and_order_one():
    """They reach a single goal by luck alone. If half of the clerks are careless, about half of the
    conversations are the careful one.
    """
    random_ = random.Random(0)
    alone = [row for row in shop.rows(0, (1, 2), 90, ("en",)) if len(row["goals"]) == 1]
    reached = 0
    for row in alone:
        goal, orders = row["goals"][0], row["shop"]["orders"]
        lucky = {"buy": goal["n"] == 1, "coupon": False}
        lucky["cancel"] = bool(orders) and orders[0]["item"] == goal["item"]
        careful = shop.conversation(row)
        assert shop.clerks(row, 0.0, random_) == [careful]
        for talk in shop.clerks(row, 1.0, random_):
            texts = [m["content"] for m in talk if m["role"] == "assistant"]
            assert len(texts) == 2 and played(row, *texts)["reward"] == lucky[goal["kind"]]
        reached += sum(talk == careful for talk in shop.clerks(row, 0.5, random_))
    assert 0.4 < reached / (shop.COPIES * len(alone)) < 0.65


def test_the_readmes_commands_write_a_cold_start_and_open_everything(at_home, capsys):
    (script, *runs) = [words for _, words in commands(README)]
    assert script[:2] == ["python", "examples/shop/shop.py"]
    subprocess.run([sys.executable, *script[1:]], check=True, capture_output=True, timeout=60)
    assert (at_home / "shop.jsonl").read_text() == talks()
    assert [words[:2] for words in runs] == [["compass", "sft"], ["compass", "train"]]
    for words in runs:
        assert main([*words[1:], "--dry-run"]) == 0
        captured = capsys.readouterr()
        assert "name = " in captured.out and "warning" not in captured.out + captured.err


def test_each_setting_of_the_configuration_acts():
    config = load_config(str(EXAMPLES / "shop" / "shop_tiny_cpu.py")).validate_for_rl()
    assert list(idle_settings(config.rl, config.policy, config.scored, 10_000, 5)) == []


@pytest.mark.parametrize("calls", shop.CALLS)
def test_clerks_answer_every_request_whatever_a_careless_one_did_before(calls):
    """A careless clerk may cancel the order that the next goal is about."""
    random_ = random.Random(0)
    for row in shop.rows(0, (calls,), 100):
        assert len(shop.clerks(row, 0.5, random_)) == shop.COPIES


ONE = next(iter(shop.rows(0, [1], 1, ["en"])))
MANY = {
    "objects without a call": "[" + "{}," * 400 + "{}]",
    "calls in tags": "<tool_call>{}</tool_call>" * 3000,
    "numbers": json.dumps(list(range(20_000))),
    "brackets": "[" * 90_000,
    "a long text": "{" + " " * 300_000 + "}",
}


@pytest.mark.parametrize("name", MANY)
def test_a_turn_of_many_calls_has_a_verdict(name):
    verdict = played(ONE, MANY[name])
    assert verdict["reward"] == 0.0 and len(verdict["says"]) <= MOST_CHARS


def test_a_turn_whose_answers_are_too_long_ends_the_conversation():
    buys = [{"buy": [item, 1]} for item in ONE["shop"]["prices"]] * 6
    verdict = played(ONE, *[json.dumps(buys)] * 3, json.dumps([{"orders": []}] * 64))
    assert verdict["reward"] == 0.0 and verdict["says"] == "" and verdict["turns"] == 4
