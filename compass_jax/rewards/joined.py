"""Scorers that join several verdicts on a response, or share the work among processes.

A response may have a verdict of the workers, a verdict of the judge and a gold label. The label
becomes the component "gold" of the score. A missing label does not change the rest of the score,
because labels only measure and must not select the samples to train on.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Self

from compass_jax.base.records import EPISODE, GOLD, Prompt, SampleKey, Score, stable_id
from compass_jax.config import DataConfig
from compass_jax.config.verifiers import JUDGE
from compass_jax.rewards.checks import DECIMALS, gold_places, judged_sources, sources_with
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.judges.endpoint import Asker, Pooled
from compass_jax.rewards.judges.judging import Judge
from compass_jax.rewards.judges.scalar import ScalarJudge
from compass_jax.rewards.score import Scorer
from compass_jax.rewards.tasks.rows import decode_row, encode_row

AnyJudge = Judge | ScalarJudge
WORKERS = "workers"
FORM = "judge_form"  # component: 1 where a broken form decided
ROWS_AT_ONCE = 16
MOST_NAMED = 3
TURN_S = 0.05  # timeout of each wait while workers and judge are polled in turn


class ScorerWrapper:
    """The methods that scorers around another scorer share."""

    def __init__(self, scorer: Any):
        self._scorer = scorer

    @property
    def workers(self) -> Scorer:
        """The scorer that runs the workers."""
        return self._scorer.workers

    @property
    def workers_only(self) -> bool:
        """Whether all verdicts come from workers, in seconds and without the engine."""
        return self._scorer.workers_only

    def wait_ready(self) -> None:
        """Waits until this process's workers have finished their imports."""
        self._scorer.wait_ready()

    def close(self) -> None:
        """Ends this process's workers and drops uncollected samples."""
        self._scorer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JoinedScorer(ScorerWrapper):
    """A `Scorer` that joins the workers' verdicts, the judge's and the gold labels. A sample is
    collected when its last part is known.

    Around a SharedScorer it behaves alike in every process: each process's judge sees all samples,
    and `collect` returns samples only with `block`, because clocks differ.
    """

    def __init__(
        self,
        scorer: Scorer | SharedScorer,
        data: DataConfig,
        judge: AnyJudge | None = None,
        gold_share: float = 1.0,
        needs_form: bool = False,
    ):
        """Joins the scores of `scorer` with the judge's and the gold labels; `gold_share` and
        `needs_form` are rewards.gold_share and rewards.judge_needs_form.
        """
        super().__init__(scorer)
        self._gold_share, self._needs_form = gold_share, needs_form
        self.judge = judge
        self._judged = judged_sources(data) if judge is not None else {}
        self._gold = gold_places(data)
        # sample -> (source, scores by part; None while a part is pending)
        self._parts: dict[Hashable, tuple[int, dict[str, Score | None]]] = {}

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response, like `Scorer.submit`."""
        if key in self._parts:
            raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
        text = response if isinstance(response, str) else functools.cache(response)
        source, parts = prompt.source, dict[str, Score | None]()
        judged = self._judged.get(source)
        if judged is not None and self.judge is not None:
            self.judge.submit((key, JUDGE), prompt, text)
            parts[JUDGE] = None
        if judged is None or not judged.alone:
            self._scorer.submit((key, WORKERS), prompt, text)
            parts[WORKERS] = None
        if source in self._gold and is_audited(prompt, self._gold_share):
            columns = decode_row(prompt.row)
            row = encode_row({**columns, "answer": columns.get(GOLD, columns.get("answer"))})
            gold_prompt = dataclasses.replace(prompt, source=self._gold[source], row=row)
            self._scorer.submit((key, GOLD), gold_prompt, text)
            parts[GOLD] = None
        self._parts[key] = source, parts

    @property
    def asker(self) -> Asker | None:
        """The judge's asker; None without a generative judge."""
        return self.judge.asker if isinstance(self.judge, Judge) else None

    @property
    def workers_only(self) -> bool:
        """Whether there is no judge."""
        return self.judge is None

    @property
    def slow(self) -> bool:
        """Whether a verdict may take minutes, in which case a stop must not wait for it."""
        return isinstance(self.asker, Pooled)

    @property
    def outstanding(self) -> int:
        """Number of samples submitted and not yet collected."""
        return len(self._parts)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """Returns the samples whose last part arrived since the last call. `block` and errors are
        those of `Scorer.collect` and `Judge.collect`.
        """
        complete: list[tuple[Any, Score]] = []
        if not block and isinstance(self._scorer, SharedScorer):
            return complete
        while True:
            judging = self.judge is not None and self.judge.outstanding > 0
            known = self._scorer.collect(block and not judging)
            if judging and self.judge is not None:
                busy = bool(known) or self._scorer.outstanding > 0
                known += self.judge.collect((TURN_S if busy else None) if block else 0)
            for (key, name), score in known:
                source, parts = self._parts[key]
                parts[name] = score
                if all(part is not None for part in parts.values()):
                    del self._parts[key]
                    complete.append((key, self._join(source, parts)))
            if complete or not block or not self._parts:
                return complete

    def _join(self, source: int, parts: dict[str, Score | None]) -> Score:
        score, verdict, gold = (parts.get(name) for name in (WORKERS, JUDGE, GOLD))
        if verdict is not None:
            if self._needs_form and score is not None:
                verdict = _needing_form(verdict, score)
            score = _sum_scores(score, verdict, self._judged[source].weight)
        assert score is not None
        if gold is not None:
            label = {GOLD: gold.reward} if gold.known else {}
            components = {name: x for name, x in score.components.items() if name != GOLD}
            score = dataclasses.replace(score, components={**components, **label})
        return score

    def close(self) -> None:
        """Ends the workers, cancels the judge's requests and drops uncollected samples."""
        super().close()
        if self.judge is not None:
            self.judge.close()


