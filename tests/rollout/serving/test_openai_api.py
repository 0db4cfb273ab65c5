"""OpenAI's client against a server of a tiny model: the text is that of a plain rollout."""

import secrets

import numpy as np
import openai
import pytest
from served import LONG, MOST, PAGED, TOKENIZER, WHOLE, ask, own, own_texts, saved, served

from compass_jax.data.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields the options of a server that runs during the module's tests."""
    folder = saved(tmp_path_factory.mktemp("serve") / "tiny")
    options = {"slots": 2, "prompt_tokens": 64, "max_new_tokens": MOST, "max_waiting": 4}
    with served(folder, **options) as config:
        yield config


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(
        base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0, timeout=120
    ) as openai_client:
        yield openai_client


def test_a_completion_is_what_our_rollout_samples(server, client):
    for text, limit in (("1 + 2 = ", 20), ("tschüß", MOST), (LONG, 7)):
        expected, logp, finish = own(text, limit)
        answer = client.completions.create(
            model="tiny",
            prompt=text,
            max_tokens=10**6 if limit == MOST else limit,  # reduced to the tokens that fit
            temperature=0,
            logprobs=0,
        )
        (choice,) = answer.choices
        assert (choice.text, choice.finish_reason) == (expected, finish)
        np.testing.assert_allclose(choice.logprobs.token_logprobs, logp, atol=1e-4)
        assert answer.usage.completion_tokens == len(logp) and answer.usage.prompt_tokens > 0
    assert [m.id for m in client.models.list()] == ["tiny"]


@pytest.mark.parametrize("options", [PAGED, WHOLE])
def test_pages_bfloat16_and_a_mesh_give_the_text_of_the_rollout(server, options):
    """Six requests run at once on four slots that do not have enough pages for all."""
    texts = ["1 + 2 = ", "State the final answer", "a", "?", "x" * 16, "tschüß, 7 - 5"]
    with (
        served(server.weights, max_waiting=8, **options) as config,
        openai.OpenAI(
            base_url=f"http://127.0.0.1:{config.port}/v1", api_key="none", timeout=300
        ) as client,
    ):
        answer = client.completions.create(model="tiny", prompt=texts, max_tokens=24, temperature=0)
    assert [c.text for c in answer.choices] == own_texts(server.weights, options, texts, [24] * 6)
    assert len({c.text for c in answer.choices}) == 6


def test_a_chat_goes_through_the_template_and_streams_to_the_same_text(server, client):
    messages = [{"role": "user", "content": "How much is 7 - 5?"}]
    ids = Tokenizer.load(TOKENIZER).encode_chat(messages, add_generation_prompt=True)
    expected, logp, finish = own(ids, MOST)
    full = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, logprobs=True
    )
    assert full.choices[0].message.content == expected and len(
        full.choices[0].logprobs.content
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
        and len(deltas) == full.usage.completion_tokens > 2
    )
    roles = [d.delta.role for d in deltas]
    assert roles == ["assistant"] + [None] * (len(deltas) - 1), "the first delta alone has it"
    assert events[-1].usage.completion_tokens == full.usage.completion_tokens


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
    # without a seed, each request gets a different one
    assert (
        len({client.completions.create(**{**ask, "n": 1}).choices[0].text for _ in range(3)}) == 3
    )


def test_requests_without_a_seed_draw_one_that_no_restart_repeats(server, client, monkeypatch):
    monkeypatch.setattr(secrets, "randbits", lambda bits: 7)
    ask = {"model": "tiny", "prompt": "a", "max_tokens": 12, "temperature": 1}
    drawn = [client.completions.create(**ask, **seed) for seed in ({}, {}, {"seed": 7})]
    assert len({answer.choices[0].text for answer in drawn}) == 1
    numbers = [int(answer.id.partition("-")[2]) for answer in drawn]
    assert numbers[1] == numbers[0] + 1 > 1000


def test_a_stop_text_ends_the_answer_before_it(server, client):
    text, _, _ = own("1 + 2 = ", 40)
    stop = text[9:12]
    for stream in (False, True):
        response = client.completions.create(
            model="tiny",
            prompt="1 + 2 = ",
            max_tokens=40,
            temperature=0,
            stop=[stop, "never"],
            stream=stream,
        )
        pieces = [e.choices[0] for e in response] if stream else [response.choices[0]]
        assert (
            "".join(p.text for p in pieces) == text[: text.index(stop)]
            and pieces[-1].finish_reason == "stop"
        )


def test_the_sampling_that_qwen3_advises_can_be_asked_for(server, client):
    """Greedy, low-temperature and advised requests share the slots. A top_k of 1 is greedy at any
    temperature.
    """
    fields = {"model": "tiny", "prompt": "1 + 2 = ", "max_tokens": 12, "seed": 3}

    def text(**options):
        return client.completions.create(**fields, **options).choices[0].text

    greedy = text(temperature=0)
    assert text(temperature=2, extra_body={"top_k": 1}) == greedy
    assert text(temperature=2, top_p=0.0) == text(temperature=2, top_p=1e-9) == greedy
    drawn = text(temperature=2)
    assert drawn != greedy
    assert text(temperature=2, top_p=1.0, extra_body={"top_k": 0}) == drawn
    assert text(temperature=2, extra_body={"top_k": 10**6}) == drawn
    advised = {"temperature": 0.6, "top_p": 0.95, "extra_body": {"top_k": 20, "min_p": 0}}
    assert text(**advised) == text(**advised)
    messages = [{"role": "user", "content": "7 - 5?"}]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=3, **advised
    )
    assert answer.choices


def test_the_metrics_page_counts_requests_and_tokens(server, client):
    parser = pytest.importorskip("prometheus_client.parser")

    def total(name, **labels):
        page = ask(server, "GET", "/metrics")[2].decode()
        families = list(parser.text_string_to_metric_families(page))
        assert all(family.documentation for family in families)
        samples = [s for family in families for s in family.samples]
        return sum(
            s.value for s in samples if s.name == name and labels.items() <= s.labels.items()
        )

    route = {"route": "/v1/completions"}
    names = [
        ("compass_requests_total", {**route, "status": "200"}),
        ("compass_completion_tokens_total", {}),
        ("compass_prompt_tokens_total", {}),
        ("compass_first_token_seconds_count", route),
        ("compass_request_seconds_count", route),
    ]
    before = [total(name, **labels) for name, labels in names]
    used = client.completions.create(model="tiny", prompt="1 + 2 = ", max_tokens=5).usage
    after = [total(name, **labels) for name, labels in names]
    counted = [b - a for a, b in zip(before, after, strict=True)]
    assert counted == [1, used.completion_tokens, used.prompt_tokens, 1, 1]
    assert total("process_open_fds") > 2 and total("process_resident_memory_bytes") > 2**20
