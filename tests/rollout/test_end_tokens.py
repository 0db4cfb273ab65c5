"""Models with several end tokens: each of them ends an answer everywhere, and is kept."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params

from compass_jax.base.errors import UserError
from compass_jax.base.records import Score
from compass_jax.base.token_ids import end_ids
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.experience import saved_samples
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.turns import Turns
from compass_jax.model.params import to_decode
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.online import OnlineBatcher, Streamed
from compass_jax.rollout.request import Columns, Request
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.weights.carried import carry_files
from compass_jax.weights.hf import save_params
from compass_jax.weights.hf_config import find_token_ids

WEIGHTS = to_decode(random_params())
ROLL = dataclasses.replace(ROLLOUT, max_new_tokens=8, cache_bucket=32)
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 16, 8, 9))]
TOKENIZER = Path(__file__).parents[2] / "configs" / "tiny_tokenizer"
ENDS = (EOS, 7, 12, 30, 4, 9, 22, 35)


def rolled_out(ends, temperature=1.0):
    """Returns (prompt, sample) -> rollout for four prompts with three samples each."""
    engine, sampler = Engine(MODEL, COMPUTE, ROLL, ends), Sampler(temperature)
    job = Collection(engine, WEIGHTS, PROMPTS, 3, Purpose.TRAIN, 0, sampler=sampler)
    return {(r.prompt.id, r.sample): r for r in job}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_a_rollout_is_the_endless_one_up_to_its_first_end_token(temperature):
    """Sampled and greedy answers keep the end token, with its log-prob, as their last token."""
    endless = rolled_out((), temperature)
    ends = (*ENDS, int(endless[PROMPTS[0].id, 0].response[0]))
    rollouts = rolled_out(ends, temperature)
    assert all(r.truncated and r.response_length == 8 for r in endless.values())
    seen = set()
    for key, rollout in rollouts.items():
        response = endless[key].response.tolist()
        stops = [i + 1 for i, token in enumerate(response) if token in ends]
        n = stops[0] if stops else len(response)
        assert rollout.response.tolist() == response[:n] and rollout.truncated == (not stops)
        logp = rollout.logp[-n:]
        np.testing.assert_allclose(
            logp, endless[key].logp[len(rollout.prompt.tokens) :][:n], atol=1e-5
        )
        seen |= {(n == 1, response[n - 1])} if stops else set()
    assert any(first for first, _ in seen), "a first token ended one"
    assert {token for _, token in seen} - {EOS, ends[-1]}, "and other ones did"


def test_one_end_token_is_given_as_a_number_too():
    one, several = Engine(MODEL, COMPUTE, ROLL, EOS), Engine(MODEL, COMPUTE, ROLL, [EOS])
    assert one == several and one.end_ids == (EOS,)
    assert one != Engine(MODEL, COMPUTE, ROLL, ENDS)


def test_a_server_says_stop_for_each_of_them():
    chunks = {}
    rollouts = rolled_out(ENDS, 0.0)
    with OnlineBatcher(Engine(MODEL, COMPUTE, ROLL, ENDS), WEIGHTS, 8) as batcher:
        for prompt in PROMPTS:
            received = chunks[prompt.id] = []
            batcher.submit([Streamed.of_client(prompt.tokens, 8, 0.0, received.append)])
        while not all(any(c.finish for c in received) for received in chunks.values()):
            assert batcher.error is None
    for (prompt, sample), rollout in rollouts.items():
        if sample == 0:
            received = chunks[prompt]
            assert [t for c in received for t in c.tokens] == rollout.response.tolist()
            assert received[-1].finish == ("length" if rollout.truncated else "stop")


def test_jetstream_stops_at_each_of_them():
    """JetStream is imported in a separate process, because its import configures logging."""
    program = f"""
