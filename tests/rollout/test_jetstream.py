"""JetStream drives our engine: its server and client give, request by request, the text of our own
rollout; and what `compass serve` refuses.
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

from compass_jax.config import ComputeConfig, ConfigError, ModelConfig, MoEConfig, RolloutConfig
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.model.params import to_decode
from compass_jax.model.transformer import init_params
from compass_jax.records import Prompt
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.serve import ServeConfig, load
from compass_jax.weights.hf import save_params

ROOT = Path(__file__).parent.parent.parent
TOKENIZER = ROOT / "configs" / "tiny_tokenizer"
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
    max_positions=64,
    moe=MoEConfig(experts=6, top_k=2, ffn=16),
)
TEXTS = ["1 + 2 = ", "State the final answer", "a", "", "x" * 40, "tschüß, 7 - 5"]
LIMITS = [24, 5, 1, 12, 24, 20]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A Hugging Face folder with a tokenizer."""
    folder = tmp_path_factory.mktemp("serve") / "hf"
    save_params(
        init_params(MODEL, ComputeConfig(), jax.random.key(3)),
        MODEL,
        folder,
        "float32",
        tokenizer_from=TOKENIZER,
    )
    return folder


def own_texts(weights):
    """Greedy, by our rollout: the last 32 tokens of each prompt, cut at its limit; the padding
    token for the empty prompt.
    """
    model, params, tokenizer = load(str(weights))
    rollout = RolloutConfig(slots=2, prompt_buckets=(16, 32), max_new_tokens=24, tokens_per_call=4)
    engine = Engine(model, ComputeConfig(), rollout, tokenizer.eos_id, known=tokenizer.vocab_size)
    ids = [tokenizer.encode(text)[-32:] or [tokenizer.pad_id] for text in TEXTS]
    prompts = [
        Prompt(i, 0, "", text, np.array(x, np.int32), "")
        for i, (text, x) in enumerate(zip(TEXTS, ids, strict=True))
    ]
    found = {}
    for rollout in Collection(
        engine,
        params,
        prompts,
        1,
        Purpose.SERVE,
        0,
        sampler=Sampler(0.0),
        keep_routing=False,
        max_new_tokens=LIMITS,
    ):
        found[rollout.row] = tokenizer.decode(rollout.response)
    return [found[i] for i in range(len(TEXTS))]


def test_jetstreams_server_and_client_give_the_text_of_our_own_rollout(weights):
    """Six requests at once on two slots, each with a limit of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = json.dumps({"prompts": TEXTS, "max_tokens": LIMITS})
    command = [
        sys.executable,
        str(Path(__file__).with_name("jetstream_session.py")),
        str(weights),
        str(port),
    ]
    result = subprocess.run(
        command, input=asked, capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    expected = own_texts(weights)
    assert found == {"texts": expected, "health": True, "waiting": 0}
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
    ],
)
def test_settings_that_cannot_be_served_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(ServeConfig("x"), **change).rollout()


def test_weights_without_a_folder_or_without_a_tokenizer_are_refused(weights, tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        load(str(tmp_path / "nowhere"))
    bare = shutil.copytree(weights, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="has no tokenizer beside it"):
        load(str(bare))


def test_the_decode_layout_is_loaded(weights):
    model, params, _ = load(str(weights))
    expected = to_decode(init_params(MODEL, ComputeConfig(), jax.random.key(3)))
    assert dataclasses.replace(model, init_std=MODEL.init_std) == MODEL
    jax.tree.map(np.testing.assert_array_equal, params, expected)
