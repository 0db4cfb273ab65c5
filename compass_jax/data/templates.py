"""Chat templates rendered in a process of their own (template_worker.py), with limits on time,
memory and output.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from compass_jax.children import import_path, module_command
from compass_jax.data.template_worker import (
    CPU_S,
    MEMORY,
    MOST_FRAME,
    OUT_OF_MEMORY,
    read_frame,
    write_frame,
)
from compass_jax.errors import UserError

WALL_S = 60.0  # of one request: the processor time ends it first, unless the machine is very busy
TOGETHER = 256  # jobs in one request
TOGETHER_CHARS = 2**20  # and about this many characters of messages
MOST_CHARS = MOST_FRAME // 16  # of one conversation: a character may take 12 bytes of JSON

Messages = Sequence[Mapping[str, Any]]


class TemplateFailure(UserError):
    """A template did not render a conversation: it refused it, failed, or ran into a limit. The
    message says which.
    """


class TemplateLimit(TemplateFailure):
    """A template needed more time, memory or characters than it gets."""


class Job(NamedTuple):
    """The first `count` messages of a conversation, with or without the opening of the assistant's
    turn; and the tools that the template is told of.
    """

    messages: Messages
    count: int  # type: ignore[assignment]  # the tuple's own `count` is not needed
    add_generation_prompt: bool
    tools: Sequence[Mapping[str, Any]] = ()


class _Ended(Exception):
    """The worker ended, by no limit."""


class _Process:
    """A worker that runs. `ask` gives its answer to one request."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        command = module_command("compass_jax.data.template_worker", str(os.getpid()))
        passed = {
            name: os.environ[name]
            for name in ("PATH", "LD_LIBRARY_PATH", "LANG")
            if name in os.environ
        }
        passed["PYTHONPATH"] = import_path()
        with theirs:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=passed,
                start_new_session=True,
            )
        ours.settimeout(WALL_S)
        self.process, self.connection = process, ours
        self.end = weakref.finalize(self, _end, process, ours)

    def ask(self, request: bytes) -> list[list[Any]]:
        """The worker's answers. Raises TemplateLimit or _Ended where it gave none; it is
        gone then.
        """
        try:
            write_frame(self.connection, request)
            return json.loads(read_frame(self.connection))
        except TimeoutError:
            failure: Exception = TemplateLimit(f"it takes longer than {WALL_S:g} s")
        except (OSError, EOFError, ValueError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
            failure = _failure(self.process.poll())
        self.end()
        raise failure


def _end(process: subprocess.Popen, connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()


def _failure(status: int | None) -> Exception:
    if status == -signal.SIGXCPU:
        return TemplateLimit(f"it takes longer than {CPU_S} s")
    if status == OUT_OF_MEMORY:
        return TemplateLimit(f"it takes more than {MEMORY // 2**20} MiB of memory")
    return _Ended(f"the process that renders it ended with status {status}")


class Renderer:
    """Renders chat templates, from any thread: one request at a time, by one worker that is started
    when it is needed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: _Process | None = None

    def render(
        self, template: str, variables: Mapping[str, str], jobs: Sequence[Job]
    ) -> list[str | TemplateFailure]:
        """The text of each job, or why there is none. After a job that ran into a limit the later
        ones are not tried: they have its failure.
        """
        found: list[str | TemplateFailure] = []
        for part in _parts(jobs):
            found += self._part(template, variables, part)
            if isinstance(found[-1], TemplateLimit):
                break
        return [*found, *found[-1:] * (len(jobs) - len(found))]

    def unread(self, template: str, variables: Mapping[str, str], job: Job, text: str) -> str:
        """The part of a conversation that the template passes over: `text`, what it made of the
        job, is the same without it. Empty: there is none.

        A template may leave out the reasoning of earlier turns, but must know of it. The id of a
        call may be passed over: the order of the messages says it too.
        """
        said = {name for message in job.messages[: job.count] for name in message}
        if "reasoning_content" in said and "reasoning_content" not in template:
            return "reasoning_content"
        without = {"tools": job._replace(tools=())} if job.tools else {}
        for field in sorted(said & {"tool_calls", "name"}):
            kept = [{k: v for k, v in m.items() if k != field} for m in job.messages]
            without[field] = job._replace(messages=kept)
        texts = self.render(template, variables, list(without.values())) if without else []
        return next((name for name, other in zip(without, texts) if other == text), "")

    def _part(
        self, template: str, variables: Mapping[str, str], jobs: Sequence[Job]
    ) -> list[str | TemplateFailure]:
        """Together, or one by one to see which ran into a limit; up to that one."""
        try:
            return self._render(template, variables, jobs)
        except TemplateLimit as limit:
            if len(jobs) == 1:
                return [limit]
        found: list[str | TemplateFailure] = []
        for job in jobs:
            found += self._part(template, variables, [job])
            if isinstance(found[-1], TemplateLimit):
                break
        return found

    def _render(
        self, template: str, variables: Mapping[str, str], jobs: Sequence[Job]
    ) -> list[str | TemplateFailure]:
        conversations = {id(job.messages): job.messages for job in jobs}
        number = {key: n for n, key in enumerate(conversations)}
        request = {
            "template": template,
            "variables": dict(variables),
            "conversations": [list(messages) for messages in conversations.values()],
            "jobs": [
                [number[id(job.messages)], job.count, job.add_generation_prompt, list(job.tools)]
                for job in jobs
            ],
        }
        try:
            data = json.dumps(request).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateLimit(
                f"they cannot be written as JSON ({type(error).__name__}: {error})"
            ) from error
        if len(data) > MOST_FRAME:
            raise TemplateLimit(f"they have more than {MOST_CHARS:,} characters")
        with self._lock:
            answers = self._ask(data)
        kinds = {True: str, False: TemplateFailure, None: TemplateLimit}
        return [kinds[good](text) for good, text in answers]

    def _ask(self, data: bytes) -> list[list[Any]]:
        """The worker's answers. One that was killed from outside, by no limit, is replaced once."""
        while True:
            fresh = self._process is None
            process = self._process or _Process()
            # until the exchange is whole: an interrupt would leave half a frame
            self._process = None
            try:
                answers = process.ask(data)
            except _Ended as ended:
                if fresh:
                    raise TemplateLimit(str(ended)) from ended
                continue
            self._process = process
            return answers


def _parts(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    part: list[Job] = []
    size = 0
    for job in jobs:
        part.append(job)
        size += sum(
            len(value)
            for message in job.messages
            for value in message.values()
            if isinstance(value, str)
        )
        if len(part) >= TOGETHER or size >= TOGETHER_CHARS:
            yield part
            part, size = [], 0
    if part:
        yield part


@cache
def renderer() -> Renderer:
    """The renderer of this process."""
    return Renderer()
