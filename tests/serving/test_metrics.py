"""The page of metrics is what Prometheus' own parser reads."""

import math
import threading

import pytest

from compass_jax.serving.metrics import Counter, Metrics

parser = pytest.importorskip("prometheus_client.parser")


def families(metrics):
    return {family.name: family for family in parser.text_string_to_metric_families(metrics.page())}


def test_prometheus_reads_what_was_counted():
    metrics = Metrics()
    metrics.watch("compass_slots", "Slots.", lambda: 16)
    metrics.requests.add("/v1/completions", 200)
    metrics.requests.add("/v1/completions", 200)
    metrics.requests.add('a "b"\\\n', 404)
    metrics.prompt_tokens.add(by=7)
    for seconds in (0.001, 0.01, 0.3, 1000.0):
        metrics.latency.observe("/v1/completions", seconds)
    found = families(metrics)
    requests = {
        (s.labels["route"], s.labels["status"]): s.value for s in found["compass_requests"].samples
    }
    assert requests == {("/v1/completions", "200"): 2, ('a "b"\\\n', "404"): 1}
    assert found["compass_requests"].type == "counter" and found["compass_slots"].type == "gauge"
    assert [s.value for s in found["compass_prompt_tokens"].samples] == [7]
    latency = found["compass_request_seconds"]
    assert latency.type == "histogram"
    buckets = {
        float(s.labels["le"]): s.value for s in latency.samples if s.name.endswith("_bucket")
    }
    assert (buckets[0.01], buckets[0.25], buckets[0.5], buckets[120.0], buckets[math.inf]) == (
        2,
        2,
        3,
        3,
        4,
    )
    assert {s.name[24:]: s.value for s in latency.samples if "bucket" not in s.name} == {
        "sum": 1000.311,
        "count": 4,
    }
    assert found["process_open_fds"].samples[0].value > 2
    assert found["process_resident_memory_bytes"].samples[0].value > 2**20
    assert all(family.documentation for family in found.values())


def test_nothing_is_lost_between_threads():
    counter = Counter("n_total", "N.", "who")
    threads = [
        threading.Thread(target=lambda: [counter.add("x") for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 'n_total{who="x"} 8000' in counter.lines()
