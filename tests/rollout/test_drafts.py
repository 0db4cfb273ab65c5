"""Drafts: each variant's accepted prefix against a plain reference, answers with coupled drafts
against answers without, and the distribution that each variant samples from.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, UNSET, make_prompt, random_params

from compass_jax.base.records import Draft
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer
from compass_jax.model.transformer import apply as apply_model
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.draft_engine import engine_for
from compass_jax.rollout.drafts import Coupled, DraftInputs, DraftRows, Lenient
from compass_jax.rollout.sampling import Purpose, Sampler, sample_keys
from compass_jax.rollout.stats import RolloutStats
from compass_jax.training.step import forward

ROLL = dataclasses.replace(ROLLOUT, cache_bucket=32, prefill_chunk=16)
PAGED = dataclasses.replace(ROLL, cache_pages=20, page_tokens=8)
SAMPLES = 3
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9, 2, 5, 12))]
AGAIN = [prompt.at_visit(1) for prompt in PROMPTS]
OLD = random_params()


def perturbed(share):
    """Returns the old parameters plus `share` times other random ones."""
    return jax.tree.map(lambda x, y: x + share * y, OLD, random_params(seed=1))


NEW, FAR = perturbed(0.06), perturbed(0.5)
_forward = jax.jit(forward, static_argnums=(0, 5))


def collect(params, drafts, prompts=PROMPTS, answers=None, config=ROLL, sampler=None, **options):
    """Returns the rollouts by sample index and prompt id, the store of routes, and the counters."""
    job = Collection(
        engine_for(drafts, MODEL, COMPUTE, config, EOS, find=(answers or {}).get),
        to_decode(params),
        prompts,
        SAMPLES,
        Purpose.TRAIN,
        0,
        policy_version=4,
        sampler=sampler,
        **options,
    )
    rollouts = {(r.prompt.id, r.sample): r for r in job}
    assert len(rollouts) == len(prompts) * SAMPLES
    return rollouts, np.asarray(job.routes), job.stats


def drafts_of(rollouts):
    """Returns the answers as the drafts of the next visit."""
    return {
        r.prompt.at_visit(r.prompt.visit + 1).sample(r.sample): Draft(
            r.response, r.logp[len(r.prompt.tokens) :]
        )
        for r in rollouts.values()
    }


# ---- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize("lenience", [1.0, 1.65, 40.0])
def test_lenient_accepts_with_the_ratio_of_probabilities(lenience):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), 500)[:, 0], rng.dirichlet(np.ones(5), 500)[:, 0]
    u = rng.random(500)
    expected = u <= np.minimum(1.0, lenience * p / q)
    tokens = jnp.zeros(500, jnp.int32)
    numbers = (jnp.asarray(x, jnp.float32) for x in (np.log(p), np.log(q), u))
    accepted = Lenient(lenience=lenience).accepted(DraftInputs(tokens, tokens + 1, *numbers))
    np.testing.assert_array_equal(accepted, expected)
    assert 0.2 < expected.mean() < 1


def test_coupled_accepts_what_the_sampler_draws_and_shares_noise_between_visits():
    token, drawn = jnp.array([3, 4, 5]), jnp.array([3, 5, 5])
    zeros = jnp.zeros(3)
    accepted = Coupled().accepted(DraftInputs(token, drawn, zeros - 9, zeros, zeros + 0.9))
    assert accepted.tolist() == [True, False, True]
    assert [Coupled(refresh=3).noise_visit(v) for v in range(7)] == [0, 0, 0, 1, 1, 1, 2]
    assert Lenient().noise_visit(5) is None


# ---- one pass over drafts ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def first_visit():
    """Returns the answers of the old policy, drawn with the noise of coupled drafts."""
    return collect(OLD, Coupled())


def scored(params, rows, sampler, drafts, config=ROLL):
    engine = engine_for(drafts, MODEL, COMPUTE, config, EOS)
    return jax.device_get(engine.prefill_drafts(to_decode(params), rows, sampler, drafts))


def rows_of(rollouts, size):
    """Returns the drafts of `rollouts` as rows of `size` tokens, with a row of padding."""
    shape = len(rollouts) + 1, size
    tokens, logp = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    lengths, prompts = np.zeros((2, shape[0]), np.int32)
    for i, r in enumerate(rollouts):
        lengths[i], prompts[i] = len(r.tokens), len(r.prompt.tokens)
        tokens[i, : lengths[i]], logp[i, : lengths[i]] = r.tokens, r.logp
    ids = np.array([*(r.prompt.id for r in rollouts), 0], np.uint32)
    each = np.array([*(r.sample for r in rollouts), 0], np.uint32)
    visits = np.zeros_like(ids)
    keys = sample_keys(0, Purpose.COUPLED, ids, visits, each)
    accept_keys = sample_keys(0, Purpose.ACCEPT, ids, visits + 1, each)
    return DraftRows(*map(jnp.asarray, (tokens, lengths, prompts, logp)), keys, accept_keys)


def reference(params, rows, temperature):
    """Returns the current policy's logits / T of token t at [:, t], in float64, from a plain
    forward.
    """

    @jax.jit
    def plain(params, tokens, mask):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        model = Transformer(MODEL, COMPUTE)
        hidden = apply_model(model, params, tokens, positions, mask=mask).hidden
        return logits_of(hidden, head_weights(params))

    mask = jnp.arange(rows.tokens.shape[1])[None] < rows.lengths[:, None]
    logits = np.asarray(plain(params, rows.tokens, mask), np.float64) / temperature
    return np.roll(logits, 1, axis=1)


def folded(keys, row, position):
    return jax.random.fold_in(jax.random.wrap_key_data(keys[row]), position)


def expected_prefix(row, rows, logits, drafts):
    """Returns the length of prompt and accepted prefix, computed token by token, and the next
    token.
    """
    tokens, end = np.asarray(rows.tokens[row]), int(rows.lengths[row])
    for t in range(int(rows.prompts[row]), end + 1):
        gumbel = jax.random.gumbel(folded(rows.keys, row, t), logits.shape[-1:], jnp.float32)
        drawn = int(np.argmax(logits[row, t % logits.shape[1]] + np.asarray(gumbel, np.float64)))
        if t == end:
            break
        if isinstance(drafts, Coupled):
            stands = drawn == tokens[t]
        else:
            logp = logits[row, t] - np.logaddexp.reduce(logits[row, t])
            u = float(jax.random.uniform(folded(rows.accept_keys, row, t), (), jnp.float32))
            ratio = np.exp(logp[tokens[t]] - float(rows.draft_logp[row, t]))
            stands = u <= min(1.0, drafts.lenience * ratio)
        if not stands:
            break
    return t, drawn


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "drafts", [Coupled(), Lenient(lenience=1.0), Lenient()], ids=["coupled", "strict", "lenient"]
)
def test_the_accepted_prefix_is_that_of_a_plain_reference(first_visit, drafts, temperature):
    rollouts = list(first_visit[0].values())
    rows, sampler = rows_of(rollouts, 32), Sampler(temperature)
    logits = reference(FAR, rows, temperature)
    prefix, scores = scored(FAR, rows, sampler, drafts)
    shares = []
    for i, r in enumerate(rollouts):
        length, following = expected_prefix(i, rows, logits, drafts)
        assert (scores.lengths[i], prefix.first_token[i, 0]) == (length, following)
        shares.append((length - len(r.prompt.tokens)) / r.response_length)
        answer = np.arange(len(r.prompt.tokens), length)
        logp = logits[i] - np.logaddexp.reduce(logits[i], axis=-1, keepdims=True)
        np.testing.assert_allclose(
            scores.logp[i, answer], logp[answer, r.tokens[answer]], atol=1e-5
        )
        entropy = -(np.exp(logp) * logp).sum(axis=-1)
        np.testing.assert_allclose(scores.entropy[i, answer], entropy[answer], atol=1e-5)
        set_rows = np.all(prefix.routes[i] != UNSET, axis=(1, 2))
        np.testing.assert_array_equal(set_rows, np.arange(32) < length)
    assert prefix.lengths[-1] == 0
    assert 0.1 < np.mean(shares) < 1


def test_a_pass_in_pieces_is_that_in_one(first_visit):
    rows = rows_of(list(first_visit[0].values()), 32)
    parts = [
        scored(NEW, rows, Sampler(), Coupled(), dataclasses.replace(ROLL, prefill_chunk=chunk))
        for chunk in (8, 64)
    ]
    (pieces, scores), (one_piece, expected) = parts
    np.testing.assert_array_equal(scores.lengths, expected.lengths)
    np.testing.assert_array_equal(pieces.routes, one_piece.routes)
    np.testing.assert_array_equal(pieces.first_token[:-1], one_piece.first_token[:-1])
    np.testing.assert_allclose(scores.logp[:-1], expected.logp[:-1], atol=1e-5)


# ---- whole answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slots", "config"), [(2, ROLL), (6, PAGED), (32, PAGED)], ids=["two slots", "pages", "at once"]
)
def test_answers_with_coupled_drafts_are_those_without_token_for_token(first_visit, config, slots):
    config = dataclasses.replace(config, slots=slots)
    answers = drafts_of(first_visit[0])
    swapped = [AGAIN[0].sample(0), AGAIN[1].sample(2)]  # each gets the draft of the other
    answers |= dict(zip(swapped, [answers[key] for key in reversed(swapped)], strict=True))
    expected, routes, without = collect(NEW, Coupled(), AGAIN, config=config)
    actual, stored, counts = collect(NEW, Coupled(), AGAIN, answers, config)
    drafted = sum(r.drafted for r in actual.values())
    for key, r in actual.items():
        np.testing.assert_array_equal(r.tokens, expected[key].tokens)
        np.testing.assert_allclose(r.logp, expected[key].logp, atol=1e-5)
        np.testing.assert_allclose(r.entropy, expected[key].entropy, atol=1e-5)
        assert r.truncated == expected[key].truncated and set(r.versions) == {4}
        assert r.draft_tokens == len(answers[r.key].tokens) >= r.drafted
    np.testing.assert_array_equal(stored, routes)
    assert counts.tokens == without.tokens - drafted and drafted > without.tokens / 4
    complete = [r for r in actual.values() if r.drafted == r.response_length]
    assert 0 < len(complete) < len(actual) and any(r.drafted == 0 for r in actual.values())


def test_under_the_same_policy_coupled_drafts_leave_nothing_to_sample(first_visit):
    rollouts, routes, counts = collect(OLD, Coupled(), AGAIN, drafts_of(first_visit[0]))
    for key, r in rollouts.items():
        np.testing.assert_array_equal(r.tokens, first_visit[0][key].tokens)
        assert r.drafted == r.draft_tokens == r.response_length
    np.testing.assert_array_equal(routes, first_visit[1])
    assert counts.tokens == counts.calls == 0


@pytest.mark.parametrize("drafts", [Coupled(), Lenient()], ids=["coupled", "lenient"])
def test_log_probs_and_routes_are_those_of_training(first_visit, drafts):
    """Training gives the same log-probs and routes, whether it replays the routes or not, for
    accepted and for sampled tokens.
    """
    rollouts, routes, _ = collect(NEW, drafts, AGAIN, drafts_of(first_visit[0]))
    length = ROLL.max_length
    in_order = sorted(rollouts.values(), key=lambda r: r.row)
    tokens, lengths = np.zeros((len(in_order), length), np.int32), []
    for row, r in zip(tokens, in_order, strict=True):
        row[: len(r.tokens)] = r.tokens
        lengths.append(len(r.tokens))
    model, inputs = Transformer(MODEL, COMPUTE), (jnp.asarray(tokens), jnp.asarray(lengths))
    for replayed in (jnp.asarray(routes), None):
        logp, entropy, used, _ = _forward(model, NEW, *inputs, replayed, 1.0)
        np.testing.assert_array_equal(used, routes)
        for i, r in enumerate(in_order):
            answer = slice(len(r.prompt.tokens), len(r.tokens))
            np.testing.assert_allclose(r.logp[answer], logp[i, answer], atol=1e-5)
            np.testing.assert_allclose(r.entropy[answer], entropy[i, answer], atol=1e-5)
    assert sum(r.drafted for r in in_order) > 30


def test_a_draft_is_cut_at_the_limit_and_continues_where_it_ends_before(first_visit):
    answers = drafts_of(first_visit[0])
    short, _, _ = collect(OLD, Coupled(), AGAIN, answers, max_new_tokens=[5] * len(AGAIN))
    for key, r in short.items():
        expected = first_visit[0][key].response[:5]
        np.testing.assert_array_equal(r.response, expected)
        assert r.drafted == r.draft_tokens == len(expected)
    halves = {key: Draft(x.tokens[:3], x.logp[:3]) for key, x in answers.items()}
    complete, _, counts = collect(OLD, Coupled(), AGAIN, halves)
    for key, r in complete.items():
        np.testing.assert_array_equal(r.tokens, first_visit[0][key].tokens)
        assert r.drafted == min(3, r.response_length)
    assert counts.tokens == sum(r.sampled_length for r in complete.values()) > 0


def test_interrupted_samples_keep_their_drafted_tokens(first_visit):
    """The collection is aborted after the first call and continued by another one under the same
    policy.
    """
    answers, stats_, seen = drafts_of(first_visit[0]), RolloutStats(), []
    expected, _, _ = collect(NEW, Coupled(), AGAIN, answers)
    engine = engine_for(Coupled(), MODEL, COMPUTE, ROLL, EOS, find=answers.get)
    request = engine, to_decode(NEW), AGAIN, SAMPLES, Purpose.TRAIN, 0
    options = {"policy_version": 4}
    job = Collection(*request, stats=stats_, enough=lambda: stats_.calls >= 1, **options)
    seen += list(job)
    carried = job.abort()
    assert carried and any(r.drafted for r in carried)
    done = {r.key for r in seen}
    missing = frozenset(p.sample(c) for p in AGAIN for c in range(SAMPLES)) - done
    rows = [n * SAMPLES for n in range(len(AGAIN))]
    more = Collection(
        *request,
        buffer=job._held,
        rows=rows,
        sample_keys=missing,
        carried=carried,
        **options,
    )
    seen += list(more)
    assert len(seen) == len(expected)
    for r in seen:
        one = expected[r.prompt.id, r.sample]
        np.testing.assert_array_equal(r.tokens, one.tokens)
        assert (r.drafted, r.draft_tokens) == (one.drafted, one.draft_tokens)


# ---- distributions -------------------------------------------------------------------------------

ROWS, BATCHES = 1024, 8


def first_tokens(drafts, sampler):
    """Returns the first tokens of many samples at a second visit under FAR, with first tokens drawn
    under OLD as drafts, and the distributions of both policies.
    """
    engine = engine_for(drafts, MODEL, COMPUTE, ROLL, EOS)
    prompt = make_prompt(0, 3).tokens
    tokens = np.zeros((ROWS, 8), np.int32)
    tokens[:, :3] = prompt
    lengths = jnp.full(ROWS, 3, jnp.int32)
    chosen, shared = [], drafts.noise_visit(0) is not None
    purpose = Purpose.COUPLED if shared else Purpose.TRAIN
    one = np.zeros(ROWS, np.uint32)
    for batch in range(BATCHES):
        ids = np.arange(ROWS, dtype=np.uint32) + np.uint32(batch * ROWS)
        first, second = (
            sample_keys(0, purpose, ids, one + np.uint32(visit and not shared), one)
            for visit in (0, 1)
        )
        drawn = engine.prefill_multisampling(
            params=to_decode(OLD),
            padded_tokens=jnp.asarray(tokens),
            true_length=lengths,
            sampler=sampler,
            rng=first[:, None],
            num_samples=1,
        )
        with_draft = np.array(tokens)
        with_draft[:, 3] = drawn.first_token[:, 0]
        logp = np.zeros(tokens.shape, np.float32)
        logp[:, 3] = drawn.first_logp[:, 0]
        rows = DraftRows(
            jnp.asarray(with_draft),
            lengths + 1,
            lengths,
            jnp.asarray(logp),
            second,
            sample_keys(0, Purpose.ACCEPT, ids, one + np.uint32(1), one),
        )
        prefix, scores = scored(FAR, rows, sampler, drafts)
        chosen.append(np.where(scores.lengths == 4, with_draft[:, 3], prefix.first_token[:, 0]))
    policies = []
    for params in (FAR, OLD):
        logits = reference(params, rows, sampler.temperature)[0, 3]
        policies.append(np.exp(logits - np.logaddexp.reduce(logits)))
    return np.concatenate(chosen), *policies


def p_value(tokens, distribution):
    """Returns the p-value of the chi-square test, with rare tokens pooled."""
    counts = np.bincount(tokens, minlength=len(distribution))
    expected = distribution * len(tokens)
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    return stats.chisquare(counts[keep], expected[keep] * counts.sum() / expected.sum()).pvalue


def test_over_the_noise_coupled_answers_have_the_present_distribution():
    tokens, p, q = first_tokens(Coupled(), Sampler(1.3))
    assert p_value(tokens, p) > 1e-3
    assert p_value(tokens, q) < 1e-6  # the two policies differ enough to be distinguished


@pytest.mark.parametrize("lenience", [1.0, 1.65])
def test_lenient_answers_have_the_distribution_of_the_rule_and_not_the_present_one(lenience):
    tokens, p, q = first_tokens(Lenient(lenience=lenience), Sampler(1.3))
    accepted = np.minimum(q, lenience * p)
    expected = accepted + (1 - accepted.sum()) * p
    assert expected.sum() == pytest.approx(1)
    assert p_value(tokens, expected) > 1e-3
    assert p_value(tokens, p) < 1e-6
