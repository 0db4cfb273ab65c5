"""Turns that continue in the slot that holds their keys: the samples of a whole prefill, of which
only the new tokens are computed.
"""

import dataclasses

import jax
import numpy as np
import pytest
from evolve import evolve
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params
from tiny_run import tiny_run

from compass_jax.base.programs import Program
from compass_jax.base.records import EPISODE
from compass_jax.config import ConfigError, MeshConfig, RolloutConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model import kernels
from compass_jax.model.params import place, to_decode
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.programs import EngineWorkload, sampling_programs
from compass_jax.rollout.request import Request
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose
from compass_jax.training.episodes import check_episodes
from compass_jax.weights.sync import sync_weights

PARAMS = random_params()
ROLL = dataclasses.replace(
    ROLLOUT, slots=2, prompt_buckets=(32,), max_new_tokens=120, cache_bucket=64
)
GIVEN = [9, 8, 7]
PROMPT, TURN = 5, 4  # tokens of a first request, and the most of a turn


def batcher(hold=True, mesh=None, attention="portable", **changes):
    """Returns a batcher of episodes with its route buffer of four rows."""
    placement = None if mesh is None else Placement(make_mesh(MeshConfig(**mesh)), "decode")
    rollout = dataclasses.replace(ROLL, hold_sessions=hold, **changes)
    compute = dataclasses.replace(COMPUTE, attention=attention)
    engine = Engine(MODEL, compute, rollout, EOS, placement)
    params = to_decode(PARAMS)
    if placement is not None:
        sizes = {"layout": engine.layout, "placement": placement}
        params = sync_weights(place(PARAMS, MODEL, placement), MODEL, "float32", **sizes)[0]
    buffer = RouteBuffer(engine.new_routes, engine.taken_routes, 1, 8)
    buffer.allocate()
    return engine.batcher(params, Purpose.TRAIN, 0, version=3, routes=buffer, streams=True)


def run(batch, *requests):
    """Runs requests to their ends."""
    batch.add([x for x in requests if x.has_tokens])
    for request in requests:
        if not request.has_tokens:
            batch.add([request])
    while batch.busy:
        batch.step()


def first(n):
    """Returns the first turn of episode n."""
    prompt = dataclasses.replace(make_prompt(n, PROMPT), turns=EPISODE)
    return Request.of(prompt, 0, n, PROMPT + TURN, 3)


def following(request, given=GIVEN):
    """Returns the turn after a request's, with the given tokens between."""
    was = request.rollout((EOS,))
    more = len(given)
    arrays = {name: np.pad(getattr(was, name), (0, more)) for name in ("logp", "entropy")}
    tokens = np.append(was.tokens, np.array(given, np.int32))
    versions = np.pad(was.versions, (0, more), constant_values=-1)
    was = dataclasses.replace(was, tokens=tokens, versions=versions, **arrays)
    return Request.resumed(was, len(tokens) + TURN)


def play(batch, episodes=2, turns=4):
    """Plays episodes turn by turn; returns their last requests."""
    live = [first(n) for n in range(episodes)]
    run(batch, *live)
    for _ in range(turns - 1):
        live = [following(x) for x in live]
        run(batch, *live)
    return live


def assert_equal_samples(one, two):
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.logp, two.logp, atol=2e-5)
    np.testing.assert_array_equal(one.columns.versions, two.columns.versions)


def assert_equal(batch, other, requests, expected):
    for one, two in zip(requests, expected, strict=True):
        assert_equal_samples(one, two)
    np.testing.assert_array_equal(batch.routes.rows, other.routes.rows)


@pytest.fixture(scope="module")
def whole():
    """A batcher without held slots, and the episodes that it played."""
    batch = batcher(hold=False)
    return batch, play(batch)


@pytest.mark.parametrize(
    ("mesh", "changes"),
    [(None, {}), ({"fsdp": 2, "tensor": 2}, {}), (None, {"kv_quantize": "int8"})],
    ids=["one device", "mesh", "8-bit keys"],
)
def test_the_samples_are_those_of_whole_prefills_and_new_tokens_alone_are_computed(
    whole, mesh, changes
):
    other, expected = whole
    if changes:
        other = batcher(hold=False, **changes)
        expected = play(other)
    batch = batcher(mesh=mesh, **changes)
    requests = play(batch)
    assert_equal(batch, other, requests, expected)
    # of each later turn: what was given, and the token before, which was no input yet
    assert batch.stats.prefill_tokens == 2 * PROMPT + 2 * 3 * (len(GIVEN) + 1)
    assert other.stats.prefill_tokens > 2 * batch.stats.prefill_tokens
    assert batch.stats.prefills == other.stats.prefills


