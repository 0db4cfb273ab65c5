"""`compass distil`: SFT conversations from a teacher's answers that a verifier accepts.

    OUT/answers.jsonl   one line per sampled answer with its verdict, appended as answers arrive
    OUT/train.jsonl     the kept conversations, in the order of the prompts
    OUT/report.json     pass rates, failures and token counts
    OUT/settings.json   the settings that the answers depend on

A stopped command resumes when it is run again: it draws only the samples that have no line. With
the built-in engine a draw depends only on (seed, prompt, sample, position), so a resumed command
writes the same files as an uninterrupted one. An endpoint draws fresh samples.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from compass_jax.apps.curate.resume import require_same_settings, resumed_lines
from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.chat.base import any_format
from compass_jax.base.chat.calls import write_call
from compass_jax.base.errors import CompassError
from compass_jax.base.records import Prompt, SampleKey
from compass_jax.base.untrusted import parse_json, read_json
from compass_jax.config import ConfigError
from compass_jax.config.distil import DistilConfig
from compass_jax.data.files import DataError
from compass_jax.data.prompts import fitting, to_prompts
from compass_jax.data.questions import Question, questions
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rewards.checks import judged_sources
from compass_jax.rewards.judges.endpoint import NONSENSE, Pooled, Reply
from compass_jax.rewards.score import Scorer
from compass_jax.runs.rundir import FolderLock, write_atomically

ANSWERS, TRAIN, REPORT, SETTINGS = "answers.jsonl", "train.jsonl", "report.json", "settings.json"
# settings that may change on resume: the answers drawn before stay valid
MAY_CHANGE = (
    "samples",
    "keep",
    "choose",
    "requests",
    "timeout_s",
    "workers",
    "endpoint",
    "key_env",
    "heldout_frac",
)
HOPELESS = 16  # consecutive failed requests before the command gives up
TOLD_EVERY = 100  # answers between progress messages
Tell = Callable[[str], None]


class TeacherError(CompassError, RuntimeError):
    """The teacher does not answer; the message quotes the endpoint's error."""


Key = tuple[int, int]  # Question.id, number of the sample
Pending = tuple[Question, int]
Drawn = Generator[tuple[Pending, Reply], None, None]
NEWLINE = "\n"
CONTROL = (
    "the answer has control tokens, which SFT would learn as text: serve the teacher by a server"
    " that parses its thoughts and calls, and name it with --endpoint"
)


class Answer(NamedTuple):
    """A line of answers.jsonl."""

    id: int
    sample: int
    text: str
    thought: str
    tokens: int
    complete: bool
    reward: float
    known: bool
    outcome: str

    def right(self, right_at: float) -> bool:
        """Returns whether the answer is used for training: judged correct and not truncated."""
        return self.known and self.complete and self.reward >= right_at

    @property
    def content(self) -> str:
        """The training target: the chain of thought and the answer. A teacher whose prompt opens
        the thought returns it without the opening tag; parsers of thoughts may leave blank lines.
        """
        if self.thought:
            return any_format().write(self.thought.strip(NEWLINE), self.text.lstrip(NEWLINE))
        return any_format().with_opening(self.text)


class Answers:
    """The file answers.jsonl with an index of byte offsets."""

    def __init__(self, path: Path):
        self.path = path
        self.offsets: dict[Key, int] = {}
        self._size = 0
        for where, size, value in resumed_lines(path):
            self._note(_answer(value, where), size)

    def add(self, answers: Iterable[Answer]) -> None:
        """Appends the answers to the file."""
        with self.path.open("ab") as file:
            for answer in answers:
                line = json.dumps(answer._asdict(), ensure_ascii=False).encode() + b"\n"
                file.write(line)
                self._note(answer, len(line))

    def of(self, question: int, samples: int) -> list[Answer]:
        """Returns the stored answers to a question among its first `samples` samples."""
        answers = []
        for sample in range(samples):
            if (offset := self.offsets.get((question, sample))) is not None:
                with self.path.open("rb") as file:
                    file.seek(offset)
                    where = f"{self.path}, byte {offset}"
                    answers.append(_answer(parse_json(file.readline(), where), where))
        return answers

    def _note(self, answer: Answer, size: int) -> None:
        self.offsets.setdefault((answer.id, answer.sample), self._size)
        self._size += size