def is_audited(prompt: Prompt, share: float) -> bool:
    """Returns whether the answers of a group get gold labels, where a `share` of all groups does. A
    hash of the prompt and its visit decides, so that a resumed run has the same labels.
    """
    return stable_id(f"gold {prompt.id} {prompt.visit}") < share * 2**32


def _needing_form(judge: Score, workers: Score) -> Score:
    """Returns the judge's score, of an answer that breaks the form that of Worse."""
    if not workers.known:
        return judge
    broken = workers.reward <= 0
    components = {**judge.components, FORM: float(broken)}
    if not broken:
        return dataclasses.replace(judge, components=components)
    return Score(0.0, True, components=components)


def _sum_scores(workers: Score | None, judge: Score, weight: float) -> Score:
    """Returns the weighted judge's score plus the workers'. Unknown if either score is."""
    components = {**(workers.components if workers else {}), **judge.components}
    if judge.known and (workers is not None or weight != 1):
        components[JUDGE] = judge.reward
    missing = next((x for x in (workers, judge) if x is not None and not x.known), None)
    if missing is not None:
        return dataclasses.replace(missing, components=components)
    total = weight * judge.reward + (workers.reward if workers else 0.0)
    extracted = workers is None or workers.extracted
    return Score(round(total, DECIMALS), True, components=components, extracted=extracted)


