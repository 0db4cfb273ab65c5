"""The engine against the training forward: log-probs, greedy tokens and routing rows, and slots
that finish, are refilled and read from a bounded cache.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, UNSET, make_prompt, random_params

from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer
from compass_jax.model.transformer import apply as apply_model
from compass_jax.rollout import decode
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler, sample_keys
from compass_jax.training.step import forward

PARAMS = random_params()
LOOSE = to_decode(PARAMS)
ENGINE = Engine(MODEL, COMPUTE, ROLLOUT, EOS)
LENGTHS = (3, 8, 5)  # three prompts in the bucket of 8, with two samples each
PROMPTS = [make_prompt(i, n) for i, n in enumerate(LENGTHS)]
SLOTS = np.array([[4, 0], [1, 5], [3, 2]])
T = ROLLOUT.max_length
_forward = jax.jit(forward, static_argnums=(0, 5))


def keys_of(rows=3, samples=2):
    one = jnp.repeat(jnp.arange(rows, dtype=jnp.uint32), samples)
    return sample_keys(
        2, Purpose.TRAIN, one, one * 0, jnp.tile(jnp.arange(samples, dtype=jnp.uint32), rows)
    ).reshape(rows, samples, 2)


def prefill(engine=ENGINE, params=LOOSE, prompts=PROMPTS, samples=2, sampler=None, keys=None):
    tokens = np.zeros((len(prompts), 8), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt.tokens)] = prompt.tokens
    lengths = jnp.array([len(p.tokens) for p in prompts], jnp.int32)
    keys = keys_of(len(prompts), samples) if keys is None else keys
    return engine.prefill_multisampling(
        params=params,
        padded_tokens=jnp.asarray(tokens),
        true_length=lengths,
        sampler=sampler,
        rng=keys,
        num_samples=samples,
    )


def start(engine=ENGINE, params=LOOSE, sampler=None):
    return engine.bulk_insert(
        prefill(engine, params, sampler=sampler), engine.init_decode_state(), jnp.asarray(SLOTS)
    )


def finish(state, engine=ENGINE, params=LOOSE, sampler=None, read=None, prompts=PROMPTS, calls=3):
    """Decodes until no slot is live. Returns the state's fields on the host, and rows `[6 T]` of
    tokens, log-probs and entropies, built from the results of the calls.
    """
    tokens, logp, entropy = np.zeros((6, T), np.int32), *np.zeros((2, 6, T), np.float32)
    ends = np.zeros(6, int)
    for slots, prompt in zip(SLOTS, prompts, strict=True):
        tokens[slots, : len(prompt.tokens)], ends[slots] = prompt.tokens, len(prompt.tokens)
    steps, call_count, results = [], 0, None
    while results is None or bool(jnp.any(state.live)):
        if call_count == calls:
            break
        state, results = engine.generate(params, state, sampler, read=read)
        results = results.convert_to_numpy()
        steps.append(int(results.steps))
        assert steps[-1] <= ROLLOUT.tokens_per_call
        call_count += 1
        for slot in range(6):
            result = results.get_result_at_slot(slot)
            valid = result.valid[0].astype(bool)
            at = slice(ends[slot], ends[slot] + valid.sum())
            tokens[slot, at] = result.tokens[0][valid]
            logp[slot, at], entropy[slot, at] = (
                results.logp[slot][valid],
                results.entropy[slot][valid],
            )
            ends[slot] = at.stop
    state = jax.device_get(state)
    fields = dict(tokens=tokens, logp=logp, entropy=entropy, steps=steps, state=state)
    if state.routes is not None:
        fields["routes"] = state.routes.reshape(6, T, -1, MODEL.mixture.top_k)
    return SimpleNamespace(**{**state._asdict(), **fields})


@pytest.fixture(scope="module")
def done():
    """Returns all six sequences at T = 1, on the host."""
    finished = finish(start())
    assert not finished.live.any()
    return finished


def sequences(state):
    """Returns (slot, prompt length, length, tokens) for every slot."""
    order = {int(SLOTS[p, s]): LENGTHS[p] for p in range(3) for s in range(2)}
    return [
        (slot, order[slot], int(state.lengths[slot]), np.asarray(state.tokens[slot]))
        for slot in range(6)
    ]


# ---- against the training forward ----------------------------------------------------------------


def training_pass(state, temperature, replayed=True, params=PARAMS, model=None):
    lengths = np.asarray(state.lengths)
    tokens = np.where(np.arange(T) < lengths[:, None], state.tokens, 0)
    routes = jnp.asarray(state.routes) if replayed else None
    return _forward(
        model or Transformer(MODEL, COMPUTE),
        params,
        jnp.asarray(tokens),
        jnp.asarray(lengths),
        routes,
        temperature,
    )


def generated_mask(state):
    return np.stack(
        [(np.arange(T) >= first) & (np.arange(T) < n) for _, first, n, _ in sequences(state)]
    )


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_are_those_of_the_training_forward(done, temperature):
    how = Sampler(temperature)
    state = done if temperature == 1.0 else finish(start(sampler=how), sampler=how)
    logp, entropy, used, aux = training_pass(state, temperature)
    mask = generated_mask(state)
    assert mask.sum() > 30 and np.std(state.logp[mask]) > 0.3
    np.testing.assert_allclose(state.logp[mask], np.asarray(logp)[mask], atol=1e-5, rtol=0)
    np.testing.assert_allclose(state.entropy[mask], np.asarray(entropy)[mask], atol=1e-5, rtol=0)
    assert not state.logp[~mask].any() and not state.entropy[~mask].any()
    assert not np.any(aux.unset) and not np.any(aux.flips)
    np.testing.assert_array_equal(used, state.routes)


def test_every_token_that_was_an_input_owns_a_route_and_no_other(done):
    """T tokens have T - 1 routing rows, across the boundary of prompt and response. Training's live
    routes agree row by row, so that no row is shifted.
    """
    for slot, _, n, _ in sequences(done):
        rows = done.routes[slot]
        is_set = rows != UNSET
        np.testing.assert_array_equal(
            is_set, np.broadcast_to((np.arange(T) < n - 1)[:, None, None], rows.shape)
        )
        ids = rows[: n - 1].astype(int)
        assert ids.max() < MODEL.moe.experts and np.all(ids[..., 0] != ids[..., 1])
    for layer in range(2):  # unwritten routes would be expert 0 everywhere
        assert len(np.unique(done.routes[:, :, layer])) > MODEL.moe.experts // 2 + 1
    np.testing.assert_array_equal(training_pass(done, 1.0, replayed=False)[2], done.routes)


def test_greedy_tokens_are_the_argmax_of_a_plain_forward():
    state = finish(start(sampler=Sampler(0.0)), sampler=Sampler(0.0))
    positions = np.broadcast_to(np.arange(T, dtype=np.int32), (6, T))
    mask = positions < state.lengths[:, None]

    @jax.jit
    def plain(params, tokens, positions, mask):
        return logits_of(
            apply_model(Transformer(MODEL, COMPUTE), params, tokens, positions, mask=mask).hidden,
            head_weights(params),
        )

    best = np.argmax(plain(PARAMS, state.tokens, positions, mask), axis=-1)
    for slot, first, n, tokens in sequences(state):
        np.testing.assert_array_equal(tokens[first:n], best[slot, first - 1 : n - 1])
    np.testing.assert_array_equal(state.tokens[4], state.tokens[0])  # two samples of one prompt
    assert len({tuple(state.tokens[s][:16]) for s in (0, 1, 2)}) == 3


def test_a_dense_model_has_no_routes():
    model = dataclasses.replace(MODEL, family="qwen3", moe=None, layers=1)
    params = random_params(model)
    engine = Engine(model, COMPUTE, ROLLOUT, EOS)
    state = finish(start(engine, to_decode(params)), engine, to_decode(params))
    assert state.routes is None and engine.new_routes(3) is None
    expected = training_pass(state, 1.0, False, params, Transformer(model, COMPUTE))[0]
    mask = generated_mask(state)
    np.testing.assert_allclose(state.logp[mask], np.asarray(expected)[mask], atol=1e-5, rtol=0)


# ---- when generation stops -----------------------------------------------------------------------


def test_a_sequence_ends_at_its_first_end_token_or_its_limit(done):
    ends = set()
    for _, first, n, tokens in sequences(done):
        response = tokens[first:n]
        assert EOS not in response[:-1]
        ends.add("eos" if response[-1] == EOS else "limit")
        assert response[-1] == EOS or len(response) == ROLLOUT.max_new_tokens
    assert ends == {"eos", "limit"} and not done.live.any()


def cut(state, extra):
    """Returns the state with slot i limited to extra[i] more tokens."""
    return state._replace(limits=state.lengths + jnp.asarray(extra, jnp.int32))


@pytest.mark.parametrize(
    ("free_slots", "expected"), [(None, 4), (1, 1), (2, 2), (3, 3), (5, 4), (6, 4)]
)
def test_a_call_stops_when_enough_slots_are_free(free_slots, expected):
    """Decoding is greedy without an end token in four steps, so that limits alone free slots after
    1, 2, 3 and 3 steps, and slots 4 and 5 continue.
    """
    state = start(sampler=Sampler(0.0))
    state = cut(state, [1, 2, 3, 3, 9, 9])._replace(live=jnp.ones(6, bool))
    before = np.asarray(state.lengths)
    state, results = ENGINE.generate(LOOSE, state, Sampler(0.0), wanted_free=free_slots)
    (m, _), n = results.valid_idx, results.length_idx[0]
    assert EOS not in np.asarray(results.data[:, :m])[np.asarray(results.data[:, m:n]) == 1]
    assert int(results.steps) == expected
    np.testing.assert_array_equal(
        np.asarray(state.lengths) - before, np.minimum([1, 2, 3, 3, 9, 9], expected)
    )
    np.testing.assert_array_equal(state.live, np.array([1, 2, 3, 3, 9, 9]) > expected)


def test_a_call_stops_when_no_slot_is_live_and_takes_no_step_on_an_empty_state():
    state, results = ENGINE.generate(
        LOOSE, cut(start(sampler=Sampler(0.0)), [2, 1, 2, 1, 1, 2]), Sampler(0.0)
    )
    assert int(results.steps) == 2 and not np.any(state.live)
    before = jax.device_get(state)
    after, results = ENGINE.generate(LOOSE, state, Sampler(0.0))
    assert int(results.steps) == 0
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), before)


def test_finished_slots_are_not_dispatched(monkeypatch):
    """The mask that the model gets in each decoding step contains only the live slots."""
    masks = []

    def recording(*args, mask, **kwargs):
        jax.debug.callback(lambda m: masks.append(np.asarray(m)[:, 0]), mask, ordered=True)
        return apply_model(*args, mask=mask, **kwargs)

    monkeypatch.setattr(decode, "apply", recording)
    state = cut(start(sampler=Sampler(0.0)), [1, 2, 3, 3, 9, 9])
    state = state._replace(live=state.live.at[5].set(False))
    Engine._generate.__wrapped__(ENGINE, LOOSE, state, jnp.int32(7), Sampler(0.0), None)
    jax.effects_barrier()
    np.testing.assert_array_equal(masks, [np.array([1, 2, 3, 3, 9, 0]) > step for step in range(4)])


def test_a_freed_slot_stops_and_disturbs_nobody(done):
    state = finish(ENGINE.free_resource(jnp.int32(1), start()))
    assert int(state.lengths[1]) == LENGTHS[1] + 1
    for slot, _, n, tokens in sequences(done):
        if slot != 1:
            np.testing.assert_array_equal(np.asarray(state.tokens[slot])[:n], tokens[:n])


# ---- slots ---------------------------------------------------------------------------------------


def test_one_prefill_in_all_slots_of_a_group_equals_prefills_of_their_own():
    group = ENGINE.bulk_insert(prefill(), ENGINE.init_decode_state(), jnp.asarray(SLOTS))
    single = ENGINE.init_decode_state()
    for p in range(3):
        for s in range(2):
            alone = prefill(
                prompts=PROMPTS[p : p + 1], samples=1, keys=keys_of()[p : p + 1, s : s + 1]
            )
            single = ENGINE.insert(alone, single, int(SLOTS[p, s]))
    for name in ("token", "routes", "lengths", "limits", "keys", "live", "unreported"):
        np.testing.assert_array_equal(getattr(group, name), getattr(single, name), err_msg=name)
    for a, b in zip(
        jax.tree.leaves((group.first_logp, group.first_entropy, group.cache)),
        jax.tree.leaves((single.first_logp, single.first_entropy, single.cache)),
        strict=True,
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)
    assert len(np.unique(np.asarray(group.keys), axis=0)) == 6


def test_a_reused_slot_is_as_good_as_a_fresh_one(done):
    """Slots that held sequences of 20 tokens are reused for shorter ones, and no token, log-prob or
    route of the old ones remains.
    """
    short = [make_prompt(50 + i, 2) for i in range(3)]
    longest = {int(s): n for s, _, n, _ in sequences(done)}
    limit = 4

    def second(state):
        state = ENGINE.bulk_insert(prefill(prompts=short), state, jnp.asarray(SLOTS))
        return finish(state._replace(limits=jnp.full(6, limit, jnp.int32)), prompts=short)

    fresh, reused = second(ENGINE.init_decode_state()), second(jax.device_put(done.state))
    assert max(longest.values()) > 15 and fresh.lengths.max() <= limit
    for name in ("lengths", "logp", "entropy", "routes", "tokens"):  # past the end too
        np.testing.assert_array_equal(getattr(reused, name), getattr(fresh, name), err_msg=name)


def test_reading_a_bounded_part_of_the_cache_changes_nothing():
    full, part = finish(start(), read=None, calls=1), finish(start(), read=16, calls=1)
    assert T == 32 and int(np.max(part.lengths)) <= 16
    for name in ("tokens", "routes", "lengths", "live"):
        np.testing.assert_array_equal(getattr(part, name), getattr(full, name), err_msg=name)
    np.testing.assert_allclose(part.logp, full.logp, atol=1e-5)


def test_harvest_copies_what_was_asked_for_and_drops_rows_past_the_store(done):
    store = ENGINE.new_routes(4)
    assert store.shape == (4, T, 2, 2) and np.all(np.asarray(store) == UNSET)
    state = jax.device_put(done.state)
    store = ENGINE.harvest(state, store, jnp.array([3, 0, 1]), jnp.array([2, 4, 0]))
    np.testing.assert_array_equal(np.asarray(store)[[2, 0]], done.routes[[3, 1]])
    assert np.all(np.asarray(store)[[1, 3]] == UNSET)


SCANNED = dataclasses.replace(COMPUTE, scan_decode=True)


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param({}, id="plain"),
        pytest.param({"prefill_chunk": 4}, id="in pieces"),
        pytest.param({"kv_quantize": "int8"}, id="8-bit keys", marks=pytest.mark.slow),
    ],
)
def test_layers_in_a_scan_sample_what_unrolled_layers_do(rollout):
    """The engine with compute.scan_decode gives the same tokens, routes and log-probs from stacked
    weights and caches. The model has three repeats of a dense and an MoE layer.
    """
    moe = dataclasses.replace(MODEL.moe, dense_layers=(), sparse_step=2)
    model, config = (
        dataclasses.replace(MODEL, layers=6, moe=moe),
        dataclasses.replace(ROLLOUT, **rollout),
    )
    weights = random_params(model)
    states = []
    for compute in (COMPUTE, SCANNED):
        engine = Engine(model, compute, config, EOS)
        params = to_decode(weights, layout=engine.layout)
        states.append(finish(start(engine, params), engine, params))
    unrolled, scanned = states
    np.testing.assert_array_equal(scanned.tokens, unrolled.tokens)
    np.testing.assert_array_equal(scanned.routes, unrolled.routes)
    np.testing.assert_allclose(scanned.logp, unrolled.logp, atol=2e-6)
    assert [x.shape[0] for x in jax.tree.leaves(scanned.cache)] == [3] * len(
        jax.tree.leaves(scanned.cache)
    ) and len(unrolled.cache) == 6
