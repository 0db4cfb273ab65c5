"""Messages between the training and its samplers."""

import json
import socket
import struct
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from compass_jax.base.records import Prompt
from compass_jax.rollout.remote import frames
from compass_jax.rollout.remote.frames import DTYPES, Message, SamplersError, decode, encode
from compass_jax.rollout.remote.requests import results
from compass_jax.rollout.request import Columns, Request

ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=1, max_dims=3, min_side=0))
)


@given(st.dictionaries(st.text(max_size=5), ARRAYS, max_size=3), st.text(max_size=5))
def test_a_message_comes_back_as_it_was(named, text):
    message = decode(encode(Message("work", {"text": text, "none": None}, named)))
    assert message.kind == "work" and message.fields == {"text": text, "none": None}
    assert message.arrays.keys() == named.keys()
    for name, x in named.items():
        assert message.arrays[name].dtype == x.dtype
        np.testing.assert_array_equal(message.arrays[name], x)


def test_a_strided_array_is_sent_in_its_own_order():
    x = np.arange(12, dtype=np.int32).reshape(3, 4).T
    np.testing.assert_array_equal(decode(encode(Message("a", {}, {"x": x}))).arrays["x"], x)


def test_the_log_probs_of_a_computation_in_float64_can_be_sent():
    request = Request.of(Prompt.of_tokens([1, 2], 0), 0, 0, 8, 0)
    logp = np.array([-0.1])  # float64, from compute.dtype = float64
    request.take(Columns.of(np.array([3]), logp, logp, 0).rows())
    message = decode(encode(results("done", 0, {0: request}, {})))
    assert message.arrays["0.logp"].dtype == np.float64
    np.testing.assert_array_equal(message.arrays["0.logp"], request.logp)


def frame(header, rest=b""):
    text = json.dumps(header).encode()
    return struct.pack(">I", len(text)) + text + rest


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0\0\0\xff{}",
        frame(["kind", {}, [["x", "object", [1]]]], b"12345678"),
        frame(["kind", {}, [["x", "int32", [2]]]], b"1234"),
        frame(["kind", {}, []], b"more"),
        frame(["kind"]),
        frame(["kind", [], []]),
        frame([1, {}, []]),
        frame(["kind", {}, [["x", "int32", [-1]]]], b""),
        b"\x80\x04\x95pickled",
    ],
)
def test_anything_else_is_refused(data):
    with pytest.raises(SamplersError, match="a message of the samplers' protocol is broken"):
        decode(data)


def connected():
    """Returns the two ends of a connection."""
    return [Connection(end.detach()) for end in socket.socketpair()]


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 200, 201, 1000])
def test_a_message_is_sent_in_frames_and_joined(size, monkeypatch):
    assert frames.FRAME == 64 * 2**20
    monkeypatch.setattr(frames, "FRAME", 100)
    (sender, receiver), data = connected(), bytes(range(250)) * 4
    frames.send(sender, data[:size])
    frames.send(sender, b"next")
    assert frames.receive(receiver) == data[:size]
    assert frames.receive(receiver) == b"next"


def test_a_frame_that_is_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(frames, "FRAME", 100)
    sender, receiver = connected()
    sender.send_bytes(bytes(101))
    with pytest.raises(OSError, match="bad message length"):
        frames.receive(receiver)


def test_a_message_that_breaks_off_is_a_loss(monkeypatch):
    monkeypatch.setattr(frames, "FRAME", 100)
    sender, receiver = connected()
    sender.send_bytes(bytes(100))
    sender.close()
    with pytest.raises(EOFError):
        frames.receive(receiver)
