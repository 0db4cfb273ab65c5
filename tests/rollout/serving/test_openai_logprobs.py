"""Log-probs in the formats of the two APIs: bytes of partial characters, offsets into the text, and
tokens with the same spelling.
"""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sentencepiece_folders import KINDS, write_sentencepiece

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.serving.openai_logprobs import Logprobs, joined

TOKENIZER = Tokenizer.load(Path(__file__).parents[3] / "configs" / "tiny_tokenizer")


def logprobs_of(tokens, most=0, alternatives=(), prompt=False, chat=False, tokenizer=TOKENIZER):
    """Returns the log-probs of `tokens`, each with the same `alternatives`: -1, -2, ..."""
    ids = np.array([[token, *alternatives] for token in tokens], np.int32)
    logp = np.broadcast_to(-1.0 - np.arange(ids.shape[1], dtype=np.float32), ids.shape)
    return Logprobs(tokenizer, most, chat).push(TopLogprobs(ids, logp), prompt)


def test_the_bytes_of_tokens_are_the_bytes_of_the_text():
    for text in ("a tschüß b", "日本語 x", "🎉!", " <|im_end|>", "\x00\xff"):
        ids = TOKENIZER.encode(text)
        assert b"".join(map(TOKENIZER.bytes_of, ids)) == text.encode()
    assert TOKENIZER.bytes_of(TOKENIZER.eos_id) == b"<|im_end|>"
    assert TOKENIZER.bytes_of(10**6) == b""


def test_offsets_are_those_of_the_characters_in_the_text():
    """A part of a character has the offset of the character."""
    ids = TOKENIZER.encode("ab ü日🎉c")
    logprobs = logprobs_of(ids)
    seen = b""
    for offset, token, i in zip(logprobs["text_offset"], logprobs["tokens"], ids, strict=True):
        complete = len((seen + b"x").decode(errors="ignore")) - 1  # number of complete characters
        assert offset == complete
        data = TOKENIZER.bytes_of(i)
        seen += data
        assert token == data.decode(errors="ignore") or "bytes:\\x" in token
    assert any("bytes:\\xc3" in token for token in logprobs["tokens"])
    control = [TOKENIZER.eos_id, *TOKENIZER.encode("a")]
    assert logprobs_of(control)["text_offset"] == [0, 0]
    echoed = logprobs_of(control, prompt=True)
    assert echoed["text_offset"] == [0, 10] and echoed["tokens"] == ["<|im_end|>", "a"]


@pytest.mark.parametrize("kind", KINDS)
def test_words_of_sentencepiece_keep_their_space(tmp_path, kind):
    """The first word's space is in its token, and not in the text."""
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path, kind))
    ids = [tokenizer._backend.token_to_id(x) for x in ("▁the", "▁answer", "▁", "7", "</s>")]
    logprobs = logprobs_of(ids, tokenizer=tokenizer)
    assert logprobs["tokens"] == [" the", " answer", " ", "7", "</s>"]
    text = tokenizer.decode_response(ids)
    later = [text.index(x) for x in (" answer", " 7", "7")]
    assert logprobs["text_offset"] == [0, *later, len(text)]
    stream = Logprobs(tokenizer, 0, False)
    part = TopLogprobs(np.array(ids[:2])[:, None], np.zeros((2, 1), np.float32))
    prompt, answer = stream.push(part, prompt=True), stream.push(part)
    shown = tokenizer.decode(ids[:2], special=True)
    assert answer["text_offset"][0] == len(shown)
    assert answer["text_offset"][1] == len(shown) + prompt["text_offset"][1]


INVALID = {
    "a stray byte": [0xFF, *b"ab"],
    "bytes that continue nothing": [0x80, 0xBF, *b"a"],
    "an incomplete character": [*b"x", 0xE4, 0xB8, *b"yz"],
    "two incomplete ones": [0xF0, 0x9F, 0xE6, 0x97, *b"a"],
    "among characters": [*"ü".encode(), 0xC3, *"日".encode(), 0xFE, *"🎉c".encode()],
    "a surrogate": [0xED, 0xA0, 0x80, *b"a"],
    "too long a form": [0xC0, 0xAF, *b"a"],
    "the replacement itself": [*"\ufffd".encode(), 0xEF, 0xBF, *b"a"],
    "at the end": [*b"ab", 0xF0, 0x9F, 0x8E],
}


