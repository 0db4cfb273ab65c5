"""Load on `compass serve`: good clients of all kinds and hostile ones, against a separate
server process.

A tiny random model is made and served. First a lone client asks every request of a catalogue. Then
all good clients ask them together, in turns without and with the hostile clients. Every text of a
good client must be the lone client's. Ends with one line of JSON.

    python -m benchmarks.server_load --requests 10000
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.hostile_clients import KINDS, STREAM, connected, end, for_ever, request

ROOT = Path(__file__).parent.parent
TURNS = 2  # of both kinds, alternating
WATCHED = ("process_resident_memory_bytes", "process_open_fds", "compass_connections")
MOST_LATENCY = 2.0  # with the hostile clients, over the latency without them
MOST_GROWTH = 0.05  # of memory, between the second and the last quarter of the hostile time
MOST_STOP_S = 10.0
CONNECTIONS = 640
OPTIONS = (
    "--port 0 --slots 16 --prompt-tokens 64 --max-new-tokens 32 --max-waiting 512"
    f" --max-connections {CONNECTIONS}"
)


@dataclass
class LoadResults:
    """The results of the good clients."""

    right: int = 0
    wrong: int = 0
    failed: int = 0
    retried: int = 0
    latency: dict[str, list[float]] = field(
        default_factory=lambda: {"alone": [], "quiet": [], "hostile": []}
    )


def catalogue() -> list[tuple[str, dict[str, Any]]]:
    """Returns (path, body) of every kind of request; each has one right answer."""
    requests: list[tuple[str, dict[str, Any]]] = []
    for i in range(12):
        text = f"{i} + {3 * i} = "
        greedy = {"prompt": text, "max_tokens": 8 + i, "temperature": 0, "seed": i}
        user = [{"role": "user", "content": f"How much is {i} - 5?"}]
        talk = {"messages": user, "max_tokens": 8 + i, "temperature": 0}
        requests += [
            ("/v1/completions", greedy),
            ("/v1/completions", {**greedy, "stream": True}),
            ("/v1/completions", {**greedy, "n": 2}),
            ("/v1/completions", {**greedy, "prompt": [text, "a"], "logprobs": 0}),
            ("/v1/completions", {**greedy, "stop": ["1", "e", "ing", " t"], "stream": i % 2 == 0}),
            ("/v1/completions", {**greedy, "prompt": [5 + i, 40, 41], "stream": True}),
            ("/v1/chat/completions", talk),
            ("/v1/chat/completions", {**talk, "stream": True, "logprobs": True}),
        ]
    return requests


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while size := int(await reader.readline(), 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return content


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
) -> tuple[int, bytes]:
    """Returns (status, body) of one answer. Raises ConnectionError if none came."""
    writer.write(sent)
    head = {}
    status = await reader.readline()
    if not status:
        raise ConnectionResetError
    while (line := (await reader.readline()).strip()) != b"":
        name, _, value = line.partition(b":")
        head[name.lower()] = value.strip()
    if b"content-length" in head:
        return int(status.split()[1]), await reader.readexactly(int(head[b"content-length"]))
    return int(status.split()[1]), await _chunks(reader)


def texts(body: bytes, streamed: bool) -> tuple[list[str], list[str]]:
    """Returns the texts of the choices, and the reasons why they ended."""
    parts: dict[int, str] = {}
    ends: dict[int, str] = {}
    if streamed:
        events = [x.removeprefix(b"data: ") for x in body.split(b"\n\n") if x]
        assert events[-1] == b"[DONE]", events[-1:]
        answers = [json.loads(x) for x in events[:-1]]
    else:
        answers = [json.loads(body)]
    for choice in (c for event in answers for c in event["choices"]):
        index = choice["index"]
        text = choice.get(
            "text", (choice.get("delta") or choice.get("message") or {}).get("content")
        )
        parts[index] = parts.get(index, "") + text
        ends[index] = choice["finish_reason"] or ends.get(index, "")
    return [parts[i] for i in sorted(parts)], [ends[i] for i in sorted(ends)]


class Client:
    """A good client: keeps its connection, tries again when the server is busy, and reconnects when
    the connection was closed.
    """

    def __init__(self, host: str, port: int, results: LoadResults):
        self.host = host
        self.port = port
        self.results = results
        self._held: contextlib.AsyncExitStack | None = None
        self._connection: Any = None

    async def ask(self, path: str, body: dict[str, Any]) -> tuple[list[str], list[str]]:
        """Returns the answer's texts, after as many tries as are needed. Raises RuntimeError after
        thirty.
        """
        sent = request(json.dumps(body).encode(), path)
        for tried in range(30):
            try:
                if self._held is None:
                    self._held = contextlib.AsyncExitStack()
                    self._connection = await self._held.enter_async_context(
                        connected(self.host, self.port)
                    )
                status, answer = await exchange(*self._connection, sent)
                if status == 200:
                    return texts(answer, body.get("stream", False))
                if status not in (429, 503):
                    raise RuntimeError(f"{status}: {answer[:200]!r}")
            except (OSError, asyncio.IncompleteReadError):
                await self.close()
            self.results.retried += 1
            await asyncio.sleep(min(0.02 * 2**tried, 1.0))
        raise RuntimeError("thirty tries were refused")

    async def close(self) -> None:
        """Closes the connection."""
        if self._held is not None:
            await self._held.aclose()
        self._held = None


async def good(
    client: Client, todo: list[int], asks: Sequence, expected: Sequence, turn: str
) -> None:
    """Sends the remaining requests one after the other, and compares the answers."""
    while todo:
        number = todo.pop() % len(asks)
        began = time.monotonic()
        try:
            answer = await client.ask(*asks[number])
        except (RuntimeError, AssertionError, ValueError) as error:
            client.results.failed += 1
            print(f"{turn}: {asks[number]}: {error}", flush=True)
            continue
        client.results.latency[turn].append(time.monotonic() - began)
        if answer == expected[number]:
            client.results.right += 1
        else:
            client.results.wrong += 1
            print(f"{turn}: {asks[number]}: {answer} instead of {expected[number]}", flush=True)
    await client.close()


async def watch(host: str, port: int, seen: list[dict[str, float]]) -> None:
    """Reads the server's own metrics, once a second."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            async with connected(host, port) as (reader, writer):
                page = (
                    await exchange(
                        reader, writer, b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n"
                    )
                )[1].decode()
                seen.append(
                    {name: float(re.search(rf"^{name} (\S+)$", page, re.M)[1]) for name in WATCHED}
                )
        await asyncio.sleep(1)


