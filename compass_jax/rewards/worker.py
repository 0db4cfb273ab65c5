"""The process that checks answers: `python -m compass_jax.rewards.worker SOCKET LIFELINE`.

It splits in two. The guardian waits until the scorer is gone or the other ends, and takes all
descendants with it. The other imports what the checks need, confines itself and answers (the lines
are described in channel.py): what decides by comparing it checks itself, what evaluates text or is
a user's own it checks in a child for each answer, or for a batch where the verifier takes one.

Only `rewards/score.py` starts it. Nothing here may import jax: it is started anew after a hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from compass_jax.config import ConfigError
from compass_jax.errors import UserError
from compass_jax.rewards import sandbox
from compass_jax.rewards.called import Case
from compass_jax.rewards.channel import line
from compass_jax.rewards.checks import UNDECIDED, Check, Response, Verifier, build
from compass_jax.tasks.rows import decode_row
from compass_jax.verifiers import guards, program, program_files

DETAIL_CHARS = 2000
PROBE_S = 30.0


def answers(
    verifier: Verifier, sent: Sequence[Response], zone: sandbox.Zone, seconds: float
) -> list[list]:
    """Of each response: reward or None, outcome, detail, components, whether it had an answer, and
    what an environment says to it.

    What is not decided here is judged in one child, within `seconds` for all.
    """
    found: list[list | None] = [None] * len(sent)
    values: dict[int, list] = {}
    cases = {}
    for i, one in enumerate(sent):
        try:
            cases[i] = Case(decode_row(one.row), one.text, one.prompt)
            values[i] = verifier.decided(cases[i])
        except BaseException:
            found[i] = _unknown("error", traceback.format_exc())
    left = [i for i in values if any(value is UNDECIDED for value in values[i])]
    which = sorted({n for i in left for n, value in enumerate(values[i]) if value is UNDECIDED})
    if left:
        said = zone.run(partial(verifier.judged, [cases[i] for i in left], which), seconds)
        for i, outcome, value in zip(left, *_each(said, len(left), len(which)), strict=True):
            if outcome == "ok":
                for n, part in zip(which, value, strict=True):
                    values[i][n] = part
            else:
                found[i] = _unknown(outcome, said.detail)
    return [found[i] or _graded(verifier, values[i]) for i in range(len(sent))]


def _each(said: sandbox.Outcome, cases: int, parts: int) -> tuple[list[str], list[list]]:
    """Outcome and values of each case, from what a child said of all: it is not trusted."""
    value = said.value
    whole = isinstance(value, list) and len(value) == cases
    if (
        said.outcome == "ok"
        and whole
        and all(isinstance(x, list) and len(x) == parts for x in value)
    ):
        return ["ok"] * cases, value
    return [said.outcome if said.outcome != "ok" else "crash"] * cases, [[]] * cases


def _graded(verifier: Verifier, values: list) -> list:
    try:
        graded = verifier.graded(values)
    except BaseException:
        return _unknown("error", traceback.format_exc())
    outcome = "unjudged" if graded.reward is None else "ok"
    return [graded.reward, outcome, "", graded.components, graded.extracted, graded.says]


def _unknown(outcome: str, detail: str) -> list:
    return [None, outcome, detail[-DETAIL_CHARS:], {}, False, ""]


def _judge(
    verifiers: Sequence[Verifier],
    batch: Sequence[Response],
    zone: sandbox.Zone,
    seconds: float,
    alive: Callable[[], None],
) -> Iterator[list]:
    """The answers to a batch, in its order. Where a verifier takes many at once and fails, each is
    judged alone: one that hangs must not cost the others. `alive` says that work goes on.
    """
    ready: dict[int, list] = {}
    tried: set[int] = set()
    for index, response in enumerate(batch):
        source, verifier = response.source, verifiers[response.source]
        if response.rows:
            yield _tried(verifier, response.rows, zone, seconds)
            continue
        if verifier.batch and source not in tried:
            tried.add(source)
            same = [i for i, one in enumerate(batch) if one.source == source]
            found = answers(verifier, [batch[i] for i in same], zone, seconds)
            if len(same) == 1 or all(one[1] in ("ok", "unjudged") for one in found):
                ready |= dict(zip(same, found, strict=True))
            alive()
        yield ready.get(index) or answers(verifier, [response], zone, seconds)[0]


def _tried(verifier: Verifier, rows: Sequence[str], zone: sandbox.Zone, seconds: float) -> list:
    """Returns an answer whose detail lists [number of the row, what is wrong with it] as JSON."""
    said = zone.run(lambda: verifier.row_faults([decode_row(row) for row in rows]), seconds)
    if said.outcome != "ok" or not isinstance(said.value, list):
        return _unknown(said.outcome if said.outcome != "ok" else "crash", said.detail)
    faults = [(n, str(fault)) for n, fault in enumerate(said.value) if fault]
    while len(json.dumps(faults)) > DETAIL_CHARS:
        faults = [(n, text[: len(text) // 2]) for n, text in faults]
    return _unknown("unjudged", json.dumps(faults))


def serve(connection: socket.socket, setup: dict[str, Any], folder: str) -> None:
    """Answers until the scorer closes the connection."""
    seconds = setup["timeout_s"]
    try:
        verifiers = [
            build([Check(*map(_tuples, check)) for check in checks], setup["tag"])
            for checks in setup["checks"]
        ]
        programs = [part.name for one in verifiers for part in one.parts if part.runs_programs]
        if programs and not setup["programs"]:
            raise ConfigError(_no_guards(programs[0], setup["guards"]))
        zone = sandbox.enter(setup["guards"], folder, _imported(), _of_programs(setup, programs))
        guards.limit_memory()
        guards.die_with_parent()  # again: the kernel forgets it where the user changes
        if programs and not zone.run(program.can_run, PROBE_S).value:
            raise ConfigError(_cannot_run(programs[0]))
    except UserError as error:
        connection.sendall(line(["refused", str(error)[-2 * DETAIL_CHARS :]]))
        return
    except BaseException:
        connection.sendall(line(["failed", traceback.format_exc()[-2 * DETAIL_CHARS :]]))
        return
    connection.sendall(line(["ready", ""]))
    with connection.makefile("rb") as lines, contextlib.suppress(OSError):
        alive = partial(connection.sendall, line(["begun", ""]))
        for sent in lines:
            alive()
            batch = [Response(*one) for one in json.loads(sent)]
            for index, answer in enumerate(_judge(verifiers, batch, zone, seconds, alive)):
                connection.sendall(line([index, *answer]))


def _of_programs(setup: dict[str, Any], programs: Sequence[str]) -> guards.ProgramFiles:
    """Returns what programs may read; nothing where no verifier runs one."""
    if not programs:
        return guards.NO_PROGRAM
    modules, files = program_files.package_files(setup["packages"])
    program_files.allow(modules)
    python = program_files.python_files()
    return python._replace(readable=python.readable | files)


def _no_guards(name: str, active: Sequence[str]) -> str:
    missing = ", ".join(guard for guard in guards.GUARDS if guard not in active)
    return (
        f"the verifier {name!r} runs programs that the model wrote, and this machine has no"
        f" {missing}: allow it, or run them with this user's files and network by"
        " rewards.sandbox = 'off'"
    )


def _cannot_run(name: str) -> str:
    return (
        f"the verifier {name!r} runs programs that the model wrote, and in the sandbox"
        f" {sys.executable} does not run even an empty one: this Python ({sys.base_prefix}) must"
        f" start with the limits of a program, and within {PROBE_S:.0f} s"
    )


def _tuples(value: Any) -> Any:
    """JSON has lists where settings have tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _imported() -> set[str]:
    """Where modules lie, to be read by those that import the rest of themselves later."""
    files = [getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if "." not in n]
    return {*filter(os.path.isdir, sys.path), *(os.path.dirname(f) for f in files if f)}


