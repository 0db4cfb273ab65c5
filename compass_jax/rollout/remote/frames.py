"""Messages between the training and its samplers: JSON fields and arrays over authenticated
sockets. No message is unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.base.errors import CompassError
from compass_jax.config import ConfigError

KEY_VARIABLE = "COMPASS_SAMPLERS_KEY"
DTYPES = frozenset({"int32", "float32", "float64", "uint8", "uint16"})
# Seconds after which a sampler that sends or reads nothing counts as lost, and between the messages
# by which it shows that it works.
SILENT_S, ALIVE_S = 120, 10
FRAME = 2**26  # bytes of a message that are sent at once
_LENGTH = struct.Struct(">I")
# Seconds after which the system counts a silent host as lost: 10 + 4 * 5.
_KEEP_ALIVE = (
    (socket.TCP_KEEPIDLE, 10),
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 4),
    # milliseconds, for sent data that is not acknowledged: no probes are sent then
    (socket.TCP_USER_TIMEOUT, 30_000),
)
GREETING_S = 10  # within which the two sides must have authenticated
# errors of `accept`
REFUSED = (AuthenticationError, EOFError, OSError, AssertionError)


_EMPTY: Tree = MappingProxyType({})


class SamplersError(CompassError, RuntimeError):
    """Training and samplers cannot work together, or a sampler has refused its settings."""


class StoppedWaiting(SamplersError):
    """The run was asked to stop while it waited for samplers."""

    exit_status = 143  # that of SIGTERM: the same command continues


class Message(NamedTuple):
    """A message: its kind, JSON fields and arrays by name."""

    kind: str
    fields: JsonObject = _EMPTY
    arrays: Mapping[str, np.ndarray] = _EMPTY


def as_array(payload: bytes) -> dict[str, np.ndarray]:
    """Returns the array of a message that carries bytes."""
    return {"payload": np.frombuffer(payload, np.uint8)}


def encode(message: Message) -> bytes:
    """Returns the bytes of a message, which `decode` reads."""
    arrays = {name: np.ascontiguousarray(x) for name, x in message.arrays.items()}
    shapes = [[name, x.dtype.name, x.shape] for name, x in arrays.items()]
    header = json.dumps([message.kind, dict(message.fields), shapes]).encode()
    return b"".join([_LENGTH.pack(len(header)), header, *(x.data for x in arrays.values())])


def decode(data: bytes) -> Message:
    """Returns the message in `data`. Raises SamplersError for anything else."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        kind, fields, shapes = json.loads(data[_LENGTH.size : end])
        if not (isinstance(kind, str) and isinstance(fields, dict)):
            raise ValueError(f"kind {kind!r:.80} with fields {fields!r:.80}")
        arrays = {}
        for name, dtype, shape in shapes:
            if dtype not in DTYPES or any(size < 0 for size in shape):
                raise ValueError(f"an array of type {dtype!r} and shape {shape}")
            count = int(np.prod(shape))
            x = np.frombuffer(data, dtype, count, end).reshape(shape)
            arrays[name], end = x, end + x.nbytes
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes too many")
        return Message(kind, fields, arrays)
    except (ValueError, TypeError, struct.error) as error:
        raise SamplersError(f"a message of the samplers' protocol is broken: {error}") from error


def send(connection: Connection, data: bytes) -> None:
    """Sends a message in frames of FRAME bytes, the last of which is smaller, for `receive`."""
    for start in range(0, len(data) + 1, FRAME):
        connection.send_bytes(memoryview(data)[start : start + FRAME])


def receive(connection: Connection) -> bytes:
    """Waits for a message and returns its bytes. Raises EOFError or OSError after a loss, and
    OSError for a frame that is too large.
    """
    frames = [connection.recv_bytes(FRAME)]
    while len(frames[-1]) == FRAME:
        frames.append(connection.recv_bytes(FRAME))
    return b"".join(frames)  # a single frame is not copied


def secret() -> bytes:
    """Returns the key that training and samplers share. Raises ConfigError if it is not set."""
    key = os.environ.get(KEY_VARIABLE, "")
    if len(key) < 16:
        raise ConfigError(
            f"{KEY_VARIABLE} has {len(key)} characters: set it to the same text of 16 or more in"
            " the training and in every sampler (such as that of `openssl rand -hex 16`)"
        )
    return key.encode()


def connect(address: tuple[str, int]) -> Connection:
    """Connects with the training. Raises OSError where nothing answers, and AuthenticationError (of
    multiprocessing) where the keys differ.
    """
    connection = Connection(socket.create_connection(address, timeout=GREETING_S).detach())
    with _greeting(connection):
        # Each side proves that it has the key, in the opposite order to `accept`.
        answer_challenge(connection, secret())
        deliver_challenge(connection, secret())
    return connection


def accept(one: socket.socket) -> Connection:
    """Authenticates a process that has connected; errors are those of `connect`."""
    connection = Connection(one.detach())
    with _greeting(connection):
        deliver_challenge(connection, secret())
        answer_challenge(connection, secret())
    return connection


@contextlib.contextmanager
def _greeting(connection: Connection) -> Iterator[None]:
    """Limits the time of authentication; closes the connection after an error."""
    try:
        with socket_of(connection) as one:
            # A timeout of Python's socket would make the descriptor non-blocking, which Connection
            # does not expect. The kernel ends its reads instead.
            one.setblocking(True)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", GREETING_S, 0))
        yield
        with socket_of(connection) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        keep_alive(connection)
    except BaseException:
        connection.close()
        raise


def shut_down(connection: Connection) -> None:
    """Ends a connection, which wakes the threads that read or write it."""
    with contextlib.suppress(OSError), socket_of(connection) as one:
        one.shutdown(socket.SHUT_RDWR)


def keep_alive(connection: Connection) -> None:
    """Makes the system detect a lost host, and makes a write fail if its peer does not read."""
    with socket_of(connection) as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SILENT_S, 0))
        for option, value in _KEEP_ALIVE:
            one.setsockopt(socket.IPPROTO_TCP, option, value)


def local_host(connection: Connection) -> str:
    """Returns this end's address of a connection, at which its other end can reach this host."""
    with socket_of(connection) as one:
        return one.getsockname()[0]


def resolved(host: str) -> str:
    """Returns the IP address of this host by its name. Raises SamplersError for an unknown one, for
    a wildcard, and for a name that only this host resolves to itself.
    """
    try:
        ip = socket.gethostbyname(host)
    except OSError as error:
        raise SamplersError(f"samplers.address: no host {host!r}: {error.strerror}") from error
    loopback = ip.startswith("127.") and not (host.startswith("127.") or host == "localhost")
    if loopback or ip == "0.0.0.0":
        raise SamplersError(
            f"samplers.address: {host!r} is {ip} here, which no other host reaches: name this"
            " host's address on the network of the samplers"
        )
    return ip


def socket_of(connection: Connection) -> socket.socket:
    """Returns a second socket object of a connection, to be closed by the caller."""
    return socket.socket(fileno=os.dup(connection.fileno()))
