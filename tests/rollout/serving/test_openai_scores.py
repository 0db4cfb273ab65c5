"""Log-probs over HTTP, of prompts and of answers, complete and streamed, against an independent
forward pass; and the numbers that evaluation harnesses read from them.
"""

import json

import numpy as np
import openai
import pytest
from served import TOKENIZER, ask, forward, saved, served

from compass_jax.data.tokenizer import Tokenizer

TEXT = "1 + 2 = 3, tschüß"
IDS = Tokenizer.load(TOKENIZER).encode(TEXT)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields the options of a server that runs during the module's tests."""
    folder = saved(tmp_path_factory.mktemp("serve") / "tiny")
    options = {"slots": 2, "prompt_tokens": 64, "max_new_tokens": 48, "max_waiting": 8}
    with served(folder, **options) as config:
        yield config


@pytest.fixture(scope="module")
def client(server):
    url = f"http://127.0.0.1:{server.port}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as openai_client:
        yield openai_client


def complete(server, **body):
    """Returns the choices of a completion."""
    status, _, answer = ask(server, "POST", "/v1/completions", json.dumps(body))
    assert status == 200, answer
    return json.loads(answer)["choices"]


def check(logprobs, ids, first=0):
    """Checks the log-probs of `ids` from `first` on against a forward pass: the token's and the
    most probable ones. The first token of a text must have no log-prob.
    """
    logp = forward(ids)
    expected = [logp[i - 1, ids[i]] for i in range(max(first, 1), len(ids))]
    token_logprobs, top = logprobs["token_logprobs"], logprobs["top_logprobs"]
    if not first:
        assert token_logprobs[0] is None and top[0] is None
        token_logprobs, top = token_logprobs[1:], top[1:]
    np.testing.assert_allclose(token_logprobs, expected, atol=1e-4)
    for row, value, i in zip(top, token_logprobs, range(max(first, 1), len(ids)), strict=True):
        best = np.sort(logp[i - 1])[::-1]
        np.testing.assert_allclose(max(row.values()), best[0], atol=1e-4)
        assert value in row.values()  # equal to the last bit, since harnesses compare them


@pytest.mark.parametrize("prompt", [TEXT, [TEXT], IDS, [IDS], [IDS, IDS[:1], IDS[:7]]])
def test_a_prompt_is_scored_without_an_answer_and_with_one(server, prompt):
    """The prompt is a text, ids, a list of either, or a list of several lengths."""
    expected_ids = prompt if isinstance(prompt[0], list) else [IDS]
    fields = {"echo": True, "logprobs": 1, "temperature": 0}
    choices = complete(server, prompt=prompt, max_tokens=0, **fields)
    for choice, ids in zip(choices, expected_ids, strict=True):
        logprobs = choice["logprobs"]
        assert (choice["text"], choice["finish_reason"]) == (TEXT[: len(choice["text"])], "length")
        assert len(logprobs["tokens"]) == len(ids) and logprobs["text_offset"][0] == 0
        assert TEXT.startswith("".join(logprobs["tokens"][:7]))
        check(logprobs, ids)
    choices = complete(server, prompt=prompt, max_tokens=1, **fields)
    for choice, ids in zip(choices, expected_ids, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids) + 1
        check({name: logprobs[name][:-1] for name in logprobs}, ids)
        following = forward(ids)[-1].max()
        np.testing.assert_allclose(logprobs["token_logprobs"][-1], following, atol=1e-4)


def test_an_echo_without_log_probs_is_the_prompt_and_the_answer(server):
    (plain,) = complete(server, prompt=TEXT, max_tokens=5, temperature=0)
    (echo,) = complete(server, prompt=IDS, max_tokens=5, temperature=0, echo=True)
    assert echo["text"] == TEXT + plain["text"] and echo["logprobs"] is None
    (alone,) = complete(server, prompt=TEXT, max_tokens=0, echo=True)
    assert (alone["text"], alone["finish_reason"]) == (TEXT, "length")