class SharedScorer(ScorerWrapper):
    """A `Scorer` that shares the work with those of other processes. Each process checks its share
    of the samples in its own workers, and all processes get all scores.

    Every process submits every sample, in the same order. Sample number n is checked by process n
    mod `processes`. Results are gathered when the caller waits, so that all processes continue with
    the same scores, including those of hangs and crashes.

    exchange: gathers every process's bytes, in their order. All processes call it at the same
    places.
    """

    slow = False  # a stop must not interrupt a wait in one process only

    def __init__(
        self,
        scorer: Scorer | JoinedScorer,
        process: int,
        processes: int,
        exchange: Callable[[bytes], list[bytes]],
    ):
        super().__init__(scorer)
        self._exchange = exchange
        self._process, self._processes = process, processes
        self._count = 0
        # key -> number, for all uncollected samples
        self._keys: dict[Hashable, int] = {}

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response in the process that checks it. Raises ValueError for a known key."""
        if key in self._keys:
            raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
        self._keys[key] = self._count
        if self._count % self._processes == self._process:
            self._scorer.submit(self._count, prompt, response)
        self._count += 1

    @property
    def outstanding(self) -> int:
        return len(self._keys)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """Returns the scores of all submitted samples, in that order, after every process has
        checked its share. Returns nothing without `block`, because clocks differ. A VerifierError
        of any process is raised in all.
        """
        if not block or not self._keys:
            return []
        scores: list[list] = []
        failure = ""
        try:
            while self._scorer.outstanding:
                collected = self._scorer.collect(block=True)
                scores += [[number, *dataclasses.astuple(score)] for number, score in collected]
        except VerifierError as error:  # every process must fail, so the message is exchanged
            failure = str(error)
        payload = json.dumps([failure, scores])
        parts = [json.loads(part) for part in self._exchange(payload.encode())]
        for failure, _ in parts:
            if failure:
                raise VerifierError(failure)
        by_number = {number: Score(*rest) for _, part in parts for number, *rest in part}
        results = [(key, by_number[number]) for key, number in self._keys.items()]
        self._keys.clear()
        return results


class EpisodeScorer(ScorerWrapper):
    """A scorer around another one that also knows the verdicts on episodes, which their
    environments gave.

    verdicts: those on episodes that have ended, by sample; they are taken out.
    """

    LOST = "the verdict on this episode was lost with the process that had it"

    def __init__(
        self, scorer: Scorer | JoinedScorer | SharedScorer, verdicts: dict[SampleKey, Score]
    ):
        super().__init__(scorer)
        self._verdicts = verdicts
        self._asked: list[SampleKey] = []

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response, or an episode by its sample's key."""
        if prompt.turns == EPISODE:
            assert isinstance(key, SampleKey)
            self._asked.append(key)
        else:
            self._scorer.submit(key, prompt, response)

    @property
    def slow(self) -> bool:
        """Whether a verdict of the other scorer may take minutes."""
        return self._scorer.slow

    @property
    def outstanding(self) -> int:
        return len(self._asked) + self._scorer.outstanding

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """Returns the verdicts on all submitted episodes and those of the other scorer; waits for
        these only where there is no episode.
        """
        lost = Score(0.0, False, "error", self.LOST)
        ready = [(key, self._verdicts.pop(key, lost)) for key in self._asked]
        self._asked = []
        if self._scorer.outstanding:
            ready += self._scorer.collect(block and not ready)
        return ready


AnyScorer = Scorer | JoinedScorer | SharedScorer | EpisodeScorer


def with_episodes(scorer: AnyScorer, verdicts: dict[SampleKey, Score]) -> EpisodeScorer:
    """Returns a scorer that also knows these verdicts on episodes."""
    return scorer if isinstance(scorer, EpisodeScorer) else EpisodeScorer(scorer, verdicts)


def sources_of(data: DataConfig) -> frozenset[int]:
    """Returns the indices of the sources whose rows can be validated."""
    return frozenset(sources_with(data, lambda kind: kind.row_faults))


def check_rows(scorer: AnyScorer, data: DataConfig, prompts: Sequence[Prompt]) -> None:
    """Raises VerifierError, naming file and row, for prompts whose setup or tests cannot run: every
    response to such a row would get a reward of 0. Rows that were validated before are skipped.
    """
    workers = scorer.workers
    chunks: list[list[Prompt]] = []
    for source in sorted(sources_of(data)):
        of_source = [prompt for prompt in prompts if prompt.source == source]
        untried = [prompt for prompt in of_source if prompt.row not in workers.tried_rows]
        chunks += [untried[i : i + ROWS_AT_ONCE] for i in range(0, len(untried), ROWS_AT_ONCE)]
    for n, chunk in enumerate(chunks):
        workers.submit_rows(n, chunk[0].source, [prompt.row for prompt in chunk])
    scores: dict[int, Score] = {}
    while len(scores) < len(chunks):
        scores.update(workers.collect(block=True))
    faults = [
        f"{prompt.place or f'{prompt.label}, {prompt.question!r:.60}'}: {fault}"
        for n, chunk in enumerate(chunks)
        for prompt, fault in zip(chunk, _faults(scores[n], len(chunk)), strict=True)
        if fault
    ]
    if faults:
        more = len(faults) - MOST_NAMED
        raise VerifierError(
            f"{'; '.join(faults[:MOST_NAMED])}{f'; {more:,} more rows' if more > 0 else ''}. Every"
            " response to such a row would get 0: mend it, or leave it out"
        )
    workers.tried_rows.update(prompt.row for chunk in chunks for prompt in chunk)


def _faults(score: Score, rows: int) -> list[str]:
    if score.outcome == "unjudged":
        return json.loads(score.detail)
    return [f"its setup and tests cannot be tried ({score.outcome}: {score.detail})"] * rows
