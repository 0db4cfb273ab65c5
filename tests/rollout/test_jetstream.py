"""JetStream's server and client over this package's batcher: each request gets the text of a plain
rollout. Also the options that `compass serve` refuses.
"""

import dataclasses
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from served import MODEL, PAGED, TOKENIZER, WHOLE, own_texts, parameters, saved

from compass_jax.commands.options import Serve
from compass_jax.commands.serve import make_engine, mesh_config, rollout_config, with_lengths
from compass_jax.config import ConfigError
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.params import to_decode

ROOT = Path(__file__).parent.parent.parent
TEXTS = ["1 + 2 = ", "State the final answer", "a", "", "x" * 40, "tschüß, 7 - 5"]
LIMITS = [24, 5, 1, 12, 24, 20]
PLAIN = {"slots": 2, "prompt_tokens": 32, "max_new_tokens": 24}


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Writes a Hugging Face folder with a tokenizer."""
    return saved(tmp_path_factory.mktemp("serve") / "hf")


def jetstreams(weights, options):
    """Returns what JetStream's client receives from a server in a separate process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    session = json.dumps(
        {"prompts": TEXTS, "max_tokens": LIMITS, "serve": {**options, "temperature": 0}}
    )
    script = Path(__file__).with_name("jetstream_session.py")
    command = [sys.executable, str(script), str(weights), str(port)]
    result = subprocess.run(
        command, input=session, capture_output=True, text=True, timeout=600, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        (PAGED, True),
        *(pytest.param(options, False, marks=pytest.mark.slow) for options in (PLAIN, WHOLE)),
    ],
)
def test_jetstreams_server_and_client_give_the_text_of_our_own_rollout(weights, options, preempts):
    """Six requests run at once with different limits: on two slots; on four slots whose pages run
    out, so that requests are preempted and resumed; and in bfloat16 with 8-bit weights, keys and
    values, with pages, on a mesh of eight devices.
    """
    report = jetstreams(weights, options)
    expected = own_texts(weights, options, TEXTS, LIMITS)
    preempted = report.pop("preempted")
    assert report == {"texts": expected, "health": True, "waiting": 0}
    # no preemption with pages for all; with few it depends on the requests that overlap
    assert preempts or preempted == 0
    assert len(set(expected)) == len(TEXTS) and sum(len(text) > 10 for text in expected) >= 3


