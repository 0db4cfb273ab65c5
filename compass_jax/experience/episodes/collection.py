"""A collection whose prompts may stand for episodes: drivers play them, many at once, while the
engine decodes the turns that they ask for.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import EPISODE, Rollout, SampleKey, Score
from compass_jax.experience.buffer import NO_ROW
from compass_jax.experience.episodes.drivers import Ended, Said
from compass_jax.experience.episodes.played import Episodes, Event
from compass_jax.experience.episodes.record import record_of
from compass_jax.experience.episodes.sessions import Refused, Session
from compass_jax.rollout.ask import Ask, Left, Reply
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.request import Request

MOST_PLAYS = 3  # of an episode whose driver ends each time
MOST_END = 200  # characters of the reason why an episode ended
START_S = 600.0  # time that a driver has to start
POLL_S = 0.05  # between looks for a stop and for timeouts while only environments work
LEFT = "the rollout has ended"


@dataclass(eq=False)
class _Playing:
    """An episode that is being played."""

    session: Session
    limit_s: float
    plays: int = 1  # times that it was begun
    spent_s: float = 0.0  # of the environment's time
    began: float = field(default_factory=time.monotonic)
    since: float = field(default_factory=time.monotonic)  # the environment's last turn began

    def waited_s(self, now: float) -> float:
        """Returns the seconds since the model's last turn ended, 0 while another one is sampled."""
        return 0.0 if self.session.live else max(now - self.since, 0.0)

    def record(self, agent: str, now: float) -> dict[str, object]:
        """Returns how the episode went until `now`, whose verdict is that of `agent`."""
        environment_s = self.spent_s + self.waited_s(now)
        return record_of(self.session, agent, environment_s, now - self.began)


class _Asked(NamedTuple):
    """A request of an episode in the batcher."""

    token: str  # of its session
    ask: Ask
    at: float
    environment_s: float  # before it


