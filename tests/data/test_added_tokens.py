"""Tokens that other files than tokenizer.json add or name: the ids that transformers gives them, or
an error with the file and the token.
"""

import json
import random

import pytest
from sentencepiece_folders import write_sentencepiece
from test_tokenizer_folder import CONFIG, write_tokenizer
from transformers import AutoTokenizer

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.weights.hf_config import find_token_ids

FIRST = 338  # the first id after those of the tiny tokenizer
FAST = {**CONFIG, "tokenizer_class": "PreTrainedTokenizerFast"}
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}


def token(content, special=False, **flags):
    return {"content": content, **PLAIN, "special": special, **flags}


def decoder(*tokens, first=FIRST):
    return {"added_tokens_decoder": {str(first + i): x for i, x in enumerate(tokens)}}


CHATML = {
    "0": token("<|endoftext|>", True),
    "1": token("<|im_start|>", True),
    "2": token("<|im_end|>", True),
}
# name -> (fields of tokenizer_config.json, further files, tokens in the texts)
KINDS = {
    "plain": (decoder(token("<tool_call>"), token("</tool_call>")), {}, 2),
    "special": (decoder(token("<|a|>", True), token("<|b|>", True)), {}, 2),
    "with those of tokenizer.json": (
        {"added_tokens_decoder": {**CHATML, "338": token("<|tool|>", True)}},
        {},
        1,
    ),
    "lstrip": (decoder(token("<mask>", True, lstrip=True)), {}, 1),
    "rstrip": (decoder(token("<sep>", rstrip=True), token("<x>", lstrip=True, rstrip=True)), {}, 2),
    "single word": (
        decoder(token("<w>", single_word=True), token("tool", single_word=True)),
        {},
        2,
    ),
    "normalized": (decoder(token("<n>", normalized=True), token("<m>", normalized=False)), {}, 2),
    "other flags than tokenizer.json": (
        {"added_tokens_decoder": {**CHATML, "1": token("<|im_start|>", True, rstrip=True)}},
        {},
        0,
    ),
    "of the plain vocabulary": ({"added_tokens_decoder": {"10": token("on")}}, {}, 0),
    "named, and not special there": (
        {**decoder(token("<bot>", lstrip=True)), "bos_token": "<bot>"},
        {},
        1,
    ),
    "spaces": (decoder(token("   "), token("\n\n\n")), {}, 2),
    "one is a part of another": (decoder(token("<a>"), token("<a><b>"), token("<b>")), {}, 3),
    "added_tokens.json": ({}, {"added_tokens.json": {"<a>": 338, "<b>": 339}}, 2),
    "added_tokens.json, out of order": ({}, {"added_tokens.json": {"<b>": 339, "<a>": 338}}, 2),
    "added_tokens.json and special_tokens_map.json": (
        {},
        {
            "added_tokens.json": {"[PAD]": 338, "<s>": 339},
            "special_tokens_map.json": {
                "pad_token": "[PAD]",
                "bos_token": token("<s>", True, rstrip=True),
            },
        },
        2,
    ),
    "special_tokens_map.json with additional ones": (
        {},
        {
            "added_tokens.json": {"<a>": 338, "<b>": 339},
            "special_tokens_map.json": {"additional_special_tokens": ["<a>", "<b>"]},
        },
        2,
    ),
    "special_tokens_map.json alone": (
        {},
        {"special_tokens_map.json": {"mask_token": token("<mask>", lstrip=True)}},
        1,
    ),
    "legacy files beside added_tokens_decoder": (
        decoder(token("<a>")),
        {"added_tokens.json": {"<z>": 338}, "special_tokens_map.json": {"bos_token": "<z>"}},
        1,
    ),
    "additional ones without an id": ({"additional_special_tokens": ["<a>", "<b>"]}, {}, 2),
    "extra ones": ({"extra_special_tokens": ["<a>", "<b>"]}, {}, 2),
    "extra ones by name": ({"extra_special_tokens": {"image_token": "<image>"}}, {}, 1),
    "a token by its own name": ({"boi_token": "<boi>", "image_token": "<image>"}, {}, 2),
    "named without an id": ({"bos_token": "<s>", "unk_token": "<unk>", "cls_token": "<c>"}, {}, 3),
    "declared and named": (
        {**decoder(token("<a>", True), token("<b>", True)), "additional_special_tokens": ["<c>"]},
        {},
        3,
    ),
    "an object with its type": (
        {"bos_token": {"__type": "AddedToken", **token("<s>", True, rstrip=True)}},
        {},
        1,
    ),
}


