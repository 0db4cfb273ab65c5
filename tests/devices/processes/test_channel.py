"""Channels and forked functions, which end in time whatever happens to the other end."""

import multiprocessing
import time

import pytest

from compass_jax.devices.processes.channel import Channel, run_forked

pytestmark = pytest.mark.filterwarnings(r"ignore:os.fork\(\) was called:RuntimeWarning")


def test_values_cross_in_their_order_and_a_closed_end_is_an_error():
    one, other = map(Channel, multiprocessing.Pipe())
    one.send({"a": [1, None, "\ud800"]})
    one.send([2])
    assert other.receive(1) == {"a": [1, None, "\ud800"]} and other.receive() == [2]
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    one.close()
    one.close()
    with pytest.raises(EOFError):
        other.receive(1)
    with pytest.raises(OSError, match="pipe"):
        other.send(1)
    other.close()


def test_a_forked_function_is_ended_with_the_text_that_it_wrote():
    def write(page):
        page.write(b"begun")
        time.sleep(60)

    result = run_forked(write, 0.2)
    assert result.late and result.code == -9 and result.output == b"begun"
    assert run_forked(lambda page: page.write(b"[1]"), 9) == (0, False, b"[1]")
    assert run_forked(lambda page: 1 / 0, 9) == (70, False, b"")
    assert run_forked(lambda page: page.write(b"x" * len(page)), 9).output == b""
