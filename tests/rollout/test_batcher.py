"""The batcher as servers use it: requests arrive at any time, stream and are cancelled. With few
pages their tokens are still those of a collection.
"""

import dataclasses

import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params

from compass_jax.model.params import to_decode
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import Purpose, Sampler

LOOSE = to_decode(random_params())
PAGES = 20
ROLL = dataclasses.replace(
    ROLLOUT, slots=6, max_new_tokens=20, cache_bucket=40, page_tokens=4, prompt_buckets=(8, 16)
)
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9))]
SAMPLES = 3


def engine_of(pages=PAGES):
    return Engine(MODEL, COMPUTE, dataclasses.replace(ROLL, cache_pages=pages), EOS)


def batcher_of(pages=PAGES, **options):
    return Batcher(engine_of(pages), LOOSE, Purpose.SERVE, 0, streams=True, **options)


def requests_of(prompt, temperature=1.0, samples=SAMPLES, most=20):
    limit = len(prompt.tokens) + most
    return [Request.of(prompt, c, 0, limit, 0, temperature=temperature) for c in range(samples)]


def run(batcher):
    """Steps until the batcher is idle, and returns the finished requests in order."""
    finished = []
    while batcher.busy:
        finished += batcher.step()
    return finished


@pytest.fixture(scope="module")
def expected():
    """Returns (prompt, sample) -> (tokens, log-probs) of a collection with room for every slot."""
    job = Collection(engine_of(0), LOOSE, PROMPTS, SAMPLES, Purpose.SERVE, 0)
    return {(r.prompt.id, r.sample): (r.tokens.tolist(), r.logp) for r in job}


def check(requests, expected):
    for x in requests:
        tokens, logp = expected[x.prompt.id, x.column]
        assert x.tokens.tolist() == tokens
        np.testing.assert_allclose(x.logp, logp, atol=1e-5)


@pytest.mark.parametrize("pages", [0, PAGES])
def test_what_comes_at_any_time_streams_the_tokens_of_a_collection(expected, pages):
    """The tokens of a step are on the host after it, even if requests were preempted for lack of
    pages. A prompt's three samples share one prefill.
    """
    batcher, requests = batcher_of(pages, sampler=Sampler(per_request=True)), []
    for prompt in PROMPTS:
        group = requests_of(prompt)
        batcher.add(group, range(4))  # a power of two
        requests += group
        batcher.step()
        for x in batcher.slots.entered:
            tokens, _ = expected[x.prompt.id, x.column]
            assert x.has_tokens and x.tokens.tolist() == tokens[: x.length] and not x.is_finished
    run(batcher)
    check(requests, expected)
    assert all(x.is_finished and x.slot < 0 for x in requests) and not batcher.busy
    assert batcher.stats.tokens == sum(len(x.tokens) - len(x.prompt.tokens) for x in requests)
    if pages:
        assert batcher.stats.preempted > 0 and batcher.slots.pages.free == pages
    else:
        assert batcher.stats.prefills == len(PROMPTS)


def test_each_request_has_a_temperature_of_its_own(expected):
    batcher = batcher_of(sampler=Sampler(per_request=True))
    drawn, greedy = requests_of(PROMPTS[0]), requests_of(PROMPTS[1], temperature=0.0)
    batcher.add(drawn, range(4))
    batcher.add(greedy, range(4))
    run(batcher)
    check(drawn, expected)
    assert len({tuple(x.tokens.tolist()) for x in greedy}) == 1
    assert greedy[0].tokens.tolist() != expected[PROMPTS[1].id, 0][0]


def test_what_is_given_up_frees_its_slot_and_pages_at_the_next_step(expected):
    """A request may be cancelled in a slot, while its prefix is open, preempted, or queued. It
    finishes, and the other requests' tokens do not change.
    """
    batcher = batcher_of(sampler=Sampler())
    groups = [requests_of(prompt) for prompt in PROMPTS]
    for group in groups:
        batcher.add(group, range(SAMPLES))
    while not batcher.stats.preempted:
        batcher.step()
    entered = list(batcher.slots.entered)
    preempted = [
        x for group in groups for x in group if x.has_tokens and x.slot < 0 and not x.is_finished
    ]
    queued = [x for x in groups[3] if not x.has_tokens]
    assert len(entered) > 1 and preempted and queued
    given_up = [entered[0], preempted[0], queued[0]]
    batcher.cancel(*given_up)
    assert batcher.slots.entered == entered  # until the next step
    finished = batcher.step()
    assert [x for x in finished if x.cancelled] == given_up and all(x.is_finished for x in given_up)
    assert not set(given_up) & set(batcher.slots.entered)
    run(batcher)
    check([x for group in groups for x in group if x not in given_up], expected)
    assert batcher.slots.pages.free == PAGES
    group = requests_of(PROMPTS[1], samples=8)
    batcher.add(group, range(8))
    batcher.step()
    waiting = [x for x in group if x.slot < 0 and not x.has_tokens]
    assert waiting  # of an open prefix
    batcher.cancel(*group)
    assert set(group) >= set(batcher.step()) >= set(waiting)
    assert not batcher.busy and batcher.slots.pages.free == PAGES


def test_its_room_is_what_a_server_may_add():
    batcher = batcher_of(0, sampler=Sampler(0.0))
    assert batcher.room == 6
    batcher.add(requests_of(PROMPTS[0], samples=4), range(4))
    assert batcher.room == 2
    batcher.add(requests_of(PROMPTS[1], samples=4), range(4))
    assert batcher.room == -2
    batcher.step()
    assert len(batcher.slots.entered) == 6 and batcher.room == -2
