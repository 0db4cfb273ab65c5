"""Pages are lent once or shared, and freed by their last user. A rollout with few pages equals the
rollout with many, and no page or request is lost.
"""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, UNSET, make_prompt, random_params

from compass_jax.config import ConfigError
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import init_cache
from compass_jax.rollout import kv_cache
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.pages import PagePool
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import Purpose, Sampler

LOOSE = to_decode(random_params())
ROLL = dataclasses.replace(
    ROLLOUT, max_new_tokens=20, cache_bucket=40, page_tokens=4, prompt_buckets=(8, 16)
)
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9, 2, 5, 12))]
SAMPLES = 3


def collection(pages=0, slots=6, prompts=PROMPTS, samples=SAMPLES, config=ROLL, **options):
    engine = Engine(
        MODEL, COMPUTE, dataclasses.replace(config, cache_pages=pages, slots=slots), EOS
    )
    return Collection(engine, LOOSE, prompts, samples, Purpose.TRAIN, 0, **options)


@pytest.fixture(scope="module")
def dense():
    """Returns (rollouts by row, routing) with room for every slot at its longest."""
    job = collection()
    return {r.row: r for r in job}, np.asarray(job.routes)


# ---- the count of pages --------------------------------------------------------------------------


def check(pool, lengths):
    """Checks that every page has one owner, or owners that share it at the same place, and that the
    rest is free. `lengths` maps slots to tokens.
    """
    owners = {}
    for slot, row in enumerate(pool.table):
        n = pool.pages_for(lengths[slot]) if slot in lengths else 0
        assert np.all(row[:n] < pool.pages) and np.all(row[n:] == pool.pages)
        for place, page in enumerate(row[:n].tolist()):
            owners.setdefault((pool.group(slot), page), set()).add(place)
    assert all(len(places) == 1 for places in owners.values())
    assert [pool.free_of(g) for g in range(pool.groups)] == [
        pool.pages - sum(group == g for group, _ in owners) for g in range(pool.groups)
    ]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.integers(0, 24), st.integers(0, 5), st.integers(0, 24)),
        max_size=60,
    ),
    st.sampled_from([1, 2]),
)
def test_pages_are_lent_once_or_shared_at_the_same_place_and_come_back(steps, groups):
    pool, lengths, shares = PagePool(9 * groups, 4, 6, 6, groups), {}, {}
    for slot, tokens, leader, prompt in steps:
        before, table = pool.free_of(pool.group(slot)), pool.table.copy()
        if slot in lengths and tokens % 3 == 0:
            pool.release(slot)
            del lengths[slot]
        elif slot in lengths:
            tokens = max(tokens, lengths[slot])
            if pool.grow(slot, tokens):
                lengths[slot] = tokens
            else:
                assert pool.pages_for(tokens) - pool.pages_for(lengths[slot]) > before
                np.testing.assert_array_equal(pool.table, table)
        else:
            sharing = (
                leader in lengths
                and pool.group(leader) == pool.group(slot)
                and prompt <= min(lengths[leader], tokens)
            )
            if pool.admit(slot, tokens, *((leader, prompt) if sharing else ())):
                lengths[slot], shares[slot] = tokens, (leader, prompt // 4) if sharing else None
                if sharing:
                    np.testing.assert_array_equal(
                        pool.table[slot, : prompt // 4], pool.table[leader, : prompt // 4]
                    )
            else:
                assert pool.free_of(pool.group(slot)) == before
                np.testing.assert_array_equal(pool.table, table)
        check(pool, lengths)
    for slot in list(lengths):
        pool.release(slot)
    assert pool.free == 9 * groups and np.all(pool.table == pool.pages)


def test_what_a_pool_cannot_do_is_refused():
    pool = PagePool(4, 4, 3, 4)
    assert pool.admit(0, 9) and pool.free == 1
    with pytest.raises(ValueError, match="slot 0 holds 3 pages: release it first"):
        pool.admit(0, 1)
    with pytest.raises(ValueError, match="slot 1 holds 0 pages and cannot share 2"):
        pool.admit(2, 9, 1, 9)
    assert not pool.admit(1, 8) and pool.admit(1, 16, 0, 12) and pool.free == 0
    with pytest.raises(ValueError, match="9 pages and 4 slots cannot be split into 2 equal groups"):
        PagePool(9, 4, 4, 4, 2)
    pool = PagePool(8, 4, 4, 4, 2)
    assert pool.admit(0, 4)
    with pytest.raises(ValueError, match="slot 0 has pages of group 0, slot 2 of group 1"):
        pool.admit(2, 4, 0, 4)


# ---- the cache through a table -------------------------------------------------------------------


def test_a_window_through_a_table_is_the_cache_that_was_put_in():
    """Prefixes are in scattered pages, and two slots share their prompt's. Each slot writes its
    decoding steps at different positions, and masked writes are dropped.
    """
    rng = np.random.default_rng(0)
    table = jnp.array([[7, 2, 9, 20], [7, 5, 20, 20], [20, 20, 20, 20], [1, 3, 0, 8]], jnp.int32)
    cache = jax.tree.map(lambda x: x + 99.0, init_cache(MODEL, 20, 4, COMPUTE))
    prefix = jax.tree.map(
        lambda x: jnp.asarray(rng.standard_normal((2, 2, 6, 8)), jnp.float32),
        init_cache(MODEL, 2, 6, COMPUTE),
    )
    # slot 4 does not exist, so its prefix is dropped
    cache = kv_cache.put_prefix(
        cache, table, prefix, jnp.array([0, 0, 1, 1]), jnp.array([0, 1, 3, 4])
    )
    seen = kv_cache.window(cache, table, 12)
    for layer, new in zip(jax.tree.leaves(seen), jax.tree.leaves(prefix), strict=True):
        for slot, source in ((0, 0), (1, 0), (3, 1)):
            np.testing.assert_array_equal(layer[slot, :, :6], new[source])
    positions, write_mask = (
        jnp.array([[6, 5, 3, 10], [7, 6, 4, 11]]),
        jnp.array([[True, True, False, True], [True, False, False, True]]),
    )
    changed = jax.tree.map(lambda x: x + 1000.0, seen)
    after = kv_cache.window(
        kv_cache.put_back(cache, table, changed, positions, write_mask), table, 12
    )
    for old, new in zip(jax.tree.leaves(seen), jax.tree.leaves(after), strict=True):
        moved = {0: (6, 7), 1: (5,), 3: (10, 11)}
        for slot in (0, 1, 3):
            capacity = 12 if slot != 1 else 8
            expected = np.array(old[slot, :, :capacity])
            expected[:, list(moved[slot])] += 1000.0
            np.testing.assert_array_equal(new[slot, :, :capacity], expected)
    untouched = [p for p in range(20) if p not in (7, 2, 9, 5, 1, 3, 0, 8)]
    for layer in jax.tree.leaves(kv_cache.put_back(cache, table, changed, positions, write_mask)):
        assert np.all(np.asarray(layer)[untouched] == 99.0)


# ---- rollouts through pages ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "slots", "preempts"),
    [
        (60, 6, False),
        (20, 6, True),
        pytest.param(40, 16, True, marks=pytest.mark.slow),
        (10, 1, False),
    ],
)
def test_few_pages_give_the_same_rollouts_as_room_for_all(dense, pages, slots, preempts):
    """Samples that were preempted and resumed have the same tokens, log-probs and routes."""
    job = collection(pages, slots)
    rollouts = list(job)
    assert sorted(r.row for r in rollouts) == sorted(dense[0])
    for r in rollouts:
        expected = dense[0][r.row]
        np.testing.assert_array_equal(r.tokens, expected.tokens)
        np.testing.assert_allclose(r.logp, expected.logp, atol=1e-5)
        np.testing.assert_allclose(r.entropy, expected.entropy, atol=1e-5)
        assert (r.truncated, r.sample, r.prompt) == (
            expected.truncated,
            expected.sample,
            expected.prompt,
        )
    np.testing.assert_array_equal(job.routes, dense[1])
    assert (job.stats.preempted > 0) == preempts and job.stats.metrics()[
        "rollout/preempted"
    ] == job.stats.preempted
    assert job.stats.tokens == sum(r.response_length for r in rollouts)
    assert job.batcher.slots.pages.free == pages


def test_samples_of_a_group_share_the_pages_of_their_prompt(monkeypatch):
    """Sixteen tokens fill four pages. Three samples share all four, and each adds the page of its
    first call.
    """
    pages_in_use, admit = [], PagePool.admit

    def watched(self, *args):
        entered = admit(self, *args)
        pages_in_use.append(self.pages - self.free)
        return entered

    monkeypatch.setattr(PagePool, "admit", watched)
    list(collection(60, 6, prompts=[make_prompt(1, 16)]))
    first = ROLL.tokens_per_call // ROLL.page_tokens
    assert pages_in_use == [4 + first, 4 + 2 * first, 4 + 3 * first]


def test_a_preempted_sample_replays_its_routes(dense, monkeypatch):
    """The prefill of a resumed sample replays the routes that its decoding recorded, for each token
    that was an input.
    """
    seen, prefill = [], Engine.prefill_multisampling

    def watched(self, **options):
        if options["routes"] is not None:
            seen.append(
                tuple(
                    np.asarray(options[name]) for name in ("padded_tokens", "true_length", "routes")
                )
            )
        return prefill(self, **options)

    monkeypatch.setattr(Engine, "prefill_multisampling", watched)
    job = collection(20)
    list(job)
    assert len(seen) > 0
    for tokens, lengths, routes in seen:
        for text, n, row in zip(tokens, lengths, routes, strict=True):
            (index,) = [
                i
                for i, r in dense[0].items()
                if len(r.tokens) >= n > 0 and np.array_equal(r.tokens[:n], text[:n])
            ]
            np.testing.assert_array_equal(row[: n - 1], dense[1][index, : n - 1])
            assert np.all(row[n - 1 :] == UNSET)


def test_without_a_store_preempted_samples_route_live(dense):
    job = collection(20, keep_routes=False)
    rollouts = {r.row: r for r in job}
    assert job.stats.preempted and job.routes is None
    assert {row: r.tokens.tolist() for row, r in rollouts.items()} == {
        row: r.tokens.tolist() for row, r in dense[0].items()
    }


def alive():
    """Returns the number of referenced requests, and of arrays on the device."""
    gc.collect()
    return sum(type(x) is Request for x in gc.get_objects()), len(jax.live_arrays())


@pytest.mark.parametrize("n", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hundreds_and_thousands_of_requests_of_random_lengths_through_few_pages(n):
    """The collection answers each request once, with the length that it asked for. At the end every
    page is free, and finished requests do not stay in memory.
    """
    rng = np.random.default_rng(0)
    prompts = [make_prompt(i, int(length)) for i, length in enumerate(rng.integers(1, 17, n))]
    limits = rng.integers(1, 21, n).tolist()
    greedy = dict(
        samples=1,
        sampler=Sampler(0.0),
        keep_routes=False,
        max_new_tokens=limits,
        expected=(np.array(limits) * rng.random(n)).tolist(),
    )
    job = collection(20, 6, prompts, **greedy)
    rows, in_memory = [], []
    for r in job:
        rows.append(r.row)
        if len(rows) % (n // 5) == 0:
            samples, arrays = alive()
            in_memory.append((samples - (n - len(rows)), arrays))
        assert r.response_length == limits[r.row] or (
            r.response_length < limits[r.row] and r.response[-1] == EOS
        )
    assert sorted(rows) == list(range(n))
    assert job.stats.preempted > 20 and job.batcher.slots.pages.free == 20
    # in memory: unfinished requests and at most those that finished in the same step
    samples, arrays = zip(*in_memory, strict=True)
    assert max(samples) <= 6 and max(arrays) <= min(arrays) + 30


# ---- settings and long prompts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cache_pages": 9},
            (
                "rollout.cache_pages = 9: the longest sequence, rollout.prompt_buckets.* takes 10"
                " pages of 4 tokens"
            ),
        ),
        (
            {"cache_pages": 40, "page_tokens": 3},
            "rollout.cache_bucket = 40 must be a multiple of rollout.page_tokens = 3",
        ),
        ({"page_tokens": 0}, "rollout.page_tokens = 0: must be positive"),
        ({"prefill_chunk": 0}, "rollout.prefill_chunk = 0: must be positive"),
    ],
)
def test_settings_that_cannot_work_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(ROLL, **change).validate()