def _answer(value: Json, where: str) -> Answer:
    if not isinstance(value, dict) or set(value) != set(Answer._fields):
        raise DataError(
            f"{where}: not a line of compass distil; correct it, or delete the line, and its answer"
            " is drawn again"
        )
    return Answer(**value)


def distil(config: DistilConfig, out: str, tell: Tell) -> JsonObject:
    """Samples answers, judges them and writes the files; returns the content of report.json.

    Args:
        config: prompts, teacher, verifier and selection.
        out: the output folder.
        tell: receives progress messages.

    Raises DataError for prompts that cannot be read, ConfigError for invalid settings or settings
    that differ from those that `out` was begun with, and TeacherError if the teacher does not
    answer.
    """
    config.validate()
    pool = _training_questions(config, tell)
    with FolderLock(out) as lock:
        store = Answers(lock.path / ANSWERS)
        _check_settings(config, lock.path, resumed=bool(store.offsets))
        samples = ((question, sample) for question in pool for sample in range(config.samples))
        pending = [(one, i) for one, i in samples if (one.id, i) not in store.offsets]
        failures = Failures(pending, answered=bool(store.offsets))
        if pending:
            total = len(pool) * config.samples
            tell(f"{len(pending):,} of {total:,} answers are to be drawn")
            # before the workers start, so that errors of the teacher are reported at once
            draw = _at_endpoint if config.endpoint else partial(_by_engine, pool, tell)
            with contextlib.closing(draw(config, pending)) as drawn:
                _judge(config, drawn, len(pending), store, failures, lock, tell)
            failures.finish(tell)
        return _finish(config, pool, store, failures, lock.path)


def _training_questions(config: DistilConfig, tell: Tell) -> list[Question]:
    """Returns the questions on which a run with the same data trains. `tell` receives the number of
    the held-out ones: SFT on answers to them would spoil the run's evaluation.
    """
    pool = questions(config.prompts, config.seed, tell)
    if any(question.turns for question in pool) or judged_sources(config.prompts):
        raise ConfigError(
            "distil.data names a task of several turns, or one that a judge judges: a task whose"
            " verifier judges one answer is needed"
        )
    training = [question for question in pool if not question.heldout]
    share = f"distil.heldout_frac = {config.heldout_frac:g}"
    if not training:
        raise DataError(f"no question is left to distil: {share} holds out all {len(pool):,}")
    if heldout := len(pool) - len(training):
        tell(
            f"{heldout:,} of {len(pool):,} questions are held out for evaluation and are not"
            f" distilled ({share})"
        )
    return training


def _check_settings(config: DistilConfig, out: Path, resumed: bool) -> None:
    """Writes settings.json. Raises ConfigError if stored answers were drawn with other settings."""
    current = json.loads(json.dumps(asdict(config)))
    path = out / SETTINGS
    if (out / TRAIN).exists() and not path.exists():
        raise ConfigError(f"{out / TRAIN} is there, and this command did not make it")
    if resumed and path.exists():
        require_same_settings(out, read_json(path, error=DataError), current, MAY_CHANGE)
    write_atomically(path, json.dumps(current, indent=2) + "\n")


# ---- sampling and judging ------------------------------------------------------------------------


class Failures:
    """The failed requests of a command. Raises TeacherError if the teacher seems not to work.

    A prompt that the endpoint refuses, such as one that is too long, is recorded once and does not
    end the command if the teacher has answered others.
    """

    def __init__(self, pending: Sequence[Pending], answered: bool):
        self.counts: Counter[str] = Counter()
        self.rejected: dict[int, JsonObject] = {}  # Question.id -> its entry in report.json
        self._answered = answered
        self._prompts = len({question.id for question, _ in pending})
        self._samples = len(pending)
        self._in_a_row = 0

    def note(self, question: Question, reply: Reply) -> None:
        """Counts a reply."""
        if not reply.failure:
            self._answered, self._in_a_row = True, 0
            return
        self.counts[reply.failure] += 1
        most, remedy = self._samples, "the same command goes on when it answers"
        if reply.rejects_prompt:
            known = question.id in self.rejected
            self.rejected[question.id] = {"place": question.place, "detail": reply.detail}
            if known or self._answered:
                return
            most, remedy = self._prompts, "correct the settings, or leave these prompts out"
        self._in_a_row += 1
        if self._in_a_row >= min(HOPELESS, most):
            raise TeacherError(
                f"the teacher gave no answer {self._in_a_row} times in a row, the last time"
                f" {reply.failure}: {reply.detail}; {remedy}"
            )

    def finish(self, tell: Tell) -> None:
        """Reports the number of refused prompts and one of them."""
        if self.rejected:
            place, detail = next(iter(self.rejected.values())).values()
            tell(
                f"the teacher refused {len(self.rejected):,} prompts, which have no further answers"
                f" and are listed in {REPORT}; {place}: {detail}"
            )


