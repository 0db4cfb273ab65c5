"""The HTTP door: what cannot be asked is refused by name, and what cannot be served is told in one
line.
"""

import dataclasses
import json
import sys
import tomllib
from pathlib import Path

import pytest
from served import MOST, ask, saved, served

from compass_jax.commands.cli import main
from compass_jax.config import JudgeConfig
from compass_jax.rewards.endpoint import REFUSED, Endpoint
from compass_jax.serving.limits import Limits
from compass_jax.verifiers.judge import messages


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The ServeConfig of a server that runs while the module's tests do."""
    folder = saved(tmp_path_factory.mktemp("serve") / "tiny")
    options = {"slots": 2, "prompt_tokens": 64, "max_new_tokens": MOST, "max_waiting": 4}
    with served(folder, **options) as config:
        yield config


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "top_p": 1.9}, 400, "top_p = 1.9: must be a number from 0 to 1"),
        ({"prompt": "a", "frobnicate": 1}, 400, "frobnicate is not a field"),
        (
            {"prompt": "a", "max_tokens": 0},
            400,
            "max_tokens = 0: must be a whole number from 1 to",
        ),
        ({"prompt": "a", "temperature": -1}, 400, "temperature = -1: must be a number from 0 to 2"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature: NaN is no number"),
        ({"prompt": "a", "n": 65}, 400, "n = 65"),
        ({"prompt": ["a"] * 40, "n": 2}, 400, "40 prompts with n = 2 are more than 64"),
        ({"prompt": "a", "logprobs": 6}, 400, "logprobs = 6: must be a whole number from 0 to 5"),
        ({"prompt": "a", "stop": ["", "x"]}, 400, "stop must be"),
        ({"prompt": ""}, 400, "the prompt is empty"),
        ({}, 400, "prompt must be a text"),
        ({"prompt": [1, 384]}, 400, "token ids must be from 0 to 337"),
        ({"prompt": [1] * 65}, 400, "the prompt has 65 tokens, this server takes 64"),
        ({"prompt": "a", "model": "gpt"}, 404, "'gpt' is not served here; 'tiny' is"),
        (
            {"prompt": "a", "n": 7},
            400,
            "7 sequences are asked for at once, at most 4 may wait here",
        ),
        ([], 400, "must be a JSON object"),
        ("{", 400, "the body: not JSON"),
        ("x" * (Limits().body_bytes + 1), 413, "the body exceeds"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, body, status, message):
    text = body if isinstance(body, str) else json.dumps(body)
    found, _, answer = ask(server, "POST", "/v1/completions", text)
    assert found == status and message in json.loads(answer)["error"]["message"]


def test_large_stop_texts_and_prompts_are_refused_quickly(server):
    million = "1234567890" * 100_000
    stops = [{"prompt": "a", "stop": found} for found in ([million], [million[:250_000]] * 4)]
    for body in (*stops, {"prompt": million}, {"prompt": ["x"] * 200_000}):
        status, _, answer = ask(server, "POST", "/v1/completions", json.dumps(body))
        assert status == 400 and json.loads(answer)["error"]["param"] in ("stop", "prompt")


def test_errors_have_one_form_whoever_answers(server):
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("PUT", "/", 404),
    ):
        found, headers, body = ask(server, method, path, "{}")
        assert found == status and set(json.loads(body)["error"]) == {
            "message",
            "type",
            "param",
            "code",
        }
        assert status != 405 or headers["allow"] in ("POST", "GET")
    assert ask(server, "HEAD", "/health")[::2] == (200, b"")
    assert ask(server, "POST", "/v1/completions", '{"prompt": "\\ud800"}')[0] == 400
    assert ask(server, "POST", "/v1/completions", "[" * 100_000)[0] == 400
    assert ask(server, "POST", "/v1/completions", "{}", **{"content-type": "text/plain"})[0] == 415


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--host", ""], "--host is empty"),
        (["--host", "", "--openai"], "--host is empty"),
        (["--host", "no.such.host.invalid", "--openai"], "--host 'no.such.host.invalid'"),
        (
            ["--host", "0.0.0.0", "--openai", "--port", "0"],
            "whoever does may use it: set COMPASS_API_KEY",
        ),
        (
            ["--openai", "--api-key", "a secret that is none"],
            "--api-key must be 8 to 1024 characters",
        ),
        (["--api-key", "some-good-key"], "--api-key would do nothing without --openai"),
        (["--openai", "--port", "0", "--max-connections", "20"], "slots and queue alone may hold"),
        (["--openai", "--port", "TAKEN"], "ddress already in use"),
        (["--port", "TAKEN"], "ddress already in use"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(server, options, told, capsys, monkeypatch):
    monkeypatch.delenv("COMPASS_API_KEY", raising=False)
    given = [str(server.port) if x == "TAKEN" else x for x in options]
    assert main(["serve", server.weights, *given]) == 2
    out, err = capsys.readouterr()
    assert out == "" and told in err and err.count("\n") == 1
    assert "secret" not in err and "some-good-key" not in err


@pytest.mark.parametrize(
    ("options", "blocked", "needed"),
    [
        (["--openai"], "uvicorn", "uvicorn>="),
        ([], "jetstream", "google-jetstream=="),
    ],
)
def test_what_is_not_installed_is_told_with_commands_that_work(
    server, options, blocked, needed, capsys, monkeypatch
):
    """The requirement itself works wherever the package came from; the extra in a clone."""
    modules = [
        name for name in sys.modules if name.startswith((blocked, "compass_jax.serving.con"))
    ]
    for name in (*modules, "compass_jax.rollout.jetstream_api", "compass_jax.serving.openai_api"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, blocked, None)
    assert main(["serve", server.weights, *options]) == 2
    told = capsys.readouterr().err
    written = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extra = written["project"]["optional-dependencies"]["serve"]
    (requirement,) = [line for line in extra if line.startswith(needed)]
    assert f"pip install '{requirement}', or in a clone" in told
    assert "pip install -e '.[serve]'" in told and told.count("\n") == 1


def test_a_judge_asks_this_server_as_any_endpoint(server):
    """A short question, and what a judge is really asked, which is too long for it."""
    at = JudgeConfig(f"http://127.0.0.1:{server.port}/v1", "tiny", max_tokens=8, timeout_s=60)
    short = [{"role": "user", "content": "2 + 2?"}]
    reply = Endpoint(at)(short)
    body = {"model": "tiny", "messages": short, "max_tokens": 8, "temperature": 0}
    answer = json.loads(ask(server, "POST", "/v1/chat/completions", json.dumps(body))[2])
    assert reply.text == answer["choices"][0]["message"]["content"] and reply.text
    assert reply.failure == reply.detail == ""
    assert reply.tokens == answer["usage"]["completion_tokens"]
    assert reply.whole == (answer["choices"][0]["finish_reason"] != "length")
    refused = Endpoint(at)(messages("2 + 2?", "4", "5"))
    assert refused.failure == REFUSED and "this server takes 64" in refused.detail
    other = dataclasses.replace(at, model="another")
    assert "'another' is not served here" in Endpoint(other)(short).detail
