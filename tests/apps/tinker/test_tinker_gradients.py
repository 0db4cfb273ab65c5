"""A training request computes what the Learner computes on the same rows, and with provenance it
replays the routes of the sampler.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from served import saved
from tinkered import LEFT_OPEN, PROMPT, adam, client_of, datum_of, running, sampled, trained

from compass_jax.apps.tinker.losses import ImportanceSampling
from compass_jax.base.records import StepArrays
from compass_jax.config import AlgorithmConfig, SamplingConfig
from compass_jax.model.routes import take_routes
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.prepare import Prepared
from compass_jax.training.learner import Learner

pytestmark = LEFT_OPEN
ADVANTAGES, STEPS, RATE = (1.0, -0.5), 10, 1e-3


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def server(request, tmp_path_factory):
    """Yields a server that runs during the module's tests."""
    folder = tmp_path_factory.mktemp("tinker")
    with running(saved(folder / "tiny"), folder / "states", dtype=request.param) as server:
        yield server


def learner_of(server, replay="R3", size=2):
    """Returns a Learner in process, of the server's model and settings."""
    base = server.served.base
    config = dataclasses.replace(
        base.learner,
        algorithm=AlgorithmConfig(objective=ImportanceSampling(), replay=replay),
        sampling=SamplingConfig(prompts_per_step=1, group_size=size),
    )
    optim = dataclasses.replace(config.updates.optim, learning_rate=RATE, eps=1e-12)
    config = dataclasses.replace(config, updates=dataclasses.replace(config.updates, optim=optim))
    return Learner.start(config, base.model, base.params)


def arrays_of(server, sequences):
    """Returns the samples as a rollout of the Learner, with the routes that the server keeps."""
    n, routes = len(PROMPT), server.served.routes
    length = server.served.base.engine.config.max_length
    shape = (len(sequences), length)
    tokens, mask = np.zeros(shape, np.int32), np.zeros(shape, bool)
    logp, lengths = np.zeros(shape, np.float32), np.zeros(len(sequences), np.int32)
    for i, sequence in enumerate(sequences):
        end = n + len(sequence.tokens)
        tokens[i, :n], tokens[i, n:end] = PROMPT, sequence.tokens
        mask[i, n:end], lengths[i] = True, end
        logp[i, n:end] = sequence.logprobs
    rows = [routes._samples[x.sequence_id].row for x in sequences]
    stored = take_routes(routes.buffer.rows, jnp.asarray(rows, jnp.int32), length)
    ones, group = np.ones(len(sequences), np.float32), np.zeros(len(sequences), np.int32)
    return StepArrays(tokens, lengths, mask, logp, ones, ones > 0, 0 * ones, group, stored)


def scored_of(learner, arrays):
    """Returns (rollout, weights of its tokens), for a sum over tokens against the sampler."""
    known = np.arange(arrays.tokens.shape[1]) < arrays.lengths[:, None]
    known[:, 0] = False
    # the server computes the log-probs of the prompt's tokens, too
    scored = learner._unscored(dataclasses.replace(arrays, mask=known), every=True)
    scored.old_logp = arrays.rollout_logp
    advantage = np.where(arrays.mask, np.array(ADVANTAGES, np.float32)[:, None], 0)
    weight = arrays.mask.astype(np.float32)
    return scored, Prepared(advantage.astype(np.float32), weight, arrays.mask, None)


def rolled_out(server, number=2):
    """Returns a client, a new model of it, and samples of that."""
    client = client_of(server)
    model = trained(client)
    sampler = model.save_weights_and_get_sampling_client().result()
    return client, model, sampled(sampler, number, max_tokens=16)


def test_a_client_trains_as_the_learner_in_process(server):
    client, model, sequences = rolled_out(server)
    data = [datum_of(x, a, spans=True) for x, a in zip(sequences, ADVANTAGES, strict=True)]
    learner, arrays = learner_of(server), arrays_of(server, sequences)
    ours, theirs = [], []
    for number in range(STEPS):
        output = model.forward_backward(data, "importance_sampling").result()
        assert output.metrics["replay/unset_frac:mean"] == 0
        scored, prepared = scored_of(learner, arrays)
        grads, diagnostics = learner.gradient(scored, slice(0, 2), prepared)
        if not number:
            kept = server.served.models.get(model.model_id).trained.gradient
            for x, y in zip(jax.tree.leaves(kept), jax.tree.leaves(grads), strict=True):
                np.testing.assert_array_equal(x, y)
        learner.apply(grads)
        model.optim_step(adam(RATE)).result()
        ours.append(output.metrics["loss:sum"])
        theirs.append(float(finalize_diagnostics(diagnostics)["loss"]))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    assert ours[-1] < ours[0]
    client.close("success").result()


def test_with_provenance_the_mismatch_is_that_of_r3_and_without_that_of_replay_off(server):
    client, model, sequences = rolled_out(server, 48)
    arrays, seen = arrays_of(server, sequences), {}
    for replay in ("R3", "off"):
        data = [datum_of(x, spans=replay == "R3") for x in sequences]
        metrics = model.forward(data, "importance_sampling").result().metrics
        own = finalize_diagnostics(learner_of(server, replay, 48).score(arrays).diagnostics)
        for name in ("logp_abs_diff", "kl_k3", "ess"):
            value = seen[replay, name] = metrics[f"mismatch/{name}:mean"]
            np.testing.assert_allclose(value, float(own[f"mismatch/{name}"]), rtol=1e-4, atol=1e-9)
        if replay == "R3":
            flips = metrics["replay/flip_frac:mean"]
            assert flips == pytest.approx(float(own["replay/flip_frac"]), abs=1e-6)
    if server.served.base.engine.compute.dtype == "bfloat16":
        assert flips > 0
        assert seen["R3", "kl_k3"] < seen["off", "kl_k3"] / 2
    client.close("success").result()
