"""Metrics of the HTTP server, which prometheus_client counts and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """All metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        own: dict[str, Any] = {"registry": self.registry}
        self.requests = Counter(
            "compass_requests_total", "Requests that were answered.", ["route", "status"], **own
        )
        self.prompt_tokens = Counter(
            "compass_prompt_tokens_total", "Tokens of accepted prompts.", **own
        )
        self.completion_tokens = Counter(
            "compass_completion_tokens_total", "Tokens of answers.", **own
        )
        text = "From the end of a request's header to the end of its answer."
        self.latency = Histogram("compass_request_seconds", text, ["route"], buckets=SECONDS, **own)
        text = "From the end of a request's header to its first token."
        self.first_token = Histogram(
            "compass_first_token_seconds", text, ["route"], buckets=SECONDS, **own
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a gauge whose value is computed when the page is read."""
        Gauge(name, text, registry=self.registry).set_function(value)
