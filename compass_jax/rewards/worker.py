"""The worker process that runs verifiers. `rewards/score.py` starts it behind a guardian.

scorer -> {"checks": ..., "tag": ..., "timeout_s": ..., "guards": ...}     once
worker -> ["ready", ""]  or  ["failed", traceback]  or  ["refused", message to the user]
scorer -> [[source, response, row, prompt, rows], ...]    after all earlier answers
worker -> ["begun", ""]                             received; repeated as a heartbeat
worker -> [index, reward or null, outcome, detail, components, extracted, says]   each, in order

Verifiers that only compare run in this process. Verifiers that evaluate text, and user functions,
run in the sandbox, in one child process per answer or per batch.

This module must not import jax, because workers are restarted after a crash.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from compass_jax.config import ConfigError
from compass_jax.errors import UserError
from compass_jax.processes import guardian, guards, sandbox
from compass_jax.processes.channel import Channel
from compass_jax.rewards.called import Case
from compass_jax.rewards.checks import UNDECIDED, Check, Response, Verifier, build
from compass_jax.tasks.rows import decode_row
from compass_jax.verifiers import program, program_files

DETAIL_CHARS = 2000
PROBE_S = 30.0


class Judge:
    """Runs the verifiers on batches of responses.

    Args:
        verifiers: one for each source.
        zone: the sandbox.
        seconds: time limit of each check.
        alive: called as a heartbeat after a batch verifier.
    """

    def __init__(
        self,
        verifiers: Sequence[Verifier],
        zone: sandbox.Sandbox,
        seconds: float,
        alive: Callable[[], None],
    ):
        self._verifiers, self._zone, self._seconds = verifiers, zone, seconds
        self._alive = alive

    def answers(self, batch: Sequence[Response]) -> Iterator[list]:
        """Yields the answer to each response of a batch, in order.

        If a verifier takes a batch and fails, its responses are checked one by one, so that a
        response that hangs does not affect the others.
        """
        ready: dict[int, list] = {}
        tried: set[int] = set()
        for index, response in enumerate(batch):
            source, verifier = response.source, self._verifiers[response.source]
            if response.rows:
                yield self._row_faults(verifier, response.rows)
                continue
            if verifier.batch and source not in tried:
                tried.add(source)
                indices = [i for i, one in enumerate(batch) if one.source == source]
                answers = self._judge(verifier, [batch[i] for i in indices])
                if len(indices) == 1 or all(one[1] in ("ok", "unjudged") for one in answers):
                    ready |= dict(zip(indices, answers, strict=True))
                self._alive()
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
        places = [(i, n) for i, x in enumerate(values) for n, y in enumerate(x) if y is UNDECIDED]
        left, which = sorted({i for i, _ in places}), sorted({n for _, n in places})
        if left:
            judged = partial(verifier.judged, [cases[i] for i in left], which)
            result = _validate_result(self._zone.run(judged, self._seconds), len(left), len(which))
            if result.outcome != "ok":
                failed = _unknown_answer(result.outcome, result.detail)
                return [
                    failed if i in left else _graded_answer(verifier, x)
                    for i, x in enumerate(values)
                ]
            for i, parts in zip(left, result.value, strict=True):
                for n, part in zip(which, parts, strict=True):
                    values[i][n] = part
        return [_graded_answer(verifier, parts) for parts in values]

    def _row_faults(self, verifier: Verifier, rows: Sequence[str]) -> list:
        """Returns an answer whose detail is a JSON list of [index of the row, its fault]."""
        result = self._zone.run(
            lambda: verifier.row_faults([decode_row(row) for row in rows]), self._seconds
        )
        if result.outcome != "ok" or not isinstance(result.value, list):
            return _unknown_answer(
                result.outcome if result.outcome != "ok" else "crash", result.detail
            )
        faults = [(n, str(fault)) for n, fault in enumerate(result.value) if fault]
        while len(json.dumps(faults)) > DETAIL_CHARS:
            faults = [(n, text[: len(text) // 2]) for n, text in faults]
        return _unknown_answer("unjudged", json.dumps(faults))


def _validate_result(result: sandbox.Result, cases: int, parts: int) -> sandbox.Result:
    """Returns `result` if its value lists `parts` values for each case, or if it has no value; else
    a crash.
    """
    value = result.value
    fits = isinstance(value, list) and len(value) == cases
    if result.outcome != "ok" or (
        fits and all(isinstance(x, list) and len(x) == parts for x in value)
    ):
        return result
    return sandbox.Result(None, "crash", "the check ended without an answer")


def _graded_answer(verifier: Verifier, values: list) -> list:
    try:
        graded = verifier.graded(values)
    except BaseException:
        return _unknown_answer("error", traceback.format_exc())
    outcome = "unjudged" if graded.reward is None else "ok"
    return [graded.reward, outcome, "", graded.components, graded.extracted, graded.says]


def _unknown_answer(outcome: str, detail: str) -> list:
    return [None, outcome, detail[-DETAIL_CHARS:], {}, False, ""]


def serve(channel: Channel, setup: dict[str, Any], folder: str) -> None:
    """Answers requests until the scorer closes the channel."""
    try:
        verifiers = [
            build([Check(*map(_tuples, check)) for check in checks], setup["tag"])
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
    with contextlib.suppress(EOFError):
        while True:
            batch = [Response(*one) for one in channel.receive()]
            alive()
            for index, answer in enumerate(judge.answers(batch)):
                channel.send([index, *answer])


def _sandbox(setup: dict[str, Any], folder: str, verifiers: Sequence[Verifier]) -> sandbox.Sandbox:
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
    zone = sandbox.enter(setup["guards"], folder, _import_folders(), readable)
    guards.limit_memory()
    guards.die_with_parent()  # again, because the kernel resets it when the user changes
    if programs and not zone.run(program.can_run, PROBE_S).value:
        raise ConfigError(
            f"the verifier {programs[0]!r} runs programs that the model wrote, and in the sandbox"
            f" {sys.executable} does not run even an empty one: this Python ({sys.base_prefix})"
            f" must start with the limits of a program, and within {PROBE_S:.0f} s"
        )
    return zone


def _tuples(value: Any) -> Any:
    """Converts lists to tuples, recursively, since JSON has lists where settings have tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _import_folders() -> set[str]:
    """Returns the folders of imported modules, which must stay readable for later imports."""
    files = [getattr(m, "__file__", None) for n, m in list(sys.modules.items()) if "." not in n]
    return {*filter(os.path.isdir, sys.path), *(os.path.dirname(f) for f in files if f)}


if __name__ == "__main__":
    guardian.run(serve)
