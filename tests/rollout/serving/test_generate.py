"""The route of token ids: its answers are those of a plain rollout, and the client of the package
renderers, unmodified, reads them.
"""

import asyncio
import json

import numpy as np
import openai
import pytest
from served import MOST, TOKENIZER, ask, own, saved, served
from stub import Scripted, offered, running
from transformers import AutoTokenizer

from compass_jax.data.tokenizer import Tokenizer

PATH = "/inference/v1/generate"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields the options of a server that runs during the module's tests."""
    folder = saved(tmp_path_factory.mktemp("generate") / "tiny")
    with served(folder, slots=2, prompt_tokens=64, max_new_tokens=MOST, max_waiting=4) as config:
        yield config


def generated(server, ids, **params):
    body = {"model": "tiny", "token_ids": ids, "sampling_params": params}
    status, _, data = ask(server, "POST", PATH, json.dumps(body))
    assert status == 200, data
    return json.loads(data)


def test_tokens_and_log_probs_are_those_of_our_rollout(server):
    tokenizer = Tokenizer.load(TOKENIZER)
    for text, limit in (("1 + 2 = ", 20), ("tschüß", MOST)):
        ids = tokenizer.encode(text)
        expected, logp, finish = own(text, limit)
        answer = generated(server, ids, temperature=0, max_tokens=limit)
        (choice,) = answer["choices"]
        assert tokenizer.decode_response(choice["token_ids"]) == expected
        assert choice["finish_reason"] == finish
        content = choice["logprobs"]["content"]
        assert [x["token"] for x in content] == [f"token_id:{x}" for x in choice["token_ids"]]
        np.testing.assert_allclose([x["logprob"] for x in content], logp, atol=1e-5)
        assert answer["usage"]["prompt_tokens"] == len(ids)
        assert answer["usage"]["completion_tokens"] == len(logp)


def test_log_probs_are_of_the_temperature_that_samples_and_draws_follow_the_seed(server):
    ids = Tokenizer.load(TOKENIZER).encode("a")
    hot, again, other = (
        generated(server, ids, temperature=1.5, max_tokens=16, seed=seed)["choices"][0]
        for seed in (1, 1, 2)
    )
    assert hot == again and hot["token_ids"] != other["token_ids"]
    greedy = generated(server, ids, temperature=0, max_tokens=1)["choices"][0]
    one = [
        generated(server, ids, temperature=t, max_tokens=1, seed=3)["choices"][0]
        for t in (0.05, 2.0)
    ]
    assert one[0]["token_ids"] == greedy["token_ids"]
    # at a temperature near 0 the likeliest token is nearly sure
    assert one[0]["logprobs"]["content"][0]["logprob"] > greedy["logprobs"]["content"][0]["logprob"]


def test_a_stop_token_of_the_request_ends_it_and_is_its_last_one(server):
    ids = Tokenizer.load(TOKENIZER).encode("1 + 2 = ")
    whole = generated(server, ids, temperature=0, max_tokens=12)["choices"][0]["token_ids"]
    stop = whole[4]
    end = whole.index(stop) + 1
    answer = generated(server, ids, temperature=0, max_tokens=12, stop_token_ids=[stop])
    (choice,) = answer["choices"]
    assert choice["token_ids"] == whole[:end] and choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == end


def test_the_models_page_says_how_long_a_sequence_may_be(server):
    status, _, data = ask(server, "GET", "/v1/models")
    assert status == 200 and json.loads(data)["data"][0]["max_model_len"] == 64 + MOST


REFUSED = {
    "no ids": ({"token_ids": []}, "the prompt is empty"),
    "too many": ({"token_ids": [1] * 65}, "takes 64: shorten it, or raise --prompt-tokens"),
    "no token": ({"token_ids": [10**6]}, "token ids must be from 0 to"),
    "a text": ({"token_ids": "a"}, "token_ids"),
    "no field": ({}, "token_ids is missing"),
    "another field": ({"features": {}}, "features is not supported; leave it out"),
    "another model": ({"model": "gpt"}, "the model 'gpt' is not served here"),
    "a stream": ({"stream": True}, "stream = True"),
    "several": ({"sampling_params": {"n": 2}}, "sampling_params.n = 2"),
    "a penalty": ({"sampling_params": {"min_p": 0.1}}, "sampling_params.min_p = 0.1"),
    "a stop text": ({"sampling_params": {"stop": ["a"]}}, "use stop_token_ids"),
    "no tokens": ({"sampling_params": {"max_tokens": 0}}, "sampling_params.max_tokens = 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_refused_by_name(server, name):
    changes, message = REFUSED[name]
    base = {} if name == "no field" else {"token_ids": [1, 2]}
    status, _, data = ask(server, "POST", PATH, json.dumps({**base, **changes}))
    assert status in (400, 404) and message in json.loads(data)["error"]["message"]


@pytest.mark.parametrize(("finish", "status"), [("error", 500), ("cancelled", 503)])
def test_an_engine_that_ends_is_an_error_and_no_answer(finish, status):
    class Port:
        def __init__(self, port):
            self.port = port

    with running(Scripted(finish=finish), served=offered()) as port:
        got, _, data = ask(Port(port), "POST", PATH, json.dumps({"token_ids": [1]}))
    assert got == status and "choices" not in json.loads(data)


def test_the_client_of_renderers_samples_and_parses(server):
    from renderers import create_renderer
    from renderers.client import generate

    renderer = create_renderer(AutoTokenizer.from_pretrained(server.weights))
    messages = [{"role": "user", "content": "How much is 7 - 5?"}]

    async def run():
        url = f"http://127.0.0.1:{server.port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await generate(
                client=client,
                renderer=renderer,
                messages=messages,
                model="tiny",
                # verifiers' client names the first token whose routes it lacks
                sampling_params={
                    "temperature": 0.0,
                    "max_tokens": 12,
                    "routed_experts_prompt_start": 3,
                },
                cache_salt="3",
            )

    answer = asyncio.run(run())
    ids = Tokenizer.load(TOKENIZER).encode_chat(messages, add_generation_prompt=True)
    _, logp, _ = own(ids, 12)
    assert answer["prompt_ids"] == ids and answer["request_id"].startswith("generate-")
    np.testing.assert_allclose(answer["completion_logprobs"], logp, atol=1e-5)
    assert len(answer["completion_ids"]) == len(logp)
