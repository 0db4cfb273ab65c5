"""The unmodified client of the package renderers, which verifiers trains with, samples the turns of
a run's episodes.
"""

import asyncio

import numpy as np
import openai
import pytest
from played import collected, done, episodes, tasks
from served import MODEL, TOKENIZER, parameters, saved
from transformers import AutoTokenizer

from compass_jax.base.records import GIVEN
from compass_jax.config import ComputeConfig, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.params import to_decode
from compass_jax.rollout.engine import Engine

ROLL = RolloutConfig(
    slots=2, prompt_buckets=(96,), max_new_tokens=96, tokens_per_call=8, cache_bucket=192
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("renderers") / "tiny")


def test_two_turns_of_the_client_are_one_sample(folder):
    from renderers import create_renderer
    from renderers.client import generate

    tokenizer = Tokenizer.load(TOKENIZER)
    renderer = create_renderer(AutoTokenizer.from_pretrained(folder))
    replies = {}

    async def turns(order):
        messages = [{"role": "user", "content": "How much is 7 - 5?"}]
        url = f"{order.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            ask = {"client": client, "renderer": renderer, "model": "policy"}
            ask |= {"sampling_params": {"temperature": 1.0, "max_tokens": 9}}
            first = await generate(messages=messages, **ask)
            ids = [*first["prompt_ids"], *first["completion_ids"]]
            ids += tokenizer.encode("\nAnd 8 - 5?")
            second = await generate(messages=messages, prompt_ids=ids, **ask)
        return first, second

    def script(order, driver):
        replies[order.session] = asyncio.run(turns(order))
        return done(order)

    engine = Engine(MODEL, ComputeConfig(), ROLL, tokenizer.end_ids, known=tokenizer.vocab_size)
    with episodes(script, rollout=ROLL, vocabulary=tokenizer.vocab_size) as played:
        _, rollouts = collected(played, tasks(1), engine=engine, params=to_decode(parameters()))
        assert [x.detail for x in played.verdicts.values()] == [""]
    by_tokens = {tuple(x.tokens): x for x in rollouts.values()}
    for first, second in replies.values():
        sequence = (*second["prompt_ids"], *second["completion_ids"])
        one = by_tokens[sequence]
        for reply in (first, second):
            start = len(reply["prompt_ids"])
            part = slice(start, start + len(reply["completion_ids"]))
            assert one.tokens[part].tolist() == reply["completion_ids"]
            np.testing.assert_array_equal(one.logp[part], np.float32(reply["completion_logprobs"]))
            assert not np.any(one.versions[part] == GIVEN)
        assert one.sampled_length == sum(len(x["completion_ids"]) for x in (first, second))
