"""The servers' batcher alone: every waiting request gets an answer, even if the engine fails."""

import dataclasses
import time

import numpy as np
import pytest
from tiny import MODEL, random_params

from compass_jax.config import ComputeConfig, RolloutConfig
from compass_jax.model.params import to_decode
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.online import OnlineBatcher, QueueFull, Streamed


def request_of(finishes=None, tokens=(1, 2), most=4, temperature=0.0, **options):
    """Returns a request that appends its finish reason to `finishes`."""

    def deliver(chunk):
        if finishes is not None and chunk.finish:
            finishes.append(chunk.finish)

    return Streamed.of_client(np.array(tokens, np.int32), most, temperature, deliver, **options)


def batcher_of(max_waiting=8, slots=2):
    engine = Engine(
        MODEL,
        ComputeConfig(),
        RolloutConfig(slots=slots, prompt_buckets=(16,), max_new_tokens=8, tokens_per_call=4),
        2,
    )
    return OnlineBatcher(engine, None, max_waiting)


def test_a_batcher_that_fails_ends_every_request_and_says_so(caplog):
    """The first prefill raises, because there are no weights. Waiting requests end with an error,
    and later ones are refused.
    """
    batcher, finishes = batcher_of(), []
    with batcher:
        batcher.submit([request_of(finishes), request_of(finishes)])
        deadline = time.time() + 60
        while len(finishes) < 2 and time.time() < deadline:
            time.sleep(0.05)
        assert finishes == ["error", "error"] and batcher.error is not None
        with pytest.raises(RuntimeError, match="the engine has failed"):
            batcher.submit([request_of(finishes)])
    assert "the batcher ended" in caplog.text


def test_what_the_engine_cannot_hold_or_the_queue_has_no_room_for_is_refused():
    batcher = batcher_of(max_waiting=2)
    with pytest.raises(ValueError, match="17 tokens exceeds"):
        batcher.submit([request_of(tokens=[1] * 17)])
    with pytest.raises(ValueError, match="empty"):
        batcher.submit([request_of(tokens=[])])
    with pytest.raises(ValueError, match="3 sequences are asked for at once, at most 2 may wait"):
        batcher.submit([request_of(), request_of()], [request_of()])
    batcher.submit([request_of()], [request_of()])
    with pytest.raises(QueueFull, match="2 requests wait and at most 2 may"):
        batcher.submit([request_of()])


def test_a_batcher_that_has_stopped_takes_no_requests():
    batcher = batcher_of()
    with batcher:
        pass
    with pytest.raises(RuntimeError, match="the batcher has stopped"):
        batcher.submit([request_of()])


def test_requests_that_were_given_up_while_they_waited_make_room():
    batcher = batcher_of(max_waiting=2)
    finishes = []
    old = [request_of(finishes), request_of(finishes)]
    batcher.submit(old)
    assert batcher.waiting == 2
    batcher.cancel(old)
    batcher.submit([request_of()])
    assert finishes == ["cancelled", "cancelled"] and batcher.waiting == 1


def joined_top(chunks):
    """Returns the log-probs of all chunks as one."""
    parts = [chunk.top for chunk in chunks if chunk.top is not None]
    return TopLogprobs(*map(np.concatenate, zip(*parts, strict=True)))


def test_through_few_pages_every_chunk_comes_once_and_in_order():
    """There are six samples of two prompts on four slots, with pages for two. The answer of each
    request is the same as without pages.
    """
    rollout = RolloutConfig(
        slots=4,
        prompt_buckets=(16,),
        max_new_tokens=24,
        tokens_per_call=4,
        cache_bucket=40,
        page_tokens=4,
    )
    params, answers, tops = to_decode(random_params()), [], []
    for pages in (0, 12):
        engine = Engine(MODEL, ComputeConfig(), dataclasses.replace(rollout, cache_pages=pages), 2)
        with OnlineBatcher(engine, params, 8) as batcher:
            chunks = {}
            groups = [
                [
                    Streamed.of_client(
                        np.arange(1, 4 + 9 * p, dtype=np.int32),
                        24,
                        1.0,
                        chunks.setdefault((p, i), []).append,
                        seed=7 + p,
                        sample=3 * p + i,
                        logprobs=True,
                    )
                    for i in range(3)
                ]
                for p in range(2)
            ]
            batcher.submit(*groups)
            deadline = time.time() + 120
            while sum(chunk.finish != "" for x in chunks.values() for chunk in x) < 6:
                assert time.time() < deadline
                time.sleep(0.02)
            assert (batcher._batcher.stats.preempted > 0) == bool(pages)
        assert sum(map(len, chunks.values())) > 12
        assert not any(chunk.finish for received in chunks.values() for chunk in received[:-1])
        answers.append(
            {
                key: ([t for chunk in received for t in chunk.tokens], received[-1].finish)
                for key, received in chunks.items()
            }
        )
        assert len({tuple(tokens) for tokens, _ in answers[-1].values()}) == 6
        tops.append({key: joined_top(received) for key, received in chunks.items()})
        for key, (tokens, _) in answers[-1].items():
            assert tops[-1][key].ids[:, 0].tolist() == tokens
    assert answers[0] == answers[1]
    for key, plain in tops[0].items():
        np.testing.assert_array_equal(plain.ids, tops[1][key].ids)
        np.testing.assert_allclose(plain.logp, tops[1][key].logp, atol=1e-5)
