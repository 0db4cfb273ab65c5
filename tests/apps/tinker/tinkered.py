"""A tiny server of the Tinker API in a thread, and the unmodified client's calls."""

import contextlib
import dataclasses
import os
import threading

import numpy as np
import pytest

pytest.importorskip("tinker", reason="the client package tinker is not installed (extra tinker)")
os.environ["TINKER_TELEMETRY"] = "0"
os.environ["TINKER_API_KEY"] = "tml-of-a-test"

from tinker import APIStatusError, RequestFailedError, ServiceClient, types
from tinker.proto import tinker_public_pb2 as pb

from compass_jax.commands.options import Serve
from compass_jax.commands.serve_tinker import tinker_server

# Tests take these from here, so that they are skipped where the package is missing.
__all__ = ["APIStatusError", "RequestFailedError", "ServiceClient", "pb", "types"]
# the client leaves its connections open
LEFT_OPEN = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
OPTIONS = {"slots": 4, "prompt_tokens": 16, "max_new_tokens": 16, "routes_gib": 0.01}
PROMPT = [5, 6, 7, 8, 9]


@contextlib.contextmanager
def running(folder, states, **options):
    """Runs a server and yields its address and its models (`HttpServer`)."""
    config = Serve(weights=str(folder), port=0, tinker=True, states=str(states), **OPTIONS)
    config = dataclasses.replace(config, **options)
    with tinker_server(config) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server
        finally:
            server.server.should_exit = True
            thread.join()


def client_of(server):
    """Returns a new session of the client."""
    return ServiceClient(base_url=f"http://127.0.0.1:{server.address[1]}")


def trained(client, rank=0, **options):
    """Returns a new model of the client."""
    return client.create_lora_training_client("tiny", rank=rank, **options).result()


def sampled(sampler, number=2, prompt=PROMPT, **params):
    """Returns sampled sequences."""
    params = types.SamplingParams(**{"max_tokens": 12, "seed": 1, **params})
    return sampler.sample(types.ModelInput.from_ints(prompt), number, params).result().sequences


def datum_of(sequence, advantage=1.0, prompt=PROMPT, spans=False, **inputs):
    """Returns a datum of a sampled sequence, whose prompt has no advantage."""
    n, tokens = len(prompt) - 1, [*prompt, *sequence.tokens]
    arrays = {"target_tokens": tokens[1:], "logprobs": [0.0] * n + list(sequence.logprobs)}
    arrays["advantages"] = [0.0] * n + [advantage] * len(sequence.tokens)
    datum = types.Datum(types.ModelInput.from_ints(tokens[:-1]), {**arrays, **inputs})
    if not spans:
        return datum
    key, m = sequence.sequence_id, len(sequence.tokens)
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=key, length=len(prompt)),
            types.SampledProvenanceSpan(sequence_id=key, length=m - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=key, offset=1, length=n),
            types.SampledProvenanceSpan(sequence_id=key, length=m),
        ],
    )


def adam(rate=1e-2):
    """Returns the parameters of an update."""
    return types.AdamParams(learning_rate=rate)


def logp_of(output):
    """Returns the log-probs of each datum."""
    return [np.asarray(x["logprobs"].data) for x in output.loss_fn_outputs]