def write(folder, config, files, change=lambda raw: None):
    folder.mkdir(exist_ok=True)
    write_tokenizer(folder, change, {**FAST, **config})
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def spelt(folder):
    """Returns every token that a file of the folder names."""
    tokens = []
    for file in ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json"):
        if (folder / file).is_file():
            raw = json.loads((folder / file).read_text())
            raw.pop("chat_template", None)
            values = [*raw.values(), *raw.get("added_tokens_decoder", {}).values()]
            values += raw.get("additional_special_tokens", [])
            values += [*raw] if file == "added_tokens.json" else []
            more = raw.get("extra_special_tokens", [])
            values += more.values() if isinstance(more, dict) else more
            values = [x.get("content") if isinstance(x, dict) else x for x in values]
            tokens += [x for x in values if isinstance(x, str)]
    return sorted(set(tokens))


def texts(tokens):
    """Returns texts in which the tokens stand alone, together, in words and among white space."""
    draw, words = (
        random.Random(0),
        ["a", " ", "  ", "\n", "state", "The answer is 12", "<", "é", "ON"],
    )
    yield from tokens
    yield from (x.upper() for x in tokens)
    for _ in range(60):
        yield "".join(draw.choices([*words, *tokens], k=8))


@pytest.mark.parametrize("name", KINDS)
def test_ids_are_those_of_transformers(tmp_path, name):
    config, files, count = KINDS[name]
    folder = write(tmp_path / "folder", config, files)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    tokens = spelt(folder)
    for text in texts(tokens):
        ids = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, special=True) == theirs.decode(ids)
    assert ours.vocab_size == FIRST + count == len(theirs)
    for attribute in ("eos_token_id", "pad_token_id"):
        assert getattr(ours, attribute.removesuffix("_token_id") + "_id") == getattr(
            theirs, attribute
        )


@pytest.mark.parametrize("kind", ["prepend", "first", "always", "never"])
@pytest.mark.parametrize("normalized", [True, False])
def test_slow_tokenizers_additions_are_added_as_in_transformers(tmp_path, kind, normalized):
    """Folders of SentencePiece models that were saved by a slow tokenizer."""
    folder = write_sentencepiece(tmp_path / "folder", kind)
    first = AutoTokenizer.from_pretrained(folder, tokenizer_class="PreTrainedTokenizerFast")
    size = len(first)
    raw = json.loads((folder / "tokenizer_config.json").read_text())
    added = decoder(
        token("<|im_end|>", True, normalized=normalized),
        token("<tool>", normalized=normalized),
        token("tool", lstrip=True, normalized=normalized),
        first=size,
    )
    raw |= {**added, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    assert ours.vocab_size == len(theirs) == size + 3
    for text in texts(["<|im_end|>", "<tool>", "tool", "the answer"]):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_a_lower_case_tokenizer_finds_normalized_tokens_as_in_transformers(tmp_path):
    config = decoder(token("<BIG>", normalized=True), token("<Raw>"), token("<Sp>", True))
    lower = {"type": "Lowercase"}
    folder = write(tmp_path / "f", config, {}, lambda raw: raw.update(normalizer=lower))
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.load(folder)
    for text in texts(["<BIG>", "<big>", "<Raw>", "<raw>", "<Sp>", "<sp>"]):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False), text