@dataclass
class EpisodeCollection(Collection):
    """A Collection that plays the episodes among its samples; those yield when their drivers have
    ended them, with their verdicts in `episodes.verdicts`.

    A sample whose driver fails or takes longer than its source's `timeout_s` has no reward, and a
    reason. The episodes of a driver that ends are played anew, with the same draws. All episodes
    end with the iteration.
    """

    episodes: Episodes = None  # type: ignore[assignment]  # a field after those with defaults
    # The order in which requests come depends on clocks; their tokens must not.
    streams: bool = True

    def __iter__(self) -> Iterator[Rollout]:
        self._playing: dict[str, _Playing] = {}
        self._turns: dict[Request, _Asked] = {}  # the requests in the batcher
        self._ended: list[Rollout] = []
        for at, event in self.episodes.events(0.0):  # of the time since the last collection
            self._take(at, event)
        try:
            yield from super().__iter__()
        finally:
            self._leave()

    @property
    def busy(self) -> bool:
        """Whether any sample is unfinished."""
        return bool(self._playing or self._ended) or self.batcher.busy

    def _start(self, n: int, keys: Sequence[SampleKey]) -> None:
        prompt, first = self.prompts[n], self._first(n)
        if prompt.turns != EPISODE:
            return super()._start(n, keys)
        config = self.engine.config
        most = config.prompt_buckets[-1] + config.max_new_tokens
        source = self.episodes.source(prompt)
        for key in keys:
            session = Session(
                key,
                prompt,
                first + key.index,
                NO_ROW if self.keep_routes else first + key.index,
                most,
                config.prompt_buckets[-1],
                source.turns,
            )
            self._play(session, source.timeout_s)

    def _play(self, session: Session, limit_s: float, plays: int = 1) -> None:
        token = self.episodes.play(session, f"{self.purpose}", self._sampling())
        self._playing[token] = _Playing(session, limit_s, plays)

    def _sampling(self) -> JsonObject:
        """Returns the parameters that a request of this collection has."""
        sampler = self.sampler or self.engine.default_sampler()
        temperature = sampler.temperature if self.temperature is None else self.temperature
        return {"temperature": temperature, "top_p": sampler.top_p, "top_k": sampler.top_k}

    def _step(self) -> list[Rollout]:
        """Takes in what drivers did, decodes once, and returns the finished samples."""
        idle = not (self.batcher.busy or self._ended)
        started = time.perf_counter()
        for at, event in self.episodes.events(POLL_S if idle else 0.0):
            self._take(at, event)
        if idle:
            self.stats.environment_s += time.perf_counter() - started
        for token, why in self._overdue():
            self._end(token, Score(0.0, False, "timeout", why), cancel=True)
        rollouts, self._ended = self._ended, []
        if not self.batcher.busy:
            return rollouts
        for request in self.batcher.step():
            if request in self._turns:
                self._reply(request)
            elif not request.cancelled:
                rollouts.append(request.rollout(self.engine.end_ids))
        return rollouts

    def _overdue(self) -> list[tuple[str, str]]:
        """Returns (token, reason) of the episodes whose environments have used all their time, or
        whose drivers do not start.
        """
        now, overdue = time.monotonic(), list[tuple[str, str]]()
        for token, playing in self._playing.items():
            why = f"the environment took longer than its timeout_s = {playing.limit_s:g} in all"
            limit_s = playing.limit_s
            if not self.episodes.is_ready(playing.session.task):
                limit_s, why = START_S, f"its driver was not ready after {START_S:g} s"
            if playing.spent_s + playing.waited_s(now) > limit_s:
                overdue.append((token, why))
        return overdue

    # ---- what drivers do -------------------------------------------------------------------------

    def _take(self, at: float, event: Event) -> None:
        if isinstance(event, Ask):
            self._ask(at, event)
        elif isinstance(event, Left):
            for request in [x for x, turn in self._turns.items() if turn.ask is event.ask]:
                self._cancel(request)
        elif isinstance(event, Ended):
            source = self.episodes.buried(event)
            for token, playing in list(self._playing.items()):
                if playing.session.task.source == source:
                    self._play_anew(token, event.reason)
        else:
            self._hear(at, event)

    def _hear(self, at: float, event: Said) -> None:
        if "refused" in event.message:
            self.episodes.refused(event)
        if "ready" in event.message:
            event.driver.ready = True
            for started in self._playing.values():
                if self.episodes.plays(event.driver, started.session.task):
                    started.began = started.since = at
        for kind in ("done", "failed"):
            message = event.message.get(kind)
            if not isinstance(message, dict):
                continue
            token = str(message.get("session"))
            playing = self._playing.get(token)
            if playing is not None and self.episodes.plays(event.driver, playing.session.task):
                self.episodes.played(event.driver)
                self._end(token, verdict(message), str(message.get("agent", "")), at=at)

    def _ask(self, at: float, ask: Ask) -> None:
        playing = self._playing.get(ask.session)
        if playing is None:
            return ask.answer(Refused(LEFT))
        environment_s = playing.waited_s(at)
        try:
            self._check(ask)
            request = playing.session.ask(
                ask.tokens, ask.limit, self.policy_version, self.temperature or 0.0, ask.agent
            )
        except Refused as error:
            return ask.answer(error)
        playing.spent_s += environment_s
        self._turns[request] = _Asked(ask.session, ask, at, environment_s)
        self.batcher.add([request])

    def _check(self, ask: Ask) -> None:
        """Raises Refused for a request that asks for other sampling than the run's."""
        for name, value in self._sampling().items():
            wanted_value = max(float(ask.sampling.get(name) or 0.0), 0.0)  # top_k -1: off
            if name in ask.sampling and wanted_value != value:
                raise Refused(
                    f"{name} = {wanted_value:g}: the run samples with {value:g}, on whose log-probs"
                    " it trains; leave it out"
                )
        if other := {*ask.stops} - {*self.engine.end_ids}:
            raise Refused(
                f"stop_token_ids has {min(other)}: turns end at {sorted(self.engine.end_ids)}, the"
                " end tokens of the run's tokenizer"
            )

    def _reply(self, request: Request) -> None:
        token, ask, at, environment_s = self._turns.pop(request)
        playing = self._playing.get(token)
        if playing is None or request.cancelled:
            return
        start = len(ask.tokens)
        playing.since = time.monotonic()
        playing.session.of(request).take(request, environment_s, playing.since - at)
        stopped = int(request.tokens[-1]) in self.engine.end_ids
        ask.answer(Reply(request.tokens[start:], request.logp[start:], stopped))

    def _cancel(self, request: Request) -> None:
        token, ask = self._turns[request][:2]
        self.batcher.cancel(request)
        playing = self._playing.get(token)
        if playing is not None:
            playing.session.of(request).request = None
            playing.since = time.monotonic()
        ask.answer(Refused("the request was cancelled"))

    def _end(
        self,
        token: str,
        score: Score,
        agent: str = "",
        cancel: bool = False,
        at: float | None = None,
    ) -> None:
        """Ends an episode with its verdict, which is that of `agent` where one is named and came at
        the time `at` (None: now).
        """
        playing = self._close(token, cancel)
        session = playing.session
        rollout = session.sample(frozenset(self.engine.end_ids), agent)
        if score.known and not rollout.sampled_length:
            score = Score(0.0, False, "error", "the episode ended without a sampled token")
        now = time.monotonic() if at is None else at
        record = {**playing.record(agent, now), **score.episode}
        self.episodes.verdicts[session.key] = dataclasses.replace(score, episode=record)
        self._ended.append(rollout)

    def _close(self, token: str, cancel: bool) -> _Playing:
        """Closes an episode's session, and returns it."""
        playing = self._playing.pop(token)
        session = playing.session
        for request in session.live:
            self.batcher.cancel(request)
            self._turns[request].ask.answer(Refused("the episode has ended"))
        self.episodes.end(token, session.task, cancel)
        self.batcher.forget({(x.prompt.key, session.column(x)) for x in session.branches})
        return playing

    def _play_anew(self, token: str, reason: str) -> None:
        """Begins an episode again whose driver has ended; it is an error after MOST_PLAYS times."""
        plays = self._playing[token].plays
        if plays >= MOST_PLAYS:
            why = f"{reason}. The driver ended {plays} times while this episode was played"
            return self._end(token, Score(0.0, False, "error", why))
        playing = self._close(token, cancel=False)
        session = dataclasses.replace(playing.session, branches=[], turns=0)
        self._play(session, playing.limit_s, plays + 1)

    def _leave(self) -> None:
        """Ends all episodes that are still played; their samples are sampled anew."""
        for token, playing in self._playing.items():
            self.episodes.end(token, playing.session.task, cancel=True)
        for turn in self._turns.values():
            turn.ask.answer(Refused(LEFT))
        self._playing, self._turns = {}, {}


def verdict(message: JsonObject) -> Score:
    """Returns the verdict of a driver's message on an episode."""
    if "reward" not in message:
        detail = message.get("detail")
        reason = detail if isinstance(detail, str) and detail else "the driver gave no reason"
        return Score(0.0, False, "error", reason)
    try:
        reward = _finite(message["reward"], "reward")
        metrics = message.get("metrics") or {}
        if not isinstance(metrics, dict) or not all(_is_name(name) for name in metrics):
            raise ValueError(f"metrics = {metrics!r:.100}: names of letters, digits and _")
        components = {name: _finite(value, name) for name, value in metrics.items()}
    except ValueError as error:
        return Score(0.0, False, "error", f"the driver's verdict is unusable: {error}")
    end = message.get("end")
    record = {"end": end[:MOST_END]} if isinstance(end, str) and end else {}
    return Score(reward, True, components=components, episode=record)


def _finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise ValueError(f"{name} = {value!r:.80} is no finite number")
    if value != value:
        raise ValueError(f"{name} is NaN")
    return float(value)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and len(name) <= 64