def _judge(
    config: DistilConfig,
    drawn: Drawn,
    count: int,
    store: Answers,
    failures: Failures,
    lock: FolderLock,
    tell: Tell,
) -> None:
    """Judges the drawn samples and stores their answers; a failed request has no line."""
    replies: dict[Key, Reply] = {}
    done = 0

    def write(block: bool) -> int:
        answers = []
        for (question, sample), score in scorer.collect(block=block):
            reply = replies.pop((question, sample))
            reply_fields = reply.text, reply.thought, reply.tokens, reply.complete
            verdict = score.reward, score.known, score.outcome
            answers.append(Answer(question, sample, *reply_fields, *verdict))
        if answers:
            lock.check()
            store.add(answers)
        return len(answers)

    with Scorer(config.rewards, config.prompts) as scorer:
        scorer.wait_ready()
        for (question, sample), reply in drawn:
            failures.note(question, reply)
            if not reply.failure:
                replies[question.id, sample] = reply
                scorer.submit((question.id, sample), _prompt(question), reply.text)
            before, done = done, done + write(block=False)
            if done // TOLD_EVERY > before // TOLD_EVERY:
                tell(f"{done:,} of {count:,} answers are drawn and judged")
        while write(block=True):
            pass


def _prompt(question: Question) -> Prompt:
    """Returns the question as the Prompt that verifiers read, without tokens."""
    question_fields = question.id, question.source, question.label, question.text
    return Prompt(*question_fields, np.zeros(1, np.int32), question.answer, question.row)


def _at_endpoint(config: DistilConfig, pending: Sequence[Pending]) -> Drawn:
    """Returns each sample with the endpoint's reply, as replies arrive."""
    pool = Pooled(config.teacher, key="distil")

    def replies() -> Drawn:
        in_flight: dict[Future[Reply], Pending] = {}
        rejected: set[int] = set()
        samples = (sample for sample in pending if sample[0].id not in rejected)
        try:
            while True:
                for sample in islice(samples, 2 * config.requests - len(in_flight)):
                    question = sample[0]
                    reply = pool.submit(list(question.messages), question.tools)
                    in_flight[reply] = sample
                if not in_flight:
                    return
                for future in wait(in_flight, return_when=FIRST_COMPLETED).done:
                    sample, result = in_flight.pop(future), future.result()
                    if result.rejects_prompt:
                        rejected.add(sample[0].id)
                    yield sample, result
        finally:
            pool.close()

    return replies()