@pytest.mark.parametrize(
    ("given", "attention", "extends"),
    [(14, "portable", True), (60, "portable", True), (60, "cudnn", True), (50, "cudnn", False)],
)
def test_turns_with_many_given_tokens(given, attention, extends, monkeypatch):
    """Attention takes tokens that fill their cache for a whole sequence: those are prefilled."""
    monkeypatch.setattr(kernels, "INTERPRET", True)
    tokens, ends = [3 + i % 30 for i in range(given)], []
    for hold in (True, False):
        batch = batcher(hold, attention=attention)
        one = first(0)
        run(batch, one)
        before, two = batch.stats.prefill_tokens, following(one, tokens)
        run(batch, two)
        ends.append(two)
        computed = batch.stats.prefill_tokens - before
        assert computed == (given + 1 if hold and extends else len(one.tokens) + given)
    assert_equal_samples(*ends)


def test_the_slot_of_an_ended_episode_is_free():
    batch = batcher()
    one, other = first(0), first(1)
    run(batch, one)
    run(batch, other)
    assert not batch.slots.free()
    batch.forget({(other.prompt.key, 0)})
    assert len(batch.slots.free()) == 1
    run(batch, third := first(2))
    before = batch.stats.prefill_tokens
    run(batch, following(one))  # its keys are there
    assert batch.stats.prefill_tokens - before == len(GIVEN) + 1 and third.is_finished


@pytest.mark.parametrize("turns", [2, 4, 8])
def test_the_computed_tokens_are_linear_in_the_turns(turns):
    batch = batcher()
    play(batch, episodes=1, turns=turns)
    assert batch.stats.prefill_tokens == PROMPT + (turns - 1) * (len(GIVEN) + 1)


def test_the_slot_that_waited_longest_is_given_up():
    batch, other = batcher(), batcher(hold=False)
    requests, expected = [], []
    for each, to in ((batch, requests), (other, expected)):
        old, kept, new = first(0), first(1), first(2)
        for request in (old, kept, new):
            run(each, request)  # the third needs the slot of the first
        before = each.stats.prefill_tokens
        later = [following(kept), following(old)]
        run(each, later[0])
        middle = each.stats.prefill_tokens
        run(each, later[1])
        to += [*later, new]
        if each is batch:
            assert middle - before == len(GIVEN) + 1
            assert each.stats.prefill_tokens - middle == len(later[1].prompt.tokens) + len(
                old.tokens
            ) - PROMPT + len(GIVEN)
    assert_equal(batch, other, requests, expected)


def test_new_weights_and_another_history_hold_nothing():
    batch = batcher()
    one = first(0)
    run(batch, one)
    changed = following(one)
    tokens = changed.tokens.copy()
    tokens[PROMPT] ^= 1  # of the reply
    changed.put(changed.columns._replace(tokens=tokens))
    before = batch.stats.prefill_tokens
    run(batch, changed)
    assert batch.stats.prefill_tokens - before == len(one.tokens) + len(GIVEN)
    batch.renew(batch.params, 4)
    again, before = following(changed), batch.stats.prefill_tokens
    run(batch, again)
    assert batch.stats.prefill_tokens - before == len(changed.tokens) + len(GIVEN)


def test_plain_prompts_hold_no_slot():
    batch = batcher()
    plain = Request.of(make_prompt(0, PROMPT), 0, 0, PROMPT + TURN, 3)
    run(batch, plain)
    assert len(batch.slots.free()) == 2
    run(batch, first(1))
    assert len(batch.slots.free()) == 1


def test_extensions_have_shapes_of_the_list_of_programs():
    batch = batcher()
    engine, used = batch.engine, set()
    real = engine.extend

    def extend(params, state, extension, sampler):
        used.add(shapes(extension))
        return real(params, state, extension, sampler)

    engine.extend = extend
    one = first(0)
    run(batch, one)
    for given in (3, 14, 50):
        one = following(one, [3 + i % 30 for i in range(given)])
        run(batch, one)
    arguments = engine, jax.eval_shape(engine.load_params, PARAMS)
    made = Program("decode params", jax.jit(lambda x: x), arguments[1:])
    use = EngineWorkload("", 1, (engine.default_sampler(),))
    listed = list(sampling_programs(engine, made, (use,)))
    results = {}
    for program in listed:
        if program.name.startswith(("slots", "extend")):
            results[program] = program.lower({made: arguments[1], **results}).out_info
    extensions = {shapes(x.arguments[3]) for x in listed if x.name == "extend"}
    assert len(used) == 2 and used <= extensions


def shapes(extension):
    """Returns shapes and types of an extension."""
    return tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(extension))


def test_settings_without_effect_are_refused():
    with pytest.raises(ConfigError, match=r"hold_sessions with .*cache_pages = 64: .* set cache_p"):
        RolloutConfig(hold_sessions=True, cache_pages=64).validate()
    config = evolve(tiny_run(), rollout={"hold_sessions": True})
    with pytest.raises(ConfigError, match=r"hold_sessions acts on episodes, and data.* none"):
        check_episodes(config.data, config.rollout, config.rl, False)
