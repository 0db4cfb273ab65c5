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
from compass_jax.commands.serve import make_engine, mesh_config, rollout_config
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
        ({"port": 0}, "--port 0: must be from 1"),
        ({"temperature": -1.0}, r"temperature = -1\.0"),
        ({"slots": 0}, "slots = 0: must be positive"),
        (
            {"openai": True, "temperature": 0.5},
            "--temperature 0.5 would do nothing beside --openai",
        ),
        ({"max_waiting": 3}, "--max-waiting 3 would do nothing without --openai"),
        ({"openai": True, "max_waiting": 0}, "--max-waiting 0: must be positive"),
        ({"cache_pages": 9}, "rollout.cache_pages = 9: the longest sequence"),
        ({"quantize": "int4"}, "rollout.quantize = 'int4'"),
    ],
)
def test_settings_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        rollout_config(Serve(weights="x", **change))


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
    engine, params, tokenizer = make_engine(Serve(weights=str(weights)))
    assert dataclasses.replace(engine.model_config, init_std=MODEL.init_std) == MODEL
    assert engine.model.known == tokenizer.vocab_size
    jax.tree.map(np.testing.assert_array_equal, params, to_decode(parameters()))
