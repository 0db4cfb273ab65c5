"""A tiny served model: its weights, a server in a thread, and the answers of our own rollout."""

import contextlib
import dataclasses
import functools
import http.client
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.base.records import Prompt
from compass_jax.commands.options import Serve
from compass_jax.commands.serve import make_engine, openai_server
from compass_jax.config import ComputeConfig, ModelConfig, MoEConfig, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.logprobs import head_weights
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import Transformer, apply, init_params
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.weights.hf import save_params

TOKENIZER = Path(__file__).parent.parent / "configs" / "tiny_tokenizer"
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=384,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=32,
    rope_theta=100.0,
    init_std=0.3,
    max_positions=128,
    moe=MoEConfig(experts=6, top_k=2, ffn=16),
)
MOST, LONG = 48, "x" * 30
FORWARD = 80  # longest sequence of `forward`
# PAGED has too few pages for four slots; WHOLE adds every option of a rollout on a pod.
PAGED = {"slots": 4, "prompt_tokens": 32, "max_new_tokens": 24, "cache_pages": 16, "page_tokens": 4}
WHOLE = {**PAGED, "cache_pages": 64, "dtype": "bfloat16", "quantize": "int8"}
WHOLE |= {"kv_quantize": "int8", "mesh": "fsdp=2,expert=2,tensor=2"}


@functools.cache
def parameters():
    """Returns the model's parameters in the layout of training."""
    return init_params(MODEL, ComputeConfig(), jax.random.key(3))


def saved(folder):
    """Saves the model as a Hugging Face folder with a tokenizer."""
    save_params(parameters(), MODEL, folder, "float32", tokenizer_from=TOKENIZER)
    return folder


@contextlib.contextmanager
def served(folder, **options):
    """Runs a server for OpenAI's clients and yields its options with the port that it chose."""
    config = Serve(weights=str(folder), port=0, **options)
    with openai_server(config) as running:
        thread = threading.Thread(target=running.run)
        thread.start()
        yield dataclasses.replace(config, port=running.address[1])
        running.server.should_exit = True
        thread.join()


def own(text_or_ids, limit, temperature=0.0):
    """Returns our rollout's answer: (text, log-probs of its tokens, finish reason)."""
    tokenizer = Tokenizer.load(TOKENIZER)
    ids = tokenizer.encode(text_or_ids) if isinstance(text_or_ids, str) else text_or_ids
    rollout = RolloutConfig(slots=2, prompt_buckets=(16, 64), max_new_tokens=MOST)
    engine = Engine(MODEL, ComputeConfig(), rollout, tokenizer.eos_id, known=tokenizer.vocab_size)
    ((text, logp, truncated),) = rolled_out(
        engine, to_decode(parameters()), tokenizer, [ids], [limit], temperature
    )
    return text, logp, "length" if truncated else "stop"


@jax.jit
def _hidden(params, tokens, mask):
    positions = jnp.arange(FORWARD, dtype=jnp.int32)[None]
    model = Transformer(MODEL, ComputeConfig())
    return apply(model, params, tokens, positions, mask=mask).hidden


def forward(ids):
    """Returns the log-probs [t v] (float64) of the token after each of `ids`, from one forward pass
    of the training model, without a cache.
    """
    n = len(ids)
    tokens = np.zeros((1, FORWARD), np.int32)
    tokens[0, :n] = ids
    params, mask = parameters(), jnp.arange(FORWARD, dtype=jnp.int32)[None] < n
    hidden = _hidden(params, jnp.asarray(tokens), mask)
    known = Tokenizer.load(TOKENIZER).vocab_size
    head = np.asarray(head_weights(params), np.float64)[:, :known]
    logits = np.asarray(hidden[0, :n], np.float64) @ head
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def own_texts(weights, options, texts, limits):
    """Returns the greedy texts of a Collection with the settings of a server. It takes the last
    tokens of each prompt that fit, and the padding token for an empty prompt.
    """
    config = Serve(weights=str(weights), **options)
    engine, params, tokenizer = make_engine(config)
    most = config.prompt_tokens
    ids = [tokenizer.encode(text)[-most:] or [tokenizer.pad_id] for text in texts]
    return [text for text, _, _ in rolled_out(engine, params, tokenizer, ids, limits)]


def rolled_out(engine, params, tokenizer, prompts, limits, temperature=0.0):
    """Returns (text, log-probs, whether it was truncated) for the ids of each prompt, from one
    Collection.
    """
    prompt_records = [
        Prompt(i, 0, "", "", np.array(ids, np.int32), "") for i, ids in enumerate(prompts)
    ]
    job = Collection(
        engine,
        params,
        prompt_records,
        1,
        Purpose.SERVE,
        0,
        sampler=Sampler(temperature),
        keep_routes=False,
        max_new_tokens=limits,
    )
    answers = {}
    for r in job:
        logp = r.logp[len(r.prompt.tokens) :]
        answer = tokenizer.decode_response(r.response), logp, r.truncated
        answers[r.row] = answer
    return [answers[i] for i in range(len(prompt_records))]


def ask(server, method, path, body=None, **headers):
    """Sends one request; returns (status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, body, {"content-type": "application/json", **headers})
    response = connection.getresponse()
    reply = response.status, dict(response.getheaders()), response.read()
    connection.close()
    return reply
