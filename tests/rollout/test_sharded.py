"""The rollout over meshes of eight simulated devices: every mesh gives the tokens, log-probs and
routes of one device.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import EOS, make_prompt, random_params

from compass_jax.apps.plan.collectives import collectives, total_bytes
from compass_jax.base.records import Draft
from compass_jax.config import (
    ComputeConfig,
    ConfigError,
    MeshConfig,
    ModelConfig,
    MoEConfig,
    RolloutConfig,
)
from compass_jax.devices.sharding import AXES, Placement, make_mesh
from compass_jax.model.params import place
from compass_jax.model.quantize import Quantized
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.draft_engine import engine_for
from compass_jax.rollout.drafts import Coupled
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.weights.sync import sync_weights

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=40,
    hidden=32,
    layers=3,
    heads=8,
    kv_heads=8,
    head_dim=8,
    ffn=32,
    rope_theta=100.0,
    moe=MoEConfig(experts=8, top_k=2, ffn=16, dense_layers=(1,)),
)
ROLLOUT = RolloutConfig(
    slots=8, prompt_buckets=(8, 16), max_new_tokens=10, tokens_per_call=4, cache_bucket=16
)
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9, 2, 5, 12))]
SAMPLES = 3
PARAMS = random_params(MODEL)
ALONE = [{axis: 8} for axis in AXES]
PAIRS = [{a: 2, b: 4} for a, b in itertools.combinations(AXES, 2)]
QUICK = [{"expert": 2, "tensor": 4}]
OPTIONS = {
    "plain": ({}, "off"),
    "pages, 8-bit weights, keys and values": (
        {"cache_pages": 20, "page_tokens": 8, "kv_quantize": "int8", "quantize": "int8"},
        "int8",
    ),
}


def named(mesh):
    return "-".join(f"{axis}{n}" for axis, n in mesh.items())


def collect(
    mesh, options="plain", devices=None, prompts=PROMPTS, drafts=None, answers=None, **more
):
    """Returns (rollouts by row, the routes on the host, the decode weights, the collection)."""
    changes, quantize = OPTIONS[options]
    rollout, compute = dataclasses.replace(ROLLOUT, **changes), ComputeConfig(scan_layers=False)
    if mesh is None:
        placement, decode = None, sync_weights(PARAMS, MODEL, "float32", quantize, stored=True)[0]
    else:
        placement = Placement(make_mesh(MeshConfig(**mesh), devices), "decode")
        decode = sync_weights(
            place(PARAMS, MODEL, placement),
            MODEL,
            "float32",
            quantize,
            stored=True,
            placement=placement,
        )[0]
    find = (answers or {}).get
    engine = engine_for(drafts, MODEL, compute, rollout, EOS, placement, find=find)
    job = Collection(engine, decode, prompts, SAMPLES, Purpose.TRAIN, 0, **more)
    rollouts = {r.row: r for r in job}
    return rollouts, np.asarray(job.routes), decode, job


@pytest.fixture(scope="module")
def one_device():
    """Returns a cached function from options to the collection on one device."""
    return functools.cache(functools.partial(collect, None))


def test_fewer_pairs_than_devices_that_share_the_experts(monkeypatch):
    """One slot has two pairs of token and expert, for eight devices with an expert each."""
    monkeypatch.setitem(OPTIONS, "one slot", ({"slots": 1}, "off"))
    actual, expected = (
        collect(mesh, "one slot", prompts=PROMPTS[:1])[0] for mesh in ({"expert": 8}, None)
    )
    for row, rollout in expected.items():
        np.testing.assert_array_equal(actual[row].tokens, rollout.tokens)


SLOW = [
    pytest.param(mesh, marks=pytest.mark.slow) for mesh in [*ALONE, *PAIRS] if mesh not in QUICK
]


@pytest.mark.parametrize("mesh", [*QUICK, *SLOW], ids=named)
def test_the_rollout_is_that_of_one_device(one_device, mesh):
    actual, store, decode, _ = collect(mesh)
    expected, routes, *_ = one_device("plain")
    assert sorted(actual) == sorted(expected) == list(range(len(PROMPTS) * SAMPLES))
    for row, rollout in actual.items():
        np.testing.assert_array_equal(rollout.tokens, expected[row].tokens)
        np.testing.assert_allclose(rollout.logp, expected[row].logp, atol=1e-5)
        np.testing.assert_allclose(rollout.entropy, expected[row].entropy, atol=1e-5)
    np.testing.assert_array_equal(store, routes)
    # experts and heads are sharded over their axes; the hidden axis is not split
    down = decode["run_0"][0]["layer_0"]["mlp"]["down"]
    shard = down.addressable_shards[0].data.shape
    assert shard == (8 // mesh.get("expert", 1), 16 // mesh.get("tensor", 1), 32)


@pytest.mark.parametrize("mesh", [{"fsdp": 2, "tensor": 4}], ids=named)
def test_drafts_over_a_mesh_are_accepted_as_on_one_device(mesh):
    """The drafts have one wrong token each, at different positions."""
    drafts, next_visit, answers = Coupled(), [x.at_visit(1) for x in PROMPTS], {}
    for row, r in collect(None, drafts=drafts)[0].items():
        tokens = r.response.copy()
        tokens[row % len(tokens)] ^= 1
        answers[r.prompt.at_visit(1).sample(r.sample)] = Draft(tokens, r.logp[-len(tokens) :])
    options = {"prompts": next_visit, "drafts": drafts, "answers": answers}
    expected, routes, *_ = collect(None, **options)
    actual, store, *_ = collect(mesh, **options)
    for row, rollout in actual.items():
        np.testing.assert_array_equal(rollout.tokens, expected[row].tokens)
        np.testing.assert_allclose(rollout.logp, expected[row].logp, atol=1e-5)
        assert rollout.drafted == expected[row].drafted == row % rollout.draft_tokens
    np.testing.assert_array_equal(store, routes)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tensor": 2, "expert": 4}, {"fsdp": 4, "tensor": 2}], ids=named)
def test_pages_and_stored_eight_bit_weights_over_a_mesh(one_device, mesh):
    name = "pages, 8-bit weights, keys and values"
    actual, _, decode, job = collect(mesh, name)
    expected = one_device(name)[0]
    assert job.stats.preempted > 0 and isinstance(
        decode["run_0"][0]["layer_0"]["attention"]["q"], Quantized
    )
    # each group of two slots has separate pages
    assert {
        x.addressable_shards[0].data.shape[0] for x in jax.tree.leaves(job.batcher._state.cache)
    } == {5}
    equal = [np.array_equal(actual[row].tokens, expected[row].tokens) for row in expected]
    # 8-bit keys may round differently
    assert sorted(actual) == sorted(expected) and np.mean(equal) > 0.9
    for row in np.flatnonzero(equal):
        np.testing.assert_allclose(actual[row].logp, expected[row].logp, atol=5e-3)


@pytest.mark.parametrize("pages", [18, 12])
def test_pages_that_the_groups_of_slots_cannot_have_alike_are_refused(pages):
    placement = Placement(make_mesh(MeshConfig(fsdp=4, tensor=2)), "decode")
    rollout = dataclasses.replace(ROLLOUT, cache_pages=pages, page_tokens=8)
    with pytest.raises(
        ConfigError,
        match=(
            rf"rollout.cache_pages = {pages}: 4 groups of slots .* must be a multiple of 4, and at"
            r" least 16"
        ),
    ):
        Engine(MODEL, ComputeConfig(), rollout, EOS, placement)


@pytest.mark.parametrize("mesh", [{"fsdp": 4, "tensor": 2}, {"expert": 2, "context": 4}], ids=named)
def test_no_device_ever_has_all_of_the_routes_that_are_copied(mesh):
    placement = Placement(make_mesh(MeshConfig(**mesh)), "decode")
    engine = Engine(MODEL, ComputeConfig(), ROLLOUT, EOS, placement)
    parts, rng = 8 // mesh.get("tensor", 1), np.random.default_rng(0)
    routes = rng.integers(0, 8, (64, *engine.new_routes(64).shape[1:]), np.uint8)
    store = engine.adopt(jnp.asarray(routes))
    rows = rng.integers(0, 80, 48).astype(np.int32)
    expected = np.full((48, *routes.shape[1:]), 255, np.uint8)
    expected[rows < 64] = routes[rows[rows < 64]]
    copied = engine.taken_routes(store, jnp.asarray(rows))
    np.testing.assert_array_equal(copied, expected)
    assert copied.addressable_shards[0].data.shape[0] == 48 // parts
    cost = Engine.taken_routes.lower(engine, store, jnp.asarray(rows)).compile().memory_analysis()
    total = copied.nbytes
    assert cost.output_size_in_bytes <= total / parts + 1024
    assert cost.temp_size_in_bytes < total / 2


def test_a_mesh_of_other_devices_gets_its_weights_from_the_training():
    """Training's parameters are on devices 0 to 3 and the rollout runs on 4 to 7. No array of the
    rollout is on a training device.
    """
    train = Placement(make_mesh(MeshConfig(fsdp=2, expert=2)))
    placement = Placement(make_mesh(MeshConfig(expert=2, tensor=2), jax.devices()[4:]), "decode")
    decode, metrics = sync_weights(
        place(PARAMS, MODEL, train), MODEL, "float32", placement=placement
    )
    assert {d.id for x in jax.tree.leaves(decode) for d in x.sharding.device_set} == {4, 5, 6, 7}
    assert metrics["handover/bytes"] == 4 * sum(x.size for x in jax.tree.leaves(PARAMS))
    job = Collection(
        Engine(MODEL, ComputeConfig(scan_layers=False), ROLLOUT, EOS, placement),
        decode,
        PROMPTS,
        SAMPLES,
        Purpose.TRAIN,
        0,
    )
    actual, expected = {r.row: r.tokens.tolist() for r in job}, collect(None)[0]
    assert actual == {row: r.tokens.tolist() for row, r in expected.items()}
    assert {d.id for d in job.routes.sharding.device_set} == {4, 5, 6, 7}


# a vocabulary so large that no other array is as large as the LM head
LARGE = dataclasses.replace(
    MODEL, vocab_size=4096, layers=1, moe=dataclasses.replace(MODEL.moe, dense_layers=())
)
SAMPLERS = {
    "plain": Sampler(),
    "greedy": Sampler(0.0),
    "top-k": Sampler(0.7, top_k=20),
    "top-p": Sampler(1.0, top_p=0.8),
}


def engine_and_params(params, model, mesh):
    compute = ComputeConfig(scan_layers=False)
    placement = Placement(make_mesh(MeshConfig(**mesh)), "decode") if mesh else None
    placed = place(params, model, placement)
    decode = sync_weights(placed, model, "float32", placement=placement)[0]
    return Engine(model, compute, ROLLOUT, EOS, placement, known=model.vocab_size - 3), decode


@pytest.mark.parametrize("sampler", ["plain", "top-p"])
@pytest.mark.parametrize("mesh", [{"tensor": 8}, {"fsdp": 2, "expert": 2, "tensor": 2}], ids=named)
def test_no_token_step_gathers_the_lm_head(mesh, sampler):
    """A device sends less than half of the head in a token step or a prefill."""
    engine, params = engine_and_params(random_params(LARGE), LARGE, mesh)
    tokens, lengths = jnp.zeros((2, 8), jnp.int32), jnp.full((2,), 3, jnp.int32)
    keys, how = jnp.zeros((2, 3, 2), jnp.uint32), SAMPLERS[sampler]
    programs = [
        Engine._generate.lower(engine, params, engine.init_decode_state(), jnp.int32(9), how, None),
        Engine._prefill.lower(engine, params, tokens, lengths, keys, how, None, None),
    ]
    for program in programs:
        sent = total_bytes(collectives(program.compile().as_text()).values())
        assert 0 < sent < 4 * LARGE.hidden * LARGE.vocab_size / 2


@pytest.mark.parametrize(
    "sampler",
    ["top-p", *(pytest.param(x, marks=pytest.mark.slow) for x in SAMPLERS if x != "top-p")],
)
@pytest.mark.parametrize("mesh", [{"fsdp": 2, "expert": 2, "tensor": 2}], ids=named)
def test_logits_in_parts_give_the_draws_of_one_device(mesh, sampler):
    results = []
    for where in (None, mesh):
        job = Collection(
            *engine_and_params(random_params(LARGE), LARGE, where),
            PROMPTS,
            SAMPLES,
            Purpose.TRAIN,
            0,
            sampler=SAMPLERS[sampler],
        )
        results.append({r.row: r for r in job})
    alone, split = results
    assert len({tuple(r.response) for r in alone.values()}) > len(PROMPTS) - 1
    for row, rollout in alone.items():
        np.testing.assert_array_equal(split[row].tokens, rollout.tokens)
        np.testing.assert_allclose(split[row].logp, rollout.logp, atol=1e-5)
