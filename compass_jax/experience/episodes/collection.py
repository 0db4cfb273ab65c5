"""A collection whose prompts may stand for episodes: drivers play them, many at once, while the
engine decodes the turns that they ask for.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import EPISODE, Rollout, SampleKey, Score
from compass_jax.experience.buffer import NO_ROW
from compass_jax.experience.episodes.drivers import Ended, Said
from compass_jax.experience.episodes.played import Episodes, Event
from compass_jax.experience.episodes.sessions import Refused, Session
from compass_jax.rollout.ask import Ask, Left, Reply
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.request import Request

POLL_S = 0.05  # between looks for a stop and for timeouts while only environments work
LEFT = "the rollout has ended"


@dataclass(eq=False)
class _Playing:
    """An episode that is being played."""

    session: Session
    limit_s: float
    spent_s: float = 0.0  # of the environment's time
    since: float = field(default_factory=time.monotonic)  # the environment's last turn began

    @property
    def overdue(self) -> bool:
        """Whether the environment has used all its time."""
        waits = not self.session.live
        return waits and self.spent_s + time.monotonic() - self.since > self.limit_s


@dataclass
class EpisodeCollection(Collection):
    """A Collection that plays the episodes among its samples; those yield when their drivers have
    ended them, with their verdicts in `episodes.verdicts`.

    A sample whose driver fails, ends or takes longer than its source's `timeout_s` has no reward,
    and a reason. All episodes end with the iteration.
    """

    episodes: Episodes = None  # type: ignore[assignment]  # a field after those with defaults
    # The order in which requests come depends on clocks; their tokens must not.
    streams: bool = True

    def __iter__(self) -> Iterator[Rollout]:
        self._playing: dict[str, _Playing] = {}
        self._turns: dict[Request, tuple[str, Ask]] = {}  # the requests in the batcher
        self._ended: list[Rollout] = []
        for event in self.episodes.events(0.0):  # of the time since the last collection
            self._take(event)
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
            token = self.episodes.play(session, f"{self.purpose}", self._sampling())
            self._playing[token] = _Playing(session, source.timeout_s)

    def _sampling(self) -> JsonObject:
        """Returns the parameters that a request of this collection has."""
        sampler = self.sampler or self.engine.default_sampler()
        temperature = sampler.temperature if self.temperature is None else self.temperature
        return {"temperature": temperature, "top_p": sampler.top_p, "top_k": sampler.top_k}

    def _step(self) -> list[Rollout]:
        """Takes in what drivers did, decodes once, and returns the finished samples."""
        idle = not (self.batcher.busy or self._ended)
        started = time.perf_counter()
        for event in self.episodes.events(POLL_S if idle else 0.0):
            self._take(event)
        if idle:
            self.stats.environment_s += time.perf_counter() - started
        for token in [x for x, playing in self._playing.items() if playing.overdue]:
            limit = self._playing[token].limit_s
            why = f"the environment took longer than its timeout_s = {limit:g} in all"
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

    # ---- what drivers do -------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, Ask):
            self._ask(event)
        elif isinstance(event, Left):
            for request in [x for x, (_, ask) in self._turns.items() if ask is event.ask]:
                self._cancel(request)
        elif isinstance(event, Ended):
            source = self.episodes.buried(event)
            for token, playing in list(self._playing.items()):
                if playing.session.task.source == source:
                    self._end(token, Score(0.0, False, "error", event.reason))
        else:
            self._hear(event)

    def _hear(self, event: Said) -> None:
        if "refused" in event.message:
            self.episodes.refused(event)
        for kind in ("done", "failed"):
            message = event.message.get(kind)
            if not isinstance(message, dict):
                continue
            token = str(message.get("session"))
            playing = self._playing.get(token)
            if playing is not None and self.episodes.plays(event.driver, playing.session.task):
                self.episodes.played(event.driver)
                self._end(token, verdict(message), str(message.get("agent", "")))

    def _ask(self, ask: Ask) -> None:
        playing = self._playing.get(ask.session)
        if playing is None:
            return ask.answer(Refused(LEFT))
        now, idle = time.monotonic(), not playing.session.live
        try:
            self._check(ask)
            request = playing.session.ask(
                ask.tokens, ask.limit, self.policy_version, self.temperature or 0.0, ask.agent
            )
        except Refused as error:
            return ask.answer(error)
        playing.spent_s += (now - playing.since) * idle
        self._turns[request] = ask.session, ask
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
        token, ask = self._turns.pop(request)
        playing = self._playing.get(token)
        if playing is None or request.cancelled:
            return
        start = len(ask.tokens)
        playing.session.of(request).take(request)
        playing.since = time.monotonic()
        stopped = int(request.tokens[-1]) in self.engine.end_ids
        ask.answer(Reply(request.tokens[start:], request.logp[start:], stopped))

    def _cancel(self, request: Request) -> None:
        token, ask = self._turns[request]
        self.batcher.cancel(request)
        playing = self._playing.get(token)
        if playing is not None:
            playing.session.of(request).request = None
            playing.since = time.monotonic()
        ask.answer(Refused("the request was cancelled"))

    def _end(self, token: str, score: Score, agent: str = "", cancel: bool = False) -> None:
        """Ends an episode with its verdict, which is that of `agent` where one is named."""
        playing = self._playing.pop(token)
        session = playing.session
        for request in session.live:
            self.batcher.cancel(request)
            self._turns[request][1].answer(Refused("the episode has ended"))
        self.episodes.end(token, session.task, cancel)
        self.batcher.forget({(x.prompt.key, session.column(x)) for x in session.branches})
        rollout = session.sample(frozenset(self.engine.end_ids), agent)
        if score.known and not rollout.sampled_length:
            score = Score(0.0, False, "error", "the episode ended without a sampled token")
        counts = {
            "turns": float(session.turns),
            "branches": float(len(session.branches)),
            "dropped_tokens": float(session.sampled - rollout.sampled_length),
        }
        score = dataclasses.replace(score, components={**score.components, **counts})
        self.episodes.verdicts[session.key] = score
        self._ended.append(rollout)

    def _leave(self) -> None:
        """Ends all episodes that are still played; their samples are sampled anew."""
        for token, playing in self._playing.items():
            self.episodes.end(token, playing.session.task, cancel=True)
        for _, ask in self._turns.values():
            ask.answer(Refused(LEFT))
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
    return Score(reward, True, components=components)


def _finite(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e300:
        raise ValueError(f"{name} = {value!r:.80} is no finite number")
    if value != value:
        raise ValueError(f"{name} is NaN")
    return float(value)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and len(name) <= 64
