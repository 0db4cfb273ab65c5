"""The episodes of a run: its drivers' processes, the door through which they reach the engine, and
the verdicts on episodes that have ended.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.records import EPISODE, Prompt, SampleKey, Score, stable_id
from compass_jax.config import DataConfig, EpisodeSource
from compass_jax.data.episodes import command_of, setup_of
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.episodes.drivers import Driver, Ended, Said
from compass_jax.experience.episodes.sessions import Session
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.tasks.rows import decode_row
from compass_jax.rollout.ask import Ask, Left

logger = logging.getLogger(__name__)

MOST_DEATHS = 4  # of a driver, one after another without an episode that it played
LOGS = "drivers"  # folder of a run

Event = Ask | Left | Said | Ended


class Door(Protocol):
    """Where drivers ask for turns."""

    def url(self, session: str) -> str:
        """Returns the address of a session's route."""
        ...

    def close(self) -> None:
        """Closes it."""
        ...


OpenDoor = Callable[[Callable[[Event], None], Callable[[str], bool]], Door]


class Episodes:
    """The drivers of a run's sources and the sessions that they play.

    Args:
        tokenizer: the arguments of the drivers' tokenizer.
        log: folder of the drivers' logs.
        open_door: opens the door; gets where events go, and whether a session is open.
        start: starts a driver's process.
    """

    def __init__(
        self,
        data: DataConfig,
        seed: int,
        tokenizer: JsonMapping,
        log: Path,
        open_door: OpenDoor,
        start: Callable[..., Driver] = Driver,
    ):
        self._sources = {
            i: source
            for i, (_, source) in enumerate(data.keyed_sources())
            if isinstance(source, EpisodeSource)
        }
        self._seed, self._tokenizer, self._log = seed, tokenizer, log
        self._start = start
        self._drivers: dict[int, Driver] = {}
        self._deaths: dict[int, int] = dict.fromkeys(self._sources, 0)
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._open: set[str] = set()
        self._lock = threading.Lock()
        self._door = open_door(self._put, self._is_open)
        self.verdicts: dict[SampleKey, Score] = {}  # of episodes that nobody has asked about

    def source(self, prompt: Prompt) -> EpisodeSource:
        """Returns the source of a prompt that stands for an episode."""
        return self._sources[prompt.source]

    # ---- sessions --------------------------------------------------------------------------------

    def play(self, session: Session, name: str, sampling: JsonObject) -> str:
        """Orders an episode from its driver, and returns the id of its session. `name`: what the
        seed of the environment depends on, beside the run's.
        """
        token = secrets.token_urlsafe(24)
        with self._lock:
            self._open.add(token)
        source = self.source(session.task)
        url = self._door.url(token)
        order = {
            "session": token,
            "url": url,
            "base_url": f"{url}/v1",  # of OpenAI's clients
            "row": decode_row(session.task.row),
            "seed": stable_id(f"{self._seed} {name} {session.key}"),
            "turns": source.turns,
            "tokens": session.most_tokens,
            "sampling": sampling,
        }
        self._driver(session.task.source).send({"play": order})
        return token

    def end(self, token: str, prompt: Prompt, cancel: bool) -> None:
        """Closes a session: later requests of it are refused."""
        with self._lock:
            self._open.discard(token)
        driver = self._drivers.get(prompt.source)
        if cancel and driver is not None:
            driver.send({"cancel": token})

    def _is_open(self, token: str) -> bool:
        with self._lock:
            return token in self._open

    # ---- drivers ---------------------------------------------------------------------------------

    def _driver(self, source: int) -> Driver:
        if source not in self._drivers:
            settings = self._sources[source]
            setup = setup_of(settings, "play", tokenizer=self._tokenizer)
            log = self._log / f"{source}-{settings.env.rpartition(':')[2]}.log"
            self._drivers[source] = self._start(command_of(settings), setup, log, self._put)
        return self._drivers[source]

    def source_of(self, driver: Driver) -> int:
        """Returns the source that a driver plays; -1 for one that was replaced."""
        return next((i for i, one in self._drivers.items() if one is driver), -1)

    def buried(self, event: Ended) -> int:
        """Returns the source of a driver that has ended; the next episode starts another one.
        Raises VerifierError after MOST_DEATHS in a row.
        """
        source = self.source_of(event.driver)
        if source >= 0:
            del self._drivers[source]
            self._deaths[source] += 1
            logger.warning("%s: %s; it is started again", self._sources[source].env, event.reason)
            if self._deaths[source] >= MOST_DEATHS:
                raise VerifierError(
                    f"{self._sources[source].env}: {event.reason}. It ended {MOST_DEATHS} times"
                    " without an episode; mend it, then run the same command again"
                )
        return source

    def refused(self, event: Said) -> None:
        """Raises VerifierError for an environment that its driver cannot play."""
        source = self._sources.get(self.source_of(event.driver))
        if source is not None:
            raise VerifierError(f"{source.env}: {event.message['refused']}")

    def is_ready(self, prompt: Prompt) -> bool:
        """Returns whether the driver of a prompt's source has started."""
        driver = self._drivers.get(prompt.source)
        return driver is not None and driver.ready

    def plays(self, driver: Driver, prompt: Prompt) -> bool:
        """Returns whether a driver is the one that plays a prompt's episodes."""
        return self._drivers.get(prompt.source) is driver

    def played(self, driver: Driver) -> None:
        """Counts an episode that a driver has played to its end."""
        self._deaths[self.source_of(driver)] = 0

    # ---- events ----------------------------------------------------------------------------------

    def _put(self, event: Event) -> None:
        self._events.put((time.monotonic(), event))

    def events(self, wait_s: float) -> Iterator[tuple[float, Event]]:
        """Yields the events so far, each with the time at which it came; waits up to `wait_s`
        seconds for the first.
        """
        with contextlib.suppress(queue.Empty):
            yield self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait()
            while True:
                yield self._events.get_nowait()

    def close(self) -> None:
        """Ends the drivers and closes the door."""
        for driver in self._drivers.values():
            driver.close()
        self._door.close()

    # ---- the verdicts in a checkpoint ------------------------------------------------------------

    def forget_lost(self, buffer: ExperienceBuffer) -> None:
        """Removes the finished episodes without a verdict from a restored buffer: they are played
        anew. There are such after a step whose episodes all failed.
        """
        for key in buffer.unjudged:
            prompt = buffer.samples[key].rollout.prompt
            if prompt.turns == EPISODE and key not in self.verdicts:
                del buffer.samples[key]

    def state(self) -> JsonObject:
        """Returns the verdicts that no buffer has yet."""
        return {"verdicts": [[*key, asdict(score)] for key, score in self.verdicts.items()]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Returns to a state."""
        self.verdicts.clear()
        self.verdicts |= {SampleKey(*key): Score(**score) for *key, score in state["verdicts"]}