from types import SimpleNamespace
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.jetstream_api import JetStreamTokenizer
engine = SimpleNamespace(end_ids=(2, 7))
assert JetStreamTokenizer(Tokenizer.load({str(TOKENIZER)!r}), engine).stop_tokens == {{2, 7}}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_jetstreams_adapter_continues_an_existing_prefix():
    program = """
from types import SimpleNamespace
import numpy as np
from compass_jax.rollout.jetstream_api import JetStreamEngine
config = SimpleNamespace(max_new_tokens=4, prompt_buckets=(8,))
engine = JetStreamEngine(SimpleNamespace(max_prefill_length=16, config=config), None, None)
tokens = dict(params=None, padded_tokens=np.array([5, 6, 7, 0]), true_length=3)
begun = engine.prefill(**tokens)
whole = engine.prefill(**tokens, existing_prefix=begun)
assert whole.prompt.tokens.tolist() == [5, 6, 7, 5, 6, 7] and whole.limit == 10
assert whole.prompt.id == begun.prompt.id + 1
for prefix, says in ((whole, "a prompt of 9 tokens exceeds"), (object(), "must be what `prefill`")):
    try:
        engine.prefill(**tokens, existing_prefix=prefix)
    except ValueError as error:
        assert says in str(error), error
    else:
        raise AssertionError(says)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_the_turn_that_any_end_token_closed_is_answered():
    request = Request.of(PROMPTS[0], 0, 0, 20, 0)
    request.length = 5
    request.take(Columns.of(np.array([3, 12]), np.zeros(2), np.zeros(2), 0).rows())
    assert request.rollout((EOS,)).truncated
    rollout = request.rollout(ENDS)
    assert not rollout.truncated and rollout.response.tolist() == [3, 12]
    rollout = dataclasses.replace(rollout, prompt=dataclasses.replace(PROMPTS[0], turns=3))
    turns = Turns(decode=str, encode=lambda says, turn: [4, 5], most_tokens=20)
    after, verdict = turns.settled(rollout, Score(0.0, True, says="[]"))
    assert verdict is None and after.response.tolist() == [3, 12, 4, 5]


def test_a_checkpoint_gives_back_what_each_of_them_ended():
    def buffer():
        return ExperienceBuffer(RouteBuffer(lambda rows: None, lambda s, r: None, 1, 2))

    saved, group = buffer(), PROMPTS[0]
    saved.add([group])
    for index, last in enumerate((12, 13)):
        request = Request.of(group, index, index, 20, 0)
        request.length = 4
        request.take(Columns.of(np.array([last]), np.zeros(1), np.zeros(1), 0).rows())
        saved.put(request.rollout(ENDS), True)
    restored = buffer()
    saved_samples.restore(restored, saved_samples.state(saved), lambda prompt, visit: group)
    assert [s.rollout.truncated for _, s in sorted(restored.samples.items())] == [False, True]


# ---- what a folder names -------------------------------------------------------------------------


def folder_of(path, generation=None, config=None):
    """Copies the tiny tokenizer (its end token is 2) into a folder with a model's end tokens."""
    shutil.copytree(TOKENIZER, path)
    for name, value in (("generation_config", generation), ("config", config)):
        if value is not None:
            (path / f"{name}.json").write_text(json.dumps(value))
    return path


