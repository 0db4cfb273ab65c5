"""Import of GGUF files, compared with the import of transformers."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from compass_jax.commands.cli import main
from compass_jax.families.raw import UnsupportedModel, WeightsError
from compass_jax.weights.gguf_folder import import_gguf
from compass_jax.weights.gguf_tokenizer import tokenizer_files
from compass_jax.weights.hf import load_params
from compass_jax.weights.hf_config import read_hf_config

HIDDEN, FFN, LAYERS, HEADS, KV, EXPERTS = 96, 64, 2, 6, 2, 4
TEXTS = ("Hello world, it's 12,345.67", "  two\n\n lines\t<|end|>", "naïve 你好 𝔘", "")
TEMPLATE = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"


def byte_level_vocabulary():
    """Returns tokens and merges of a small byte-level BPE, as a trainer learns them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "Hello hello world lines of the world"], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    tokens = ["<|end|>", "<think>", *sorted(model["vocab"], key=model["vocab"].get)]
    types = [3, 4] + [1] * (len(tokens) - 2)
    return tokens, types, [" ".join(pair) for pair in model["merges"]]


def add_tokenizer(writer, pre="qwen2", tokens=None):
    vocabulary, types, merges = byte_level_vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary if tokens is None else tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(1)
    writer.add_chat_template(TEMPLATE)
    return len(vocabulary)


def write_gguf(path, arch, kind=Q.Q8_0, experts=0, **tokenizer):
    """Writes a model with random weights, whose matrices are quantised as `kind`."""
    rng, writer = np.random.default_rng(0), gguf.GGUFWriter(path, arch)
    vocab = add_tokenizer(writer, **tokenizer)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
        if arch == "qwen3moe":
            writer.add_expert_feed_forward_length(FFN)

    def add(name, *shape):
        values = rng.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1 or "gate_inp" in name:
            writer.add_tensor(name, values + (1 if name.endswith("norm.weight") else 0))
        else:
            stored = gguf.quants.quantize(values, kind)
            writer.add_tensor(name, stored, raw_dtype=kind)

    add("token_embd.weight", vocab, HIDDEN)
    add("output_norm.weight", HIDDEN)
    add("output.weight", vocab, HIDDEN)
    for i in range(LAYERS):
        blk = f"blk.{i}."
        for name in ("attn_norm", "ffn_norm"):
            add(f"{blk}{name}.weight", HIDDEN)
        for name, heads in (("q", HEADS), ("k", KV), ("v", KV)):
            add(f"{blk}attn_{name}.weight", heads * 32, HIDDEN)
            if arch == "qwen2":
                add(f"{blk}attn_{name}.bias", heads * 32)
        add(f"{blk}attn_output.weight", HIDDEN, HEADS * 32)
        if arch in ("qwen3", "qwen3moe"):
            add(f"{blk}attn_q_norm.weight", 32)
            add(f"{blk}attn_k_norm.weight", 32)
        lead, suffix = ((experts,), "_exps") if experts else ((), "")
        if experts:
            add(f"{blk}ffn_gate_inp.weight", experts, HIDDEN)
        add(f"{blk}ffn_gate{suffix}.weight", *lead, FFN, HIDDEN)
        add(f"{blk}ffn_up{suffix}.weight", *lead, FFN, HIDDEN)
        add(f"{blk}ffn_down{suffix}.weight", *lead, HIDDEN, FFN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def of_transformers(path, folder):
    """Returns the model as transformers reads the file, with the folder's config, because
    transformers does not read the experts' size from the file.
    """
    return AutoModelForCausalLM.from_pretrained(
        path.parent,
        config=AutoConfig.from_pretrained(folder),
        gguf_file=path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )


@pytest.mark.parametrize(
    ("arch", "kind", "experts"),
    [
        ("llama", Q.Q4_1, 0),
        ("qwen2", Q.Q5_0, 0),
        ("qwen3", Q.F16, 0),
        ("qwen3moe", Q.Q8_0, EXPERTS),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_every_tensor_is_that_of_transformers(tmp_path, arch, kind, experts):
    path = write_gguf(tmp_path / "model.gguf", arch, kind, experts)
    folder = import_gguf(path, tmp_path / "out")
    expected = of_transformers(path, folder).state_dict()
    actual = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)
    config = read_hf_config(folder)
    load_params(folder, config, "float32")  # refuses a tensor that is missing or left over
    assert (config.heads, config.kv_heads, config.head_dim) == (HEADS, KV, 32)
    assert (config.norm_eps, config.rope_theta) == (1e-5, 5000.0)


def test_llama_with_experts_is_a_mixtral(tmp_path):
    """The experts are compared with the file's tensors, since transformers does not read
    this file.
    """
    path = write_gguf(tmp_path / "model.gguf", "llama", Q.Q8_0, EXPERTS)
    actual = load_file(import_gguf(path, tmp_path / "out") / "model.safetensors")
    stored = {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }
    for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
        for expert in range(EXPERTS):
            np.testing.assert_array_equal(
                actual[f"model.layers.1.block_sparse_moe.experts.{expert}.{name}.weight"],
                stored[f"blk.1.ffn_{part}_exps.weight"][expert],
            )
    config = read_hf_config(tmp_path / "out")
    assert (config.family, config.mixture.experts, config.mixture.top_k) == ("mixtral", EXPERTS, 2)
    load_params(tmp_path / "out", config, "float32")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("pre", ["qwen2", "gpt-2", "llama-bpe"])
def test_the_tokenizer_is_that_of_transformers(tmp_path, pre):
    path = write_gguf(tmp_path / "model.gguf", "qwen3", pre=pre)
    folder = import_gguf(path, tmp_path / "out")
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    actual = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert actual(text).input_ids == expected(text).input_ids
        assert actual.decode(actual(text).input_ids) == text
    chat = [{"role": "user", "content": "hello"}]
    assert actual.apply_chat_template(chat, tokenize=False) == "hello<|end|>"
    assert actual.eos_token == "<|end|>"
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 1]  # the token that ends a turn ends an answer too


def sentencepiece(**changes):
    """Returns the metadata of a SentencePiece tokenizer, where earlier merges have higher
    scores.
    """
    pieces = ["▁h", "▁he", "ll", "▁hell", "▁hello", "lo", "wo", "▁wo"]
    letters = sorted({letter for piece in pieces for letter in piece})
    byte_tokens = [f"<0x{i:02X}>" for i in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) + len(letters))
    values = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    values |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **changes}
    return {f"tokenizer.ggml.{key}": value for key, value in values.items()}


