"""The environments of examples/, played with turns that the test writes."""

import asyncio
import itertools
import json
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.experience.episodes.play import Sampled, play

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "environments"
TOKENIZER = Tokenizer.load(ROOT / "configs" / "tiny_tokenizer")


def played(environment, row, answers, tokens=2000):
    """Returns the verdict on an episode with these turns, and the text of each request."""
    requests, turns = [], iter(answers)

    def generate(ids):
        requests.append(TOKENIZER.decode(ids, special=True))
        return Sampled([*TOKENIZER.encode(next(turns)), TOKENIZER.eos_id], False)

    order = SimpleNamespace(row=row, seed=5, turns=8, tokens=tokens)
    return asyncio.run(play(environment, order, TOKENIZER, generate)), requests


def test_the_game_gives_hints_and_counts_tries():
    kind = runpy.run_path(str(FOLDER / "guess.py"))["Guess"]
    rows = list(kind.rows(0))
    assert len({row["prompt"] for row in rows}) == 200
    row = {"prompt": "Guess.", "number": 4}
    verdict, requests = played(kind(), row, ["2", "7", "4"])
    assert verdict == {"reward": pytest.approx(1 / 3), "metrics": {}, "end": "environment"}
    assert "It is higher." in requests[1] and "It is lower." in requests[2]
    # every request begins with all that came before it
    assert all(b.startswith(a) for a, b in itertools.pairwise(requests))
    assert played(kind(), row, ["4"])[0]["reward"] == 1.0
    lost = played(kind(), row, ["x"] * 8)[0]
    assert lost["reward"] == 0.0 and lost["end"] == "turns"


@pytest.fixture(scope="module")
def server():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([sys.executable, FOLDER / "server.py", str(port)])
    for _ in range(200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.05)
    yield f"http://127.0.0.1:{port}"
    process.kill()
    process.wait()


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_the_tools_of_a_server_change_the_state_of_one_episode(server):
    kind = runpy.run_path(str(FOLDER / "ledger.py"))["Ledger"]
    row = next(kind.rows(0))
    book = call("book", account=row["account"], amount=row["amount"])
    for answers, reward in (
        ([book, "done"], 1.0),
        (["done"], 0.0),
        ([book, book, "done"], 0.0),
        ([call("balance", account="a"), book, "done"], 1.0),
        (["<tool_call>{broken</tool_call>", book, "done"], 1.0),
        ([call("burn", account="a"), "done"], 0.0),
    ):
        verdict, requests = played(kind(server), row, answers)
        expected = {"reward": reward, "metrics": {"booked": reward}, "end": "environment"}
        assert verdict == expected, answers
        # the server's answer to the last call is in the last request
        balance = answers.count(book) if answers[-2:-1] == [book] else None
        assert balance is None or f'"balance": {balance}' in requests[-1]


def test_a_server_that_is_gone_is_an_answer_of_the_tool_and_an_error_of_the_verdict():
    kind = runpy.run_path(str(FOLDER / "ledger.py"))["Ledger"]
    row = next(kind.rows(0))
    book = call("book", account="a", amount=1)
    with pytest.raises(OSError, match="refused"):
        played(kind("http://127.0.0.1:9"), row, [book, "done"])


def test_an_opening_that_leaves_no_room_is_refused_with_its_length():
    kind = runpy.run_path(str(FOLDER / "guess.py"))["Guess"]
    with pytest.raises(Exception, match=r"at most 40 \(rollout.prompt_buckets"):
        played(kind(), {"prompt": "Guess. " * 50, "number": 4}, [], tokens=40)
