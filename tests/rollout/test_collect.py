"""Continuous batching: every request is answered once, with the same tokens in any slot, and is
continued after an interruption.
"""

import dataclasses
from collections import Counter

import jax
import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, UNSET, make_prompt, random_params

from compass_jax.model.params import to_decode
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.stats import RolloutStats

LOOSE = to_decode(random_params())
ROLL = dataclasses.replace(ROLLOUT, max_new_tokens=8, cache_bucket=32)
SAMPLES = 3
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9, 2, 5, 12))]
ENGINES = {
    slots: Engine(MODEL, COMPUTE, dataclasses.replace(ROLL, slots=slots), EOS)
    for slots in (2, 6, 32)
}


def collection(slots=6, prompts=PROMPTS, samples=SAMPLES, purpose=Purpose.TRAIN, seed=0, **options):
    return Collection(
        ENGINES[slots], LOOSE, prompts, samples, purpose, seed, policy_version=4, **options
    )


ALL = frozenset(prompt.sample(c) for prompt in PROMPTS for c in range(SAMPLES))


def rooms(engine):
    """Returns a route buffer, and the first row of each prompt in it."""
    buffer = RouteBuffer(engine.new_routes, engine.taken_routes, len(PROMPTS), SAMPLES)
    return buffer, [buffer.allocate() for _ in PROMPTS]


def by_request(rollouts):
    """Returns (prompt id, sample) -> tokens, and checks that each request occurs once."""
    sequences = {(r.prompt.id, r.sample): tuple(r.tokens.tolist()) for r in rollouts}
    assert len(sequences) == len(rollouts)
    return sequences


@pytest.fixture(scope="module")
def reference():
    """Returns the full batch on six slots as (rollouts by row, routing store, statistics)."""
    job = collection()
    rollouts = {r.row: r for r in job}
    return rollouts, np.asarray(job.routes), job.stats


