"""The generative judge. Each sample is compared with its anchor in both orders; threads wait for
the answers during the rollout.

    Better 1    Tie 0.5    Worse 0        both orders agree; else Tie        [ours, of +1, 0 and -1]

An empty answer is Worse than an anchor with text, and the judge is not asked: RL finds judges that
call it a Tie.

Verdicts are appended to a file when they arrive, so a run never asks a question twice, even after
it was killed. A sample that lacks one of the two verdicts has no reward and is counted by reason.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.base.chat.base import AUTO, any_format
from compass_jax.base.records import Prompt, Score
from compass_jax.base.untrusted import UntrustedError, parse_json, read_lines
from compass_jax.config.chat import find_format
from compass_jax.rewards.faults import NEVER, VerifierError
from compass_jax.rewards.judges.endpoint import (
    LATE,
    NONSENSE,
    REFUSED,
    UNREACHABLE,
    Asker,
    Messages,
    Reply,
)
from compass_jax.rewards.tasks.rows import decode_row
from compass_jax.rewards.verifiers.judge import BETTER, TIE, WORSE, both_orders, messages, verdict

logger = logging.getLogger(__name__)

UNPARSABLE = "unparsable"
# reason of a missing verdict -> outcome of the score
FAILURES = {
    **{UNPARSABLE: "unjudged", LATE: "timeout"},
    **dict.fromkeys((UNREACHABLE, NONSENSE, REFUSED), "error"),
}
# failures that mean that a judge without any verdict does not work
BROKEN = (LATE, UNREACHABLE, NONSENSE, REFUSED)
KEY_BYTES = 16
NO_ANCHOR = "the row has no column {!r} to compare with (rewards.judge.anchor_field)"


class Ruling(NamedTuple):
    """A verdict in one order, or the reason why it is missing."""

    verdict: int | None
    failure: str = ""
    detail: str = ""
    entropy_nats: float | None = None  # of an own engine's verdict


class Verdicts:
    """A cache of verdicts by question. With a run's folder it persists: new ones are appended to
    the file verdicts<suffix>.jsonl (suffix None: to none), and all files are read at the start.
    """

    def __init__(self, folder: str | os.PathLike | None = None, suffix: str | None = ""):
        self._path = None
        if folder is not None and suffix is not None:
            self._path = Path(folder) / f"verdicts{suffix}.jsonl"
        self._known: dict[bytes, Ruling] = {}
        self._lock = threading.Lock()
        for path in sorted(Path(folder).glob("verdicts*.jsonl")) if folder is not None else ():
            for where, line in read_lines(path):
                # the last line may be truncated
                with contextlib.suppress(UntrustedError, LookupError, TypeError, ValueError):
                    row = parse_json(line, where)
                    value, entropy = {1: 1, 0: 0, -1: -1}[row["verdict"]], row.get("entropy_nats")
                    entropy = None if entropy is None else float(entropy)
                    ruling = Ruling(value, entropy_nats=entropy)
                    self._known[bytes.fromhex(row["asked"])] = ruling

    @property
    def digest(self) -> str:
        """A hash of the questions that have a verdict."""
        questions = b"".join(sorted(self._known))
        return hashlib.blake2b(questions, digest_size=KEY_BYTES).hexdigest()

    def get(self, question: bytes) -> Ruling | None:
        """Returns the ruling on a question, or None if it is unknown."""
        return self._known.get(question)

    def put(self, question: bytes, ruling: Ruling) -> None:
        """Stores a ruling that has a verdict."""
        row: JsonObject = {"asked": question.hex(), "verdict": ruling.verdict}
        if ruling.entropy_nats is not None:
            row["entropy_nats"] = ruling.entropy_nats
        line = json.dumps(row).encode() + b"\n"
        with self._lock:
            self._known[question] = ruling
            if self._path is None:
                return
            with open(self._path, "ab+") as file:
                if size := file.seek(0, os.SEEK_END):
                    file.seek(size - 1)
                    # A kill may have cut off the last line; the new one must not continue it.
                    line = line if file.read() == b"\n" else b"\n" + line
                file.write(line)


class Judge:
    """A generative judge of samples, which are compared with the row's column `anchor_field`. Call
    `close()` at the end.
    """

    def __init__(
        self,
        anchor_field: str,
        asker: Asker,
        verdicts: Verdicts | None = None,
        chat_format: str = AUTO,
    ):
        self.asker = asker
        self._anchor_field = anchor_field
        self._chat_format = chat_format
        self._verdicts = verdicts or Verdicts()
        self._texts = ThreadPoolExecutor(1, "judged-texts")
        # uncollected sample -> its rulings in both orders, once they are requested
        self._asked: dict[Hashable, Future[list[Future[Ruling]]]] = {}
        self._under_way: dict[bytes, Future[Ruling]] = {}
        self._lock = threading.Lock()
        self._logged: set[str] = set()
        self._answered = False  # whether the judge has given this process a verdict
        self._failed: set[Hashable] = set()  # samples that failed before the first verdict
        self._failures = 0

    @property
    def outstanding(self) -> int:
        """Number of samples submitted and not yet collected."""
        return len(self._asked)

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response and returns at once. A thread calls a `response` function."""
        self._asked[key] = self._texts.submit(self._ask, prompt, response)

    def collect(self, wait_s: float | None) -> list[tuple[Any, Score]]:
        """Returns the samples judged since the last call, after waiting up to `wait_s` seconds for
        the first (None: without limit; 0: not at all).

        Raises VerifierError if NEVER samples failed and none was judged. These samples are then not
        collected, so that a resumed run asks about them again. Also raises the error of a
        `response` function.
        """
        if wait_s != 0 and self._asked:
            # All questions must be submitted before an engine answers them in one batch.
            wait(self._asked.values())
            self.asker.run()
        end = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            collected = self._take_judged()
            left = end - time.monotonic()
            if collected or not self._asked or left <= 0:
                return collected
            unfinished = [x for rulings in self._asked.values() for x in _pending_futures(rulings)]
            wait(unfinished, None if left == math.inf else left, FIRST_COMPLETED)

    def _take_judged(self) -> list[tuple[Any, Score]]:
        """Returns the samples that have both rulings. Until the judge's first verdict, failed
        samples are held back while others are pending, and NEVER failed samples end the run.
        """
        judged, failed = list[tuple[Any, Score]](), list[tuple[Any, Score]]()
        for key in [key for key, rulings in self._asked.items() if not _pending_futures(rulings)]:
            try:
                rulings = [ruling.result() for ruling in self._asked[key].result()]
            except BaseException:
                del self._asked[key]
                raise
            failure = next((one for one in rulings if one.failure), None)
            if failure is not None and failure.failure not in self._logged:
                self._logged.add(failure.failure)
                logger.warning(
                    f"the judge gave no verdict ({failure.failure}: {failure.detail}); such samples"
                    f" are left out, and counted in reward/judge_{failure.failure}/mean"
                )
            broken = failure is not None and failure.failure in BROKEN and not self._answered
            if failure is not None and broken and key not in self._failed:
                self._failed.add(key)
                self._failures += 1
                if self._failures >= NEVER:
                    raise VerifierError(_never_judged(failure))
            (failed if broken else judged).append((key, score_of(*rulings)))
        if len(failed) == len(self._asked):
            judged += failed
        for key, _ in judged:
            del self._asked[key]
            self._failed.discard(key)
        return judged

    def close(self) -> None:
        """Cancels the requests in flight and drops uncollected samples."""
        self.asker.close()
        self._texts.shutdown(wait=True, cancel_futures=True)

    # The methods below run in threads.

    def _ask(self, prompt: Prompt, response: str | Callable[[], str]) -> list[Future[Ruling]]:
        text, anchor = compared(prompt, response, self._anchor_field, self._chat_format)
        if anchor is None:
            why = NO_ANCHOR.format(self._anchor_field)
            return [_completed_future(Ruling(None, REFUSED, why))] * 2
        if is_blank(text, anchor):
            return [_completed_future(Ruling(one)) for one in (WORSE, BETTER)]
        orders = (text, anchor), (anchor, text)
        return [self._ruling(messages(prompt.question, *order)) for order in orders]

    def _ruling(self, question: Messages) -> Future[Ruling]:
        """Returns the future ruling on a question, asked unless it is known or pending."""
        text = self.asker.name + json.dumps(list(question))
        name = hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()
        with self._lock:
            known = self._verdicts.get(name)
            if known is not None:
                return _completed_future(known)
            # Equal answers of a group make the same question, which the judge gets once.
            if name in self._under_way:
                return self._under_way[name]
            ruling = self._under_way[name] = Future[Ruling]()
        reply = self.asker.submit(question)
        reply.add_done_callback(lambda done: self._rule(name, done, ruling))
        return ruling

    def _rule(self, name: bytes, reply: Future[Reply], ruling: Future[Ruling]) -> None:
        """Resolves a ruling from the judge's reply, or with the error of the asker."""
        try:
            answer = reply.result()
            visible_text = any_format().read(answer.text).text  # a verdict in a thought is none
            value = None if answer.failure else verdict(visible_text)
            end = f"it ended: {answer.text[-200:].strip()!r}"
            result = Ruling(value, answer.failure or UNPARSABLE, answer.detail or end)
            if value is not None:
                entropy = answer.entropy_nats
                if entropy is not None and 0 < self.asker.unsure_nats <= entropy:
                    value = TIE
                result = Ruling(value, entropy_nats=entropy)
                self._verdicts.put(name, result)
                self._answered = True
        except BaseException as error:
            ruling.set_exception(error)
        else:
            ruling.set_result(result)
        finally:
            with self._lock:
                del self._under_way[name]


