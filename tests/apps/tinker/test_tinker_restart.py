"""A server that starts again has its models at their last saved states, applies no request twice,
and says what was lost.
"""

import http.client
import json

import pytest
from served import MODEL, saved
from tinkered import (
    LEFT_OPEN,
    RequestFailedError,
    adam,
    client_of,
    datum_of,
    running,
    sampled,
    trained,
)

from compass_jax.apps.tinker.states import States
from compass_jax.config import ConfigError

pytestmark = LEFT_OPEN


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tiny model."""
    return saved(tmp_path_factory.mktemp("tinker") / "tiny")


def post(server, name, body):
    """Sends a request without the client; returns (status, answer)."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    headers = {"content-type": "application/json", "x-api-key": "any"}
    connection.request("POST", f"/api/v1/{name}", json.dumps(body), headers)
    response = connection.getresponse()
    reply = response.status, json.loads(response.read())
    connection.close()
    return reply


def resent(server, model, number):
    """Sends an update again under its number; returns the answer."""
    body = {"adam_params": {"learning_rate": 0.01}, "model_id": model.model_id, "seq_id": number}
    status, answer = post(server, "optim_step", body)
    assert status == 200, answer
    return post(server, "retrieve_future", answer)[1]


def updates(server, model):
    """Returns how many updates a model has."""
    return server.served.models.get(model.model_id).trained.learner.version


def test_an_update_is_applied_once_and_lost_ones_are_named(folder, tmp_path):
    states = tmp_path / "states"
    with running(folder, states) as server:
        client = client_of(server)
        model = trained(client)
        sampler = model.save_weights_and_get_sampling_client().result()  # request 1
        data = [datum_of(x) for x in sampled(sampler)]
        model.forward_backward(data, "importance_sampling").result()
        model.optim_step(adam()).result()  # request 3
        assert updates(server, model) == 1
        first = resent(server, model, 3)
        assert updates(server, model) == 1 and first["metrics"]["policy_version"] == 1
        path = model.save_state("a").result().path  # request 4
        loss = model.forward(data, "importance_sampling").result().metrics["loss:sum"]
        port = server.address[1]
    with running(folder, states, port=port) as server:
        # nothing was lost: the update is not applied again, and the next request is
        assert updates(server, model) == 1
        assert resent(server, model, 3) == {"metrics": {}}
        assert updates(server, model) == 1
        again = model.forward(data, "importance_sampling").result().metrics["loss:sum"]
        assert again == loss
        model.forward_backward(data, "importance_sampling").result()  # request 7
        model.optim_step(adam()).result()
        assert updates(server, model) == 2
    with running(folder, states, port=port) as server:
        assert updates(server, model) == 1
        lost = "after request 6: requests 7 to 8 are lost; load a state"
        assert lost in resent(server, model, 8)["error"]
        with pytest.raises(RequestFailedError, match=lost):
            model.forward(data, "importance_sampling").result()
        model = client.create_training_client_from_state_with_optimizer(path).result()
        assert updates(server, model) == 1
        again = model.forward(data, "importance_sampling").result().metrics["loss:sum"]
        assert again == loss
        client.close("success").result()
    with running(folder, states, port=port) as server:
        assert not server.served.states.record.models


def test_a_gap_in_the_numbers_is_refused_until_a_state_is_loaded(folder, tmp_path):
    with running(folder, tmp_path / "states") as server:
        client = client_of(server)
        model = trained(client)
        path = model.save_state("a").result().path
        body = {"adam_params": {"learning_rate": 0.01}, "model_id": model.model_id, "seq_id": 3}
        status, answer = post(server, "optim_step", body)
        assert status == 400 and "request 3 came, and 2 is next" in answer["error"]["message"]
        body = {"model_id": model.model_id, "seq_id": 5, "path": path, "optimizer": True}
        status, answer = post(server, "load_weights", body)
        assert status == 200
        assert post(server, "retrieve_future", answer)[1]["path"] == path
        assert server.served.models.get(model.model_id).next == 6
        client.close("success").result()


def test_two_servers_do_not_share_their_states(tmp_path):
    first = States(tmp_path, MODEL)
    with pytest.raises(ConfigError, match="another server uses it"):
        States(tmp_path, MODEL)
    first.close()
    States(tmp_path, MODEL).close()


@pytest.mark.parametrize("line", ["{", "[]", '{"event": "applied", "model": "m", "number": 1}'])
def test_a_journal_that_no_server_wrote_is_refused_by_its_line(tmp_path, line):
    session = '{"event": "session", "session": "s"}'
    (tmp_path / "journal.jsonl").write_text(f"{session}\n{line}\n{session}\n")
    with pytest.raises(ConfigError, match=r"journal\.jsonl, line 2: not what a server writes"):
        States(tmp_path, MODEL)
    # a line that a kill cut off is left out
    (tmp_path / "journal.jsonl").write_text(f"{session}\n{line}")
    States(tmp_path, MODEL).close()


def test_a_save_keeps_the_gradient_so_far(folder, tmp_path):
    states = tmp_path / "states"
    with running(folder, states) as server:
        client = client_of(server)
        model = trained(client)
        sampler = model.save_weights_and_get_sampling_client().result()
        data = [datum_of(x) for x in sampled(sampler)]
        model.forward_backward(data, "importance_sampling").result()
        model.save_state("between").result()
        port = server.address[1]
        expected = model.optim_step(adam()).result().metrics["grad_norm"]
    with running(folder, states, port=port) as server:
        # the update after the save was answered, so it is lost; the gradient before it is not
        assert "requests 4 to 4 are lost" in server.served.models.get(model.model_id).lost
        path = f"tinker://{model.model_id}/weights/between"
        model = client.create_training_client_from_state_with_optimizer(path).result()
        assert model.optim_step(adam()).result().metrics["grad_norm"] == expected
        client.close("success").result()