def test_every_request_is_answered_once_and_as_recorded(reference):
    rollouts, store, _ = reference
    assert sorted(rollouts) == list(range(len(PROMPTS) * SAMPLES))
    for row, rollout in rollouts.items():
        prompt, n = PROMPTS[row // SAMPLES], len(rollout.tokens)
        assert (rollout.prompt, rollout.sample) == (
            prompt,
            row % SAMPLES,
        ) and rollout.versions.tolist() == [4] * n
        np.testing.assert_array_equal(rollout.tokens[: len(prompt.tokens)], prompt.tokens)
        assert len(rollout.logp) == len(rollout.entropy) == n and 1 <= rollout.response_length <= 8
        assert rollout.truncated == (rollout.response[-1] != EOS) and (
            not rollout.truncated or rollout.response_length == 8
        )
        assert (
            np.all(rollout.logp[len(prompt.tokens) :] < 0)
            and not rollout.logp[: len(prompt.tokens)].any()
        )
        np.testing.assert_array_equal(
            np.all(store[row] != UNSET, axis=(1, 2)), np.arange(store.shape[1]) < n - 1
        )
    assert {r.truncated for r in rollouts.values()} == {True, False}


@pytest.mark.parametrize("slots", [2, 32])
def test_the_same_rollouts_come_from_fewer_slots_than_a_group_and_from_more_than_requests(
    reference, slots
):
    job = collection(slots)
    rollouts = list(job)
    assert by_request(rollouts) == by_request(list(reference[0].values()))
    for rollout in rollouts:
        np.testing.assert_allclose(rollout.logp, reference[0][rollout.row].logp, atol=1e-5)
    np.testing.assert_array_equal(job.routes, reference[1])


def test_the_order_of_the_prompts_does_not_matter(reference):
    order = np.random.default_rng(0).permutation(len(PROMPTS))
    job = collection(prompts=[PROMPTS[i] for i in order])
    rollouts = list(job)
    assert by_request(rollouts) == by_request(list(reference[0].values()))
    rows = [order[r.row // SAMPLES] * SAMPLES + r.sample for r in rollouts]
    np.testing.assert_array_equal(
        np.asarray(job.routes)[[r.row for r in rollouts]], reference[1][rows]
    )


@pytest.mark.parametrize("completed", [1, 8, 20])
def test_an_interrupted_collection_continues_to_the_same_result(reference, completed):
    buffer, rows = rooms(ENGINES[6])
    job, first = collection(buffer=buffer, rows=rows), {}
    for rollout in job:
        first[rollout.row] = rollout
        if len(first) == completed:
            break
    resumed = collection(
        buffer=buffer, rows=rows, sample_keys=ALL - {r.key for r in first.values()}
    )
    second = {r.row: r for r in resumed}
    assert not set(first) & set(second) and len(second) == len(PROMPTS) * SAMPLES - completed
    assert by_request([*first.values(), *second.values()]) == by_request(
        list(reference[0].values())
    )
    np.testing.assert_array_equal(resumed.routes, reference[1])
    assert resumed.stats.tokens == sum(r.response_length for r in second.values())


@pytest.mark.parametrize("pages", [0, 40])
def test_a_cut_collection_goes_on_and_each_token_keeps_its_version(reference, pages):
    """The collection is aborted at the third finished sample, and version 5 continues the samples
    that version 4 started. The weights are the same, so the tokens are, too.
    """
    first, engine = {}, ENGINES[6]
    if pages:
        engine = Engine(
            MODEL,
            COMPUTE,
            dataclasses.replace(ROLL, slots=6, cache_pages=pages, page_tokens=4),
            EOS,
        )
    buffer, rows = rooms(engine)
    request = (engine, LOOSE, PROMPTS, SAMPLES, Purpose.TRAIN, 0)
    shared = {"buffer": buffer, "rows": rows}
    job = Collection(*request, policy_version=4, enough=lambda: len(first) >= 3, **shared)
    for rollout in job:
        first[rollout.row] = rollout
    unfinished = {rollout.row: rollout for rollout in job.abort()}
    assert (
        3 <= len(first) < 9
        and unfinished
        and not unfinished.keys() & first.keys()
        and all(1 <= r.response_length < 8 for r in unfinished.values())
    )
    assert job.stats.tokens == sum(r.response_length for r in (first | unfinished).values())
    missing = ALL - {r.key for r in first.values()}
    carried = list(unfinished.values())
    resumed = Collection(*request, policy_version=5, sample_keys=missing, carried=carried, **shared)
    second = {r.row: r for r in resumed}
    assert (
        by_request([*first.values(), *second.values()]) == by_request(list(reference[0].values()))
        and not resumed.abort()
    )
    assert resumed.stats.tokens == sum(
        r.response_length - (unfinished[row].response_length if row in unfinished else 0)
        for row, r in second.items()
    )
    for row, rollout in second.items():
        n = len(unfinished[row].tokens) if row in unfinished else 0
        assert rollout.versions.tolist() == [4] * n + [5] * (len(rollout.tokens) - n)
        for name in ("logp", "entropy"):
            np.testing.assert_array_equal(
                getattr(rollout, name)[:n], getattr(unfinished[row], name) if n else []
            )
            np.testing.assert_allclose(
                getattr(rollout, name), getattr(reference[0][row], name), atol=1e-5
            )
    np.testing.assert_array_equal(resumed.routes, reference[1])


def test_draws_belong_to_seed_purpose_prompt_visit_and_sample(reference):
    """The weights are frozen: the same request gives the same tokens twice, and a request with
    another visit, purpose or seed gives other samples.
    """
    base = by_request(list(reference[0].values()))
    assert by_request(list(collection())) == base
    variants = {
        "visit": collection(prompts=[p.at_visit(1) for p in PROMPTS]),
        "purpose": collection(purpose=Purpose.EVAL),
        "seed": collection(seed=1),
    }
    for name, job in variants.items():
        sequences = by_request(list(job))
        overlap = np.mean([sequences[key] == base[key] for key in base])
        assert overlap < 0.2, name
    for prompt in PROMPTS:
        assert len({base[prompt.id, s] for s in range(SAMPLES)}) == SAMPLES


def test_the_draws_of_one_sequence_are_not_one_draw_repeated():
    """The model is nearly uniform, so that a key shared by all positions would repeat one token."""
    flat = to_decode(random_params(scale=1e-3))
    job = Collection(ENGINES[6], flat, PROMPTS, SAMPLES, Purpose.TRAIN, 0)
    counts = [
        Counter(r.response.tolist()).most_common(1)[0][1] for r in job if r.response_length == 8
    ]
    assert len(counts) > 10 and max(counts) <= 4 and np.mean(counts) < 2.5


def test_another_sampler_and_a_dropped_store():
    """A greedy sampler ignores the seed, and all samples of a prompt are equal. Without a store no
    routes are recorded.
    """
    options = dict(prompts=PROMPTS[::2][:2], sampler=Sampler(0.0), keep_routes=False)
    job = collection(**options)
    greedy = by_request(list(job))
    assert job.routes is None and greedy == by_request(list(collection(seed=9, **options)))
    assert len(greedy) == 6 and len(set(greedy.values())) == 2


def test_the_account_of_a_collection(reference):
    rollouts, _, stats = reference
    tokens = sum(r.response_length for r in rollouts.values())
    # the first token of each is the prefill's
    assert stats.tokens == tokens and stats.live_steps == tokens - len(rollouts)
    assert stats.slot_steps == 6 * stats.steps and stats.live_steps <= stats.slot_steps
    assert stats.calls >= stats.steps / ROLL.tokens_per_call and 4 <= stats.prefills <= len(PROMPTS)
    metrics = stats.metrics()
    assert metrics["rollout/slot_occupancy"] == (tokens - len(rollouts)) / stats.slot_steps > 0.5
    assert (
        metrics["rollout/tokens_per_s"] == pytest.approx(tokens / stats.seconds)
        and metrics["time/rollout_s"] == stats.seconds > 0
    )
    assert RolloutStats().metrics()["rollout/slot_occupancy"] == 0


def test_routes_stay_on_the_device_in_one_byte_a_choice(monkeypatch):
    """A collection never copies routes to the host, and the store takes layers x k bytes a
    token.
    """
    fetched, real = [], jax.device_get

    def device_get(tree):
        fetched.extend(jax.tree.leaves(tree))
        return real(tree)

    monkeypatch.setattr(jax, "device_get", device_get)
    job = collection(prompts=PROMPTS[:2])
    assert len(list(job)) == 2 * SAMPLES and len(fetched) > 6
    assert {str(x.dtype) for x in fetched} == {"int32", "float32", "bool"} and max(
        x.ndim for x in fetched
    ) == 2
    assert (
        isinstance(job.routes, jax.Array)
        and job.routes.nbytes
        == 2 * SAMPLES * ROLL.max_length * len(MODEL.moe_layers) * MODEL.moe.top_k
    )


def test_no_requests_and_nothing_left_to_do():
    assert list(collection(prompts=[])) == []
    assert list(collection(sample_keys=frozenset())) == []


def test_a_prompt_longer_than_the_longest_bucket_is_refused():
    with pytest.raises(ValueError, match="a prompt of 17 tokens exceeds the longest bucket"):
        list(collection(prompts=[PROMPTS[0], make_prompt(9, 17)]))


def test_the_longest_expected_start_first_and_no_sample_changes(reference, monkeypatch):
    """Within a bucket, prompts are prefilled in the order of their expected lengths, and every
    sample equals the reference's.
    """
    expected = [3.0, float("nan"), 9.0, 1.0, 8.0, 2.0, 7.0]  # prompt 1 counts as the mean, 5
    started, prefill = [], Batcher._prefill

    def watched(self, free):
        opened = prefill(self, free)
        started.extend(
            request.row // SAMPLES for _, request in opened.waiting if request.column == 0
        )
        return opened

    monkeypatch.setattr(Batcher, "_prefill", watched)
    rollouts = list(collection(2, expected=expected))
    assert started == [2, 4, 6, 1, 0, 5, 3]
    assert by_request(rollouts) == by_request(list(reference[0].values()))


def test_each_prompt_may_have_a_limit_of_its_own(reference):
    """A sample is the reference's, truncated at its prompt's limit. A limit above the
    configuration's has no effect.
    """
    limits = [1, 8, 3, 99, 2, 5, 4]
    unlimited = by_request(list(reference[0].values()))
    for (prompt, sample), tokens in by_request(list(collection(max_new_tokens=limits))).items():
        n = next(i for i, p in enumerate(PROMPTS) if p.id == prompt)
        assert tokens == unlimited[prompt, sample][: len(PROMPTS[n].tokens) + limits[n]]


@pytest.mark.parametrize("pages", [0, 24])
@pytest.mark.parametrize("slots", [2, 6])
def test_samples_under_way_continue_under_new_weights(slots, pages):
    """The result is as if the collection were aborted and its samples carried into another one with
    the new weights. Samples without tokens, also those of an open prefix, come from the new weights
    only.
    """
    rollout = dataclasses.replace(ROLL, slots=slots, cache_pages=pages, page_tokens=8)
    engine = Engine(MODEL, COMPUTE, rollout, EOS)
    new = to_decode(jax.tree.map(lambda x: x * 1.1, random_params()))

    def started():
        buffer, rows = rooms(engine)
        options, rollouts = {"buffer": buffer, "rows": rows}, []
        request = (engine, LOOSE, PROMPTS, SAMPLES, Purpose.TRAIN, 0)
        job = Collection(*request, policy_version=4, enough=lambda: len(rollouts) >= 5, **options)
        for one in job:
            rollouts.append(one)
        return job, rollouts, options

    job, first, options = started()
    done = {r.key for r in first}
    finished = {x.key: x for x in (x.rollout(engine.end_ids) for x in job.batcher.step())}
    carried = [r for r in job.abort() if r.key not in done]
    rest = Collection(
        engine,
        new,
        PROMPTS,
        SAMPLES,
        Purpose.TRAIN,
        0,
        policy_version=5,
        carried=carried,
        sample_keys=ALL - done - finished.keys(),
        **options,
    )
    expected = {r.key: r for r in rest} | finished
    routes = np.asarray(rest.routes)

    job, _, _ = started()
    actual = {x.key: x for x in (x.rollout(engine.end_ids) for x in job.batcher.step())}
    job.batcher.renew(new, 5)
    while job.batcher.busy:
        actual |= {x.key: x for x in (x.rollout(engine.end_ids) for x in job.batcher.step())}
    assert actual.keys() == expected.keys() == ALL - done
    for key, r in expected.items():
        one = actual[key]
        assert one.tokens.tolist() == r.tokens.tolist()
        n = len(r.prompt.tokens)
        assert one.versions[n:].tolist() == r.versions[n:].tolist()
        np.testing.assert_allclose(one.logp, r.logp, atol=1e-5)
        np.testing.assert_array_equal(np.asarray(job.routes)[one.row], routes[r.row])
    mixed = [set(r.versions[len(r.prompt.tokens) :].tolist()) for r in expected.values()]
    assert {4, 5} in mixed and {5} in mixed


@pytest.mark.parametrize("slots", [2, 6])
def test_samples_are_admitted_while_others_decode(slots, reference):
    """A user of the open rollout: a sample with an odd last token, and one that ends early, gets a
    successor at once. The samples are those of a closed collection, whose rounds need more steps
    where slots are few.
    """

    def successors(finished):
        odd = [x for x in finished if x.tokens[-1] % 2 and x.sample + 1 < SAMPLES]
        return [x.prompt.sample(x.sample + 1) for x in odd]

    first = frozenset(prompt.sample(0) for prompt in PROMPTS)
    job = collection(slots, sample_keys=first, admit=successors)
    rollouts = list(job)
    expected = by_request(reference[0].values())
    assert all(expected[key] == tokens for key, tokens in by_request(rollouts).items())
    keys = {x.key for x in rollouts}
    assert keys == first | set(successors(rollouts)) and len(keys) > len(first)
    store = np.asarray(job.routes)
    for x in rollouts:
        np.testing.assert_array_equal(store[x.row], reference[1][x.row])

    rounds, asked = 0, first
    while asked:
        job_of_round = collection(slots, sample_keys=frozenset(asked))
        asked = successors(list(job_of_round))
        rounds += job_of_round.stats.steps
    assert job.stats.steps < rounds if slots == 2 else job.stats.steps <= rounds


@pytest.mark.parametrize("key", [PROMPTS[0].sample(0), PROMPTS[0].sample(SAMPLES)])
def test_a_sample_that_cannot_be_admitted_is_refused(key):
    job = collection(admit=lambda finished: [key])
    with pytest.raises(ValueError, match=r"Collection\.admit returned SampleKey\(prompt=1000"):
        list(job)