def test_a_prompt_in_pieces_is_the_prompt_in_one(dense):
    """Prompts of 16 tokens are split into pieces of 5 (the last has one token), and prompts of 8
    into pieces of 5 and 3.
    """
    job = collection(config=dataclasses.replace(ROLL, prefill_chunk=5))
    rollouts = {r.row: r for r in job}
    for row, expected in dense[0].items():
        np.testing.assert_array_equal(rollouts[row].tokens, expected.tokens)
        np.testing.assert_allclose(rollouts[row].logp, expected.logp, atol=1e-5)
    np.testing.assert_array_equal(job.routes, dense[1])


def test_pieces_of_a_bfloat16_prompt_may_have_a_float32_stream():
    compute = dataclasses.replace(COMPUTE, dtype="bfloat16", float32_parts=("stream",))
    engine = Engine(MODEL, compute, dataclasses.replace(ROLL, prefill_chunk=5), EOS)
    weights = to_decode(random_params(dtype="bfloat16"))
    in_pieces = engine.prefill(
        params=weights, padded_tokens=np.arange(2, 18, dtype=np.int32), true_length=14
    )
    one_piece = Engine(MODEL, compute, ROLL, EOS).prefill(
        params=weights, padded_tokens=np.arange(2, 18, dtype=np.int32), true_length=14
    )
    np.testing.assert_allclose(in_pieces.first_entropy, one_piece.first_entropy, atol=0.05)


def test_an_insert_that_assigns_no_pages_is_refused_where_there_are_pages():
    engine = Engine(MODEL, COMPUTE, dataclasses.replace(ROLL, cache_pages=20), EOS)
    one = engine.prefill(params=LOOSE, padded_tokens=np.zeros(8, np.int32), true_length=3)
    with pytest.raises(ValueError, match="insert assigns no pages"):
        engine.insert(one, engine.init_decode_state(), 0)
