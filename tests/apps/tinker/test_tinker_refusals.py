"""What the server refuses: by name, with a clear error, and the next request succeeds."""

import http.client
import json
import random

import numpy as np
import pytest
from served import saved
from tinkered import (
    LEFT_OPEN,
    PROMPT,
    APIStatusError,
    RequestFailedError,
    adam,
    client_of,
    datum_of,
    pb,
    running,
    sampled,
    trained,
    types,
)

pytestmark = LEFT_OPEN
PROTOBUF, JSON = "application/x-protobuf", "application/json"
NAMES = (
    *("create_model", "optim_step", "save_weights", "load_weights", "save_weights_for_sampler"),
    *("asample", "retrieve_future", "create_session", "create_sampling_session", "get_info"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the folder of a tiny model."""
    return saved(tmp_path_factory.mktemp("secret_place") / "tiny")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """Yields a server that runs during the module's tests."""
    states = tmp_path_factory.mktemp("secret_place") / "states"
    with running(folder, states, max_sessions=3) as server:
        yield server


def post(server, name, body, kind=JSON, **headers):
    """Sends a body; returns (status, answer)."""
    connection = http.client.HTTPConnection(*server.address, timeout=60)
    headers = {"content-type": kind, "x-api-key": "tml-any", **headers}
    connection.request("POST", f"/api/v1/{name}", body, headers)
    response = connection.getresponse()
    reply = response.status, response.read().decode()
    connection.close()
    return reply


def mutated(data, draw):
    """Returns a body with some bytes changed, cut off or inserted."""
    data = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(data) + 1)
        kind = draw.randrange(3)
        if kind == 0 and at < len(data):
            data[at] = draw.randrange(256)
        elif kind == 1:
            del data[at : at + draw.randint(1, 8)]
        else:
            data[at:at] = draw.randbytes(draw.randint(1, 8))
    return bytes(data)


def test_500_malformed_bodies_each_get_a_clear_error_and_the_next_request_succeeds(server):
    client, draw = client_of(server), random.Random(1)
    model = trained(client)
    message = pb.ForwardBackwardRequest(model_id="nobody", seq_id=1, loss_fn="cross_entropy")
    chunk = message.data.add().model_input.add()
    chunk.encoded_text.tokens = np.arange(4, dtype=np.int32).tobytes()
    valid = message.SerializeToString()
    text = json.dumps({"model_id": "nobody", "seq_id": 1, "path": "x", "optimizer": True}).encode()
    for number in range(500):
        if number % 2:
            name, body, kind = "forward_backward", mutated(valid, draw), PROTOBUF
        else:
            name, body, kind = draw.choice(NAMES), mutated(text, draw), JSON
        status, answer = post(server, name, body, kind)
        assert 400 <= status < 500, (name, body, status, answer)
        assert json.loads(answer)["error"]["message"] and "secret_place" not in answer
    sampler = model.save_weights_and_get_sampling_client().result()
    data = [datum_of(x) for x in sampled(sampler)]
    model.forward_backward(data, "ppo").result()
    model.optim_step(adam()).result()
    client.close("success").result()


def test_losses_and_inputs_that_are_not_served_are_refused_by_name(server):
    client = client_of(server)
    model = trained(client)
    sampler = model.save_weights_and_get_sampling_client().result()
    (sequence,) = sampled(sampler, 1)
    datum, ones = datum_of(sequence), [1.0] * (4 + len(sequence.tokens))
    clips = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}
    mask = {"sequence_ratio_mask": [0.0] * 4 + [1.0] * len(sequence.tokens)}
    shifted = {"target_tokens": [0] * len(ones)}
    for loss, options, inputs, words in (
        ("stable_reinforce", None, {}, "loss_fn = 'stable_reinforce'"),
        ("dro", None, {}, "loss_fn = 'dro'"),
        ("ppo", {"beta": 1.0}, {}, "loss_fn_config 'beta'"),
        ("ppo", {"clip_low_threshold": 2.0}, {}, "must be numbers"),
        ("gspo", None, mask, "loss_fn_config lacks"),
        ("gspo", clips, {}, "needs loss_fn_inputs\\['sequence_ratio_mask'\\]"),
        ("importance_sampling", None, {"weights": ones}, "loss_fn_inputs\\['weights'\\]"),
        ("importance_sampling", None, shifted, "target_tokens\\[4\\] is not the input token"),
        ("cross_entropy", None, {}, "needs loss_fn_inputs\\['weights'\\]"),
        ("compass.espo", None, {}, "needs the sampler's entropies"),
        ("compass.grpo", {"kl_coef": 0.1}, {}, "loss_fn_config 'kl_coef'"),
    ):
        changed = datum_of(sequence, **inputs)
        with pytest.raises(RequestFailedError, match=words):
            model.forward_backward([changed], loss, options).result()
    long = types.Datum(
        types.ModelInput.from_ints([3] * 99), {"target_tokens": [3] * 99, "weights": [1.0] * 99}
    )
    with pytest.raises(RequestFailedError, match="datum 1: 99 tokens"):
        short = types.Datum(
            types.ModelInput.from_ints([3]), {"target_tokens": [4], "weights": [1.0]}
        )
        model.forward_backward([short, long], "cross_entropy").result()
    # none of these left a gradient
    with pytest.raises(RequestFailedError, match="there is no gradient"):
        model.optim_step(adam()).result()
    for loss, options, inputs in (
        ("cispo", None, {}),
        ("gspo", clips, mask),
        ("compass.grpo", {"clip_high": 0.28}, {}),
        ("compass.cispo", None, {}),
    ):
        output = model.forward_backward([datum_of(sequence, **inputs)], loss, options).result()
        # at the sampler's weights every ratio is 1, so that the sum is that of the advantages
        if loss in ("gspo", "compass.grpo"):
            assert output.metrics["loss:sum"] == pytest.approx(-len(sequence.tokens), rel=1e-4)
    other = datum_of(sequence, spans=True)
    wrong = types.Datum(
        types.ModelInput.from_ints([3, *other.model_input.to_ints()[1:]]), datum.loss_fn_inputs
    ).with_provenance(other.model_input_spans, other.loss_fn_input_spans)
    with pytest.raises(RequestFailedError, match="that has other tokens there"):
        model.forward_backward([wrong], "ppo").result()
    client.close("success").result()


