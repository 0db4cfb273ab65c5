"""Work on threads of its own: large jobs rest in between, a closed place does not wait for that
rest.
"""

import asyncio
import time

import pytest

from compass_jax.serving.errors import BadRequest
from compass_jax.serving.places import Places


def busy(seconds):
    """What a request costs."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return seconds


def test_a_thread_rests_in_proportion_to_its_last_job():
    """The first result comes at once; the second job begins 4 times 0.1 s later."""

    async def both():
        began = time.monotonic()
        places = Places("large requests", 1, 2, 5.0, rest=4.0)
        first = asyncio.ensure_future(places.run(busy, 0.1))
        second = asyncio.ensure_future(places.run(busy, 0.0))
        assert await first == 0.1
        early = time.monotonic() - began
        assert await second == 0.0
        places.close()
        return early, time.monotonic() - began

    early, late = asyncio.run(both())
    assert early < 0.4 <= late - 0.1


def test_a_rest_does_not_hold_up_the_end():
    async def left():
        places = Places("large requests", 1, 2, 5.0, rest=1000.0)
        await places.run(busy, 0.05)
        waits = asyncio.ensure_future(places.run(busy, 0.0))
        await asyncio.sleep(0.05)
        began = time.monotonic()
        places.close()
        await waits
        return time.monotonic() - began

    assert asyncio.run(left()) < 5


def test_no_place_and_no_result_in_time_are_told_apart():
    async def told():
        places = Places("large requests", 1, 1, 0.1)
        slow = asyncio.ensure_future(places.run(time.sleep, 0.5))
        await asyncio.sleep(0.01)
        with pytest.raises(BadRequest, match="1 large requests are being prepared") as full:
            await places.run(busy, 0.0)
        with pytest.raises(BadRequest, match=r"could not be prepared within 0\.1 s") as late:
            await slow
        places.close()
        return full.value.status, late.value.status

    assert asyncio.run(told()) == (429, 503)
