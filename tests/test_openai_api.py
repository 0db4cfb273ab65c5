"""The HTTP door: OpenAI's own client completes, streams and cancels; the text is that of our own
rollout; what cannot be asked is refused by name.
"""

import http.client
import json
import socket
import threading
import time
from pathlib import Path

import jax
import numpy as np
import openai
import pytest

from compass_jax.cli import main
from compass_jax.config import ComputeConfig, ModelConfig, MoEConfig, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.transformer import init_params
from compass_jax.openai_requests import Served, chat_request, completion_request
from compass_jax.records import Prompt
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import Full, OnlineBatcher
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.serve import ServeConfig, load, openai_server
from compass_jax.serving.errors import BadRequest
from compass_jax.serving.limits import Limits
from compass_jax.serving.text import TextStream
from compass_jax.weights.hf import save_params

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_tokenizer"
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=384,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=32,
    rope_theta=100.0,
    init_std=0.3,
    max_positions=64,
    moe=MoEConfig(experts=6, top_k=2, ffn=16),
)
MOST, LONG = 48, "x" * 30


@pytest.fixture(scope="module")
def server(tmp_path_factory, compile_lightly):
    """(ServeConfig, weights' folder) of a server with two slots that runs while the module's tests
    do.
    """
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    save_params(
        init_params(MODEL, ComputeConfig(), jax.random.key(3)),
        MODEL,
        folder,
        "float32",
        tokenizer_from=TOKENIZER,
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ServeConfig(
        str(folder),
        port=port,
        slots=2,
        prompt_tokens=64,
        max_new_tokens=MOST,
        openai=True,
        max_waiting=4,
    )
    with openai_server(config) as running:
        thread = threading.Thread(target=running.run)
        thread.start()
        while not running.started:
            time.sleep(0.05)
        yield config
        running.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def own(server, text_or_ids, limit, temperature=0.0):
    """Our rollout's answer: (text, log-probs without the end token's, finish reason)."""
    model, params, tokenizer = load(server.weights)
    ids = tokenizer.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    rollout = RolloutConfig(slots=2, prompt_buckets=(16, 64), max_new_tokens=MOST)
    engine = Engine(model, ComputeConfig(), rollout, tokenizer.eos_id, known=tokenizer.vocab_size)
    prompt = Prompt(0, 0, "", "", np.array(ids, np.int32), "")
    (r,) = Collection(
        engine,
        params,
        [prompt],
        1,
        Purpose.SERVE,
        0,
        sampler=Sampler(temperature),
        keep_routing=False,
        max_new_tokens=[limit],
    )
    logp = r.logp[len(ids) :] if r.truncated else r.logp[len(ids) : -1]
    return tokenizer.decode(r.response), logp, "length" if r.truncated else "stop"


def test_a_completion_is_what_our_rollout_samples(server, client):
    for text, limit in (("1 + 2 = ", 20), ("tschüß", MOST), (LONG, 7)):
        expected, logp, finish = own(server, text, limit)
        found = client.completions.create(
            model="tiny", prompt=text, max_tokens=limit, temperature=0, logprobs=0
        )
        (choice,) = found.choices
        assert (choice.text, choice.finish_reason) == (expected, finish)
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logp, atol=1e-4)
        assert (
            found.usage.completion_tokens == len(logp) + (finish == "stop")
            and found.usage.prompt_tokens > 0
        )
    assert [m.id for m in client.models.list()] == ["tiny"]


