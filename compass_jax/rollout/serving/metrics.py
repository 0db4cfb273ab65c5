"""Prometheus metrics of the HTTP server, in the default registry of prometheus_client."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

REQUESTS = Counter("compass_requests_total", "Requests that were answered.", ["route", "status"])
PROMPT_TOKENS = Counter("compass_prompt_tokens_total", "Tokens of accepted prompts.")
COMPLETION_TOKENS = Counter("compass_completion_tokens_total", "Tokens of answers.")
LATENCY = Histogram(
    "compass_request_seconds",
    "From the end of a request's header to the end of its answer.",
    ["route"],
    buckets=SECONDS,
)
FIRST_TOKEN = Histogram(
    "compass_first_token_seconds",
    "From the end of a request's header to its first token.",
    ["route"],
    buckets=SECONDS,
)
CONNECTIONS = Gauge("compass_connections", "Connections that are open.")
PREPARING = Gauge("compass_preparing", "Requests that are received, parsed and tokenised.")
SLOTS = Gauge("compass_slots", "Sequences that are decoded together.")
SLOTS_USED = Gauge("compass_slots_used", "Slots that hold a sequence.")
WAITING = Gauge("compass_waiting", "Sequences that wait for a slot.")
