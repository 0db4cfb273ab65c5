"""The text of an answer: it does not depend on how the tokens are split, ends at the first stop
text, and takes linear time.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece_folders import KINDS, write_sentencepiece

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.serving.text import SETTLED_AFTER, TextStream, text_pieces

FOLDER = Path(__file__).parents[3] / "configs" / "tiny_tokenizer"
TOKENIZER = Tokenizer.load(FOLDER)


def streamed(ids, stop, cuts):
    """Returns (text, whether a stop text ended it) of tokens in pieces that end at `cuts`."""
    stream = TextStream(TOKENIZER, stop)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    starts = [0, *ends[:-1]]
    text = "".join(stream.push(ids[a:b], b == len(ids)) for a, b in zip(starts, ends, strict=True))
    return text, stream.stopped


def first_stop(text, stop):
    """Returns the text before the first complete stop text, by trying every prefix."""
    for end in range(len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            return text[: end - max(map(len, matches))]
    return None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 383), max_size=120), st.lists(st.integers(0, 120), max_size=20))
def test_the_text_is_that_of_all_tokens_whatever_they_are(ids, cuts):
    """Random tokens of a byte-level vocabulary are mostly invalid UTF-8."""
    assert streamed(ids, (), cuts) == (TOKENIZER.decode_response(ids), False)


@settings(max_examples=300, deadline=None)
@given(
    st.text("ab", max_size=60),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(0, 60), max_size=9),
)
def test_the_first_stop_text_that_is_complete_ends_the_text(text, stop, cuts):
    expected = first_stop(text, stop)
    ids = [TOKENIZER.encode(c)[0] for c in text]
    assert streamed(ids, stop, cuts) == ((text, False) if expected is None else (expected, True))


@pytest.mark.parametrize("ids", ["text", "invalid", "euro", "random"])
def test_the_work_is_linear_in_the_answer(ids):
    """The number of tokens decoded for an answer of n tokens is at most a constant times n, even if
    its bytes never form a character.
    """
    byte = {TOKENIZER.byte_of(i): i for i in range(384) if TOKENIZER.byte_of(i) is not None}
    tokens = {
        "text": TOKENIZER.encode("Let us see: 17 + 4 makes 21, grün. " * 100),
        "invalid": [byte[0x80]] * 2000,
        "euro": [byte[b] for b in "€".encode()] * 600,
        "random": np.random.default_rng(0).integers(0, 338, 2000).tolist(),
    }[ids]
    decoded = 0

    class Counted:
        bytes_of = staticmethod(TOKENIZER.bytes_of)

        def decode_response(self, part):
            nonlocal decoded
            decoded += len(part)
            return TOKENIZER.decode_response(part)

    stream = TextStream(Counted(), ("never" * 40,))
    text = "".join(stream.push([token], i == len(tokens) - 1) for i, token in enumerate(tokens))
    assert text == TOKENIZER.decode_response(tokens)
    assert decoded < 5 * SETTLED_AFTER * len(tokens)


def test_special_tokens_that_a_call_is_written_with_are_text(tmp_path):
    """Some published tokenizers have <tool_call> as a special token, as this one does."""
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "tokenizer.json"
    raw = json.loads(path.read_text())
    token = {**raw["added_tokens"][-1], "id": 338, "content": "<tool_call>", "special": True}
    raw["added_tokens"].append(token)
    path.write_text(json.dumps(raw))
    tokenizer = Tokenizer.load(tmp_path)
    ids = [*tokenizer.encode('<tool_call>{"name": "f"}'), tokenizer.eos_id]
    assert ids[0] == 338 and TextStream(tokenizer, ()).push(ids, True) == '<tool_call>{"name": "f"}'


@pytest.mark.parametrize("size", [1, 2, 5])
def test_text_comes_whole_whatever_the_pieces(size):
    """Characters of several bytes are never split, and no part of a possible stop text is sent
    until it is certain not to be one.
    """
    text = "größer — 12 <answ <answer>7</answer>"
    ids = TOKENIZER.encode(text)
    for stop, expected in (
        ((), text),
        (("<answer>",), "größer — 12 <answ "),
        (("never", "größer"), ""),
    ):
        stream = TextStream(TOKENIZER, stop)
        pieces = [
            stream.push(ids[i : i + size], i + size >= len(ids)) for i in range(0, len(ids), size)
        ]
        assert "".join(pieces) == expected and stream.stopped == bool(stop)
        assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 34])
def test_characters_of_byte_tokens_come_whole(tmp_path, kind, size):
    """Decoders of byte tokens write U+FFFD for each byte of an incomplete character."""
    tokenizer = Tokenizer.load(write_sentencepiece(tmp_path, kind))
    ids = tokenizer.encode("the answer is \N{GRINNING FACE}\N{GRINNING FACE} 日本語é " * 8)
    stream = TextStream(tokenizer, ())
    pieces = [
        stream.push(ids[i : i + size], i + size >= len(ids)) for i in range(0, len(ids), size)
    ]
    assert "".join(pieces) == tokenizer.decode_response(ids)
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 383), max_size=120))
def test_each_token_has_its_piece_of_the_text(ids):
    pieces = text_pieces(TOKENIZER, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == TOKENIZER.decode_response(ids)


def test_a_character_of_several_tokens_is_the_last_ones():
    ids = TOKENIZER.encode("a\N{GRINNING FACE}b")
    pieces = text_pieces(TOKENIZER, ids)
    assert [x for x in pieces if x] == ["a", "\N{GRINNING FACE}", "b"] and len(pieces) > 3
