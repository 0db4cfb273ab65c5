"""The processor time of a training's process 0 for each sample that a sampler finishes, and the
bytes that the other processes get: 1, 8 and 32 of them over loopback, without a model.

    python -m benchmarks.leader --label after [--rounds 3] [--peers 1 8 32] [--out FILE]

The other processes are threads of a second program, which also plays the sampler; its time is not
counted. A sample has 32,768 tokens with the routes of Qwen3's 30B (48 layers, 8 experts of a token)
or 235B (94 layers). The rows of the route buffer are split evenly over all processes. For another
commit, set PYTHONPATH to its tree and run this file by its path.
    process_ms     process 0, all threads: receiving a sample, deciding, and sending it
    thread_ms      the part of the thread that decides and sends
    sent_mb        bytes that process 0 sends, to all processes together
    routes_mb      bytes of routes that a process gets; mean, least and most
    columns_mb     bytes of tokens, log-probs, entropies and versions that a process gets
    share_mb       bytes of routes of a process's rows, from the size of a sample
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import experiments
from compass_jax.base.records import Prompt
from compass_jax.config import SamplersConfig
from compass_jax.rollout.remote import frames, pool, serve, weights
from compass_jax.rollout.remote.frames import Message
from compass_jax.rollout.request import Request

TOKENS, TOP_K = 32_768, 8
LAYERS = {"30B": 48, "235B": 94}
LEAST_SAMPLES = 32
OUT = experiments.ROOT / "benchmarks" / "results" / "leader.jsonl"


class Server:
    """A weight server that serves nothing."""

    def __init__(self, host: str):
        self.address = f"{host}:0"


class CountedConnection(frames.Connection):
    """A connection that counts the bytes that it sends."""

    sent = 0

    def send_bytes(self, buf: Any, *options: int) -> None:
        """Sends bytes."""
        self.sent += memoryview(buf).nbytes
        super().send_bytes(buf, *options)


class CountedPool(pool.Pool):
    """The pool of another process of the training. It counts the bytes of arrays and drops them."""

    def apply(self, event: Message) -> None:
        """Counts an event, and applies those that end or connect the process."""
        self.counts = getattr(self, "counts", {"routes": 0, "columns": 0})
        for name, x in event.arrays.items():
            self.counts["routes" if name.endswith("routes") else "columns"] += x.nbytes
        if event.kind in ("relay", "finished", "failed"):
            super().apply(event)


def new_pool(kind: type[pool.Pool], address: str, process: int, peers: int) -> pool.Pool:
    """Returns the pool of one of the training's processes."""
    jax.process_index, jax.process_count = lambda: process, lambda: peers + 1
    return kind(SamplersConfig(address=address))


def connection(address: str) -> frames.Connection:
    """Returns a connection with process 0, which may start later."""
    host, port = address.split(":")
    while True:
        try:
            return frames.connect((host, int(port)))
        except OSError:
            time.sleep(0.05)


def transport() -> tuple[Any, Any]:
    """Returns the functions that send and receive the bytes of a message, of this or an earlier
    commit.
    """
    if hasattr(frames, "send"):
        return frames.send, frames.receive
    return frames.Connection.send_bytes, frames.Connection.recv_bytes


def play_sampler(address: str, layers: int) -> None:
    """Answers each request with a finished sample until the training ends."""
    (send, receive), link, draw = transport(), connection(address), np.random.default_rng(0)
    columns = {
        "tokens": draw.integers(0, 150_000, TOKENS, np.int32),
        "logp": draw.standard_normal(TOKENS, np.float32),
        "entropy": draw.standard_normal(TOKENS, np.float32),
        "versions": np.zeros(TOKENS, np.int32),
        "routes": draw.integers(0, 128, (TOKENS, layers, TOP_K), np.uint8),
    }
    send(link, frames.encode(Message("hello", serve.hello())))
    while (message := frames.decode(receive(link))).kind != "end":
        if message.kind == "work":
            (n, *_), *_ = message.fields["samples"]
            fields = {"job": message.fields["job"], "samples": [n], "stats": {}}
            arrays = {f"{n}.{name}": x for name, x in columns.items()}
            send(link, frames.encode(Message("done", fields, arrays)))