def _completed_future(result: Ruling) -> Future[Ruling]:
    future: Future[Ruling] = Future()
    future.set_result(result)
    return future


def _pending_futures(rulings: Future[list[Future[Ruling]]]) -> list[Future]:
    """Returns the unfinished futures of a sample."""
    if not rulings.done():
        return [rulings]
    return [] if rulings.exception() else [one for one in rulings.result() if not one.done()]


def _never_judged(failed: Ruling) -> str:
    remedy = "Start the judge, or mend its endpoint; the same command goes on then"
    remedy = "Mend the judge or the rows" if failed.failure == REFUSED else remedy
    return (
        f"rewards.judge: {NEVER} samples failed and none was judged; the last one was"
        f" {failed.failure}: {failed.detail}. {remedy}"
    )


def compared(
    prompt: Prompt, response: str | Callable[[], str], anchor_field: str, chat_format: str = AUTO
) -> tuple[str, str | None]:
    """Returns (answer without thoughts, anchor); the anchor is None without such a column."""
    text = response if isinstance(response, str) else response()
    anchor = decode_row(prompt.row).get(anchor_field)
    if anchor is not None and not isinstance(anchor, str):
        anchor = json.dumps(anchor, ensure_ascii=False)
    return find_format(chat_format).read(text).text, anchor


