"""The HTTP door: OpenAI's own client completes, streams and cancels; the text is that of our own
rollout.
"""

import json
import threading
import time

import numpy as np
import openai
import pytest
from served import LONG, MOST, PAGED, TOKENIZER, WHOLE, ask, own, own_texts, saved, served

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import Full, OnlineBatcher, Streamed
from compass_jax.serving.text import TextStream


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The ServeConfig of a server with two slots that runs while the module's tests do."""
    folder = saved(tmp_path_factory.mktemp("serve") / "tiny")
    options = {"slots": 2, "prompt_tokens": 64, "max_new_tokens": MOST, "max_waiting": 4}
    with served(folder, **options) as config:
        yield config


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120
    ) as made:
        yield made


def test_a_completion_is_what_our_rollout_samples(server, client):
    for text, limit in (("1 + 2 = ", 20), ("tschüß", MOST), (LONG, 7)):
        expected, logp, finish = own(text, limit)
        found = client.completions.create(
            model="tiny",
            prompt=text,
            max_tokens=10**6 if limit == MOST else limit,  # cut to what fits
            temperature=0,
            logprobs=0,
        )
        (choice,) = found.choices
        assert (choice.text, choice.finish_reason) == (expected, finish)
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logp, atol=1e-4)
        assert found.usage.completion_tokens == len(logp) and found.usage.prompt_tokens > 0
    assert [m.id for m in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("options", [PAGED, WHOLE])
def test_pages_bfloat16_and_a_mesh_give_the_text_of_the_rollout(server, options):
    """Six requests at once on four slots whose pages do not last; and in bfloat16 with 8-bit
    weights and keys and values, with pages, on a mesh of eight devices.
    """
    texts = ["1 + 2 = ", "State the final answer", "a", "?", "x" * 16, "tschüß, 7 - 5"]
    with (
        served(server.weights, max_waiting=8, **options) as config,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{config.port}/v1", api_key="none", timeout=300
        ) as client,
    ):
        found = client.completions.create(model="tiny", prompt=texts, max_tokens=24, temperature=0)
    assert [c.text for c in found.choices] == own_texts(server.weights, options, texts, [24] * 6)
    assert len({c.text for c in found.choices}) == 6


def test_a_chat_goes_through_the_template_and_streams_to_the_same_text(server, client):
    messages = [{"role": "user", "content": "How much is 7 - 5?"}]
    ids = Tokenizer.load(TOKENIZER).encode_chat(messages, add_generation_prompt=True)
    expected, logp, finish = own(ids, MOST)
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
    assert [c.text for c in greedy.choices] == [own(text, 12)[0] for text in ("a", "b")]
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
    text, _, _ = own("1 + 2 = ", 40)
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
    generate, hand_over, ended = Engine.generate, Streamed.hand_over, []

    def slow(self, *args, **options):
        time.sleep(0.2)
        return generate(self, *args, **options)

    def watched(self, finish):
        if finish:
            ended.append(finish)
        hand_over(self, finish)

    monkeypatch.setattr(Engine, "generate", slow)
    monkeypatch.setattr(Streamed, "hand_over", watched)
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
        == own("a", 2)[0]
    )
    # An answer that an earlier test's stop text ended may be given up here, too; only the third
    # request may end by its length.
    assert (
        ended.count("length") == 1
        and ended.count("cancelled") >= 2
        and set(ended) == {"length", "cancelled"}
    )


def test_a_full_queue_is_told_to_come_back(server, client, monkeypatch):
    def full(self, *groups):
        raise Full("4 requests wait and at most 4 may: try again later")

    monkeypatch.setattr(OnlineBatcher, "submit", full)
    with pytest.raises(openai.RateLimitError, match="at most 4 may") as refused:
        client.completions.create(model="tiny", prompt="a")
    assert refused.value.response.headers["retry-after"] == "1"


def test_health_is_answered_while_a_prompt_is_tokenised(server, monkeypatch):
    """The tokenizer is held until /health was answered; on the event loop that would never be."""
    released, entered = threading.Event(), threading.Event()
    encode = Tokenizer.encode_prompt

    def held(self, *args, **options):
        entered.set()
        assert released.wait(60)
        return encode(self, *args, **options)

    monkeypatch.setattr(Tokenizer, "encode_prompt", held)
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
