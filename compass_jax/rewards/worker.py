"""The worker process that runs verifiers. `rewards/score.py` starts it behind a guardian.

scorer -> {"checks": ..., "tag": ..., "chat_format": ..., "timeout_s": ..., ...}     once
worker -> ["ready", ""]  or  ["failed", traceback]  or  ["refused", message to the user]
scorer -> [[source, response, row, prompt, rows], ...]    after all earlier answers
worker -> ["begun", ""]                             received; repeated as a heartbeat
worker -> [reward or null, outcome, detail, components, extracted, says]      for each, in order

Verifiers that only compare run in this process. Verifiers that evaluate text, and user functions,
run in the sandbox, in one child process per answer or per batch.

This module must not import jax, because workers are restarted after a crash.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.errors import UserError
from compass_jax.config import ConfigError
from compass_jax.devices.processes import guards, sandbox, start
from compass_jax.devices.processes.channel import Channel
from compass_jax.rewards.called import Case
from compass_jax.rewards.checks import UNDECIDED, Check, Response, Verifier, build
from compass_jax.rewards.tasks.rows import decode_row
from compass_jax.rewards.verifiers import program, program_files

DETAIL_CHARS = 2000
FAULT_CHARS = 1000
PROBE_S = 30.0


@dataclass
class Judge:
    """Runs the verifiers of each source on batches of responses."""

    verifiers: Sequence[Verifier]
    zone: sandbox.Sandbox
    seconds: float  # time limit of each check
    alive: Callable[[], None]  # a heartbeat

    def answers(self, batch: Sequence[Response]) -> Iterator[list]:
        """Yields the answer to each response of a batch, in order.

        If a verifier takes a batch and fails, its responses are checked one by one, so that a
        response that hangs does not affect the others.
        """
        ready: dict[int, list] = {}
        tried: set[int] = set()
        for index, response in enumerate(batch):
            source, verifier = response.source, self.verifiers[response.source]
            if response.rows:
                faults = self._row_faults(verifier, response.rows)
                yield [None, "unjudged", json.dumps(faults), {}, False, ""]
                continue
            if verifier.batch and source not in tried:
                tried.add(source)
                indices = [i for i, one in enumerate(batch) if one.source == source]
                answers = self._judge(verifier, [batch[i] for i in indices])
                if len(indices) == 1 or all(one[1] in ("ok", "unjudged") for one in answers):
                    ready |= dict(zip(indices, answers, strict=True))
                self.alive()
            yield ready.get(index) or self._judge(verifier, [response])[0]

    def _judge(self, verifier: Verifier, responses: Sequence[Response]) -> list[list]:
        """Returns the answer to each response. Results that cannot be decided in this process are
        computed in one child.
        """
        values: list[list] = []
        try:
            cases = [Case(decode_row(one.row), one.text, one.prompt) for one in responses]
            values = [verifier.decided(case) for case in cases]
        except BaseException:
            if len(responses) == 1:
                return [_unknown_answer("error", traceback.format_exc())]
            return [self._judge(verifier, [one])[0] for one in responses]
        left = [i for i, x in enumerate(values) if any(y is UNDECIDED for y in x)]
        outcome = detail = ""
        if left:
            judged = partial(verifier.judged, [cases[i] for i in left])
            judgements, outcome, detail = self.zone.run(judged, self.seconds)
            fits = isinstance(judgements, list) and len(judgements) == len(left)
            if outcome == "ok" and not fits:
                outcome, detail = "crash", "the check ended without an answer"
            for n, i in enumerate(left):
                values[i] = judgements[n] if outcome == "ok" else []
        failed = _unknown_answer(outcome, detail)
        return [_graded_answer(verifier, parts) if parts else failed for parts in values]

    def _row_faults(self, verifier: Verifier, rows: Sequence[str]) -> list[str]:
        """Returns the fault of each row. If some row ends the process, each is tried alone."""
        self.alive()
        result = self.zone.run(
            lambda: verifier.row_faults([decode_row(row) for row in rows]), self.seconds
        )
        faults = result.value
        if isinstance(faults, list) and len(faults) == len(rows):
            return [str(fault)[:FAULT_CHARS] for fault in faults]
        if len(rows) > 1:
            return [self._row_faults(verifier, [row])[0] for row in rows]
        last = (result.detail.strip().splitlines() or [""])[-1]
        return [f"its setup and tests cannot be tried ({result.outcome}: {last:.200})"]


def _graded_answer(verifier: Verifier, values: list) -> list:
    try:
        graded = verifier.graded(values)
    except BaseException:
        return _unknown_answer("error", traceback.format_exc())
    outcome = "unjudged" if graded.reward is None else "ok"
    return [graded.reward, outcome, "", graded.components, graded.extracted, graded.says]


def _unknown_answer(outcome: str, detail: str) -> list:
    return [None, outcome, detail[-DETAIL_CHARS:], {}, False, ""]


def serve(channel: Channel, setup: JsonObject, folder: str) -> None:
    """Answers requests until the scorer closes the channel, which raises."""
    reading = setup["tag"], setup["chat_format"]
    try:
        verifiers = [
            build([Check(*map(_tuples, check)) for check in checks], *reading)
            for checks in setup["checks"]
        ]
        zone = _sandbox(setup, folder, verifiers)
    except UserError as error:
        channel.send(["refused", str(error)[-2 * DETAIL_CHARS :]])
        return
    except BaseException:
        channel.send(["failed", traceback.format_exc()[-2 * DETAIL_CHARS :]])
        return
    alive = partial(channel.send, ["begun", ""])
    judge = Judge(verifiers, zone, setup["timeout_s"], alive)
    channel.send(["ready", ""])
    while True:
        batch = [Response(*one) for one in channel.receive()]
        alive()
        for answer in judge.answers(batch):
            channel.send(answer)


def _sandbox(setup: JsonObject, folder: str, verifiers: Sequence[Verifier]) -> sandbox.Sandbox:
    """Confines this process and returns its sandbox. Raises ConfigError if a verifier's programs
    could not run in it.
    """
    programs = [part.name for one in verifiers for part in one.parts if part.runs_programs]
    if programs and not setup["programs"]:
        missing = ", ".join(guard for guard in guards.GUARDS if guard not in setup["guards"])
        raise ConfigError(
            f"the verifier {programs[0]!r} runs programs that the model wrote, and this machine has"
            f" no {missing}: allow it, or run them with this user's files and network by"
            " rewards.sandbox = 'off'"
        )
    readable = guards.NO_PROGRAM
    if programs:
        modules, files = program_files.package_files(setup["packages"])
        program_files.allow(modules)
        python = program_files.python_files()
        readable = python._replace(readable=python.readable | files)
    # folders of imported modules stay readable, for later imports
    paths = [getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if "." not in n]
    imports = {*filter(os.path.isdir, sys.path), *(os.path.dirname(f) for f in paths if f)}
    zone = sandbox.Sandbox(setup["guards"], folder, imports, readable)
    guards.set_limits({resource.RLIMIT_AS: guards.MEMORY_BYTES})
    guards.die_with_parent()  # again, because the kernel resets it when the user changes
    if programs and not zone.run(program.can_run, PROBE_S).value:
        raise ConfigError(
            f"the verifier {programs[0]!r} runs programs that the model wrote, and in the sandbox"
            f" {sys.executable} does not run even an empty one: this Python ({sys.base_prefix})"
            f" must start with the limits of a program, and within {PROBE_S:.0f} s"
        )
    return zone


def _tuples(value: Json) -> Json:
    """Converts lists to tuples, recursively, since JSON has lists where settings have tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


if __name__ == "__main__":
    start.run(serve)
