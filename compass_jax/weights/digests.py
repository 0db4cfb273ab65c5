"""Digests of files, computed in threads: a file of which one bit was changed has another one.

XXH3 of 128 bits. It finds damage, and mistakes such as a file of another step; who forges a file
can forge its digest too. A file's digest is that of its pieces' digests, so that threads share a
file of many gigabytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import xxhash

PIECE = 16 * 2**20  # bytes; part of the format: other pieces make other digests
_BUFFER = 2**20  # what is read at once stays in the processor's cache until it is digested
_MOST_THREADS = 16
_POPULATE_READ = 22  # madvise's MADV_POPULATE_READ, since Linux 5.14
_local = threading.local()


class Digest(NamedTuple):
    """The size of a file in bytes, and its digest in hexadecimal digits."""

    size: int
    value: str


def of_bytes(data: bytes) -> Digest:
    """The digest of a file that holds `data`."""
    pieces = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
    return _whole([(len(piece), xxhash.xxh3_128_digest(piece)) for piece in pieces])


def of_files(root: Path, names: Iterable[str]) -> dict[str, Digest | OSError]:
    """Each file's digest, or the error that reading it ended in; `names` are relative to `root`."""
    out: dict[str, Digest | OSError] = {}
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "digests") as pool:
        asked = {}
        for name in names:
            try:
                size = (root / name).stat().st_size
            except OSError as error:
                out[name] = error
                continue
            starts = range(0, size, PIECE)
            asked[name] = [pool.submit(_piece, str(root / name), start) for start in starts]
        for name, pieces in asked.items():
            try:
                out[name] = _whole([piece.result() for piece in pieces])
            except OSError as error:
                out[name] = error
    return out


def _whole(pieces: list[tuple[int, bytes]]) -> Digest:
    value = xxhash.xxh3_128_hexdigest(b"".join(digest for _, digest in pieces))
    return Digest(sum(size for size, _ in pieces), value)


def _piece(file: str, start: int) -> tuple[int, bytes]:
    """Bytes and digest of one piece of a file."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        return _mapped(descriptor, start) or _read(descriptor, start)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, start: int) -> tuple[int, bytes] | None:
    """The piece as it lies in the system's memory, which takes half the time of copying it; None
    where it cannot be had without danger. A bad sector that is met through a mapping is a signal
    which ends the process: so all pages are asked for first, by a call that fails instead.
    """
    length = min(PIECE, os.fstat(descriptor).st_size - start)
    if length <= 0:
        return None
    try:
        with mmap.mmap(descriptor, length, prot=mmap.PROT_READ, offset=start) as mapped:
            mapped.madvise(_POPULATE_READ)
            return length, xxhash.xxh3_128_digest(mapped)
    except (OSError, ValueError):
        return None


def _read(descriptor: int, start: int) -> tuple[int, bytes]:
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(_BUFFER))
    buffer = _local.buffer
    digest = xxhash.xxh3_128()
    at = start
    while at < start + PIECE:
        count = os.preadv(descriptor, [buffer[: start + PIECE - at]], at)
        if not count:
            break
        digest.update(buffer[:count])
        at += count
    return at - start, digest.digest()
