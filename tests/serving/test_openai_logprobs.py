"""Log-probs as the two APIs write them: bytes of parts of characters, offsets into the text, and
tokens that are written alike.
"""

from pathlib import Path

import numpy as np

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.serving.openai_logprobs import Logprobs, joined

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "configs" / "tiny_tokenizer")


def logprobs_of(tokens, most=0, others=(), prompt=False, chat=False):
    """Log-probs of `tokens`, the same `others` beside each: -1, -2, ..."""
    ids = np.array([[token, *others] for token in tokens], np.int32)
    logp = np.broadcast_to(-1.0 - np.arange(ids.shape[1], dtype=np.float32), ids.shape)
    return Logprobs(TOKENIZER, most, chat).push(TopLogprobs(ids, logp), prompt)


def test_the_bytes_of_tokens_are_the_bytes_of_the_text():
    for text in ("a tschüß b", "日本語 x", "🎉!", " <|im_end|>", "\x00\xff"):
        ids = TOKENIZER.encode(text)
        assert b"".join(map(TOKENIZER.bytes_of, ids)) == text.encode()
    assert TOKENIZER.bytes_of(TOKENIZER.eos_id) == b"<|im_end|>"
    assert TOKENIZER.bytes_of(10**6) == b""


def test_offsets_are_those_of_the_characters_in_the_text():
    """Of a part of a character the offset is the character's."""
    ids = TOKENIZER.encode("ab ü日🎉c")
    found = logprobs_of(ids)
    seen = b""
    for offset, token, i in zip(found["text_offset"], found["tokens"], ids, strict=True):
        whole = len((seen + b"x").decode(errors="ignore")) - 1  # characters that are complete
        assert offset == whole
        data = TOKENIZER.bytes_of(i)
        seen += data
        assert token == data.decode(errors="ignore") or "bytes:\\x" in token
    assert any("bytes:\\xc3" in token for token in found["tokens"])
    control = [TOKENIZER.eos_id, *TOKENIZER.encode("a")]
    assert logprobs_of(control)["text_offset"] == [0, 0]
    shown = logprobs_of(control, prompt=True)
    assert shown["text_offset"] == [0, 10] and shown["tokens"] == ["<|im_end|>", "a"]


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
    found = logprobs_of([a, b], 1, [b, a], prompt=True)
    assert found["token_logprobs"] == [None, -1.0]
    assert found["top_logprobs"] == [None, {"b": -1.0}]
    row, _ = logprobs_of([a, b], 1, [b, a], prompt=True, chat=True)["content"]
    assert row["logprob"] is None and row["top_logprobs"] == []


def test_the_token_is_among_the_likeliest_and_ids_that_are_none_are_not():
    a, b, c = (TOKENIZER.encode(x)[0] for x in "abc")
    found = logprobs_of([a], 2, [TOKENIZER.vocab_size + 1, b, c, b])
    assert found["top_logprobs"] == [{"b": -3.0, "c": -4.0, "a": -1.0}]
    assert logprobs_of([a], 0, [b])["top_logprobs"] is None
    (entry,) = logprobs_of([a], 1, [b, c], chat=True)["content"]
    other = {"token": "b", "logprob": -2.0, "bytes": [98]}
    assert entry == {"token": "a", "logprob": -1.0, "bytes": [97], "top_logprobs": [other]}
