"""Digests of files, computed in threads, that detect any changed bit.

The hash is XXH3 with 128 bits. It detects damage and mistakes such as a file of another step; it
does not protect against forgery. A file's digest is computed from the digests of its pieces, so
that threads can share a file of many gigabytes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

PIECE = 16 * 2**20  # bytes per piece; part of the format, since digests depend on it
_BUFFER = 2**20  # bytes per read, few enough for the processor's cache
_MOST_THREADS = 16
_local = threading.local()


class Digest(NamedTuple):
    """The size of a file in bytes and its hexadecimal digest."""

    size: int
    value: str


def of_bytes(data: bytes) -> Digest:
    """Returns the digest of a file with the content `data`."""
    pieces = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
    return _combine([(len(piece), xxhash.xxh3_128_digest(piece)) for piece in pieces])


def of_files(root: Path, names: Iterable[str]) -> dict[str, Digest]:
    """Returns the digest of each file. `names` are relative to `root`. Raises OSError."""
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "digests") as pool:
        pieces = {
            name: [
                pool.submit(_piece, str(root / name), start)
                for start in range(0, (root / name).stat().st_size, PIECE)
            ]
            for name in names
        }
        return {name: _combine([piece.result() for piece in pieces[name]]) for name in pieces}


def _combine(pieces: list[tuple[int, bytes]]) -> Digest:
    value = xxhash.xxh3_128_hexdigest(b"".join(digest for _, digest in pieces))
    return Digest(sum(size for size, _ in pieces), value)


def _piece(file: str, start: int) -> tuple[int, bytes]:
    """Returns the number of bytes and the digest of one piece of a file."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BUFFER))
    digest, at = xxhash.xxh3_128(), start
    with open(file, "rb", buffering=0) as data:
        data.seek(start)
        while at < start + PIECE and (count := data.readinto(_local.buffer[: start + PIECE - at])):
            digest.update(_local.buffer[:count])
            at += count
    return at - start, digest.digest()