async def load(
    host: str, port: int, args: argparse.Namespace
) -> tuple[LoadResults, dict[str, int], dict[str, list]]:
    """Runs the lone client, then the turns. Returns the results of the good clients, the hostile
    attempts, and the metrics of each turn.
    """
    results = LoadResults()
    asks = catalogue()
    lone = Client(host, port, results)
    expected = []
    for _ in range(2):  # the first round compiles
        expected = [await lone.ask(*ask) for ask in asks]
    for ask, answer in zip(asks, expected, strict=True):
        began = time.monotonic()
        results.wrong += await lone.ask(*ask) != answer
        results.latency["alone"].append(time.monotonic() - began)
    await lone.close()
    counts: dict[str, int] = {}
    seen: dict[str, list] = {"quiet": [], "hostile": []}
    for turn in ("quiet", "hostile") * TURNS:
        bad = range(args.hostile if turn == "hostile" else 0)
        tasks = [
            asyncio.ensure_future(for_ever(KINDS[i % len(KINDS)], host, port, i, counts))
            for i in bad
        ]
        tasks.append(asyncio.ensure_future(watch(host, port, seen[turn])))
        todo = list(range(args.requests // (2 * TURNS)))
        clients = [Client(host, port, results) for _ in range(args.clients - args.hostile)]
        await asyncio.sleep(2 if bad else 0)  # the hostile clients start before the good ones
        began = time.monotonic()
        await asyncio.gather(*(good(client, todo, asks, expected, turn) for client in clients))
        took = time.monotonic() - began
        print(
            f"{turn}: {took:.1f} s, {results.right} right so far, {results.retried} tries again;"
            f" {seen[turn][-1:]}",
            flush=True,
        )
        await end(tasks)
        await asyncio.sleep(1)
    return results, counts, seen


async def stop(host: str, port: int, process: subprocess.Popen) -> float:
    """Returns the seconds from SIGTERM to the process's end, while clients are at work and others
    are slow.
    """
    tasks = [
        asyncio.ensure_future(for_ever(KINDS[i % len(KINDS)], host, port, i, {})) for i in range(24)
    ]
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(8):
            _, writer = await stack.enter_async_context(connected(host, port))
            writer.write(request(json.dumps(STREAM).encode()))
        await asyncio.sleep(1)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        while process.poll() is None and time.monotonic() < began + 60:
            await asyncio.sleep(0.02)
        took = time.monotonic() - began
    await end(tasks)
    return took


def make_model(folder: Path) -> None:
    """Writes a model of random weights in Hugging Face form."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    from compass_jax.config import ComputeConfig, ModelConfig, MoEConfig
    from compass_jax.model.transformer import init_params
    from compass_jax.weights.hf import save_params

    model = ModelConfig(
        family="qwen3_moe",
        vocab_size=384,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=32,
        rope_theta=100.0,
        init_std=0.3,
        max_positions=256,
        moe=MoEConfig(experts=4, top_k=2, ffn=16),
    )
    params = init_params(model, ComputeConfig(), jax.random.key(3))
    save_params(
        params, model, folder, "float32", tokenizer_from=ROOT / "configs" / "tiny_tokenizer"
    )


def start(folder: Path, errors: Any) -> tuple[subprocess.Popen, str, int]:
    """Starts the server; returns (process, host, port) when it listens."""
    command = [sys.executable, "-m", "compass_jax", "serve", str(folder), *OPTIONS.split()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    line = process.stdout.readline()
    if not (where := re.search(r" on (\S+):(\d+) \(", line)):
        process.kill()
        raise RuntimeError(f"the server did not start: {line!r}")
    return process, where[1], int(where[2])


def flat(seen: list[dict[str, float]]) -> dict[str, float]:
    """Returns of each number its median in the second quarter of the time, its median in the last,
    and its maximum.
    """
    summary = {}
    quarter = max(len(seen) // 4, 1)
    numbers = {name: [x[name] for x in seen] for name in WATCHED}
    numbers["other_descriptors"] = [x["process_open_fds"] - x["compass_connections"] for x in seen]
    for name, values in numbers.items():
        summary[f"{name}_early"] = statistics.median(values[quarter : 2 * quarter] or values)
        summary[f"{name}_late"] = statistics.median(values[-quarter:])
        summary[f"{name}_max"] = max(values)
    return summary


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = " (default: %(default)s)"
    parser.add_argument("--requests", type=int, default=10_000, help="of good clients" + default)
    parser.add_argument("--clients", type=int, default=200, help="good and hostile" + default)
    parser.add_argument("--hostile", type=int, default=50, help="of them" + default)
    return parser.parse_args(argv)


def judged(
    results: LoadResults,
    counts: dict[str, int],
    seen: dict[str, list],
    stop_s: float,
    status: int,
    stderr_text: str,
) -> dict[str, Any]:
    """Returns the report of the load, with the properties that must hold under `checks`. `status`
    and `stderr_text`: the server's exit status, and its output on stderr.
    """
    median = {turn: statistics.median(values) for turn, values in results.latency.items()}
    watched = flat(seen["hostile"])
    memory = [watched[f"process_resident_memory_bytes_{when}"] for when in ("early", "late")]
    growth = memory[1] / memory[0] - 1
    return {
        "right": results.right,
        "wrong": results.wrong,
        "failed": results.failed,
        "retried": results.retried,
        **{f"median_latency_{turn}_s": round(value, 4) for turn, value in median.items()},
        "latency_ratio": round(median["hostile"] / median["quiet"], 3),
        "memory_growth": round(growth, 4),
        **{name: int(value) for name, value in watched.items()},
        "hostile_attempts": counts,
        "sigterm_s": round(stop_s, 2),
        "checks": {
            "right": results.wrong == results.failed == 0,
            "latency": median["hostile"] <= MOST_LATENCY * median["quiet"],
            "memory": growth <= MOST_GROWTH,
            "descriptors": (
                watched["other_descriptors_late"] <= watched["other_descriptors_early"] + 10
                and watched["compass_connections_max"] <= CONNECTIONS
            ),
            "stop": stop_s <= MOST_STOP_S and status == 0,
            "hostile": counts.get("answered", 0) == 0,
            "quiet_log": stderr_text == "",
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the load; returns 0 if all checks of the summary hold."""
    args = _arguments(argv)
    with tempfile.TemporaryDirectory() as temporary, tempfile.TemporaryFile("w+") as errors:
        folder = Path(temporary) / "tiny"
        make_model(folder)
        process, host, port = start(folder, errors)
        try:
            results, counts, seen = asyncio.run(load(host, port, args))
            stop_s = asyncio.run(stop(host, port, process))
        finally:
            process.kill()
            process.communicate()
        errors.seek(0)
        stderr_text = errors.read()
    if stderr_text:
        print(f"the server's stderr:\n{stderr_text[-5000:]}")
    summary = {
        "requests": args.requests,
        "clients": args.clients,
        "hostile_clients": args.hostile,
        "status": process.returncode,
        **judged(results, counts, seen, stop_s, process.returncode, stderr_text),
    }
    summary["passed"] = all(summary["checks"].values())
    print(json.dumps(summary))
    return 0 if summary["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
