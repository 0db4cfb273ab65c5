"""Refusals over HTTP: each has OpenAI's form, and a configuration that cannot be served gives a
one-line error.
"""

import ast
import dataclasses
import json
import socket
import sys
import threading
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from served import ask, saved

sys.path.insert(0, str(Path(__file__).parent))
from stub import TOKENIZER, Scripted, offered, running

from compass_jax.commands.cli import main
from compass_jax.config import JudgeConfig
from compass_jax.rewards.judges.endpoint import REFUSED, Endpoint
from compass_jax.rewards.verifiers.judge import messages
from compass_jax.rollout.online import QueueFull


class Address:
    """The address that `ask` of served.py sends its requests to."""

    def __init__(self, port):
        self.port = port


@pytest.fixture(scope="module")
def server():
    """Runs a server over a batcher without a model, and yields its address."""
    with running(served=offered(prompt_tokens=64)) as port:
        yield Address(port)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return str(saved(tmp_path_factory.mktemp("serve") / "tiny"))


def error_of(server, body, path="/v1/completions"):
    """Returns (status, error, headers) of a request that is refused."""
    status, headers, content = ask(server, "POST", path, body)
    error = json.loads(content)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return status, error, headers


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ('{"prompt": "a", "top_p": 1.9}', 400, "top_p = 1.9: must be less than or equal to 1"),
        ('{"prompt": "a", "model": "gpt"}', 404, "'gpt' is not served here; 'tiny' is"),
        ("[" * 100_000, 400, "nested deeper"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(server, body, status, message):
    actual, error, _ = error_of(server, body)
    assert actual == status and message in error["message"]


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (QueueFull("4 requests wait and at most 4 may"), 429, "rate_limit_error"),
        (ValueError("7 sequences are asked for at once"), 400, "invalid_request_error"),
        (RuntimeError("the batcher has stopped"), 503, "server_error"),
    ],
)
def test_what_the_batcher_refuses_is_told(raised, status, kind):
    def submitted(groups):
        raise raised

    with running(Scripted(submitted=submitted)) as port:
        actual, error, headers = error_of(Address(port), '{"prompt": "a"}')
    assert (actual, error["type"], error["message"]) == (status, kind, str(raised))
    assert (headers.get("retry-after") == "1") == (status in (429, 503))


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("cancelled", 503)])
def test_an_engine_that_fails_and_a_server_that_stops_are_told(finish, status):
    for text in ("text", ""):  # a stream is refused before its first token, too
        with running(Scripted(text, finish)) as port:
            body = json.dumps({"prompt": "a", "stream": not text})
            assert error_of(Address(port), body)[0] == status
    with running(Scripted("text", finish)) as port:
        stream = ask(Address(port), "POST", "/v1/completions", '{"prompt": "a", "stream": true}')
    assert stream[0] == 200 and b'"text": "te' in stream[2]
    last = stream[2].split(b"\n\n")[-2].removeprefix(b"data: ")
    assert json.loads(last)["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("GET", "/v1/nothing", 404, None),
        ("GET", "/v1/models/", 404, None),
        ("GET", "/v1/completions", 405, "POST"),
        ("POST", "/health", 405, "GET"),
        ("PUT", "/", 404, None),
    ],
)
def test_errors_have_one_form_whoever_answers(server, method, path, status, allow):
    actual, headers, body = ask(server, method, path, "{}")
    assert actual == status and set(json.loads(body)["error"]) >= {"message", "type", "param"}
    assert (allow or "") in headers.get("allow", "") and (allow is None) == ("allow" not in headers)
    assert ask(server, "HEAD", "/health")[::2] == (200, b"")


class BlockedTokenizer:
    """A tokenizer that renders no chat until it is released."""

    def __init__(self):
        self.released, self.entered = threading.Event(), threading.Event()

    def __getattr__(self, name):
        return getattr(TOKENIZER, name)

    def encode_prompt(self, *args, **options):
        self.entered.set()
        assert self.released.wait(60)
        return TOKENIZER.encode_prompt(*args, **options)