def _by_engine(
    all_questions: Sequence[Question], tell: Tell, config: DistilConfig, pending: Sequence[Pending]
) -> Drawn:
    """Returns an iterator over each sample with the built-in engine's reply. The engine's sizes
    follow from all questions, so a resumed command compiles the same programs.
    """
    from compass_jax.experience.evaluate import decoder_of, turns_of
    from compass_jax.rollout.collect import Collection
    from compass_jax.rollout.sampling import Purpose, Sampler
    from compass_jax.training.from_files import engine_config

    chats = [question.messages for question in all_questions]
    tools = [question.tools for question in all_questions]
    run = engine_config(config.model, chats, config.max_tokens or None, tools)
    run = replace(run, data=replace(run.data, chat_format=config.chat_format))
    engine, params, tokenizer = decoder_of(run.policy, run.data, run.seed, config.model)
    by_id = {question.id: question for question, _ in pending}
    prompts = to_prompts(list(by_id.values()), tokenizer)
    prompts = fitting(prompts, run.rollout.prompt_buckets[-1], "drop", tell)
    keys = frozenset(SampleKey(question.id, 0, sample) for question, sample in pending)
    batch_size = max(1, 8 * run.rollout.slots // config.samples)
    text_of = turns_of(tokenizer, run.rollout).response
    options: JsonObject = {"sampler": Sampler(config.temperature), "keep_routes": False}
    options["sample_keys"], settings = keys, (config.samples, Purpose.FILTER, config.seed)

    def replies() -> Drawn:
        for start in range(0, len(prompts), batch_size):
            batch = prompts[start : start + batch_size]
            for rollout in Collection(engine, params, batch, *settings, **options):
                text, complete = text_of(rollout), not rollout.truncated
                reply = Reply(text, tokens=rollout.response_length, complete=complete)
                if _has_control(tokenizer, text):
                    reply = _parsed(reply, tokenizer)
                yield (by_id[rollout.prompt.id], rollout.sample), reply

    return replies()


def _has_control(tokenizer: Tokenizer, text: str) -> bool:
    return tokenizer.encode(text) != tokenizer.encode(text, trusted=False)


def _parsed(reply: Reply, tokenizer: Tokenizer) -> Reply:
    """Returns a reply whose thoughts and calls are marked by control tokens as an endpoint returns
    it: the thought apart, and calls in Hermes's form.
    """
    message = tokenizer.chat_format.read(reply.text)
    text = "\n".join([*filter(None, [message.content]), *map(write_call, message.marked)])
    if message.malformed or _has_control(tokenizer, text + message.thought):
        return Reply("", NONSENSE, CONTROL)
    return reply._replace(text=text, thought=message.thought)


# ---- output --------------------------------------------------------------------------------------


def _finish(
    config: DistilConfig,
    all_questions: Sequence[Question],
    store: Answers,
    failures: Failures,
    out: Path,
) -> JsonObject:
    labels: dict[str, Counter[str]] = {}
    temporary = out / f"{TRAIN}.part"
    with temporary.open("wb") as file:
        for question in all_questions:
            answers = store.of(question.id, config.samples)
            kept_answers = chosen(answers, config)
            counts = _counted(answers, kept_answers, config.rewards.right_at)
            labels.setdefault(question.label, Counter()).update(counts)
            for answer in kept_answers:
                row = _row(question, answer)
                file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    total: Counter[str] = Counter()
    for counts in labels.values():
        total.update(counts)
    report = {
        "settings": asdict(config),
        **_rates(total),
        "failures": dict(failures.counts),
        "refused_prompts": list(failures.rejected.values()),
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
    """Returns at most `config.keep` correct answers to one question, without equal texts."""
    right_at = config.rewards.right_at
    by_content = {a.content: a for a in reversed(answers) if a.right(right_at)}
    distinct = sorted(by_content.values(), key=lambda a: a.sample)
    if config.choose == "random":
        question_id = distinct[0].id if distinct else 0
        rng = random.Random(f"{config.seed}:{question_id}")
        return rng.sample(distinct, min(config.keep, len(distinct)))
    return sorted(distinct, key=lambda a: (a.tokens, len(a.content), a.sample))[: config.keep]


def _counted(
    answers: Sequence[Answer], kept_answers: Sequence[Answer], right_at: float
) -> dict[str, int]:
    correct = sum(answer.right(right_at) for answer in answers)
    return {
        "prompts": 1,
        "solved": int(correct > 0),
        "answers": len(answers),
        "right": correct,
        "unknown": sum(not answer.known for answer in answers),
        "cut": sum(not answer.complete for answer in answers),
        "kept": len(kept_answers),
        "tokens": sum(answer.tokens for answer in answers),
        "kept_tokens": sum(answer.tokens for answer in kept_answers),
    }


def _rates(counts: Counter[str]) -> JsonObject:
    """Returns the counts with the pass rate and the number of sampled tokens per kept answer."""
    return {
        **counts,
        "pass_rate": counts["right"] / counts["answers"] if counts["answers"] else None,
        "tokens_a_kept_answer": counts["tokens"] / counts["kept"] if counts["kept"] else None,
    }


def _row(question: Question, answer: Answer) -> JsonObject:
    """Returns a conversation in the format of `compass sft`, with its reference answer."""
    message = {"role": "assistant", "content": answer.content}
    row: JsonObject = {"messages": [*question.messages, message]}
    row |= {"tools": list(question.tools)} if question.tools else {}
    row |= {"answer": question.answer} if question.answer else {}
    return {**row, "label": question.label, "sample": answer.sample, "tokens": answer.tokens}