def test_a_chat_goes_through_the_template_and_streams_to_the_same_text(server, client):
    messages = [{"role": "user", "content": "How much is 7 - 5?"}]
    ids = Tokenizer.load(TOKENIZER).encode_chat(messages, add_generation_prompt=True)
    expected, logp, finish = own(server, ids, MOST)
    whole = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, logprobs=True
    )
    assert whole.choices[0].message.content == expected and len(
        whole.choices[0].logprobs.content
    ) == len(logp)
    events = list(
        client.chat.completions.create(
            model="tiny",
            messages=messages,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [e.choices[0] for e in events if e.choices]
    assert (
        "".join(d.delta.content or "" for d in deltas) == expected
        and deltas[-1].finish_reason == finish
        and len(deltas) > 2
    )
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_requests_of_different_temperatures_share_the_slots_and_draws_follow_the_seed(
    server, client
):
    greedy = client.completions.create(
        model="tiny", prompt=["a", "b"], max_tokens=12, temperature=0
    )
    assert [c.text for c in greedy.choices] == [own(server, text, 12)[0] for text in ("a", "b")]
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 12, "temperature": 1, "n": 3}
    drawn = [
        [c.text for c in client.completions.create(**ask, seed=seed).choices] for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 3
    # without a seed, each request has its own
    assert (
        len({client.completions.create(**{**ask, "n": 1}).choices[0].text for _ in range(3)}) == 3
    )


def test_a_stop_text_ends_the_answer_before_it(server, client):
    text, _, _ = own(server, "1 + 2 = ", 40)
    stop = text[9:12]
    for stream in (False, True):
        found = client.completions.create(
            model="tiny",
            prompt="1 + 2 = ",
            max_tokens=40,
            temperature=0,
            stop=[stop, "never"],
            stream=stream,
        )
        pieces = [e.choices[0] for e in found] if stream else [found.choices[0]]
        assert (
            "".join(p.text for p in pieces) == text[: text.index(stop)]
            and pieces[-1].finish_reason == "stop"
        )


def test_a_client_that_leaves_gives_up_its_slot(server, client, monkeypatch):
    """Two streams hold both slots of an engine that takes 0.2 s a call; closed after the first
    event, they end as cancelled, not by their length.
    """
    generate, finish, ended = Engine.generate, OnlineBatcher._finish, []

    def slow(self, *args, **options):
        time.sleep(0.2)
        return generate(self, *args, **options)

    def watched(self, slot, chunk):
        ended.append(chunk.finish)
        finish(self, slot, chunk)

    monkeypatch.setattr(Engine, "generate", slow)
    monkeypatch.setattr(OnlineBatcher, "_finish", watched)
    streams = [
        client.completions.create(
            model="tiny", prompt=LONG, max_tokens=MOST, temperature=1, stream=True, seed=i
        )
        for i in range(2)
    ]
    for stream in streams:
        next(iter(stream))
        stream.close()
    assert (
        client.completions.create(model="tiny", prompt="a", max_tokens=2, temperature=0)
        .choices[0]
        .text
        == own(server, "a", 2)[0]
    )
    # An answer that an earlier test's stop text ended may be given up here, too; only the third
    # request may end by its length.
    assert (
        ended.count("length") == 1
        and ended.count("cancelled") >= 2
        and set(ended) == {"length", "cancelled"}
    )


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"prompt": "a", "top_p": 0.9}, 400, "top_p = 0.9 is not supported"),
        ({"prompt": "a", "frobnicate": 1}, 400, "frobnicate is not a field"),
        (
            {"prompt": "a", "max_tokens": 0},
            400,
            "max_tokens = 0: must be a whole number from 1 to 48",
        ),
        ({"prompt": "a", "max_tokens": 49}, 400, "from 1 to 48"),
        ({"prompt": "a", "temperature": -1}, 400, "temperature = -1: must be a number from 0 to 2"),
        ({"prompt": "a", "temperature": float("nan")}, 400, "temperature: NaN is no number"),
        ({"prompt": "a", "n": 65}, 400, "n = 65"),
        ({"prompt": ["a"] * 40, "n": 2}, 400, "40 prompts with n = 2 are more than 64"),
        ({"prompt": "a", "logprobs": 5}, 400, "logprobs = 5: 0 gives"),
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
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(
        "POST",
        "/v1/completions",
        body if isinstance(body, str) else json.dumps(body),
        {"content-type": "application/json"},
    )
    response = connection.getresponse()
    error = json.loads(response.read())["error"]
    connection.close()
    assert response.status == status and message in error["message"]


SERVED = Served("tiny", Tokenizer.load(TOKENIZER), 384, 64, MOST)


