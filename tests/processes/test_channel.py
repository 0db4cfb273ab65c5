"""A channel of JSON lines ends in time whatever the other end does, and a forked function too."""

import contextlib
import os
import time

import pytest

from compass_jax.processes.channel import Channel, ChannelError
from compass_jax.processes.forked import run_forked

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")


@pytest.fixture
def ends():
    """A channel, and the descriptors of its other end."""
    (here, there), (other, mine) = os.pipe(), os.pipe()
    channel = Channel(here, mine, limit=100_000)
    yield channel, other, there
    channel.close()
    channel.close()
    for descriptor in (other, there):
        with contextlib.suppress(OSError):
            os.close(descriptor)


def soon(seconds=0.1):
    return time.monotonic() + seconds


def test_values_cross_in_their_order(ends):
    channel, other, there = ends
    channel.send({"a": [1, None, "\ud800"]}, soon())
    assert os.read(other, 999) == b'{"a":[1,null,"\\ud800"]}\n'
    os.write(there, b'[1]\n{"b": 2}\n"half')
    assert channel.receive(soon()) == [1] and channel.receive(soon()) == {"b": 2}
    with pytest.raises(TimeoutError):
        channel.receive(soon())
    os.write(there, b' a line"\n')
    assert channel.receive(soon()) == "half a line"


@pytest.mark.parametrize("line", [b"?\n", b"[" * 50_000 + b"\n", b"\xff\n", b"\n"])
def test_a_line_that_is_no_json_is_an_error(line, ends):
    channel, _, there = ends
    os.write(there, line)
    with pytest.raises(ChannelError, match="no JSON"):
        channel.receive(soon())


def test_more_than_the_limit_a_closed_end_and_one_that_does_not_read_are_errors(ends):
    channel, _, there = ends
    with pytest.raises(TimeoutError):
        channel.send("x" * 10**6, soon())
    os.set_blocking(there, False)
    with pytest.raises(ChannelError, match="more than 100,000 bytes"):
        while True:
            os.write(there, b"x" * 50_000)
            with contextlib.suppress(TimeoutError):
                channel.receive(soon(0.01))
    os.close(there)
    with pytest.raises(EOFError):
        channel.receive(soon())


def test_all_output_is_read_to_its_end(ends):
    channel, other, there = ends
    os.write(there, b"out")
    os.close(there)
    assert channel.read_all(b"in", soon()) == b"out"
    assert os.read(other, 9) == b"in" and os.read(other, 9) == b""


def test_a_forked_function_is_ended_with_the_text_that_it_wrote():
    def write(page):
        page.write(b"begun")
        time.sleep(60)

    ended = run_forked(write, 0.2)
    assert ended.late and ended.code == -9 and ended.output == b"begun"
    assert run_forked(lambda page: page.write(b"[1]"), 9) == (0, False, b"[1]")
    assert run_forked(lambda page: 1 / 0, 9) == (70, False, b"")
    assert run_forked(lambda page: os._exit(3), 9) == (3, False, b"")
    assert run_forked(lambda page: page.write(b"x" * len(page)), 9).output == b""
