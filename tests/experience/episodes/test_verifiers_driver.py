"""The parts of verifiers' driver that need no verifiers."""

import asyncio
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from compass_jax.config import EpisodeSource
from compass_jax.data.episodes import setup_of
from compass_jax.experience.episodes import verifiers_driver as driver


def test_tasks_with_the_same_prompt_are_rows_of_their_own():
    tasks = [
        {"prompt": "Guess a word.", "seed": 0},
        {"prompt": "Guess a word.", "seed": 1},
        {"prompt": None, "seed": 2},
        {"prompt": "Guess another.", "seed": 3},
    ]
    rows = list(driver.rows_of(iter(tasks)))
    assert len({row["prompt"] for row in rows}) == 4
    assert [rows[0]["prompt"], rows[3]["prompt"]] == ["Guess a word.", "Guess another."]
    assert [json.loads(row["data"]) for row in rows] == tasks


@pytest.mark.parametrize(("own", "turns"), [(None, 6), (4, None), (9, 6)])
def test_an_agent_takes_no_more_turns_than_its_source_has(own, turns):
    setup = setup_of(EpisodeSource("verifiers:game", turns=6), "play")
    agent = SimpleNamespace(max_turns=own, model_fields_set={"runtime"})
    fields = driver.agent_defaults(agent, setup["turns"])
    assert fields == ({"max_turns": turns} if turns else {})


def test_an_agent_without_a_runtime_has_that_of_this_machine():
    agent = SimpleNamespace(max_turns=1, model_fields_set=set())
    assert driver.agent_defaults(agent, 6) == {"runtime": {"type": "subprocess"}}


def test_the_clients_of_all_episodes_share_their_connections(monkeypatch):
    clients, base, train = map(ModuleType, ("verifiers.v1.clients", "base", "train"))
    clients.base, clients.train = base, train
    base.MAX_RETRIES, built = 0, []
    base.resolve_api_key = lambda config: "none"

    def build_async_httpx(config):
        built.append(httpx.AsyncClient())
        return built[-1]

    httpx = pytest.importorskip("httpx")
    base.build_async_httpx = build_async_httpx
    for name in ("verifiers", "verifiers.v1"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", clients)
    driver.share_connections()
    urls = [f"http://127.0.0.1:1/s/{n}/v1/" for n in range(3)]
    made = [train.build_async_openai(SimpleNamespace(base_url=url)) for url in urls]
    assert [str(client.base_url) for client in made] == urls
    assert len(built) == 1 and all(client._client is built[0] for client in made)


def call(arguments):
    function = {"name": "roundtrip", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}


def talk(*turns):
    """Returns the messages of a conversation whose model says `turns`, and why it ended."""
    said, bodies = list(turns), []

    async def ask(body):
        bodies.append(json.loads(json.dumps(body)))
        turn = said.pop(0)
        if isinstance(turn, str):
            return 400, turn
        return 200, json.dumps({"choices": [{"message": turn}]})

    async def made(name, arguments):
        return f"{name} of {arguments['word']}"

    messages = [{"role": "user", "content": "Go."}]
    tools = [{"type": "function"}]
    fault = asyncio.run(driver.converse(messages, tools, ask, made))
    assert all(body["tools"] == tools for body in bodies)
    return messages, fault


def test_calls_are_answered_until_a_turn_has_none():
    messages, fault = talk(call('{"word": "echo"}'), {"role": "assistant", "content": "echo"})
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert (messages[2]["content"], messages[2]["tool_call_id"]) == ("roundtrip of echo", "a")
    assert not fault


@pytest.mark.parametrize("arguments", ["{", "[1]", "3"])
def test_arguments_that_are_no_object_are_answered_with_an_error(arguments):
    messages, fault = talk(call(arguments), {"role": "assistant", "content": "?"})
    assert messages[2]["content"].startswith("error: the tool's arguments are no JSON object")
    assert not fault


def test_a_turn_that_is_refused_ends_the_conversation_with_its_reason():
    messages, fault = talk(call('{"word": "echo"}'), "no room")
    assert messages[-1]["role"] == "tool" and fault == "no room"
