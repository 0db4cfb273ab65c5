"""Import of GGUF files, compared with the import of transformers."""

import json
import struct
import time

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

from compass_jax.base.errors import UserError
from compass_jax.commands.cli import main
from compass_jax.model.families.raw import UnsupportedModel, WeightsError
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


def write_gguf(path, arch, kind=Q.Q8_0, experts=0, more=lambda writer: None, **tokenizer):
    """Writes a model with random weights, whose matrices are quantised as `kind`; `more` adds to
    its metadata.
    """
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
    more(writer)
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
        (truncated, "the file is truncated or damaged"),
        (no_gguf, "it does not begin with GGUF"),
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


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def header(tensors=0, pairs=()):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, len(pairs)) + b"".join(pairs)


ENDLESS = text("x.y") + struct.pack("<IIQ", 9, 0, 2**62)
TWICE = text("x.y") + struct.pack("<IB", 7, 1)
NESTED = text("x.y") + struct.pack("<IIQ", 9, 9, 1)
DAMAGED = {
    "endless": (header(pairs=[ENDLESS]), "4611686018427387904 numbers, where 0 bytes are left"),
    "texts": (header(pairs=[text("x.y") + struct.pack("<IIQ", 9, 8, 2**40)]), "texts, where 0"),
    "many keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "keys, where 0 bytes are left"),
    "twice": (header(pairs=[TWICE, TWICE]), "the key 'x.y' twice"),
    "nested": (header(pairs=[NESTED]), "lists of lists"),
    "kind": (header(pairs=[text("x.y") + struct.pack("<I", 99) + b"12345678"]), "type 99"),
    "version": (b"GGUF" + struct.pack("<IQQ", 9, 0, 0), "version 9 of GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "empty": (b"", "is empty"),
    "no UTF-8": (header(pairs=[struct.pack("<Q", 4) + b"\xff" * 14]), "is not UTF-8"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_header_is_refused_before_anything_is_read_by_it(tmp_path, name):
    data, message = DAMAGED[name]
    (tmp_path / "x.gguf").write_bytes(data)
    with pytest.raises(WeightsError, match=message):
        import_gguf(tmp_path / "x.gguf", tmp_path / "out")


ADDED = {
    "a scale of positions": (
        lambda writer: writer.add_float32("llama.rope.scale_linear", 4.0),
        "llama.rope.scale_linear = 4.0: not supported",
    ),
    "a scale of experts": (
        lambda writer: writer.add_expert_weights_scale(2.5),
        "llama.expert_weights_scale = 2.5: not supported",
    ),
    "a window": (lambda writer: writer.add_sliding_window(64), "llama.attention.sliding_window"),
    "part of a head": (
        lambda writer: writer.add_rope_dimension_count(16),
        "llama.rope.dimension_count = 16: not supported",
    ),
    "a factor alone": (
        lambda writer: writer.add_rope_scaling_factor(2.0),
        "rope.scaling.factor = 2 without",
    ),
    "an end of each text": (
        lambda writer: writer.add_add_eos_token(True),
        "tokenizer.ggml.add_eos_token = True: not supported",
    ),
    "an id outside": (lambda writer: writer.add_pad_token_id(10**6), "pad_token_id = 1000000"),
}


@pytest.mark.parametrize("name", ADDED)
def test_metadata_that_change_the_model_are_refused_by_name(tmp_path, name):
    more, message = ADDED[name]
    path = write_gguf(tmp_path / "model.gguf", "llama", more=more)
    with pytest.raises(WeightsError, match=message):
        import_gguf(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_all_keys_that_are_not_read_are_named_at_once_and_neutral_ones_are_none(tmp_path):
    def more(writer):
        writer.add_float32("llama.rope.scale_linear", 4.0)
        writer.add_logit_scale(0.5)

    path = write_gguf(tmp_path / "model.gguf", "llama", more=more)
    with pytest.raises(UnsupportedModel, match=r"scale_linear = 4.0, llama.logit_scale = 0.5"):
        import_gguf(path, tmp_path / "out")

    def neutral(writer):
        writer.add_float32("llama.rope.scale_linear", 1.0)
        writer.add_rope_dimension_count(32)
        writer.add_vocab_size(len(byte_level_vocabulary()[0]))

    import_gguf(write_gguf(tmp_path / "model.gguf", "llama", more=neutral), tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (b"llama.block_count", 7, "block_count = 7, and its tensors are of 2 layers"),
        (
            b"llama.feed_forward_length",
            32,
            r"shape \(96, 64\), and the metadata ask for \(96, 32\)",
        ),
    ],
)
def test_sizes_that_the_tensors_do_not_have_are_refused(tmp_path, key, value, message):
    path = write_gguf(tmp_path / "model.gguf", "llama")
    data = path.read_bytes()
    at = data.index(key) + len(key) + 4
    path.write_bytes(data[:at] + struct.pack("<I", value) + data[at + 4 :])
    with pytest.raises(WeightsError, match=message):
        import_gguf(path, tmp_path / "out")


def test_two_tensors_at_one_place_are_refused(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", "llama")
    data = bytearray(path.read_bytes())
    reader = gguf.GGUFReader(path)
    place = reader.tensors[3].field.offset + reader.tensors[3].field.parts[0].nbytes
    at = data.index(reader.tensors[3].name.encode(), place - 8) + len(reader.tensors[3].name)
    axes = struct.unpack_from("<I", data, at)[0]
    offset = at + 4 + 8 * axes + 4
    before = reader.tensors[2].data_offset - reader.data_offset
    struct.pack_into("<Q", data, offset, before)
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="again, or over another one"):
        import_gguf(path, tmp_path / "out")


@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, 10))]
)
def test_mutated_files_are_refused_in_one_line_or_read_within_seconds(tmp_path, part):
    """Fifty files each, whose headers have random bytes, lengths or ends."""
    rng = np.random.default_rng(part)
    arch, experts = ("qwen3moe", EXPERTS) if part % 2 else ("llama", 0)
    whole = write_gguf(tmp_path / "model.gguf", arch, experts=experts)
    data = whole.read_bytes()
    end, refused, path = gguf.GGUFReader(whole).data_offset, 0, tmp_path / "mutated.gguf"
    for number in range(50):
        mutated, at = bytearray(data), int(rng.integers(4, end - 8))
        if number % 3 == 0:
            struct.pack_into("<Q", mutated, at, int(rng.integers(0, 2**63)))
        elif number % 3 == 1:
            mutated[at] ^= 1 << int(rng.integers(8))
        else:
            del mutated[at : at + int(rng.integers(1, 9))]
        path.write_bytes(mutated)
        started = time.process_time()
        try:
            import_gguf(path, tmp_path / f"out{number}")
        except UserError as error:
            refused += 1
            assert str(error).startswith(str(path)) and "\n" not in str(error)
            assert not (tmp_path / f"out{number}").exists()
        assert time.process_time() - started < 5
    assert refused > 15