def test_an_added_end_token_ends_answers_and_is_exported(tmp_path):
    config = {**decoder(token("<|eot|>", True)), "eos_token": "<|eot|>"}
    folder = write(tmp_path / "folder", config, {})
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.eos_id == FIRST and tokenizer.encode("<|eot|>") == [FIRST]
    assert FIRST not in tokenizer.encode("<|eot|>", trusted=False)
    assert find_token_ids(folder)["eos_token_id"] == FIRST
    files = {"added_tokens.json": {"</s>": FIRST}, "special_tokens_map.json": {"eos_token": "</s>"}}
    folder = write(tmp_path / "legacy", {"eos_token": "<|im_end|>"}, files)
    assert Tokenizer.load(folder).eos_id == FIRST == find_token_ids(folder)["eos_token_id"]


def test_control_tokens_that_are_added_cannot_be_spelt_in_a_message(tmp_path):
    config = decoder(token("<|tool|>", True)) | {"chat_template": "{{ messages[0].content }}"}
    tokenizer = Tokenizer.load(write(tmp_path / "folder", config, {}))
    ids = tokenizer.encode_prompt([{"role": "user", "content": "a <|tool|> b"}])
    assert FIRST not in ids and "<|tool|>" in tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("config", "files", "words"),
    [
        (decoder(token("<a>"), first=400), {}, r"'<a>' the id 400, .* comes 338"),
        (decoder(token("<a>"), first=5), {}, r"'<a>' the id 5, .* comes 338"),
        ({}, {"added_tokens.json": {"<a>": 339}}, r"'<a>' the id 339, .* comes 338"),
        ({}, {"added_tokens.json": {"<a>": 338, "<b>": 340}}, "'<b>' the id 340, .* comes 339"),
        ({}, {"added_tokens.json": {"<a>": "x"}}, r"added_tokens\.json, '<a>': 'x' is no token id"),
        ({}, {"added_tokens.json": {"<a>": -1}}, "-1 is no token id"),
        ({}, {"added_tokens.json": {"<a>": True}}, "True is no token id"),
        ({}, {"added_tokens.json": ["<a>"]}, r"added_tokens\.json holds a list"),
        ({}, {"special_tokens_map.json": []}, r"special_tokens_map\.json holds a list"),
        ({}, {"special_tokens_map.json": {"bos_token": 7}}, "bos_token = 7"),
        ({"added_tokens_decoder": [token("<a>")]}, {}, r"added_tokens_decoder = \[.*an object of"),
        ({"added_tokens_decoder": None}, {}, "added_tokens_decoder = None: an object of ids"),
        ({"added_tokens_decoder": {"x": token("<a>")}}, {}, "'x' is no token id"),
        ({"added_tokens_decoder": {"338": {"special": True}}}, {}, "338: .* is no token"),
        ({"added_tokens_decoder": {"338": token("")}}, {}, "338: .* is no token"),
        (decoder(token("<a>", lstrip="yes")), {}, "'<a>' has 'lstrip' = 'yes'; it may have lstrip"),
        (decoder(token("<a>", stripped=True)), {}, "'<a>' has 'stripped' = True; it may have lst"),
        ({"extra_special_tokens": [7]}, {}, "additional_special_tokens.0: 7 is no token"),
    ],
)
def test_what_contradicts_or_is_no_token_is_refused(tmp_path, config, files, words):
    with pytest.raises(TokenizerError, match=words):
        Tokenizer.load(write(tmp_path / "folder", config, files))


def test_a_token_beyond_the_model_s_rows_is_refused(tmp_path):
    folder = write(tmp_path / "folder", {"cls_token": "<c>"}, {})
    with pytest.raises(TokenizerError, match="ids up to 338, and the model has rows for 338 ids"):
        Tokenizer.for_model(folder, 338)
