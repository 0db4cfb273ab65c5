"""`compass distil`: answers of a teacher that a verifier finds right, as conversations for SFT.

    OUT/answers.jsonl   a line for each sampled answer with its verdict, as it comes
    OUT/train.jsonl     the conversations that are kept, in the prompts' order
    OUT/report.json     pass rates, failures and tokens; settings.json: what the answers depend on

The same command goes on after a stop: only samples without a line are drawn. Of our own engine the
draws depend on (seed, prompt, sample, position) alone, so that it ends with the files of a command
that nobody disturbed; an endpoint draws anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compass_jax.config import ConfigError
from compass_jax.config.distil import DistilConfig
from compass_jax.curate.settings import require_same_settings
from compass_jax.data.files import DataError
from compass_jax.data.prompts import fitting, to_prompts
from compass_jax.data.questions import Question, questions
from compass_jax.errors import CompassError
from compass_jax.records import Prompt, SampleKey, Score
from compass_jax.rewards.asking import Pooled
from compass_jax.rewards.checks import judged_sources
from compass_jax.rewards.endpoint import Reply
from compass_jax.rewards.score import Scorer
from compass_jax.runs.rundir import FolderLock, write_atomically
from compass_jax.untrusted import parse_json, read_json, read_lines

ANSWERS, TRAIN, REPORT, SETTINGS = "answers.jsonl", "train.jsonl", "report.json", "settings.json"
# what may be another when a command goes on: answers that are there stay answers
MAY_CHANGE = (
    "samples",
    "keep",
    "choose",
    "requests",
    "timeout_s",
    "workers",
    "endpoint",
    "key_env",
)
HOPELESS = 16  # answers in a row that did not come
TOLD_EVERY = 100  # answers
WAIT_S = 0.05  # for an answer, before verdicts are looked at
Tell = Callable[[str], None]


class TeacherError(CompassError, RuntimeError):
    """The teacher gives no answers; the message says what the endpoint said."""


Key = tuple[int, int]  # Question.id, number of the sample


class Answer(NamedTuple):
    """A line of answers.jsonl."""

    id: int
    sample: int
    text: str
    thought: str
    tokens: int
    whole: bool
    reward: float
    known: bool
    outcome: str

    def right(self, right_at: float) -> bool:
        """Whether it is learnt from: one that was cut has no end to learn."""
        return self.known and self.whole and self.reward >= right_at

    @property
    def content(self) -> str:
        """What is learnt: the chain of thought, where it came apart, and the answer."""
        return f"<think>\n{self.thought}\n</think>\n\n{self.text}" if self.thought else self.text


class Answers:
    """answers.jsonl, and where each answer stands in it. A half last line, which a kill leaves, is
    cut off.
    """

    def __init__(self, path: Path):
        self.path = path
        self.offsets: dict[Key, int] = {}
        self._size = 0
        for where, line in read_lines(path, error=DataError) if path.exists() else ():
            if not line.endswith(b"\n"):
                os.truncate(path, self._size)
                break
            self._note(_read(line, where), len(line))

    def add(self, answers: Sequence[Answer]) -> None:
        """Appends lines."""
        with self.path.open("ab") as file:
            for answer in answers:
                line = json.dumps(answer._asdict(), ensure_ascii=False).encode() + b"\n"
                file.write(line)
                self._note(answer, len(line))

    def of(self, question: int, samples: int) -> list[Answer]:
        """The first `samples` answers to a question, as many as there are."""
        found = []
        with self.path.open("rb") as file:
            for sample in range(samples):
                if (offset := self.offsets.get((question, sample))) is not None:
                    file.seek(offset)
                    found.append(_read(file.readline(), f"{self.path}, byte {offset}"))
        return found

    def _note(self, answer: Answer, size: int) -> None:
        self.offsets.setdefault((answer.id, answer.sample), self._size)
        self._size += size


def _read(line: bytes, where: str) -> Answer:
    value = parse_json(line, where, error=DataError)
    if not isinstance(value, dict) or set(value) != set(Answer._fields):
        raise DataError(
            f"{where}: not a line of compass distil; correct it, or delete the line, and its answer"
            " is drawn again"
        )
    return Answer(**value)


def distil(config: DistilConfig, out: str, tell: Tell) -> dict[str, Any]:
    """Samples, judges and keeps; what report.json holds. `tell` gets a line now and then.

    Raises DataError for prompts that cannot be read, ConfigError for settings that cannot be used
    or are others than those that `out` was begun with, TeacherError where no answer comes.
    """
    config.validate()
    asked = questions(config.prompts, config.seed, tell)
    if any(question.turns for question in asked) or judged_sources(config.prompts):
        raise ConfigError(
            "distil.data names a task of several turns, or one that a judge judges: a task whose"
            " verifier judges one answer is needed"
        )
    with FolderLock(out) as lock:
        known = Answers(lock.path / ANSWERS)
        _check_settings(config, lock.path, begun=bool(known.offsets))
        failures: Counter[str] = Counter()
        left = [
            (question, sample)
            for question in asked
            for sample in range(config.samples)
            if (question.id, sample) not in known.offsets
        ]
        if left:
            tell(f"{len(left):,} of {len(asked) * config.samples:,} answers are to be drawn")
            _sample(config, asked, left, known, failures, lock, tell)
        return _finish(config, asked, known, failures, lock.path)


def _check_settings(config: DistilConfig, out: Path, begun: bool) -> None:
    """Keeps the settings, or raises ConfigError where answers that are there follow from others."""
    now = json.loads(json.dumps(asdict(config)))
    path = out / SETTINGS
    if (out / TRAIN).exists() and not path.exists():
        raise ConfigError(f"{out / TRAIN} is there, and this command did not make it")
    before = read_json(path, error=DataError) if begun and path.exists() else now
    if not isinstance(before, dict):
        raise ConfigError(f"{path} is not of compass distil; give another --out")
    require_same_settings(out, before, now, MAY_CHANGE)
    write_atomically(path, json.dumps(now, indent=2) + "\n")


# ---- sampling and judging ------------------------------------------------------------------------


def _sample(
    config: DistilConfig,
    asked: Sequence[Question],
    left: Sequence[tuple[Question, int]],
    known: Answers,
    failures: Counter[str],
    lock: FolderLock,
    tell: Tell,
) -> None:
    """Draws and judges what is left. An answer that does not come is counted, and has no line."""
    replies: dict[Key, Reply] = {}
    # before the workers start: what is wrong with the teacher is said at once
    draw = _at_endpoint(config, left) if config.endpoint else _by_engine(config, asked, left, tell)
    hopeless = min(HOPELESS, len(left))
    done = told = in_a_row = 0
    with contextlib.closing(draw) as drawn, Scorer(config.rewards, config.prompts) as scorer:
        scorer.wait_ready()
        for (question, sample), reply in drawn:
            if reply is not None and reply.failure:
                failures[reply.failure] += 1
                in_a_row += 1
                if in_a_row >= hopeless:
                    raise TeacherError(
                        f"the teacher gave no answer {in_a_row} times in a row, the last time"
                        f" {reply.failure}: {reply.detail}; the same command goes on when it"
                        " answers"
                    )
            elif reply is not None:
                in_a_row = 0
                replies[question.id, sample] = reply
                scorer.submit((question.id, sample), _prompt(question), reply.text)
            done += _write(scorer.collect(block=False), replies, known, lock)
            if done >= told + TOLD_EVERY:
                told = done
                tell(f"{done:,} of {len(left):,} answers are drawn and judged")
        while verdicts := scorer.collect(block=True):
            _write(verdicts, replies, known, lock)


def _write(
    verdicts: Sequence[tuple[Key, Score]],
    replies: dict[Key, Reply],
    known: Answers,
    lock: FolderLock,
) -> int:
    """Writes judged answers down; how many."""
    lines = []
    for (question, sample), score in verdicts:
        reply = replies.pop((question, sample))
        said = (reply.text, reply.thought, reply.tokens, reply.whole)
        lines.append(Answer(question, sample, *said, score.reward, score.known, score.outcome))
    if lines:
        lock.check()
        known.add(lines)
    return len(lines)


def _prompt(question: Question) -> Prompt:
    """The question as verifiers read it."""
    no_tokens = np.zeros(1, np.int32)
    return Prompt(
        question.id,
        question.source,
        question.label,
        question.text,
        no_tokens,
        question.answer,
        question.row,
    )


Drawn = Generator[tuple[tuple[Question, int], Reply | None], None, None]


def _at_endpoint(config: DistilConfig, left: Sequence[tuple[Question, int]]) -> Drawn:
    """Each sample with the endpoint's reply, as they come; None now and then, while it waits."""
    pool = Pooled(config.teacher, key="distil")

    def drawn() -> Drawn:
        waiting: dict[Future[Reply], tuple[Question, int]] = {}
        coming = iter(left)
        try:
            while True:
                for one in islice(coming, 2 * config.requests - len(waiting)):
                    waiting[pool.submit(list(one[0].messages))] = one
                if not waiting:
                    return
                done, _ = wait(waiting, timeout=WAIT_S, return_when=FIRST_COMPLETED)
                for future in done:
                    yield waiting.pop(future), future.result()
                if not done:
                    yield next(iter(waiting.values())), None
        finally:
            pool.close()

    return drawn()