def byte_ids(tokenizer, data):
    """Returns a token for each byte, where the vocabulary has one."""
    ids = {tokenizer.byte_of(i): i for i in range(tokenizer.vocab_size) if tokenizer.bytes_of(i)}
    return [ids[byte] for byte in data]


def beginnings(tokenizer, ids):
    """Returns, for each token, the characters that its text and that of the tokens before have in
    common; a token that changes no character is within the last one.
    """
    texts = [tokenizer.decode_response(ids[:n]) for n in range(len(ids) + 1)]
    result = []
    for before, after in pairwise(texts):
        same = next((i for i, (a, b) in enumerate(zip(before, after)) if a != b), len(before))
        result.append(same - (before == after))
    return result


@pytest.mark.parametrize("name", INVALID)
def test_a_byte_that_is_no_utf_8_is_a_character(name):
    ids = byte_ids(TOKENIZER, INVALID[name])
    offsets = logprobs_of(ids)["text_offset"]
    assert offsets == beginnings(TOKENIZER, ids)
    stream = Logprobs(TOKENIZER, 0, False)
    parts = [stream.push(TopLogprobs(np.array([[i]]), np.zeros((1, 1), np.float32))) for i in ids]
    assert joined(parts)["text_offset"] == offsets


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("data", [b"\xff", b"\xe4\xb8", b"\xc3\xa9\xff", "é日".encode(), b"\xc3\n"])
def test_byte_tokens_of_sentencepiece_count_as_its_decoder_counts_them(tmp_path, kind, data):
    """A run with a byte that is no UTF-8 is one U+FFFD for each byte."""
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path, kind))
    vocabulary = tokenizer._backend
    ids = [vocabulary.token_to_id(f"<0x{byte:02X}>") for byte in data]
    ids = [vocabulary.token_to_id(x) for x in ("a",)] + ids
    ids += [vocabulary.token_to_id(x) for x in ("b", "c")]
    text = tokenizer.decode_response(ids)
    assert logprobs_of(ids, tokenizer=tokenizer)["text_offset"][-2:] == [
        len(text) - 2,
        len(text) - 1,
    ]


def test_an_answer_begins_after_a_prompt_that_ends_within_a_character():
    ids = byte_ids(TOKENIZER, b"a\xe4")
    stream = Logprobs(TOKENIZER, 0, False)
    part = TopLogprobs(np.array(ids)[:, None], np.zeros((2, 1), np.float32))
    assert stream.push(part, prompt=True)["text_offset"] == [0, 1]
    assert stream.push(part)["text_offset"] == [2, 3]


def test_parts_follow_each_other():
    ids = TOKENIZER.encode("ab ü日🎉c")
    stream = Logprobs(TOKENIZER, 0, False)
    logp = np.full((len(ids), 1), -1.0, np.float32)
    parts = [
        stream.push(TopLogprobs(np.array(ids[i : i + 2])[:, None], logp[i : i + 2]))
        for i in range(0, len(ids), 2)
    ]
    assert joined(parts) == logprobs_of(ids)


def test_the_first_token_of_a_prompt_has_no_log_prob():
    a, b = TOKENIZER.encode("ab")
    logprobs = logprobs_of([a, b], 1, [b, a], prompt=True)
    assert logprobs["token_logprobs"] == [None, -1.0]
    assert logprobs["top_logprobs"] == [None, {"b": -1.0}]
    row, _ = logprobs_of([a, b], 1, [b, a], prompt=True, chat=True)["content"]
    assert row["logprob"] is None and row["top_logprobs"] == []


def test_the_token_is_among_the_likeliest_and_ids_that_are_none_are_not():
    a, b, c = (TOKENIZER.encode(x)[0] for x in "abc")
    logprobs = logprobs_of([a], 2, [TOKENIZER.vocab_size + 1, b, c, b])
    assert logprobs["top_logprobs"] == [{"b": -3.0, "c": -4.0, "a": -1.0}]
    assert logprobs_of([a], 0, [b])["top_logprobs"] is None
    (entry,) = logprobs_of([a], 1, [b, c], chat=True)["content"]
    other = {"token": "b", "logprob": -2.0, "bytes": [98]}
    assert entry == {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [other]}
