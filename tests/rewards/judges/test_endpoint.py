"""A judge's endpoint that is right, slow, down or no endpoint at all: each request ends in time,
with a text or a named failure."""

import json
import socket
import threading
import time

import pytest
from judged import served, settings

from compass_jax.base.chat.base import read_calls
from compass_jax.base.chat.calls import ToolCall
from compass_jax.config import ConfigError
from compass_jax.rewards.judges import endpoint as module
from compass_jax.rewards.judges.endpoint import (
    LATE,
    NONSENSE,
    REFUSED,
    UNREACHABLE,
    Endpoint,
    Reply,
)

ASKED = [{"role": "user", "content": "Which one?"}]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.01)


def test_a_request_has_the_configured_fields_and_the_key_of_the_environment(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", " sk-secret\n")
    with served(lambda n, body: "Better") as (at, seen):
        config = settings(at + "/", key_env="JUDGE_KEY", max_tokens=7, fields=(("seed", 3),))
        assert Endpoint(config)(ASKED) == Reply("Better")
        assert Endpoint(settings(at, max_tokens=0))(ASKED).text == "Better"
    common = {"model": "judge", "messages": ASKED, "temperature": 0.0}
    assert seen.requests == [common | {"seed": 3, "max_tokens": 7}, common]
    assert seen.keys == ["Bearer sk-secret", None]


WRONG = {
    "HTML": (b"<html><body>Welcome</body></html>", NONSENSE, 3),
    "not the form": (b'{"choices": []}', NONSENSE, 3),
    "no text": (None, NONSENSE, 3),
    "always 500": ((500, b"boom"), UNREACHABLE, 3),
    "no such model": ((404, b"no such model"), REFUSED, 1),
    "elsewhere": ((302, b""), REFUSED, 1),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_is_no_answer_has_a_name_and_is_asked_again_where_that_may_help(kind):
    answer, failure, requests = WRONG[kind]
    with served(lambda n, body: answer) as (at, seen):
        reply = Endpoint(settings(at, retries=2))(ASKED)
    assert (reply.text, reply.failure, len(seen.requests)) == ("", failure, requests)
    assert reply.detail and len(reply.detail) <= module.MOST_DETAIL


SAID = {
    "apart": ({"content": "4", "reasoning_content": "2 + 2"}, "stop", {}, ("4", "2 + 2", 0, True)),
    "cut": ({"content": "so"}, "length", {"completion_tokens": 7}, ("so", "", 7, False)),
    "cut in a thought": (
        {"content": None, "reasoning_content": "2 +"},
        "length",
        {"completion_tokens": 3},
        ("", "2 +", 3, False),
    ),
    "nonsense beside": (
        {"content": "4", "reasoning": 5},
        "stop",
        {"completion_tokens": "9"},
        ("4", "", 0, True),
    ),
}


@pytest.mark.parametrize("kind", SAID)
def test_a_thought_the_tokens_and_a_cut_are_read(kind):
    message, finish, usage, expected = SAID[kind]
    body = {"choices": [{"message": message, "finish_reason": finish}], "usage": usage}
    with served(lambda n, request: json.dumps(body).encode()) as (at, _):
        reply = Endpoint(settings(at, retries=0))(ASKED)
    assert (reply.text, reply.thought, reply.tokens, reply.complete) == expected
    assert not reply.failure


TOOL = {"name": "add", "parameters": {"type": "object"}}


def call(arguments):
    return {"id": "x", "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_tools_are_offered_in_openais_form_and_calls_are_in_the_text():
    messages = [
        {"content": None, "tool_calls": [call('{"a": 1}'), call('{"a": 2}')]},
        {"content": "Let me add.", "tool_calls": [call('{"a": 1}')]},
        {"content": None, "tool_calls": [call("{a")]},
        {"content": None, "tool_calls": 3},
        {"tool_calls": [call("{}")]},
    ]
    bodies = [json.dumps({"choices": [{"message": one}]}).encode() for one in messages]
    with served(lambda n, request: bodies[n]) as (at, seen):
        ask = Endpoint(settings(at, retries=0))
        wrapped = {"type": "function", "function": TOOL}
        replies = [ask(ASKED, [TOOL, wrapped]) for _ in bodies]
    assert seen.requests[0]["tools"] == [wrapped, wrapped]
    assert read_calls(replies[0].text) == [ToolCall("add", {"a": n}) for n in (1, 2)]
    assert replies[1].text.startswith("Let me add.\n<tool_call>\n")
    assert read_calls(replies[1].text) == [ToolCall("add", {"a": 1})]
    assert [one.failure for one in replies] == ["", "", NONSENSE, NONSENSE, ""]


def test_an_endpoint_that_fails_first_is_asked_until_it_is_right():
    answers = [(500, b"boom"), b"<html>", (503, b""), "Worse"]
    with served(lambda n, body: answers[n]) as (at, seen):
        assert Endpoint(settings(at, retries=5))(ASKED).text == "Worse"
    assert len(seen.requests) == 4


def test_an_answer_that_is_too_late_ends_in_time_however_it_trickles():
    with served(lambda n, body: 5.0) as (at, seen):
        started = time.monotonic()
        assert Endpoint(settings(at, timeout_s=0.3))(ASKED).failure == LATE
        assert time.monotonic() - started < 2 and len(seen.requests) == 1
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def trickle():
        connection, _ = listener.accept()
        with connection:
            while not stop.wait(0.02):  # one byte at a time: no single wait is long
                try:
                    connection.sendall(b"H")
                except OSError:
                    return

    thread = threading.Thread(target=trickle)
    thread.start()
    started = time.monotonic()
    reply = Endpoint(settings(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.3))(
        ASKED
    )
    assert reply.failure == LATE and time.monotonic() - started < 2
    stop.set()
    thread.join()
    listener.close()


def closed_address():
    """Returns an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


def test_where_nobody_listens_pauses_end_once_as_many_failed_as_may_be_under_way(monkeypatch):
    ask = Endpoint(settings(closed_address(), retries=3, requests=2))
    pauses = []
    monkeypatch.setattr(ask._closing, "wait", lambda seconds: bool(pauses.append(seconds)))
    for _ in range(5):
        assert ask(ASKED).failure == UNREACHABLE
    assert len(pauses) == 6, "three pauses for each of the first two, then none"
    assert pauses[0] < pauses[1] < pauses[2] <= 0.04, "pauses grow"


def test_the_pause_that_the_endpoint_asks_for_is_kept_and_never_outlasts_the_limit(monkeypatch):
    ask = Endpoint(settings(closed_address(), retries=3, timeout_s=5))
    monkeypatch.setattr(ask, "_post", lambda payload, end: (429, b"", "60"))
    started = time.monotonic()
    assert ask(ASKED).failure == UNREACHABLE and time.monotonic() - started < 1
    for after in ("Fri, 31 Dec", "9" * 400, None):
        monkeypatch.setattr(ask, "_post", lambda payload, end, after=after: (429, b"", after))
        assert ask._request(b"", started)[1] == 0


def test_a_key_that_the_endpoint_repeats_is_not_shown(monkeypatch):
    key = "sk-" + "a" * 200
    monkeypatch.setenv("JUDGE_KEY", key)
    for body in (f"wrong key {key}", "x" * 250 + key):
        with served(lambda n, request, body=body: (401, body.encode())) as (at, _):
            detail = Endpoint(settings(at, key_env="JUDGE_KEY"))(ASKED).detail
        assert "aaaa" not in detail and detail.startswith("HTTP 401")
    for value in ("", "two words", "ключ"):
        monkeypatch.setenv("JUDGE_KEY", value)
        with pytest.raises(ConfigError, match="JUDGE_KEY") as error:
            Endpoint(settings("http://localhost", key_env="JUDGE_KEY"))
        assert not value or value not in str(error.value)


def test_closing_cuts_what_is_under_way():
    with served(lambda n, body: 5.0) as (at, seen):
        ask, replies = Endpoint(settings(at, timeout_s=60)), []
        thread = threading.Thread(target=lambda: replies.append(ask(ASKED)))
        thread.start()
        while not seen.requests:
            time.sleep(0.01)
        started = time.monotonic()
        ask.close()
        thread.join()
        assert time.monotonic() - started < 2 and replies[0].failure == UNREACHABLE


REFUSED_SETTINGS = [
    ({"endpoint": "judge:8000"}, "rewards.judge.endpoint"),
    ({"endpoint": "http://"}, "rewards.judge.endpoint"),
    ({"endpoint": "http://h:99999999"}, "rewards.judge.endpoint"),
    ({"endpoint": "http://a b"}, "rewards.judge.endpoint"),
    ({"endpoint": "https://user:pass@h/v1"}, "rewards.judge.endpoint"),
    ({"endpoint": "https://h/v1?key=abc"}, "rewards.judge.endpoint"),
    ({"key_env": "sk-abc"}, "rewards.judge.key_env"),
    ({"fields": (("messages", 1),)}, "rewards.judge.fields"),
    ({"fields": (("a", 1), ("a", 2))}, "rewards.judge.fields"),
]


@pytest.mark.parametrize(("changed", "named"), REFUSED_SETTINGS)
def test_settings_that_cannot_be_used_are_refused_and_a_key_is_not_repeated(changed, named):
    with pytest.raises(ConfigError) as error:
        settings(**{"endpoint": "http://h", **changed}).validate()
    assert named in str(error.value)
    for secret in ("pass@", "abc"):
        assert secret not in str(error.value)
    settings("https://api.judge.example:8443/v1", key_env="KEY_2").validate()
