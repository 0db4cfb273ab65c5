"""What digests cost a checkpoint: seconds of saving and of restoring with them and without, and of
each hash alone.

    python -m benchmarks.checkpoint [--out runs/checkpoint] [--gib 2] [--rounds 7] [--smoke]

Random float32 arrays, which hardly compress: about as many bytes in files as in memory, all in the
page cache. Saving and restoring with and without digests take turns in every round, after one that
is not timed; the side that goes first alternates, and the medians are compared. `verify` is what
restoring does before it reads. The hashes read the same files, in pieces, with one thread and with
as many as there are cores; that they release the interpreter is seen in the second column. The last
line is one of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import xxhash

from benchmarks.common import cores, environment, report, say, seconds
from compass_jax.config import ModelConfig
from compass_jax.weights import checkpoint, digests, sound

MODEL = ModelConfig("qwen3", 10, 8, 1, 1, 1, 8, 8)
LEAF = 64 * 2**20  # bytes


class Crc:
    """zlib's CRC-32 with the methods of a hash."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: memoryview) -> None:
        """Goes on with `data`."""
        self.value = zlib.crc32(data, self.value)

    def digest(self) -> int:
        """The checksum so far."""
        return self.value


HASHES: dict[str, Callable[[], Any]] = {
    "xxh3, 128 bits": xxhash.xxh3_128,
    "zlib.crc32": Crc,
    "sha256": hashlib.sha256,
    "blake2b": hashlib.blake2b,
}


def arrays_of(size: int) -> dict[str, jax.Array]:
    """Random leaves of `size` bytes together."""
    keys = jax.random.split(jax.random.key(0), max(1, size // LEAF))
    shape = (size // len(keys) // 4,)
    arrays = {f"leaf_{i}": jax.random.normal(key, shape) for i, key in enumerate(keys)}
    return jax.block_until_ready(arrays)


@contextlib.contextmanager
def without_digests() -> Iterator[None]:
    """Checkpoints are saved and restored as if their digests cost nothing: none is made, none is
    compared.
    """
    none = {"meta.json": digests.of_bytes(b"{}")}
    with (
        mock.patch.object(checkpoint, "_own_digests", lambda temporary: none),
        mock.patch.object(
            sound,
            "examine",
            lambda where, contents=True: sound.Examined(sound.manifests.read(where), []),
        ),
    ):
        yield


def one_round(
    run: Path, arrays: dict[str, jax.Array], digested: bool, step: int
) -> dict[str, float]:
    """Seconds of saving one checkpoint and of restoring it, on the clock and of the processor;
    where it is digested, of verifying it alone.
    """
    out: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> None:
        spent = time.process_time()
        out[f"{name}_s"] = round(seconds(call), 4)
        out[f"{name}_cpu_s"] = round(time.process_time() - spent, 4)

    with contextlib.nullcontext() if digested else without_digests():
        timed("save", lambda: checkpoint.save(run, step, arrays, {}, model=MODEL, keep=1))
        where, abstract = checkpoint.locate(run), checkpoint.abstract_like(arrays)
        timed("restore", lambda: jax.block_until_ready(checkpoint.restore(where, abstract)[1]))
    if digested:
        timed("verify", lambda: sound.examine(where))
    return out


def hash_seconds(files: list[Path], new: Callable[[], Any], threads: int) -> float:
    """Seconds to digest these files with one hash, as weights/digests.py does."""

    def piece(file: Path, start: int) -> None:
        left, digest = digests.PIECE, new()
        buffer = memoryview(bytearray(2**20))
        with open(file, "rb", buffering=0) as data:
            data.seek(start)
            while left > 0 and (count := data.readinto(buffer[:left])):
                digest.update(buffer[:count])
                left -= count
        digest.digest()

    work = [
        (file, start) for file in files for start in range(0, file.stat().st_size, digests.PIECE)
    ]
    started = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda job: piece(*job), work))
    return time.perf_counter() - started


def table(found: dict[str, Any]) -> str:
    """The table in Markdown."""
    lines = [
        (
            "| medians | with digests, s | without, s | digests cost (median of the rounds' ratios)"
            " | digesting alone, of the time without |"
        ),
        "|---|---|---|---|---|",
    ]
    for name, key in (("saving", "save"), ("restoring", "restore")):
        for suffix, clock in (("_s", "clock"), ("_cpu_s", "processor")):
            both = found[key + suffix], found[f"{key}_without{suffix}"]
            verify = found["verify" + suffix]
            cost = found[f"{key}_cost{suffix}"]
            lines.append(
                f"| {name}, {clock} | {both[0]:.2f} | {both[1]:.2f} | {cost:+.1%} |"
                f" {verify / both[1]:.1%} |"
            )
    lines.append(
        f"\nDigesting alone takes {found['verify_s']:.2f} s, {found['verify_cpu_s']:.2f} s of the"
        " processor."
    )
    lines += [
        "",
        f"| hash | one thread, GiB/s | {found['threads']} threads, GiB/s |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | {one:.1f} | {many:.1f} |"
        for name, (one, many) in found["hashes_gib_per_s"].items()
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the table and the line of JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out",
        default="runs/checkpoint",
        help="where checkpoints are written, and removed (default: %(default)s)",
    )
    parser.add_argument(
        "--gib", type=float, default=2.0, help="size of a checkpoint (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=7, help="(default: %(default)s)")
    parser.add_argument(
        "--smoke", action="store_true", help="a toy checkpoint: shows that the benchmark works"
    )
    args = parser.parse_args(argv)
    out = Path(args.out)
    arrays = arrays_of(2**22 if args.smoke else int(args.gib * 2**30))
    rounds: list[dict[str, Any]] = []
    one_round(out, arrays, True, 0)  # compiles, imports, and fills the page cache
    for number in range(args.rounds):
        row: dict[str, Any] = {}
        for digested in (True, False) if number % 2 == 0 else (False, True):
            shutil.rmtree(out, ignore_errors=True)
            row["with" if digested else "without"] = one_round(out, arrays, digested, number)
        rounds.append(row)
        say(f"round {number + 1}: {json.dumps(row)}")
    shutil.rmtree(out)
    checkpoint.save(out, 0, arrays, {}, model=MODEL)
    files = [file for file in out.rglob("*") if file.is_file()]
    size, threads = sum(file.stat().st_size for file in files), min(16, os.cpu_count() or 1)
    speeds = {}
    for name, new in HASHES.items():
        times = [min(hash_seconds(files, new, count) for _ in range(3)) for count in (1, threads)]
        speeds[name] = [round(size / 2**30 / time, 2) for time in times]
    shutil.rmtree(out)
    found: dict[str, Any] = {
        "bytes": size,
        "threads": threads,
        "rounds": len(rounds),
        "hashes_gib_per_s": speeds,
    }
    found |= {
        name: statistics.median(row["with"][name] for row in rounds) for name in rounds[0]["with"]
    }
    for name in rounds[0]["without"]:
        key, _, suffix = name.partition("_")
        found[f"{key}_without_{suffix}"] = statistics.median(row["without"][name] for row in rounds)
        found[f"{key}_cost_{suffix}"] = (
            statistics.median(row["with"][name] / row["without"][name] for row in rounds) - 1
        )
    print(table(found))
    report("checkpoint", args.smoke, found, {"cores": cores(), "per_round": rounds}, environment())


if __name__ == "__main__":
    main()