def test_log_probs_are_of_the_model_whatever_the_temperature_is(server):
    """Two answers drawn at temperature 1.7 in one request have the log-probs of temperature 1."""
    drawn = complete(
        server, prompt=IDS, max_tokens=12, temperature=1.7, seed=4, logprobs=5, n=2, echo=True
    )
    tokenizer = Tokenizer.load(TOKENIZER)
    spelt = {}
    for token in range(tokenizer.vocab_size):
        data = tokenizer.bytes_of(token)
        text = data.decode(errors="ignore")
        is_complete = text.encode() == data
        spelt[text if is_complete else "bytes:" + "".join(f"\\x{x:02x}" for x in data)] = token
    assert drawn[0]["text"] != drawn[1]["text"]
    for choice in drawn:
        logprobs = choice["logprobs"]
        ids = [spelt[token] for token in logprobs["tokens"]]
        assert ids[: len(IDS)] == IDS and len(ids) > len(IDS)
        check(logprobs, ids)
        logp = forward(ids)
        for i, row in enumerate(logprobs["top_logprobs"][1:]):
            for text, value in row.items():
                np.testing.assert_allclose(value, logp[i, spelt[text]], atol=1e-4)
            assert len(row) in (5, 6)
        for offset, text in zip(logprobs["text_offset"], logprobs["tokens"], strict=True):
            if "bytes:" not in text and text not in ("<|im_end|>", "<|endoftext|>"):
                assert choice["text"][offset:].startswith(text) or "\ufffd" in choice["text"]


def test_streamed_log_probs_are_those_of_the_whole_answer(server, client):
    for fields in ({"echo": True}, {}):
        fields |= {"model": "tiny", "prompt": TEXT, "max_tokens": 20, "temperature": 0}
        (full,) = client.completions.create(**fields, logprobs=2).choices
        parts = [e.choices[0] for e in client.completions.create(**fields, logprobs=2, stream=True)]
        assert "".join(part.text for part in parts) == full.text and len(parts) > 2
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [x for part in parts for x in getattr(part.logprobs, name)]
            assert joined == getattr(full.logprobs, name), name


def test_a_chat_tells_the_twenty_likeliest_whole_and_streamed(server, client):
    messages = [{"role": "user", "content": "7 - 5?"}]
    ids = Tokenizer.load(TOKENIZER).encode_chat(messages, add_generation_prompt=True)
    request = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 20}
    request |= {"logprobs": True, "top_logprobs": 20}
    (full,) = client.chat.completions.create(**request).choices
    content = full.logprobs.content
    first = np.sort(forward(ids)[-1])[::-1][:20]
    np.testing.assert_allclose([x.logprob for x in content[0].top_logprobs], first, atol=1e-4)
    assert content[0].logprob == content[0].top_logprobs[0].logprob
    data = b"".join(bytes(x.bytes) for x in content)
    assert data.removesuffix(b"<|im_end|>").decode(errors="replace") == full.message.content
    parts = [e.choices[0] for e in client.chat.completions.create(**request, stream=True)]
    assert [x for part in parts for x in part.logprobs.content] == content


def read_as_harnesses_do(choices, context_lengths):
    """Returns (sum of log-probs, whether greedy decoding gives it) for each continuation, as
    lm-evaluation-harness 0.4.13 reads them (`parse_logprobs` of its model local-completions). The
    last token is the generated one.
    """
    results = []
    for choice, n in zip(sorted(choices, key=lambda x: x["index"]), context_lengths, strict=True):
        token_logprobs = choice["logprobs"]["token_logprobs"][n:-1]
        top = choice["logprobs"]["top_logprobs"][n:-1]
        greedy = all(p == max(row.values()) for p, row in zip(token_logprobs, top, strict=True))
        results.append((sum(token_logprobs), greedy))
    return results


def test_choices_are_ranked_as_by_a_forward_pass(server):
    """The requests are exactly those that lm-evaluation-harness sends for multiple-choice
    questions: token ids, an echo and one more token. One continuation is the model's greedy token,
    so that one of them is greedy.
    """
    encode = Tokenizer.load(TOKENIZER).encode
    rankings = set()
    for question in ("6 + 6", "5 + 9", "9 + 4"):
        context = encode(f"What is {question}?\nAnswer:")
        greedy_id = int(forward(context)[-1].argmax())
        inputs = [encode(f"What is {question}?\nAnswer: {n}") for n in (12, 8, 1, 16, 14, 13)]
        inputs.append([*context, greedy_id])
        body = {"model": "tiny", "prompt": inputs, "temperature": 0, "max_tokens": 1, "logprobs": 1}
        actual = read_as_harnesses_do(
            complete(server, **body, seed=1234, echo=True), [len(context)] * len(inputs)
        )
        expected = []
        for ids in inputs:
            logp = forward(ids)[len(context) - 1 : -1]
            rest = ids[len(context) :]
            expected.append(
                (logp[range(len(rest)), rest].sum(), bool((logp.argmax(1) == rest).all()))
            )
        np.testing.assert_allclose([x for x, _ in actual], [x for x, _ in expected], atol=5e-4)
        assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
        assert expected[-1][1] and not expected[0][1]
        order = tuple(np.argsort([x for x, _ in actual]))
        assert order == tuple(np.argsort([x for x, _ in expected]))
        rankings.add(order)
    assert len(rankings) == 3
