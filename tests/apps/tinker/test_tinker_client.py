"""The unmodified client of the Tinker API against the server on loopback."""

import numpy as np
import pytest
from served import saved
from tinkered import LEFT_OPEN, adam, client_of, datum_of, logp_of, running, sampled, trained

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