def _first_line(connection: socket.socket) -> bytes:
    """Byte by byte: what follows belongs to another reader."""
    text = bytearray()
    while not text.endswith(b"\n"):
        part = connection.recv(1)
        if not part:
            return b""
        text += part
    return bytes(text)


def _guard(child: int, lifeline: int, folder: str) -> NoReturn:
    """Ends when the child ends, or ends it when the scorer is gone; nobody is left then."""
    descriptor = os.pidfd_open(child)
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.register(lifeline, select.POLLIN)  # nobody writes: it is readable when its end is closed
    if descriptor not in dict(poll.poll()):
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    guards.kill_descendants(time.monotonic() + sandbox.END_LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    """Ctrl-C and SIGTERM are for the scorer to decide about; the worker follows it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    connection = socket.socket(fileno=int(sys.argv[1]))
    lifeline = int(sys.argv[2])
    text = _first_line(connection)
    if not text:
        return
    setup = json.loads(text)
    folder = tempfile.mkdtemp(prefix="compass-check-")
    guards.adopt_orphans()
    missing = guards.separate(setup["guards"])
    child = os.fork()
    if child:
        connection.close()
        _guard(child, lifeline, folder)
    os.close(lifeline)
    guards.die_with_parent()
    if missing:
        connection.sendall(line(["failed", f"guards that were there are missing: {missing}"]))
    else:
        serve(connection, setup, folder)


if __name__ == "__main__":
    main()
