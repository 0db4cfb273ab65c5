"""Numbers of the server in Prometheus' text format (0.0.4), from counters, gauges and histograms of
our own."""

from __future__ import annotations

import bisect
import os
import threading
from collections.abc import Callable

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Counter:
    """A number for each value of its labels; it only grows."""

    def __init__(self, name: str, text: str, *labels: str):
        self.name = name
        self._head = f"# HELP {name} {text}\n# TYPE {name} counter\n"
        self._labels = labels
        self._values: dict[tuple[str, ...], float] = {} if labels else {(): 0}
        self._lock = threading.Lock()

    def add(self, *values: object, by: float = 1) -> None:
        """Adds `by` to the number of these labels' values."""
        key = tuple(str(v) for v in values)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + by

    def lines(self) -> str:
        """Its part of the page."""
        with self._lock:
            found = sorted(self._values.items())
        return self._head + "".join(
            f"{self.name}{_labelled(self._labels, key)} {n}\n" for key, n in found
        )


class Gauge:
    """A number that is asked for when the page is."""

    def __init__(self, name: str, text: str, value: Callable[[], float]):
        self._head = f"# HELP {name} {text}\n# TYPE {name} gauge\n{name} "
        self._value = value

    def lines(self) -> str:
        """Its part of the page."""
        return f"{self._head}{self._value()}\n"


class Histogram:
    """Seconds, counted in cumulative buckets for each value of its one label."""

    def __init__(self, name: str, text: str, label: str):
        self.name = name
        self._head = f"# HELP {name} {text}\n# TYPE {name} histogram\n"
        self._label = label
        self._counts: dict[str, list[int]] = {}
        self._sums: dict[str, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: str, seconds: float) -> None:
        """Counts one observation under this value of the label."""
        with self._lock:
            counts = self._counts.setdefault(value, [0] * (len(SECONDS) + 1))
            counts[bisect.bisect_left(SECONDS, seconds)] += 1
            self._sums[value] = self._sums.get(value, 0.0) + seconds

    def lines(self) -> str:
        """Its part of the page."""
        parts = [self._head]
        with self._lock:
            for value, counts in sorted(self._counts.items()):
                total = 0
                for bound, count in zip((*SECONDS, "+Inf"), counts, strict=True):
                    total += count
                    upto = _labelled((self._label, "le"), (value, str(bound)))
                    parts.append(f"{self.name}_bucket{upto} {total}\n")
                mine = _labelled((self._label,), (value,))
                parts.append(
                    f"{self.name}_sum{mine} {self._sums[value]}\n{self.name}_count{mine} {total}\n"
                )
        return "".join(parts)


class Metrics:
    """All numbers of one server."""

    def __init__(self) -> None:
        self.requests = Counter(
            "compass_requests_total", "Requests that were answered.", "route", "status"
        )
        self.rejected = Counter(
            "compass_rejected_total",
            "Requests that were refused before they reached the engine.",
            "reason",
        )
        self.closed = Counter(
            "compass_connections_closed_total", "Connections that the server gave up.", "reason"
        )
        self.prompt_tokens = Counter("compass_prompt_tokens_total", "Tokens of accepted prompts.")
        self.completion_tokens = Counter("compass_completion_tokens_total", "Tokens of answers.")
        self.latency = Histogram(
            "compass_request_seconds",
            "From the end of a request's header to the end of its answer.",
            "route",
        )
        self.first_token = Histogram(
            "compass_first_token_seconds",
            "From the end of a request's header to its first token.",
            "route",
        )
        self._all: list[Counter | Gauge | Histogram] = [
            self.requests,
            self.rejected,
            self.closed,
            self.prompt_tokens,
            self.completion_tokens,
            self.latency,
            self.first_token,
        ]
        self.watch("process_open_fds", "File descriptors that are open.", _descriptors)
        self.watch(
            "process_resident_memory_bytes", "Memory that the process holds.", _resident_bytes
        )

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Adds a number that is asked for when the page is."""
        self._all.append(Gauge(name, text, value))

    def page(self) -> str:
        """The text that Prometheus reads."""
        return "".join(part.lines() for part in self._all)


def _labelled(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # one is the listing's own
    except OSError:
        return 0


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