ANY = {"eos_token_id": [9]}
CASES = {  # generation_config.json, config.json, end tokens other than the tokenizer's
    "none": (None, None, []),
    "generation": ({"eos_token_id": [2, 0]}, {"eos_token_id": 2}, [0]),
    "config": (None, {"eos_token_id": [2, 0]}, [0]),
    "generation_wins": ({"eos_token_id": 0}, ANY, [0]),
    "generation_is_silent": ({"temperature": 0.6}, ANY, [9]),
    "generation_is_null": ({"eos_token_id": None}, ANY, [9]),
    "equal": ({"eos_token_id": 2}, {"eos_token_id": 2}, []),
    "repeated": ({"eos_token_id": [5, 5, 2, 6]}, None, [5, 6]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_end_tokens_of_a_folder(tmp_path, name):
    generation, config, more = CASES[name]
    folder = folder_of(tmp_path / "model", generation, config)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.end_ids == (2, *more) and tokenizer.eos_id == 2
    named = find_token_ids(folder)["eos_token_id"]
    assert set(named if isinstance(named, list) else [named]) == {2, *more}
    assert isinstance(named, list) == bool(more)


@pytest.mark.parametrize("name", CASES)
def test_the_carried_and_the_exported_folder_name_the_same_end_tokens(tmp_path, name):
    """A run copies the tokenizer without config.json, and an export is made from that copy."""
    generation, config, more = CASES[name]
    source, carried = folder_of(tmp_path / "model", generation, config), tmp_path / "kept"
    carried.mkdir()
    carry_files(source, carried)
    assert Tokenizer.load(carried).end_ids == (2, *more)
    out = save_params(random_params(), MODEL, tmp_path / "out", "float32", tokenizer_from=carried)
    for file in ("config.json", "generation_config.json"):
        if (out / file).exists():
            value = json.loads((out / file).read_text())["eos_token_id"]
            assert set(value if isinstance(value, list) else [value]) == {2, *more}, file
    assert (out / "generation_config.json").exists() == (generation is not None or bool(more))
    if name in ("generation", "equal"):  # no end token to add: the file is copied unchanged
        assert (out / "generation_config.json").read_text() == json.dumps(generation)
    if name == "generation_is_silent":
        assert json.loads((out / "generation_config.json").read_text())["temperature"] == 0.6


def test_transformers_stops_an_exported_model_at_each_of_them(tmp_path):
    from transformers import AutoModelForCausalLM

    source = folder_of(tmp_path / "model", None, {"eos_token_id": [2, 0]})
    out = save_params(random_params(), MODEL, tmp_path / "out", "float32", tokenizer_from=source)
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.generation_config.eos_token_id == [2, 0]


def test_an_end_token_beyond_the_models_vocabulary_is_not_in_its_config(tmp_path):
    source = folder_of(tmp_path / "model", {"eos_token_id": [2, 4000]})
    out = save_params(random_params(), MODEL, tmp_path / "out", "float32", tokenizer_from=source)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == [2]


@pytest.mark.parametrize("value", ["2", [2, "0"], -1, [True], 2.0, {"a": 1}])
@pytest.mark.parametrize("file", ["generation_config", "config"])
def test_what_is_no_token_id_is_refused_by_its_file(tmp_path, file, value):
    folder = folder_of(
        tmp_path / "model", **{file.removesuffix("_config"): {"eos_token_id": value}}
    )
    with pytest.raises(UserError, match=rf"{file}\.json: eos_token_id = .* is expected"):
        end_ids(folder, UserError)
    with pytest.raises(TokenizerError, match="eos_token_id"):
        Tokenizer.load(folder)


def test_an_assistants_turn_may_be_closed_by_any_of_them(tmp_path):
    """Llama 3.1's <|eot_id|> and Phi-3's <|end|> close turns, but are not the tokenizer's end
    token.
    """
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    folder = folder_of(tmp_path / "model", {"eos_token_id": [2, 0]})
    template = "{% for m in messages %}{{ m.content }}<|endoftext|>\n{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    tokens, mask = Tokenizer.load(folder).encode_example(talk)
    assert tokens[mask].tolist()[-1] == tokens[-1] == 0
    (folder / "generation_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"does not end it with the end token '<.im_end.>'"):
        Tokenizer.load(folder).encode_example(talk)


def test_an_added_end_token_is_a_control_token(tmp_path):
    """The token ends an answer, so its spelling in a message is plain text, and decoding an answer
    drops it.
    """
    folder = folder_of(tmp_path / "model", {"eos_token_id": [2, 338]})
    raw = json.loads((folder / "tokenizer.json").read_text())
    stop = {"id": 338, "content": "<stop>", "special": False}
    stop |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    raw["added_tokens"].append(stop)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.end_ids == (2, 338) and tokenizer.encode("<stop>") == [338]
    assert 338 not in tokenizer.encode("say <stop>", trusted=False)
    assert tokenizer.decode([*tokenizer.encode("a"), 338]) == "a"