def test_a_byte_of_a_longer_character_is_known():
    tokenizer = Tokenizer.load(TOKENIZER)
    (first, second) = tokenizer.encode("ü")
    assert [tokenizer.byte_of(x) for x in (first, second)] == list("ü".encode())
    assert (
        tokenizer.byte_of(tokenizer.encode(" ")[0]) == 0x20
        and tokenizer.byte_of(tokenizer.eos_id) is None
    )
    assert tokenizer.byte_of(10_000) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": 48}, "--prompt-tokens 48: must be a power of two"),
        ({"jetstream": True, "port": 0}, "--port 0: must be from 1"),
        ({"port": 65536}, "--port 65536: must be from 1"),
        ({"jetstream": True, "openai": True}, "one server has one protocol"),
        ({"jetstream": True, "temperature": -1.0}, r"temperature = -1\.0"),
        ({"slots": 0}, "slots = 0: must be positive"),
        (
            {"temperature": 0.5},
            "--temperature 0.5 would do nothing without --jetstream",
        ),
        (
            {"jetstream": True, "max_waiting": 3},
            "--max-waiting 3 would do nothing with --jetstream",
        ),
        ({"max_waiting": 0}, "--max-waiting 0: must be positive"),
        ({"tinker": True, "jetstream": True}, "--tinker: one server has one protocol"),
        ({"weight_copies": 3}, "--weight-copies 3: would do nothing without --tinker"),
        ({"tinker": True, "trust_prompts": True}, "--trust-prompts True: would do nothing with"),
        ({"tinker": True, "chat_format": "any"}, "--chat-format any: would do nothing with"),
        ({"prompt_tokens": 256, "cache_pages": 9}, "rollout.cache_pages = 9: the longest sequence"),
        ({"quantize": "int4"}, "rollout.quantize = 'int4'"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        rollout_config(Serve(weights="x", **change))


MODEL_64 = dataclasses.replace(MODEL, max_positions=64)
MODEL_256 = dataclasses.replace(MODEL, max_positions=256)
WIDE = dataclasses.replace(MODEL, layers=64, kv_heads=64, head_dim=512, max_positions=2**17)


@pytest.mark.parametrize(
    ("model", "options", "expected"),
    [
        (MODEL_64, {"max_new_tokens": 24}, 32),  # 40 of 64 remain
        (MODEL_64, {"max_new_tokens": 48}, 16),
        (MODEL_256, {"max_new_tokens": 128}, 128),
        (MODEL_256, {"max_new_tokens": 127}, 128),
        (MODEL_256, {"max_new_tokens": 129}, 64),
        (MODEL_256, {"max_new_tokens": 100, "cache_pages": 9}, 32),  # pages of 16 tokens
        (WIDE, {}, 256),  # 16 MiB of keys and values a token
        (MODEL_64, {}, 32),  # and answers of 32
    ],
)
def test_prompts_are_as_long_as_context_pages_and_memory_allow(model, options, expected):
    serve = Serve(weights="x", **options)
    assert with_lengths(serve, model).prompt_tokens == expected


def test_the_free_memory_bounds_the_prompts(monkeypatch):
    model = dataclasses.replace(MODEL, max_positions=4096)
    token = 16 * model.layers * model.cache_width * 4  # of 16 slots
    weights = 4 * sum(x.size for x in jax.tree.leaves(parameters()))
    monkeypatch.setattr("compass_jax.commands.serve.process_bytes", lambda: 0.0)
    for tokens, expected in ((1280, 1024), (1279, 512), (4096, 2048)):
        free = 2.0 * tokens * token + weights
        monkeypatch.setattr("compass_jax.commands.serve.usable_bytes", lambda free=free: free)
        assert with_lengths(Serve(weights="x"), model).prompt_tokens == expected


def test_answers_fit_beside_the_prompts():
    def answer(model, **options):
        return with_lengths(Serve(weights="x", **options), model).max_new_tokens

    assert answer(MODEL_64) == 32 and answer(MODEL_256) == 128 and answer(WIDE) == 256
    assert answer(MODEL_64, prompt_tokens=32) == 32 and answer(MODEL_256, prompt_tokens=128) == 128
    assert answer(MODEL_256, cache_pages=4) == 32 and answer(MODEL_64, max_new_tokens=5) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_new_tokens": 49},
            "--prompt-tokens 16 --max-new-tokens 49: together more than the 64",
        ),
        ({"max_new_tokens": 256}, "--max-new-tokens 256: together"),
        ({"cache_pages": 2, "max_new_tokens": 24}, "together more than the 32 tokens of"),
        ({"prompt_tokens": 64, "max_new_tokens": 8}, "--prompt-tokens 64 --max-new-tokens 8:"),
        ({"prompt_tokens": 64}, "--prompt-tokens 64 --max-new-tokens 1: together"),
    ],
)
def test_lengths_beyond_the_context_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        with_lengths(Serve(weights="x", **options), MODEL_64)


def test_a_client_of_http_sees_a_token_when_it_is_decoded():
    assert rollout_config(Serve(weights="x")).tokens_per_call == 1
    assert rollout_config(Serve(weights="x", jetstream=True)).tokens_per_call > 1


@pytest.mark.parametrize("mesh", ["expert", "expert=two", "experts=2", "tensor=2,tensor=2", ","])
def test_a_mesh_that_names_no_axes_is_refused(mesh):
    with pytest.raises(ConfigError, match=r"--mesh .* must be as expert=4,tensor=2; the axes are"):
        mesh_config(Serve(weights="x", mesh=mesh))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mesh": "expert=4"}, r"--mesh.expert = 4"),
        ({"mesh": "fsdp=0"}, r"--mesh.fsdp = 0: must be positive"),
        ({"mesh": "replica=9"}, "the mesh of replica 9 needs 9 devices, there are 8"),
        (
            {"mesh": "fsdp=8", "slots": 8, "cache_pages": 36, "page_tokens": 16},
            "8 groups of slots on devices of their own",
        ),
    ],
)
def test_a_mesh_that_the_model_or_the_machine_cannot_have_is_refused(weights, change, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(Serve(weights=str(weights), **change))


def test_weights_without_a_folder_or_without_a_tokenizer_are_refused(weights, tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        make_engine(Serve(weights=str(tmp_path / "nowhere")))
    bare = shutil.copytree(weights, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer beside it"):
        make_engine(Serve(weights=str(bare)))


def test_the_decode_layout_is_loaded(weights):
    engine, params, tokenizer = make_engine(Serve(weights=str(weights), max_new_tokens=8))
    assert dataclasses.replace(engine.model_config, init_std=MODEL.init_std) == MODEL
    assert engine.model.known == tokenizer.vocab_size
    jax.tree.map(np.testing.assert_array_equal, params, to_decode(parameters()))
