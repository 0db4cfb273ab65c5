"""The load on the server, end to end on a small scale: a hostile client does not change a regular
client's answers.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hostile_clients import request
from benchmarks.server_load import catalogue, flat, texts


def test_the_texts_of_streams_and_whole_answers_are_read_alike():
    events = [
        {"index": 1, "text": "b", "finish_reason": None},
        {"index": 0, "text": "a", "finish_reason": "stop"},
    ]
    events.append({"index": 1, "text": "c", "finish_reason": "length"})
    stream = (
        b"".join(b"data: %s\n\n" % json.dumps({"choices": [e]}).encode() for e in events)
        + b"data: [DONE]\n\n"
    )
    assert texts(stream, True) == (["a", "bc"], ["stop", "length"])
    chat = {"choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "stop"}]}
    assert texts(json.dumps(chat).encode(), False) == (["x"], ["stop"])


def test_what_is_asked_and_what_is_seen():
    assert len({json.dumps(x, sort_keys=True) for x in catalogue()}) == len(catalogue()) == 96
    assert request(b"ab", host="x", content_type="y").split(b"\r\n\r\n") == [
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: y\r\ncontent-length: 2",
        b"ab",
    ]
    seen = [
        {"process_resident_memory_bytes": i, "process_open_fds": 9, "compass_connections": 2}
        for i in range(8)
    ]
    summary = flat(seen)
    assert [summary[f"process_resident_memory_bytes_{x}"] for x in ("early", "late", "max")] == [
        2.5,
        6.5,
        7,
    ]
    assert summary["other_descriptors_late"] == 7


@pytest.mark.slow
def test_a_small_load_is_answered_rightly():
    command = [
        sys.executable,
        "-m",
        "benchmarks.server_load",
        "--requests",
        "200",
        "--clients",
        "24",
        "--hostile",
        "8",
    ]
    completed = subprocess.run(
        command, cwd=Path(__file__).parents[3], capture_output=True, text=True, timeout=600
    )
    report = json.loads(completed.stdout.splitlines()[-1])
    assert (report["right"], report["wrong"], report["failed"]) == (200, 0, 0), completed.stdout
    assert (
        report["checks"]["hostile"] and report["checks"]["stop"] and report["checks"]["quiet_log"]
    ), completed.stdout