def test_health_is_answered_while_a_prompt_is_tokenised():
    """The tokenizer blocks until /health has been answered. If it ran on the event loop, that would
    never happen.
    """
    tokenizer, statuses = BlockedTokenizer(), []
    body = json.dumps({"messages": [{"role": "user", "content": "x"}]})
    with running(served=offered(tokenizer)) as port:
        at = (Address(port), "POST", "/v1/chat/completions", body)
        thread = threading.Thread(target=lambda: statuses.append(ask(*at)[0]))
        thread.start()
        assert tokenizer.entered.wait(60)
        assert ask(Address(port), "GET", "/health")[::2] == (200, b'{"status":"ok"}')
        tokenizer.released.set()
        thread.join(60)
    assert statuses == [200]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--host", ""], "--host is empty"),
        (["--host", "", "--jetstream"], "--host is empty"),
        (["--host", "no.such.host.invalid"], "--host 'no.such.host.invalid'"),
        (
            ["--host", "0.0.0.0", "--port", "0"],
            "whoever does may use it: set COMPASS_API_KEY",
        ),
        (
            ["--api-key", "a secret that is none"],
            "--api-key must be 8 to 1024 characters",
        ),
        (
            ["--jetstream", "--api-key", "some-good-key"],
            "--api-key would do nothing with --jetstream",
        ),
        (["--port", "0", "--max-connections", "20"], "slots and queue alone may hold"),
        (["--openai", "--port", "TAKEN"], "ddress already in use"),  # of older commands
        (["--jetstream", "--port", "TAKEN"], "ddress already in use"),
    ],
)
def test_what_cannot_be_served_is_told_in_one_line(weights, options, expected, capsys, monkeypatch):
    monkeypatch.delenv("COMPASS_API_KEY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = [str(listener.getsockname()[1]) if x == "TAKEN" else x for x in options]
        assert main(["serve", weights, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and expected in err and err.count("\n") == 1
    assert "secret" not in err and "some-good-key" not in err


def test_the_missing_jetstream_is_told_with_commands_that_work(weights, capsys, monkeypatch):
    """The message names the requirement, which works for every installation, and the extra, which
    works in a clone.
    """
    for name in [name for name in sys.modules if name.startswith("jetstream")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "compass_jax.rollout.jetstream_api", raising=False)
    monkeypatch.setitem(sys.modules, "jetstream", None)
    assert main(["serve", weights, "--jetstream"]) == 2
    stderr = capsys.readouterr().err
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    (requirement,) = pyproject["project"]["optional-dependencies"]["serve"]
    assert f"'{requirement}'" in stderr.partition(", or in a clone")[0]
    assert "pip install -e '.[serve]'" in stderr and stderr.count("\n") == 1


def test_the_packages_of_the_http_server_are_among_the_core_s(weights):
    """The demo's last line serves on the demo's installation."""
    folder, imported = Path(__file__).parents[3] / "compass_jax", set()
    for file in [*(folder / "rollout" / "serving").glob("*.py"), folder / "commands" / "serve.py"]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {name.name.partition(".")[0] for name in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.partition(".")[0])
    known = {"compass_jax", *sys.stdlib_module_names}
    transitive = {"anyio", "h11"}  # of starlette, of uvicorn
    pyproject = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    core = {Requirement(line).name for line in pyproject["project"]["dependencies"]}
    assert {"starlette", "uvicorn"} <= imported and imported - known - transitive <= core


def test_a_judge_asks_this_server_as_any_endpoint(server):
    """The judge sends a short question, and a real judging prompt, which is too long for this
    server.
    """
    at = JudgeConfig(f"http://127.0.0.1:{server.port}/v1", "tiny", max_tokens=8, timeout_s=60)
    short = [{"role": "user", "content": "2 + 2?"}]
    reply = Endpoint(at)(short)
    body = {"model": "tiny", "messages": short, "max_tokens": 8, "temperature": 0}
    answer = json.loads(ask(server, "POST", "/v1/chat/completions", json.dumps(body))[2])
    assert reply.text == answer["choices"][0]["message"]["content"] and reply.text
    assert reply.failure == reply.detail == ""
    assert reply.tokens == answer["usage"]["completion_tokens"]
    assert reply.complete == (answer["choices"][0]["finish_reason"] != "length")
    refused = Endpoint(at)(messages("2 + 2?", "4", "5"))
    assert refused.failure == REFUSED and "this server takes 64" in refused.detail
    other = dataclasses.replace(at, model="another")
    assert "'another' is not served here" in Endpoint(other)(short).detail
