"""The process that renders chat templates: nothing that a template does ends, hangs or fills the
process that asked.

    python -m compass_jax.data.template_worker PARENT

It reads requests from the socket that is its standard input and writes one answer to each. A frame
is its length (4 bytes, big-endian) and that many bytes of JSON:

    {"template": text, "variables": {name: text}, "conversations": [messages, ...],
     "jobs": [[conversation, messages of it, add_generation_prompt, tools], ...]}
 -> [[true, text] or [false, why not] or [null, which limit], ...]

A text that is too long ends the request. One that needs more processor time or memory than the
limits ends the process; templates.py sees by its status which it was.
"""

from __future__ import annotations

import json
import os
import resource
import select
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_S = 3  # of one request
MEMORY = 512 * 2**20  # address space, Python and jinja2 included
MOST_FRAME = 64 * 2**20
MOST_TEXT = 2 * 2**20  # characters of one rendered conversation: half a million tokens
OUT_OF_MEMORY = 9  # exit status
KEPT = ("range", "dict", "namespace")  # of jinja2's globals: what chat templates use
_WORDS = 500  # characters of an error's text


def read_frame(connection: socket.socket) -> bytes:
    """The next frame. Raises EOFError at the end of the stream, ValueError for one that is longer
    than MOST_FRAME.
    """
    (size,) = struct.unpack(">I", _exactly(connection, 4))
    if size > MOST_FRAME:
        raise ValueError(f"a frame of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        if not (n := connection.recv_into(view)):
            raise EOFError
        view = view[n:]
    return bytes(data)


def write_frame(connection: socket.socket, data: bytes) -> None:
    """Sends `data` as one frame."""
    connection.sendall(struct.pack(">I", len(data)))
    connection.sendall(data)


def environment() -> jinja2.Environment:
    """The environment of transformers' chat templates: sandboxed, immutable, blocks trimmed, loop
    controls.
    """

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(str(message))

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.globals = {name: made.globals[name] for name in KEPT} | {
        "raise_exception": raise_exception
    }
    made.filters["tojson"] = tojson
    return made


def answers(request: dict[str, Any], compiled: Callable[[str], jinja2.Template]) -> list[list[Any]]:
    """[true, text] or [false, why not] for each job of a request, up to one of too long a text:
    [null, that].

    MemoryError passes through.
    """
    found: list[list[Any]] = []
    for conversation, count, prompt, tools in request["jobs"]:
        messages = request["conversations"][conversation][:count]
        variables = request["variables"] | ({"tools": tools} if tools else {})
        try:
            text = compiled(request["template"]).render(
                messages=messages, add_generation_prompt=prompt, **variables
            )
            if len(text) > MOST_TEXT:
                return [
                    *found,
                    [None, f"it writes {len(text):,} characters, more than {MOST_TEXT:,}"],
                ]
            found.append([True, text])
        except MemoryError:
            raise
        except jinja2.exceptions.TemplateError as error:
            found.append([False, str(error)[:_WORDS] or type(error).__name__])
        except Exception as error:
            found.append([False, f"{type(error).__name__}: {str(error)[:_WORDS]}"])
    return found


def _compiler() -> Callable[[str], jinja2.Template]:
    made = environment()
    kept: dict[str, jinja2.Template] = {}

    def compiled(source: str) -> jinja2.Template:
        if source not in kept:
            if len(kept) >= 4:
                kept.clear()
            kept[source] = made.from_string(source)
        return kept[source]

    return compiled


def serve(connection: socket.socket, parent: int) -> None:
    """Answers requests until the other end is closed or the parent is gone."""
    compiled = _compiler()
    while True:
        while not select.select([connection], [], [], 5.0)[0]:
            if os.getppid() != parent:
                return
        request = json.loads(read_frame(connection))
        used = resource.getrusage(resource.RUSAGE_SELF)
        seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_S
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))
        data = json.dumps(answers(request, compiled)).encode()
        if len(data) > MOST_FRAME:
            raise MemoryError
        write_frame(connection, data)


def main(parent: int) -> int:
    """The process. Returns its exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        serve(socket.socket(fileno=0), parent)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except (EOFError, OSError):
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