def play_others(address: str, peers: int, layers: int) -> None:
    """Runs the other processes and the sampler; prints what each process has got."""
    pools = [new_pool(CountedPool, address, n, peers) for n in range(1, peers + 1)]
    for trainer in pools:
        trainer.__enter__()
    play_sampler(address, layers)
    for trainer in pools:
        trainer._wait(lambda trainer=trainer: trainer._finished)
    print(json.dumps([trainer.counts for trainer in pools]))


def thread_s() -> float:
    """Returns the processor time of the threads of process 0 that decide and send."""
    threads = [x.ident for x in threading.enumerate() if x.name == "samplers"]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(x)) for x in threads if x)


def measure(peers: int, model: str) -> dict[str, Any]:
    """Measures process 0 with this many other processes."""
    address = f"127.0.0.1:{free_port()}"
    words = [sys.executable, __file__, "--others", address, str(peers), str(LAYERS[model])]
    variables = {**os.environ, "PYTHONPATH": str(Path(frames.__file__).parents[3])}
    program = subprocess.Popen(words, stdout=subprocess.PIPE, env=variables)
    processes = peers + 1
    samples = -(-LEAST_SAMPLES // processes) * processes
    owners = np.arange(samples) * processes // samples
    holders = owners == np.arange(processes)[:, None]
    holders[0] = True
    with new_pool(pool.Pool, address, 0, peers) as leading:
        leader = leading._leader
        assert leader is not None
        while not leader._samplers:
            time.sleep(0.05)
        (sampler,) = leader._samplers.values()
        leader._newest = sampler.committed = 1  # without weights
        fields = {"purpose": 0, "seed": 0, "sampler": {}, "routes": True}
        options = [holders] if "holders" in inspect.signature(pool.Pool.open).parameters else []
        job = leading.open(fields, samples, *options)
        prompt = Prompt.of_tokens([1, 2, 3], 0)
        process_s, sender_s = time.process_time(), thread_s()
        for row in range(samples):
            request = Request.of(prompt, 0, row, TOKENS, 0)
            (number,) = leading.submit(job, [request], [None], range(1))
            while leading.next_event().kind != "done":
                pass
            if options:
                leading.routes(number)
        process_s, sender_s = time.process_time() - process_s, thread_s() - sender_s
        sent = [peer.connection.sent for peer in leader._trainers.values()]
        leading.finish()
        counts = json.loads(program.communicate()[0])
    routes, columns = ([x[name] / samples / 1e6 for x in counts] for name in ("routes", "columns"))
    return {
        "samples": samples,
        "process_ms": round(process_s / samples * 1e3, 2),
        "thread_ms": round(sender_s / samples * 1e3, 2),
        "sent_mb": round(sum(sent) / samples / 1e6, 2),
        "routes_mb": [round(f(routes), 3) for f in (np.mean, min, max)],
        "columns_mb": round(float(np.mean(columns)), 3),
        "share_mb": round(TOKENS * LAYERS[model] * TOP_K / processes / 1e6, 3),
    }


def free_port() -> int:
    """Returns a port on which no process listens."""
    with frames.socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def commit() -> str:
    """Returns the commit of the package that is measured, with a + where its files differ."""
    command = ["git", "-C", str(Path(frames.__file__).parent)]

    def output(*words: str) -> str:
        return subprocess.run([*command, *words], capture_output=True, text=True).stdout.strip()

    changed = output("status", "--porcelain", "--untracked-files=no", ".")
    return output("rev-parse", "--short=8", "HEAD") + "+" * bool(changed)


def main(argv: list[str]) -> None:
    """Measures each number of processes in turn, and appends a row for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--label", default="after", help="name of the measured code in the rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--models", nargs="+", default=["30B"], choices=list(LAYERS))
    parser.add_argument("--out", default=str(OUT))
    args = parser.parse_args(argv)
    for number in range(args.rounds):
        for model in args.models:
            for peers in args.peers:
                row = {"label": args.label, "commit": commit(), "model": model, "peers": peers}
                row |= {"round": number, **measure(peers, model)}
                row["command"] = "python -m benchmarks.leader " + " ".join(argv)
                experiments.append(args.out, row)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    os.environ.setdefault(frames.KEY_VARIABLE, "a key of the benchmark of the leader")
    weights.WeightServer = Server  # type: ignore[assignment,misc]
    frames.Connection = CountedConnection  # type: ignore[misc]
    if sys.argv[1:2] == ["--others"]:
        play_others(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(sys.argv[1:])