def test_models_and_samples_that_are_not_served_are_refused_by_name(server):
    client = client_of(server)
    with pytest.raises(APIStatusError, match="this server has 'tiny' alone"):
        client.create_lora_training_client("Qwen/Qwen3-8B", rank=0).result()
    with pytest.raises(APIStatusError, match="train_unembed = True with a rank"):
        trained(client, rank=4)
    model = trained(client)
    with pytest.raises(APIStatusError, match="there may be one at a time"):
        trained(client)
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=4)
    for options, words in (
        ({"topk_sample_logprobs": 2}, "topk_sample_logprobs"),
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k"),
        ({"sampling_params": types.SamplingParams(max_tokens=4, stop=[])}, "stop = "),
        ({"sampling_params": types.SamplingParams(max_tokens=99)}, "max_tokens = 99"),
        ({"prompt": types.ModelInput.from_ints([3] * 17)}, "the prompt has 17 tokens"),
    ):
        request = {"prompt": prompt, "num_samples": 1, "sampling_params": params, **options}
        with pytest.raises(APIStatusError, match=words):
            sampler.sample(**request).result()
    client.close("success").result()


def test_sessions_bodies_and_keys_have_limits(server, folder, tmp_path, monkeypatch):
    session = {"tags": [], "user_metadata": {}, "sdk_version": "0"}
    made = []
    while (reply := post(server, "create_session", json.dumps(session)))[0] == 200:
        made.append(json.loads(reply[1])["session_id"])
    assert reply[0] == 429 and "sessions are open" in reply[1] and len(made) <= 3
    for one in made:
        assert post(server, f"sessions/{one}/finish", "{}")[0] == 200
    status, answer = post(server, "telemetry", b"", **{"content-length": str(2**30)})
    assert status == 413 and "exceeds" in answer
    status, answer = post(server, "optim_step", "{}", "text/plain")
    assert status == 415
    status, answer = post(server, "optim_step", "{}", origin="http://evil.example")
    assert status == 403
    with running(folder, tmp_path / "states", api_key="tml-the-right-one") as other:
        assert post(other, "create_session", json.dumps(session))[0] == 401
        monkeypatch.setenv("TINKER_API_KEY", "tml-the-right-one")
        client_of(other).close("success").result()
