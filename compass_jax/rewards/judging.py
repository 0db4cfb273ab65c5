"""The judge of a run's samples: each is compared with its anchor in both orders, by threads that
wait for the answers while the rollout goes on.

    Better 1    Tie 0.5    Worse 0        both orders agree; else Tie        [ours, of +1, 0 and -1]

A question whose verdict is known is not asked again: not in a run, and not after a kill, since
verdicts are appended to a file as they come. Where one of the two is missing the sample has no
reward, and is counted under the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.records import Prompt, Score
from compass_jax.rewards.asking import Asker, Messages
from compass_jax.rewards.endpoint import LATE, NONSENSE, REFUSED, UNREACHABLE, Reply
from compass_jax.rewards.faults import NEVER, VerifierError
from compass_jax.tasks.rows import decode_row
from compass_jax.untrusted import UntrustedError, parse_json, read_lines
from compass_jax.verifiers.judge import BETTER, TIE, WORSE, both_orders, messages, verdict

logger = logging.getLogger(__name__)

REWARDS = {BETTER: 1.0, TIE: 0.5, WORSE: 0.0}
UNPARSABLE = "unparsable"
# why a sample has no verdict, and the outcome of its score
FAILURES = {
    UNPARSABLE: "unjudged",
    LATE: "timeout",
    UNREACHABLE: "error",
    NONSENSE: "error",
    REFUSED: "error",
}
# failures after which a judge that has given no verdict at all does not work
BROKEN = (LATE, UNREACHABLE, NONSENSE, REFUSED)
KEY_BYTES = 16


NO_ANCHOR = "the row has no column {!r} to compare with (rewards.judge.anchor_field)"


class Ruling(NamedTuple):
    """A verdict in one order, or why there is none."""

    verdict: int | None
    failure: str = ""
    detail: str = ""


class Verdicts:
    """The verdicts that are known, by what was asked. With the folder of a run they outlive the
    process: each process appends to a file of its own, and reads all of them when it starts.
    """

    def __init__(self, folder: str | os.PathLike | None = None, process: int = 0):
        self._path = None if folder is None else Path(folder) / f"verdicts{process or ''}.jsonl"
        self._file = -1
        self._known: dict[bytes, int] = {}
        self._lock = threading.Lock()
        for path in sorted(Path(folder).glob("verdicts*.jsonl")) if folder is not None else ():
            for where, line in read_lines(path):
                try:
                    row = parse_json(line, where)
                    self._known[bytes.fromhex(row["asked"])] = {1: 1, 0: 0, -1: -1}[row["verdict"]]
                except (UntrustedError, LookupError, TypeError, ValueError):
                    continue  # a line that a kill cut short

    def get(self, asked: bytes) -> int | None:
        """The verdict on a question, None where it is not known."""
        return self._known.get(asked)

    def put(self, asked: bytes, found: int) -> None:
        """Keeps a verdict."""
        with self._lock:
            self._known[asked] = found
            if self._path is None:
                return
            start = ""
            if self._file < 0:
                self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
                size = os.fstat(self._file).st_size
                start = "\n" if size and os.pread(self._file, 1, size - 1) != b"\n" else ""
            row = json.dumps({"asked": asked.hex(), "verdict": found})
            os.write(self._file, f"{start}{row}\n".encode())

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1


class Judge:
    """Asks a judge about samples. Use `close()` at the end.

    Args:
        anchor_field: the column of a row with the answer to compare with.
        asker: brings questions to the judge.
        verdicts: those that are known already; None: none.
    """

    def __init__(self, anchor_field: str, asker: Asker, verdicts: Verdicts | None = None):
        self.asker = asker
        self._anchor_field = anchor_field
        self._verdicts = verdicts or Verdicts()
        self._begin = ThreadPoolExecutor(1, "judged-texts")
        self._under_way: dict[bytes, Future[Ruling]] = {}
        self._lock = threading.Lock()
        # None: look again at what is held back
        self._results: queue.SimpleQueue[tuple[Hashable, Score | BaseException] | None] = (
            queue.SimpleQueue()
        )
        self._told: set[str] = set()
        self._answered = False  # the judge has given a verdict to this process
        self._failed = 0  # samples that failed before that
        self._held: list[tuple[Hashable, Score]] = []  # of them, those not yet collected
        self.outstanding = 0

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response; returns at once. A function is called for the text in a thread."""
        self.outstanding += 1
        self._begin.submit(self._started, key, prompt, response)

    def collect(self, wait_s: float | None) -> list[tuple[Any, Score]]:
        """What has been judged since the last call, after waiting up to `wait_s` for the first
        (None: without limit; 0: not at all).

        Raises VerifierError where NEVER samples have failed and none was judged: they are not
        collected then, so that a run that goes on later asks about them again. Raises what a text's
        function raised.
        """
        found: list[tuple[Any, Score]] = []
        if wait_s != 0 and self.outstanding:
            self._begin.submit(lambda: None).result()  # after all that was submitted
            self.asker.run()
        while self.outstanding:
            self._release_held()
            try:
                wait = wait_s != 0 and not found
                result = self._results.get(wait, wait_s if wait else None)
            except queue.Empty:
                break
            if result is None:
                continue
            key, score = result
            self.outstanding -= 1
            if isinstance(score, BaseException):
                raise score
            found.append((key, score))
        return found

    def _release_held(self) -> None:
        """Lets held samples be collected where all others have been."""
        with self._lock:
            if self._held and len(self._held) == self.outstanding:
                self._put_held()

    def _put_held(self) -> None:
        for result in self._held:
            self._results.put(result)
        self._held = []

    def close(self) -> None:
        """Ends what is under way; what was not collected is dropped."""
        self.asker.close()
        self._begin.shutdown(wait=True, cancel_futures=True)
        self._verdicts.close()

    # The rest runs in threads.

    def _started(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        try:
            text, anchor = compared(prompt, response, self._anchor_field)
            if anchor is None:
                missing = Ruling(None, REFUSED, NO_ANCHOR.format(self._anchor_field))
                return self._finish(key, (missing, missing))
            asked = messages(prompt.question, text, anchor)
            swapped = messages(prompt.question, anchor, text)
            both = [self._once(asked), self._once(swapped)]
        except BaseException as error:  # whatever it is: a panic of the tokenizer is no Exception
            self._results.put((key, error))
            return None
        left = [2]

        def done(_: Future[Ruling]) -> None:
            with self._lock:
                left[0] -= 1
                last = not left[0]
            if not last:
                return
            try:
                first, second = (one.result() for one in both)
                self._finish(key, (first, second))
            except BaseException as error:  # whoever waits must hear of it
                self._results.put((key, error))

        for one in both:
            one.add_done_callback(done)
        return None

    def _once(self, asked: Messages) -> Future[Ruling]:
        """The ruling on a question, which is asked unless it is known or being asked."""
        text = self.asker.name + json.dumps(list(asked))
        name = hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()
        with self._lock:
            known = self._verdicts.get(name)
            if known is not None:
                ready: Future[Ruling] = Future()
                ready.set_result(Ruling(known))
                return ready
            if name in self._under_way:
                return self._under_way[name]
            ruled = self._under_way[name] = Future[Ruling]()
        reply = self.asker.submit(asked)
        reply.add_done_callback(lambda found: self._rule(name, found, ruled))
        return ruled

    def _rule(self, name: bytes, replied: Future[Reply], ruled: Future[Ruling]) -> None:
        """What a reply means, for who waits; an error of who asked is theirs too."""
        try:
            reply = replied.result()
            found = None if reply.failure else verdict(reply.text)
            end = f"it ended: {reply.text[-200:].strip()!r}"
            ruling = Ruling(found, reply.failure or UNPARSABLE, reply.detail or end)
            if found is not None:
                self._verdicts.put(name, found)
                self._answered = True
                ruling = Ruling(found)
        except BaseException as error:
            ruled.set_exception(error)
            return
        finally:
            with self._lock:
                del self._under_way[name]
        ruled.set_result(ruling)

    def _finish(self, key: Hashable, both: tuple[Ruling, Ruling]) -> None:
        """Hands a sample's score over. A failure is held back while the judge has given no verdict:
        NEVER of them end the run.
        """
        score = score_of(*both)
        failed = next((one for one in both if one.failure), None)
        with self._lock:
            if self._answered:
                self._put_held()
            broken = failed is not None and failed.failure in BROKEN and not self._answered
            self._failed += broken
            lost = broken and self._failed >= NEVER
            new = failed is not None and failed.failure not in self._told
            if failed is not None:
                self._told.add(failed.failure)
            if broken and not lost:
                self._held.append((key, score))
        if failed is not None and new:
            logger.warning(
                "the judge gave no verdict (%s: %s); such samples are left out, and counted in"
                " reward/judge_%s/mean",
                failed.failure,
                failed.detail,
                failed.failure,
            )
        if failed is not None and lost:
            self._results.put((key, VerifierError(_never_judged(failed))))
        else:
            self._results.put(None if broken else (key, score))


def _never_judged(failed: Ruling) -> str:
    told = f"rewards.judge: {NEVER} samples failed and none was judged"
    told += f"; the last one was {failed.failure}: {failed.detail}. "
    if failed.failure == REFUSED:
        return told + "Mend the judge or the rows"
    return told + "Start the judge, or mend its endpoint; the same command goes on then"


def compared(
    prompt: Prompt, response: str | Callable[[], str], anchor_field: str
) -> tuple[str, str | None]:
    """(answer, anchor) that a judge compares, the anchor None where the row has none. What was
    thought is no part of the answer.
    """
    text = response if isinstance(response, str) else response()
    anchor = decode_row(prompt.row).get(anchor_field)
    if anchor is not None and not isinstance(anchor, str):
        anchor = json.dumps(anchor, ensure_ascii=False)
    return text.rpartition("</think>")[2], anchor


def score_of(first: Ruling, swapped: Ruling) -> Score:
    """The score of a sample out of the rulings in both orders.

    Components: 1 or 0 for each of FAILURES by "judge_<name>", so that their means are shares of the
    judged samples; of a sample with a verdict also whether it is a tie, and whether the orders
    disagreed.
    """
    failed = next((one for one in (first, swapped) if one.failure), None)
    counts = {
        f"judge_{name}": float(failed is not None and failed.failure == name) for name in FAILURES
    }
    if failed is not None:
        return Score(0.0, False, FAILURES[failed.failure], failed.detail, counts)
    found = both_orders(first.verdict, swapped.verdict)
    assert found is not None and first.verdict is not None and swapped.verdict is not None
    disagreed = first.verdict != -swapped.verdict
    counts |= {"judge_tie": float(found == TIE), "judge_disagreed": float(disagreed)}
    return Score(REWARDS[found], True, components=counts)
