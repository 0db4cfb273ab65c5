"""The batcher of the servers alone: who waits is answered, whatever happens to the engine."""

import dataclasses
import time

import numpy as np
import pytest
from tiny import MODEL

from compass_jax.config import ComputeConfig, RolloutConfig
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import Full, OnlineBatcher, Request


def batcher_of(max_waiting=8, slots=2):
    engine = Engine(
        MODEL,
        ComputeConfig(),
        RolloutConfig(slots=slots, prompt_buckets=(16,), max_new_tokens=8, tokens_per_call=4),
        2,
    )
    return OnlineBatcher(engine, None, max_waiting)


def test_a_batcher_that_fails_ends_every_request_and_says_so(caplog):
    """Without weights the first prefill raises: who waits is told, and so is who comes later."""
    batcher, told = batcher_of(), []
    request = Request(np.array([1, 2], np.int32), 4, 0.0, lambda chunk: told.append(chunk.finish))
    with batcher:
        batcher.submit(request, dataclasses.replace(request))
        deadline = time.time() + 60
        while len(told) < 2 and time.time() < deadline:
            time.sleep(0.05)
        assert told == ["error", "error"] and batcher.error is not None
        with pytest.raises(RuntimeError, match="the engine has failed"):
            batcher.submit(request)
    assert "the batcher ended" in caplog.text


def test_what_the_engine_cannot_hold_or_the_queue_has_no_room_for_is_refused():
    batcher = batcher_of(max_waiting=2)
    request = Request(np.array([1, 2], np.int32), 4, 0.0, lambda chunk: None)
    with pytest.raises(ValueError, match="17 tokens exceeds"):
        batcher.submit(dataclasses.replace(request, tokens=np.ones(17, np.int32)))
    with pytest.raises(ValueError, match="empty"):
        batcher.submit(dataclasses.replace(request, tokens=np.ones(0, np.int32)))
    with pytest.raises(ValueError, match="3 sequences are asked for at once, at most 2 may wait"):
        batcher.submit(request, request, request)
    batcher.submit(request, request)
    with pytest.raises(Full, match="2 requests wait and at most 2 may"):
        batcher.submit(request)


def test_a_batcher_that_has_stopped_takes_no_requests():
    batcher = batcher_of()
    with batcher:
        pass
    with pytest.raises(RuntimeError, match="the batcher has stopped"):
        batcher.submit(Request(np.array([1, 2], np.int32), 4, 0.0, lambda chunk: None))


def test_requests_that_were_given_up_while_they_waited_make_room():
    batcher = batcher_of(max_waiting=2)
    told = []
    old = [
        Request(np.array([1, 2], np.int32), 4, 0.0, lambda chunk: told.append(chunk.finish))
        for _ in range(2)
    ]
    batcher.submit(*old)
    assert batcher.waiting == 2
    for request in old:
        request.cancel()
    batcher.submit(dataclasses.replace(old[0]))
    assert told == ["cancelled", "cancelled"] and batcher.waiting == 1