def test_messages_that_are_none_are_refused():
    for messages in (
        None,
        [],
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}],
    ):
        with pytest.raises(BadRequest, match="messages must be"):
            chat_request({"messages": messages}, SERVED)
    assert (
        chat_request(
            {
                "messages": [{"role": "user", "content": "x"}],
                "max_completion_tokens": 3,
                "top_p": 1.0,
            },
            SERVED,
        ).max_tokens
        == 3
    )
    assert completion_request({"prompt": [[1, 2], [3]], "stop": "x"}, SERVED).stop == ("x",)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_text_comes_whole_whatever_the_pieces(size):
    """Characters of several bytes are never cut, and nothing of a stop text is sent before it is
    certain not to be one.
    """
    tokenizer = Tokenizer.load(TOKENIZER)
    text = "größer — 12 <answ <answer>7</answer>"
    ids = tokenizer.encode(text)
    for stop, expected in (
        ((), text),
        (("<answer>",), "größer — 12 <answ "),
        (("never", "größer"), ""),
    ):
        stream = TextStream(tokenizer, stop)
        pieces = [
            stream.push(ids[i : i + size], i + size >= len(ids)) for i in range(0, len(ids), size)
        ]
        assert "".join(pieces) == expected and stream.stopped == bool(stop)
        assert not any("\ufffd" in piece for piece in pieces)


# ---- one client keeps nobody else waiting --------------------------------------------------------


def test_a_full_queue_is_told_to_come_back(server, client, monkeypatch):
    def full(self, *requests):
        raise Full("4 requests wait and at most 4 may: try again later")

    monkeypatch.setattr(OnlineBatcher, "submit", full)
    with pytest.raises(openai.RateLimitError, match="at most 4 may") as refused:
        client.completions.create(model="tiny", prompt="a")
    assert refused.value.response.headers["retry-after"] == "1"


def ask(server, method, path, body=None, **headers):
    """(status, headers, body) of one exchange."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    found = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return found


def test_health_is_answered_while_a_prompt_is_tokenised(server, monkeypatch):
    """The tokenizer is held until /health was answered; on the event loop that would never be."""
    released, entered = threading.Event(), threading.Event()
    encode = Tokenizer.encode_chat

    def held(self, *args, **options):
        entered.set()
        assert released.wait(60)
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", held)
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 2})
    found = []
    thread = threading.Thread(
        target=lambda: found.append(ask(server, "POST", "/v1/chat/completions", body)[0])
    )
    thread.start()
    assert entered.wait(60)
    assert ask(server, "GET", "/health")[::2] == (200, b'{"status": "ok"}')
    assert b"compass_preparing 1\n" in ask(server, "GET", "/metrics")[2]
    released.set()
    thread.join(60)
    assert found == [200]


def test_health_is_answered_while_text_is_decoded(server, monkeypatch):
    released, entered = threading.Event(), threading.Event()
    push = TextStream.push

    def held(self, *args):
        entered.set()
        assert released.wait(60)
        return push(self, *args)

    monkeypatch.setattr(TextStream, "push", held)
    found = []
    body = json.dumps({"prompt": "a", "max_tokens": 2})
    thread = threading.Thread(
        target=lambda: found.append(ask(server, "POST", "/v1/completions", body)[0])
    )
    thread.start()
    assert entered.wait(60) and ask(server, "GET", "/health")[0] == 200
    released.set()
    thread.join(60)
    assert found == [200]


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


def test_the_metrics_page_counts_requests_and_tokens(server, client):
    parser = pytest.importorskip("prometheus_client.parser")

    def total(name, **labels):
        page = ask(server, "GET", "/metrics")[2].decode()
        samples = [
            s for family in parser.text_string_to_metric_families(page) for s in family.samples
        ]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    names = [
        ("compass_requests_total", {"route": "/v1/completions", "status": "200"}),
        ("compass_completion_tokens_total", {}),
    ]
    names += [
        ("compass_prompt_tokens_total", {}),
        ("compass_first_token_seconds_count", {"route": "/v1/completions"}),
    ]
    before = [total(name, **labels) for name, labels in names]
    found = client.completions.create(model="tiny", prompt="1 + 2 = ", max_tokens=5, temperature=0)
    after = [total(name, **labels) for name, labels in names]
    used = found.usage
    assert [b - a for a, b in zip(before, after, strict=True)] == [
        1,
        used.completion_tokens,
        used.prompt_tokens,
        1,
    ]
    assert (total("compass_slots"), total("compass_connections") >= 1) == (2, True)


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
