"""`compass try`: judges one answer as a run does, and prints the reasons."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO
from compass_jax.base.records import Prompt, Score
from compass_jax.commands.catalogue import OWN_SCORERS, rows_of, shortened, source_of
from compass_jax.commands.options import Try
from compass_jax.config import (
    ConfigError,
    DataConfig,
    EpisodeSource,
    FileSource,
    JudgeConfig,
    ProceduralSource,
    RewardConfig,
    TaskSource,
)
from compass_jax.config.data import Source
from compass_jax.config.errors import check
from compass_jax.config.kinds import IN_ANSWER, kinds
from compass_jax.config.named import load
from compass_jax.config.verifiers import JUDGE, looked_for, pairs
from compass_jax.config.words import options_of
from compass_jax.rewards import faults
from compass_jax.rewards.called import Case, called
from compass_jax.rewards.joined import JoinedScorer
from compass_jax.rewards.judges import judging
from compass_jax.rewards.judges.endpoint import Messages, Pooled, Reply
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.environment import Environment
from compass_jax.rewards.tasks.rows import decode_row, encode_row
from compass_jax.rewards.tasks.task import load_task
from compass_jax.rewards.verifiers.extract import extract_answer, final_answer
from compass_jax.rewards.verifiers.judge import BETTER, TIE, WORSE, verdict

MOST_SHOWN = 400  # maximum characters of the row
# parameters that are not columns
OURS = frozenset({"prompt", "response", "row", "answer_tag", "chat_format"})
OURS |= {f"{name}s" for name in OURS}
WORDS = {BETTER: "Better", TIE: "Tie", WORSE: "Worse", None: "no verdict"}
ORDERS = ("of the answer against the anchor", "of the anchor against the answer")


class RecordingAsker(Pooled):
    """An asker that records its replies, in the order of the questions."""

    def __init__(self, config: JudgeConfig):
        super().__init__(config)
        self.said: list[Future[Reply]] = []

    def submit(self, messages: Messages, tools: Sequence[JsonMapping] = ()) -> Future[Reply]:
        """Queues a question."""
        self.said.append(super().submit(messages, tools))
        return self.said[-1]

    def lines(self) -> list[str]:
        """Returns a line for each order: the verdict and the reply's end, or the failure."""
        lines = []
        for order, reply in zip(ORDERS, (one.result() for one in self.said), strict=False):
            if reply.failure:
                lines.append(f"no verdict {order} ({reply.failure})")
            else:
                last = reply.text.strip()[-MOST_SHOWN // 2 :]
                lines.append(f"{WORDS[verdict(reply.text)]} {order}; it ended {last!r}")
        return lines


class Trial(NamedTuple):
    """A row of `source`, and the model's turns to score."""

    source: Source
    row: JsonMapping
    question: str
    responses: Sequence[str]
    tag: str
    chat_format: str = AUTO

    def verifiers(self) -> dict[Any, float]:
        """Returns the verifiers, by name or as objects, with their weights."""
        if not isinstance(self.source, TaskSource):
            return dict(pairs(self.source.verifier))
        verify = load_task(self.source.task, "TASK").verify
        return dict(verify) if isinstance(verify, Mapping) else {verify: 1.0}

    @property
    def arguments(self) -> dict[str, object]:
        """The arguments of the verifiers beside the row."""
        return dict(getattr(self.source, "verifier_args", ()))

    @property
    def turns(self) -> int:
        """The maximum number of model turns of an environment; 0 for a source without one."""
        return max(one.turns if isinstance(one, Environment) else 0 for one in self.verifiers())


def run(options: Try) -> int:
    """Judges a response, or the turns of a conversation, prints the verdict and returns the exit
    status: 1 without a verdict.

    Raises ConfigError for a task that cannot be judged: no response, or a missing column.
    """
    task, judge = options.task, None
    source = FileSource("rows.jsonl", verifier=JUDGE) if task == JUDGE else source_of(task)
    if options.options:
        source = _with_options(source, options.options)
    if isinstance(source, EpisodeSource):
        from compass_jax.commands.episode import play  # brings jax

        return play(source, options.model, options.number, options.seed)
    if options.endpoint or options.model:
        judge = JudgeConfig(options.endpoint, options.model, key_env=options.key_env, retries=1)
    rewards = RewardConfig(
        timeout_s=options.timeout_s,
        sandbox=options.sandbox,
        answer_tag=options.answer_tag,
        judge=judge,
    )
    rewards.validate()
    responses = [sys.stdin.read() if text == "-" else text for text in options.response]
    trial = Trial(
        source, *_row(options, source), responses, rewards.answer_tag, options.chat_format
    )
    _check(task, trial, judge)
    asker = RecordingAsker(judge) if judge else None
    scores = judged(trial, rewards, asker)
    for name, value in _lines(trial, scores, asker.lines() if asker else ()):
        print(f"{name:<11} {value}")
    return 0 if scores[-1].known else 1


def _with_options(source: Source, text: str) -> Source:
    """Returns the source with arguments of its verifier, data set or environment, from JSON."""
    if isinstance(source, TaskSource):
        raise ConfigError(f"--options: {source.task} is a task, whose code has its arguments")
    name = "verifier_args" if isinstance(source, FileSource) else "options"
    return replace(source, **{name: options_of(text, "--options")}).validate("TASK")


def _row(options: Try, source: Source) -> tuple[JsonObject, str]:
    """Returns the row's columns (of the example, or generated, without --row) and question."""
    if options.row:
        try:
            columns = decode_row(options.row)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--row is no JSON ({error}); write an object of columns") from error
        if not isinstance(columns, dict):
            example = """as '{"answer": "4"}'"""
            kind = type(columns).__name__
            raise ConfigError(f"--row is a {kind}; write an object of columns, {example}")
        return columns, str(columns.get("prompt", columns.get("question", "")))
    if isinstance(source, FileSource):
        kind = kinds().get(options.task)
        row = kind.example.row if kind else {}
        arguments = dict(source.verifier_args)  # which a column would replace
        return {column: x for column, x in row.items() if column not in arguments}, ""
    if isinstance(source, ProceduralSource):
        source = replace(source, size=options.number + 1)
    rows, number = rows_of(source, options.seed), options.number
    known = f"there are {len(rows)} rows, the first has number 0"
    check(0 <= number < len(rows), f"--number {number}: {known}")
    return decode_row(rows[number].row), rows[number].text


def _check(task: str, trial: Trial, judge: Any) -> None:
    """Raises ConfigError for the wrong number of responses, no judge, or a missing column."""
    count = len(trial.responses)
    check(count > 0, "--response TEXT is missing: what is to be judged? (-: standard input)")
    check(
        count == 1 or trial.turns > 0,
        f"--response came {count} times, and {task} judges one answer: only a conversation has"
        " several turns",
    )
    for verifier in trial.verifiers():
        if verifier == JUDGE:
            where = "say where it answers: --endpoint URL --model NAME"
            check(judge is not None, f"TASK = {task!r} is judged by a model; {where}")
            columns: Sequence[str] = (judge.anchor_field,)
        elif verifier == OWN_SCORERS:
            columns = ("answer", "metadata")
        else:
            function = verifier
            if isinstance(verifier, str):
                kind = kinds().get(verifier)
                function = kind.judge if kind else load(verifier, "TASK")
            columns = called(function, "TASK", {}, trial.tag).required
        for name in columns:
            check(
                name in trial.row or name in OURS or name in trial.arguments,
                f"the row has no {name!r}, which {task} reads (it has:"
                f" {', '.join(trial.row) or 'nothing'}); add it to --row",
            )


def judged(trial: Trial, rewards: RewardConfig, asker: RecordingAsker | None = None) -> list[Score]:
    """Returns the scores of a trial from a worker and from the judge that `asker` asks: one score,
    or one after each turn of a conversation until its end.

    Raises ConfigError for a missing guard that the verifier needs, and for turns after the end of a
    conversation.
    """
    columns, scores = encode_row(trial.row), list[Score]()
    prompt = Prompt(0, 0, "", trial.question, np.zeros(1, np.int32), "", columns)
    data = DataConfig(sources=(trial.source,), chat_format=trial.chat_format)
    data.validate()
    anchor = rewards.judge.anchor_field if rewards.judge else ""
    judge = judging.Judge(anchor, asker, chat_format=data.chat_format) if asker else None
    with _quiet(), JoinedScorer(Scorer(rewards, data), data, judge) as scorer:
        for turns in range(1, len(trial.responses) + 1):
            is_over = scores and not (scores[-1].known and scores[-1].says)
            check(
                not is_over and turns <= max(1, trial.turns),
                f"the conversation is over after {len(scores)} of {len(trial.responses)} responses;"
                " leave the others out",
            )
            text = json.dumps(trial.responses[:turns]) if trial.turns else trial.responses[0]
            scorer.submit(turns, prompt, text)
            scores += [score for _, score in scorer.collect(block=True)]
    return scores


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppresses log lines of scorer and judge that repeat the printed reason."""
    faults.logger.disabled = judging.logger.disabled = True
    try:
        yield
    finally:
        faults.logger.disabled = judging.logger.disabled = False


def _lines(
    trial: Trial, scores: Sequence[Score], ruled: Sequence[str] = ()
) -> list[tuple[str, str]]:
    score = scores[-1]
    parts = ", ".join(f"{name} {x:g}" for name, x in sorted(score.components.items()))
    messages = [message for one in scores for message in json.loads(one.says or "[]")]
    lines = [
        ("asked", trial.question),
        ("row", shortened(encode_row(trial.row), MOST_SHOWN)),
        *((message["role"], message["content"]) for message in messages),
        ("reward", f"{score.reward:g}" if score.known else "none: the sample would be left out"),
        ("outcome", score.outcome),
        *(("judge", line) for line in ruled),
        ("components", parts),
        *(("why", text) for text in reasons(trial, score)),
    ]
    return [(name, value) for name, value in lines if value]


def reasons(trial: Trial, score: Score) -> list[str]:
    """Returns a sentence for each verifier with the reason of its score."""
    failure = next((x for x in judging.FAILURES if score.components.get(f"judge_{x}")), "")
    if failure:
        return [f"the judge gave no verdict ({failure}): {score.detail}"]
    if score.outcome == "unjudged":
        return ["the verifier says that it can judge no answer here"]
    if not score.known:
        return [faults.summary(score.detail)]
    if trial.turns:
        return ["the conversation would go on" if score.says else "the conversation is over"]
    names = list(trial.verifiers())
    if not score.extracted and len(names) == 1:
        return [f"no answer was found; looked for: {looked_for(trial.source, trial.tag)}"]
    sentences = []
    for name in names:
        value = score.components.get(name, score.components.get(f"{name}_reward", score.reward))
        text = _reason(trial, name, value if len(names) > 1 else score.reward)
        sentences.append(f"{name}: {text}" if len(names) > 1 else text)
    return sentences


def _reason(trial: Trial, name: Any, reward: float) -> str:
    (response,) = trial.responses
    if name == JUDGE:
        return "the judge's verdict on the answer against the anchor, both orders taken together"
    kind = kinds().get(name)
    if kind is None:
        if name != OWN_SCORERS:
            return "this number is the function's own"
        answer = extract_answer(response, trial.tag, trial.chat_format)
        return f"the data set's scorer read {answer!r:.200}; its own answer is" + (
            f" {trial.row['answer']!r:.200}"
        )
    if kind.why:
        explanation = called(kind.why, "TASK", trial.arguments, trial.tag, trial.chat_format)(
            [Case(trial.row, response)]
        )[0]
        if explanation:
            return explanation
    word = "right" if reward == 1 else "not so" if reward == 0 else f"so to {reward:g}"
    read = ""
    if IN_ANSWER in kind.looks_for:
        answer = final_answer(response, trial.tag, trial.chat_format)
        read = f" (the answer was read as {answer!r:.200})" if answer is not None else ""
    return f"{word}: {kind.about}{read}"