def _by_engine(
    config: DistilConfig,
    asked: Sequence[Question],
    left: Sequence[tuple[Question, int]],
    tell: Tell,
) -> Drawn:
    """Each sample with what our own engine draws for it. The engine's sizes follow from all that is
    asked, so that they are the same after a stop.
    """
    from compass_jax.experience.evaluate import decoder_of, turns_of
    from compass_jax.from_files import engine_config
    from compass_jax.rollout.collect import Collection
    from compass_jax.rollout.sampling import Purpose, Sampler

    chats = [question.messages for question in asked]
    run = engine_config(config.model, chats, config.max_tokens or None)
    engine, params, tokenizer = decoder_of(run, config.model)
    by_id = {question.id: question for question, _ in left}
    prompts = to_prompts(list(by_id.values()), tokenizer)
    prompts = fitting(prompts, run.rollout.prompt_buckets[-1], "drop", tell)
    wanted = frozenset(SampleKey(question.id, 0, sample) for question, sample in left)
    part = max(1, 8 * run.rollout.slots // config.samples)
    sampler, purpose = Sampler(config.temperature), Purpose.FILTER
    text_of = turns_of(tokenizer, run.rollout).response

    def drawn() -> Drawn:
        for first in range(0, len(prompts), part):
            some = prompts[first : first + part]
            options: dict[str, Any] = {"sampler": sampler, "keep_routes": False, "asked": wanted}
            for rollout in Collection(
                engine, params, some, config.samples, purpose, config.seed, **options
            ):
                text, whole = text_of(rollout), not rollout.truncated
                reply = Reply(text, tokens=rollout.response_length, whole=whole)
                yield (by_id[rollout.prompt.id], rollout.sample), reply

    return drawn()


# ---- what is kept --------------------------------------------------------------------------------


def _finish(
    config: DistilConfig,
    asked: Sequence[Question],
    known: Answers,
    failures: Counter[str],
    out: Path,
) -> dict[str, Any]:
    total: Counter[str] = Counter()
    labels: dict[str, Counter[str]] = {}
    temporary = out / f"{TRAIN}.part"
    with temporary.open("wb") as file:
        for question in asked:
            answers = known.of(question.id, config.samples) if known.offsets else []
            kept = chosen(answers, config)
            counts = _counted(answers, kept, config.rewards.right_at)
            total.update(counts)
            labels.setdefault(question.label, Counter()).update(counts)
            for answer in kept:
                row = _row(question, answer)
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    report = {
        "settings": asdict(config),
        **_rates(total),
        "failures": dict(failures),
        "labels": {label: _rates(counts) for label, counts in labels.items()},
    }
    write_atomically(out / REPORT, json.dumps(report, indent=2) + "\n")
    if not total["kept"]:
        temporary.unlink()
        raise DataError(
            f"none of {total['answers']} answers is right: {out / ANSWERS} has them; try one with"
            " compass try, which says why"
        )
    os.replace(temporary, out / TRAIN)
    return report


def chosen(answers: Sequence[Answer], config: DistilConfig) -> list[Answer]:
    """The right answers to one question that are kept, at most `config.keep` and no text twice."""
    right_at = config.rewards.right_at
    right = {a.content: a for a in reversed(answers) if a.right(right_at)}
    distinct = sorted(right.values(), key=lambda a: a.sample)
    if config.choose == "random":
        number = distinct[0].id if distinct else 0
        drawn = random.Random(f"{config.seed}:{number}")
        return drawn.sample(distinct, min(config.keep, len(distinct)))
    return sorted(distinct, key=lambda a: (a.tokens, len(a.content), a.sample))[: config.keep]


def _counted(answers: Sequence[Answer], kept: Sequence[Answer], at: float) -> dict[str, int]:
    right = sum(answer.right(at) for answer in answers)
    return {
        "prompts": 1,
        "solved": int(right > 0),
        "answers": len(answers),
        "right": right,
        "unknown": sum(not answer.known for answer in answers),
        "cut": sum(not answer.whole for answer in answers),
        "kept": len(kept),
        "tokens": sum(answer.tokens for answer in answers),
        "kept_tokens": sum(answer.tokens for answer in kept),
    }


def _rates(counts: Counter[str]) -> dict[str, Any]:
    """The counts, the share of right answers, and the tokens that a kept one costs."""
    return {
        **counts,
        "pass_rate": counts["right"] / counts["answers"] if counts["answers"] else None,
        "tokens_a_kept_answer": counts["tokens"] / counts["kept"] if counts["kept"] else None,
    }


def _row(question: Question, answer: Answer) -> dict[str, Any]:
    """A conversation as `compass sft` reads it; the reference stays, so that it can be judged
    again.
    """
    said = {"role": "assistant", "content": answer.content}
    row: dict[str, Any] = {"messages": [*question.messages, said]}
    row |= {"tools": list(question.tools)} if question.tools else {}
    row |= {"answer": question.answer} if question.answer else {}
    return {**row, "label": question.label, "sample": answer.sample, "tokens": answer.tokens}