def test_a_sentencepiece_tokenizer_merges_by_score_and_falls_back_to_bytes(tmp_path):
    files = tokenizer_files(sentencepiece(), "model.gguf")
    tokenizer = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    encoded = tokenizer.encode("hello é")
    # "é" is not in the vocabulary: two bytes; "ll" comes before "lo", as its score is higher
    assert encoded.tokens == ["<s>", "▁hello", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(encoded.ids) == "hello é"
    assert tokenizer.encode("hwo").tokens == ["<s>", "▁h", "wo"]
    config = files["tokenizer_config.json"]
    assert config["bos_token"] == "<s>" and config["add_bos_token"]


def test_a_sentencepiece_tokenizer_without_a_space_prefix_keeps_the_first_space():
    files = tokenizer_files(sentencepiece(add_space_prefix=False), "model.gguf")
    tokenizer = Tokenizer.from_str(json.dumps(files["tokenizer.json"]))
    for text in (" hello", "hello"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


REFUSED = {
    "another kind of tokenizer": (sentencepiece(model="t5"), "tokenizer.ggml.model = 't5'"),
    "an unknown pattern": (
        sentencepiece(model="gpt2", pre="newest", merges=[]),
        "tokenizer.ggml.pre = 'newest': the pattern of its words is not known",
    ),
    "a missing score": (sentencepiece(scores=[0.0]), "must have a score for each token"),
    "an end token outside": (sentencepiece(eos_token_id=9999), "eos_token_id = 9999"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tokenizer_that_cannot_be_converted_is_refused(name):
    metadata, message = REFUSED[name]
    with pytest.raises((WeightsError, UnsupportedModel), match=message):
        tokenizer_files(metadata, "model.gguf")


def test_files_that_cannot_be_converted_are_refused_and_leave_nothing(tmp_path, capsys):
    good = write_gguf(tmp_path / "good.gguf", "qwen3")
    truncated = tmp_path / "truncated.gguf"
    truncated.write_bytes(good.read_bytes()[:-5000])
    no_gguf = tmp_path / "text.gguf"
    no_gguf.write_text("weights")
    other = write_gguf(tmp_path / "other.gguf", "falcon")
    tokens = byte_level_vocabulary()[0]
    extra = write_gguf(tmp_path / "extra.gguf", "qwen3", tokens=[*tokens, "more"])
    for file, message in (
        (truncated, "could not be read as a GGUF file"),
        (no_gguf, "could not be read as a GGUF file"),
        (tmp_path / "absent.gguf", "does not exist"),
        (other, "general.architecture = 'falcon' is not supported"),
        (extra, f"the tokenizer has {len(tokens) + 1} tokens, the embedding {len(tokens)} rows"),
    ):
        assert main(["import-gguf", str(file), str(tmp_path / "out")]) != 0
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out").exists()


def test_an_unknown_quantisation_and_a_missing_tensor_are_refused(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", "qwen3")
    with monkeypatch.context() as patch:
        patch.delitem(gguf.quants._type_traits, Q.Q8_0)
        with pytest.raises(WeightsError, match="quantised as Q8_0, which the package gguf cannot"):
            import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    # a Qwen2 has biases, which these tensors lack
    other = write_gguf(tmp_path / "other.gguf", "qwen3")
    data = other.read_bytes().replace(b"qwen3", b"qwen2")
    other.write_bytes(data)
    with pytest.raises(WeightsError, match="lacks 6 tensors that the model needs, such as blk"):
        import_gguf(other, tmp_path / "out")
