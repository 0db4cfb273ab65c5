"""The unmodified client of the Tinker API against the server on loopback."""

import runpy
from pathlib import Path

import numpy as np
import pytest
from served import saved
from tinkered import (
    LEFT_OPEN,
    PROMPT,
    adam,
    client_of,
    datum_of,
    logp_of,
    running,
    sampled,
    trained,
    types,
)

pytestmark = LEFT_OPEN


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields the options of a server that runs during the module's tests."""
    folder = tmp_path_factory.mktemp("tinker")
    with running(saved(folder / "tiny"), folder / "states") as config:
        yield config


def test_a_loop_of_the_client_samples_trains_saves_and_loads(server):
    client = client_of(server)
    model = trained(client)
    assert model.get_info().model_data.model_name == "tiny"
    sampler = model.save_weights_and_get_sampling_client().result()
    sequences = sampled(sampler)
    assert all(len(x.tokens) == len(x.logprobs) for x in sequences)
    data = [datum_of(x, advantage) for x, advantage in zip(sequences, (1.0, -0.5), strict=True)]
    first = model.forward_backward(data, "importance_sampling").result()
    for logp, sequence in zip(logp_of(first), sequences, strict=True):
        np.testing.assert_allclose(logp[4:], sequence.logprobs, atol=2e-5)
    assert first.metrics["mismatch/kl_k3:mean"] < 1e-6
    path = model.save_state("before").result().path
    model.optim_step(adam()).result()
    second = model.forward(data, "importance_sampling").result()
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"]
    # the snapshot keeps its weights
    again = sampled(sampler)
    assert [x.tokens for x in again] == [x.tokens for x in sequences]
    with pytest.warns(FutureWarning):
        model.load_state_with_optimizer(path).result()
    model.optim_step(adam()).result()
    third = model.forward(data, "importance_sampling").result()
    assert third.metrics["loss:sum"] == second.metrics["loss:sum"]
    client.close("success").result()


def test_samples_of_the_base_of_a_saved_name_and_with_their_own_ends(server):
    client = client_of(server)
    base = client.create_sampling_client(base_model="tiny").result()
    (whole,) = sampled(base, 1, temperature=0.0, max_tokens=16)
    stop = whole.tokens[3]
    (cut,) = sampled(base, 1, temperature=0.0, max_tokens=16, stop=[stop])
    assert cut.tokens == whole.tokens[: whole.tokens.index(stop) + 1]
    assert cut.stop_reason == "stop"
    text = server.served.base.tokenizer.decode(whole.tokens[1:3], special=True)
    (cut,) = sampled(base, 1, temperature=0.0, max_tokens=16, stop=text)
    assert cut.tokens == whole.tokens[: len(cut.tokens)] and len(cut.tokens) <= 3
    logp = base.compute_logprobs(types.ModelInput.from_ints([*PROMPT, *whole.tokens[:8]])).result()
    assert logp[0] is None
    np.testing.assert_allclose(logp[len(PROMPT) :], whole.logprobs[:8], atol=2e-5)
    # an even longer group than there are slots, and another one meanwhile
    many, few = sampled(base, 9, seed=3), sampled(base, 2, seed=3)
    assert [x.tokens for x in many[:2]] == [x.tokens for x in few]
    model = trained(client)
    path = model.save_weights_for_sampler("first").result().path
    again = client.create_sampling_client(model_path=path).result()
    assert [x.tokens for x in sampled(again, 2, seed=3)] == [x.tokens for x in few]
    client.close("success").result()


def test_two_adapters_train_apart_over_one_base(server):
    client, rank = client_of(server), {"rank": 4, "train_unembed": False}
    first, second = (trained(client, seed=seed, **rank) for seed in (1, 2))
    assert first.get_info().lora_rank == 4
    (sequence,) = sampled(first.save_weights_and_get_sampling_client().result(), 1)
    (same,) = sampled(client.create_sampling_client(base_model="tiny").result(), 1)
    assert sequence.tokens == same.tokens  # adapters begin as their base
    data, losses = [datum_of(sequence, spans=True)], []
    for model, rate in ((first, 1e-2), (second, 0.0)):
        model.forward_backward(data, "importance_sampling").result()
        model.optim_step(adam(rate)).result()
    for model in (first, second):
        losses.append(model.forward(data, "importance_sampling").result().metrics["loss:sum"])
    assert losses[0] < losses[1] == pytest.approx(-len(sequence.tokens), rel=1e-4)
    path = first.save_weights_for_sampler("adapter").result().path
    state = first.save_state("state").result().path
    tuned = [
        sampled(x, 1, temperature=0.0)[0].tokens
        for x in (
            client.create_sampling_client(model_path=path).result(),
            first.save_weights_and_get_sampling_client().result(),
        )
    ]
    assert tuned[0] == tuned[1]
    again = client.create_training_client_from_state(state).result()
    loss = again.forward(data, "importance_sampling").result().metrics["loss:sum"]
    assert loss == losses[0] and again.get_info().lora_rank == 4
    client.close("success").result()


def test_routes_that_are_gone_are_trained_live_and_counted(server):
    client = client_of(server)
    sampler = client.create_sampling_client(base_model="tiny").result()
    (sequence,) = sampled(sampler, 1)
    model, routes = trained(client), server.served.routes
    datum = datum_of(sequence, spans=True)
    metrics = model.forward([datum], "ppo").result().metrics
    assert metrics["routes/replayed_tokens:sum"] == datum.model_input.length
    assert metrics["replay/unset_frac:mean"] == 0
    for key in list(routes._samples):  # as if newer samples had taken the room
        routes.release(routes._samples.pop(key).row)
    metrics = model.forward([datum], "ppo").result().metrics
    assert metrics["routes/missing_datums:sum"] == 1 and metrics["replay/unset_frac:mean"] == 1
    client.close("success").result()


def test_a_custom_loss_of_the_client_runs_over_the_cross_entropy(server):
    client = client_of(server)
    (sequence,) = sampled(client.create_sampling_client(base_model="tiny").result(), 1)
    model, tokens = trained(client), [*PROMPT, *sequence.tokens]
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})
    data = [datum]

    def loss_of(data, logprobs):
        return -(logprobs[0] ** 2).sum(), {"mine": 1.0}

    first = model.forward_backward_custom(data, loss_of).result()
    model.optim_step(adam()).result()
    second = model.forward_backward_custom(data, loss_of).result()
    assert second.metrics["loss:sum"] < first.metrics["loss:sum"] and first.metrics["mine"] == 1
    client.close("success").result()


def test_the_example_runs_to_its_end(server, monkeypatch, capsys):
    monkeypatch.setenv("TINKER_BASE_URL", f"http://127.0.0.1:{server.address[1]}")
    example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "tinker_rl.py"))
    main = example["main"]
    monkeypatch.setitem(main.__globals__, "STEPS", 2)
    main("tiny")
    out = capsys.readouterr().out
    assert out.count("reward") == 2 and "/weights/last" in out
    for session in list(server.served.service._sessions):
        server.served.service.end_session(session)
