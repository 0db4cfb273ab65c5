"""Invalid tokenizer folders are refused when they are loaded, with the file and the reason."""

import json
from pathlib import Path

import pytest

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError

TINY = Path(__file__).parents[2] / "configs" / "tiny_tokenizer"
CONFIG = {
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
    "chat_template": "{{ messages }}",
}


def write_tokenizer(folder, change=lambda raw: None, config=CONFIG):
    raw = json.loads((TINY / "tokenizer.json").read_text())
    change(raw)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    (folder / "tokenizer_config.json").write_text(
        config if isinstance(config, str) else json.dumps(config)
    )
    return folder


def move(raw, token, index):
    raw["model"]["vocab"][token] = index
    for added in raw["added_tokens"]:
        if added["content"] == token:
            added["id"] = index


@pytest.mark.parametrize(
    ("token", "index"), [("?", 100_000), ("<|im_end|>", 5000), ("<|endoftext|>", 384)]
)
def test_an_id_beyond_the_model_is_refused_however_few_tokens_there_are(tmp_path, token, index):
    folder = write_tokenizer(tmp_path, lambda raw: move(raw, token, index))
    with pytest.raises(
        TokenizerError, match=rf"{tmp_path} has ids up to {index}, and the model has rows for 384"
    ):
        Tokenizer.for_model(folder, 384)
    assert Tokenizer.for_model(folder, index + 1).vocab_size == index + 1


def test_holes_below_the_model_s_size_keep_the_text_of_the_highest_tokens(tmp_path):
    tokenizer = Tokenizer.for_model(write_tokenizer(tmp_path, lambda raw: move(raw, "?", 380)), 384)
    assert tokenizer.vocab_size == 381 and tokenizer.encode("why?")[-1] == 380
    assert tokenizer.decode(tokenizer.encode("why?")) == "why?"
    assert tokenizer.decode([*tokenizer.encode("why"), 350, 379, 381, 383, -1, 2**40]) == "why"


@pytest.mark.parametrize(
    "change", [{"model": [1]}, {"added_tokens": 7}, {"model": {"type": "BPE", "vocab": {"a": -5}}}]
)
def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path, change):
    folder = write_tokenizer(tmp_path, lambda raw: raw.update(change))
    with pytest.raises(TokenizerError, match=rf"{folder}/tokenizer.json cannot be read: .*publish"):
        Tokenizer.load(folder)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("[]", "holds a list, a JSON object is expected"),
        ("{", "not JSON"),
        ({"eos_token": 7}, "eos_token = 7"),
        ({"eos_token": {}}, "eos_token = None"),
        ({"eos_token": ""}, "eos_token = ''"),
        ({"eos_token": None}, "names no eos_token"),
        ({"eos_token": "<end>"}, "'<end>', which is not in"),
        ({"pad_token": "<pad>"}, "'<pad>', which is not in"),
        ({"additional_special_tokens": ["x", 7]}, r"additional_special_tokens\.1 = 7"),
        ({"chat_template": 7}, r"chat_template\.str = 7"),
    ],
)
def test_an_odd_tokenizer_config_is_refused(tmp_path, config, words):
    folder = write_tokenizer(
        tmp_path, config=config if isinstance(config, str) else CONFIG | config
    )
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(folder)


def test_a_template_that_is_not_utf_8_is_refused(tmp_path):
    folder = write_tokenizer(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template.jinja: not UTF-8"):
        Tokenizer.load(folder)


def test_what_a_file_says_of_truncation_and_padding_is_left_out_as_transformers_does(tmp_path):
    def set_both(raw):
        raw["truncation"] = {
            "direction": "Right",
            "max_length": 3,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        raw["padding"] = {
            "strategy": {"Fixed": 1000},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "x",
        }

    assert Tokenizer.load(write_tokenizer(tmp_path, set_both)).encode("12345") == Tokenizer.load(
        TINY
    ).encode("12345")


def test_control_tokens_that_only_the_configuration_names_are_control_tokens_as_in_transformers(
    tmp_path,
):
    from transformers import AutoTokenizer

    config = {
        **CONFIG,
        "additional_special_tokens": ["<|im_start|>"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    folder = write_tokenizer(tmp_path, lambda raw: raw.update(added_tokens=[]), config)
    text = "<|im_start|>user\n12<|im_end|>"
    ids, hf_ids = (
        Tokenizer.load(folder).encode(text),
        AutoTokenizer.from_pretrained(folder).encode(text),
    )
    assert ids == hf_ids == Tokenizer.load(TINY).encode(text)


def test_an_end_token_of_the_plain_vocabulary_becomes_a_control_token_as_in_transformers(tmp_path):
    from transformers import AutoTokenizer

    folder = write_tokenizer(
        tmp_path,
        config={**CONFIG, "eos_token": "the", "tokenizer_class": "PreTrainedTokenizerFast"},
    )
    raw = json.loads((folder / "tokenizer.json").read_text())
    word = next(token for token in raw["model"]["vocab"] if token.isalpha() and len(token) > 2)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**CONFIG, "eos_token": word, "tokenizer_class": "PreTrainedTokenizerFast"})
    )
    tokenizer, hf_tokenizer = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    text = f"12{word}34"
    assert tokenizer.encode(text) == hf_tokenizer.encode(
        text
    ) and tokenizer.eos_id in tokenizer.encode(text)
    assert (
        tokenizer.decode(tokenizer.encode(text))
        == hf_tokenizer.decode(hf_tokenizer.encode(text), skip_special_tokens=True)
        == "1234"
    )
