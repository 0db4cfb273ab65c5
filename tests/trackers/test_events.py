"""TensorBoard's event files, against tensorboardX."""

import math

import numpy as np
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from compass_jax.trackers import events

NUMBERS = {
    "reward/mean": 0.1,
    "zero": 0.0,
    "negative": -1e-30,
    "nan": math.nan,
    "large": 1e300,
    "/a name with: marks": math.inf,
    "long/" + "x" * 300: np.float32(3.5),
    "größe": 2,
}
STEPS = (0, 1, 127, 128, 2**40)


def test_the_bytes_are_those_of_tensorboardx(tmp_path):
    now = 1.8e9 + 0.25
    theirs = RecordWriter(str(tmp_path / "events"))
    theirs.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())
    start = SessionLog(status=SessionLog.START)
    theirs.write(Event(wall_time=now, step=7, session_log=start).SerializeToString())
    for step in STEPS:
        for item in NUMBERS.items():
            event = Event(wall_time=now, step=step, summary=scalar(*item))
            theirs.write(event.SerializeToString())
    theirs.close()
    ours = events.head(now, 7) + b"".join(events.scalars(now, step, NUMBERS) for step in STEPS)
    assert ours == (tmp_path / "events").read_bytes()