def is_blank(text: str, anchor: str | None) -> bool:
    """Returns whether an answer is empty and its anchor is not."""
    return bool(anchor and anchor.strip()) and not text.strip()


def score_of(first: Ruling, swapped: Ruling) -> Score:
    """Returns the score of a sample from its rulings in both orders.

    Components: for each of FAILURES a "judge_<name>" of 0 or 1, whose mean is the share of judged
    samples. A sample with a verdict also has "judge_tie" and "judge_disagreed" (the orders
    disagree), and of an own engine "judge_entropy_nats", the mean over the orders.
    """
    _, failure, detail, _ = first if first.failure else swapped
    counts = {f"judge_{name}": float(failure == name) for name in FAILURES}
    joint = both_orders(first.verdict, swapped.verdict)
    if joint is None:
        return Score(0.0, False, FAILURES[failure], detail, counts)
    disagreed = (first.verdict or 0) != -(swapped.verdict or 0)
    counts |= {"judge_tie": float(joint == TIE), "judge_disagreed": float(disagreed)}
    if first.entropy_nats is not None and swapped.entropy_nats is not None:
        counts["judge_entropy_nats"] = (first.entropy_nats + swapped.entropy_nats) / 2
    return Score((joint + 1) / 2, True, components=counts)  # Better, Tie and Worse are 1, 0 and -1
