"""The LM head's columns beyond the tokenizer's vocabulary: they have no probability and no
gradient, and are never sampled."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evolve import evolve
from tiny import COMPUTE, EOS, ROLLOUT, make_prompt, random_params
from tiny import MODEL as TINY
from tiny_run import tiny_run

from compass_jax.apps.plan.programs import known_ids
from compass_jax.config import MeshConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.logprobs import known_columns, token_logprobs
from compass_jax.model.params import place
from compass_jax.model.transformer import Transformer
from compass_jax.rl.objectives.espo import Espo, clip_range
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, RowSampling, Sampler, sample, sample_keys
from compass_jax.training import step
from compass_jax.weights.sync import sync_weights

B, T, D, V = 3, 6, 4, 16
MODEL = evolve(TINY, layers=1, moe={"dense_layers": ()})
KNOWN = 29  # out of the 40 columns of the tiny model
SAMPLERS = [
    Sampler(0.0),
    Sampler(1.0),
    Sampler(0.05),
    Sampler(1e-4),
    Sampler(50.0),
    Sampler(1.0, top_k=1),
    Sampler(1.0, top_k=39),
    Sampler(1.0, top_p=0.3),
    Sampler(2.0, top_k=35, top_p=0.999),
]


def problem(known, seed=0):
    """Returns (hidden, head, tokens). Without a mask, the columns from `known` on would win every
    draw.
    """
    rng = np.random.default_rng(seed)
    head = rng.standard_normal((D, V))
    head[:, known:] *= 40
    return 2 * rng.standard_normal((B, T, D)), head, rng.integers(0, known, (B, T)).astype(np.int32)


def reference(hidden, head, tokens, temperature, known):
    """Returns (logp, entropy) over the first `known` columns, computed by numpy in float64."""
    logits = hidden @ head[:, :known] / temperature
    logp = logits - logits.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1)
    chosen = np.take_along_axis(logp[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
    return np.pad(chosen, ((0, 0), (1, 0))), np.pad(entropy[:, :-1], ((0, 0), (1, 0)))


@pytest.mark.parametrize("known", [1, 7, 15, 16])
@pytest.mark.parametrize("chunk", [5, 100])
def test_log_probs_and_entropies_are_those_of_the_known_columns(x64, known, chunk):
    hidden, head, tokens = problem(known)
    results = token_logprobs(*map(jnp.asarray, (hidden, head, tokens)), 0.7, chunk, known=known)
    expected = reference(hidden, head, tokens, 0.7, known)
    for result, target in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, target, atol=1e-12)


@pytest.mark.parametrize("share", [0.4, 1.0])
@pytest.mark.parametrize("mesh", [None, {"tensor": 8}, {"fsdp": 2, "tensor": 4}])
def test_gradients_are_those_of_the_known_columns_and_exactly_zero_elsewhere(x64, mesh, share):
    """Over eight devices, two hold no known column at all. Tokens that are not predicted get no
    log-prob and no gradient.
    """
    rng, known = np.random.default_rng(1), 11
    probe, predicted = rng.standard_normal((4, T)), rng.random((4, T)) < share
    hidden, head, tokens = (
        jnp.asarray(np.concatenate([x, x[:1]]) if x.shape[0] == B else x) for x in problem(known)
    )
    placement = None if mesh is None else Placement(make_mesh(MeshConfig(**mesh)))

    def total(hidden, head, predicted, known=None, placement=None):
        options = (placement, known, predicted)
        return jnp.sum(probe * token_logprobs(hidden, head, tokens, 0.7, 5, *options)[0])

    differentiated = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=(3, 4))
    grads = differentiated(hidden, head, jnp.asarray(predicted), known, placement)
    probe = np.where(predicted, probe, 0)
    expected = jax.grad(total, argnums=(0, 1))(hidden, head[:, :known], None)
    np.testing.assert_allclose(grads[0], expected[0], atol=1e-12)
    np.testing.assert_allclose(grads[1][:, :known], expected[1], atol=1e-12)
    np.testing.assert_array_equal(grads[1][:, known:], 0.0)
    numbers = token_logprobs(hidden, head, tokens, 0.7, 5, placement, known, jnp.asarray(predicted))
    expected = reference(*map(np.asarray, (hidden, head, tokens)), 0.7, known)
    np.testing.assert_allclose(numbers, np.where(predicted, expected, 0), atol=1e-12)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_no_sampler_draws_an_unknown_id_however_large_its_logit(sampler):
    rng, n = np.random.default_rng(0), 400
    logits = rng.standard_normal((n, V)).astype(np.float32)
    logits[:, 9:] += np.float32(1e4)
    zero = jnp.zeros(n, jnp.uint32)
    keys = sample_keys(0, Purpose.TRAIN, jnp.arange(n, dtype=jnp.uint32), zero, zero)
    positions = jnp.zeros(n, jnp.int32)
    draw = jax.jit(sample, static_argnums=(3, 5))
    token, logp, entropy = draw(logits, keys, positions, sampler, None, 9)
    assert int(token.max()) < 9 and np.isfinite(logp).all() and np.isfinite(entropy).all()
    scaled = logits[:, :9].astype(np.float64) / (sampler.temperature or 1.0)
    expected = scaled - scaled.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, expected[np.arange(n), token], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(entropy, -(np.exp(expected) * expected).sum(-1), atol=1e-5)
    if sampler.temperature == 0:
        np.testing.assert_array_equal(token, logits[:, :9].argmax(-1))


def test_each_request_s_own_temperature_draws_known_ids_and_so_does_a_row_of_nan():
    logits = np.zeros((3, V), np.float32)
    logits[:, 9:], logits[2] = 1e4, np.nan
    args = jnp.asarray(logits), jnp.zeros((3, 2), jnp.uint32), jnp.zeros(3, jnp.int32)
    rows = RowSampling(jnp.array([0.0, 1.5, 1.0]), jnp.zeros(3, jnp.int32), jnp.ones(3))
    token = sample(*args, Sampler(per_request=True), rows, 9)[0]
    assert int(token.max()) < 9
    assert int(sample(*args, Sampler(0.0), None, 9)[0].max()) < 9


@pytest.mark.parametrize("known", [V, V + 3])
def test_a_tokenizer_that_fills_the_head_gives_the_same_program_as_before(known):
    hidden, head, tokens = (
        jnp.asarray(x, None if x.dtype == np.int32 else jnp.float32) for x in problem(V)
    )
    rows = (
        jnp.zeros((B, V)),
        jnp.zeros((B, 2), jnp.uint32),
        jnp.zeros(B, jnp.int32),
        Sampler(0.7, 3, 0.9),
        None,
    )

    def programs(known):
        trained = jax.jit(lambda *x: token_logprobs(*x, 0.7, 5, known=known)).lower(
            hidden, head, tokens
        )
        sampled = jax.jit(sample, static_argnums=(3, 5)).lower(*rows, known)
        return trained.as_text(), sampled.as_text()

    assert programs(known) == programs(None) != programs(V - 1)
    assert known_columns(head, known) is head


def heavy_params():
    """Returns the tiny model's parameters, untied, with by far the largest logits in unknown
    columns.
    """
    params = random_params(MODEL)
    return {**params, "head": params["head"].at[:, KNOWN:].multiply(300.0)}


PROMPTS = [
    dataclasses.replace(p, tokens=p.tokens % KNOWN)
    for p in (make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9, 2, 5)))
]


def collect(sampler=None, placement=None, known=KNOWN, samples=3):
    params, more = heavy_params(), {}
    if placement is not None:
        params, more = place(params, MODEL, placement), {"placement": placement}
    decode = sync_weights(params, MODEL, "float32", **more)[0]
    engine = Engine(MODEL, COMPUTE, ROLLOUT, EOS, placement, known)
    return {
        r.row: r
        for r in Collection(engine, decode, PROMPTS, samples, Purpose.TRAIN, 0, sampler=sampler)
    }


@pytest.mark.parametrize("sampler", [Sampler(0.0), Sampler(1.3, top_k=35, top_p=0.99)], ids=repr)
def test_a_rollout_has_known_tokens_alone(sampler):
    assert max(int(r.tokens.max()) for r in collect(sampler).values()) < KNOWN


def test_without_the_tokenizer_s_size_the_model_would_draw_unknown_ids():
    assert max(int(r.tokens.max()) for r in collect(known=None).values()) >= KNOWN


def test_the_rollout_over_a_mesh_is_that_of_one_device():
    placement = Placement(make_mesh(MeshConfig(tensor=2, expert=2, fsdp=2)), "decode")
    sharded, expected = collect(placement=placement), collect()
    for row, rollout in expected.items():
        np.testing.assert_array_equal(sharded[row].tokens, rollout.tokens)
        np.testing.assert_allclose(sharded[row].logp, rollout.logp, atol=2e-5)
        np.testing.assert_allclose(sharded[row].entropy, rollout.entropy, atol=2e-5)


def test_a_plan_masks_what_the_run_masks():
    config = tiny_run()
    assert known_ids(config.data, config.model) == 338 < config.model.vocab_size
    absent = evolve(config, data={"tokenizer": "not/here"})
    assert (
        known_ids(absent.data, absent.model) == config.model.vocab_size - 1
    )  # most published heads are padded


def test_training_has_the_rollout_s_log_probs_and_no_gradient_for_unknown_columns():
    rollouts = list(collect().values())
    shape = len(rollouts), max(len(r.tokens) for r in rollouts)
    tokens, logp, entropy = (
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
        np.zeros(shape, np.float32),
    )
    lengths, mask = np.array([len(r.tokens) for r in rollouts], np.int32), np.zeros(shape, bool)
    for i, r in enumerate(rollouts):
        start, end = len(r.tokens) - len(r.response), len(r.tokens)
        tokens[i, :end], mask[i, start:end] = r.tokens, True
        logp[i, start:end], entropy[i, start:end] = r.logp[start:], r.entropy[start:]
    batch = step.UpdateBatch(
        tokens=tokens,
        lengths=lengths,
        routes=None,
        mask=mask,
        old_logp=logp,
        old_entropy=entropy,
        ref_logp=None,
        advantage=np.where(mask, np.sin(np.arange(shape[1], dtype=np.float32))[None], 0).astype(
            np.float32
        ),
        weight=(mask / mask.sum()).astype(np.float32),
        entropy_group=np.where(mask, 0, -1).astype(np.int32),
    )
    model, params = Transformer(MODEL, COMPUTE, known=KNOWN), heavy_params()
    scored, spread, _, _ = step.score(model, params, tokens, lengths, None, temperature=1.0)
    np.testing.assert_allclose(np.asarray(scored)[mask], logp[mask], atol=3e-5)
    np.testing.assert_allclose(np.asarray(spread)[mask], entropy[mask], atol=3e-5)
    espo = Espo(quantiles=())
    grads, metrics, _ = step.gradients(
        model, params, batch, jnp.float32(1), objective=espo, temperature=1.0
    )
    np.testing.assert_array_equal(grads["head"][:, KNOWN:], 0.0)
    assert np.abs(np.asarray(grads["head"])[:, :KNOWN]).max() > 0
    member = batch.mask[:, :, None]
    expected, _ = clip_range(
        jnp.asarray(entropy), jnp.asarray(member), espo.alpha, espo.floor, KNOWN
    )
    total, count = metrics["espo/group_0/epsilon"]
    # ln v, the largest entropy, counts only known columns.
    np.testing.assert_allclose(total / count, np.mean(expected), rtol=1e-6)
    weight = (mask / mask.sum()).astype(np.float32)
    tuned, _ = step.sft_gradients(model, params, tokens, lengths, weight, jnp.float32(1), 0.0)
    np.testing.assert_array_equal(tuned["head"][:, KNOWN:], 0.0)
