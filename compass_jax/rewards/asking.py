"""How a judge's questions reach it: one by one through threads to an endpoint, or all at once to an
engine in this process, when the caller waits for the answers.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from compass_jax.config import ConfigError, EngineJudgeConfig, JudgeConfig
from compass_jax.rewards.endpoint import Endpoint, Reply

Messages = Sequence[dict[str, str]]
Generate = Callable[[Sequence[Messages]], Sequence[Reply]]


class Asker(Protocol):
    """An object that brings questions to a judge."""

    @property
    def name(self) -> str:
        """The judge's identity: the same for judges that answer alike."""

    def submit(self, messages: Messages) -> Future[Reply]:
        """Queues a question."""

    def run(self) -> None:
        """Starts work on all that was submitted; the caller waits for it."""

    def close(self) -> None:
        """Ends the requests that are under way."""


class Pooled:
    """Asks an endpoint, `requests` at once; `ask` replaces it, `key` as in Endpoint."""

    def __init__(
        self,
        config: JudgeConfig,
        ask: Callable[[Messages], Reply] | None = None,
        key: str = "rewards.judge",
    ):
        self._endpoint = Endpoint(config, key)
        self._ask = ask or self._endpoint
        self._pool = ThreadPoolExecutor(config.requests, "judge")
        identity = [config.model, config.max_tokens, config.temperature, config.fields]
        self.name = json.dumps(identity)

    def submit(self, messages: Messages) -> Future[Reply]:
        """Queues a question for the threads."""
        return self._pool.submit(self._ask, messages)

    def run(self) -> None:
        """Does nothing: the threads run already."""

    def close(self) -> None:
        """Cuts the requests that are under way."""
        self._endpoint.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class Batched:
    """Asks an engine in this process all questions at once, in the thread that waits for them.

    The owner of the engine sets `generate`, and `version`, the version of the policy's weights
    where they judge: verdicts of different versions are different.
    """

    def __init__(self, config: EngineJudgeConfig):
        self._config = config
        self._questions: list[tuple[Messages, Future[Reply]]] = []
        self._lock = threading.Lock()
        self.generate: Generate | None = None
        self.version = 0

    @property
    def name(self) -> str:
        """Weights, their version and the sampler."""
        config = self._config
        return json.dumps([config.weights, self.version, config.max_tokens, config.temperature])

    def submit(self, messages: Messages) -> Future[Reply]:
        """Keeps a question until `run`."""
        reply: Future[Reply] = Future()
        with self._lock:
            self._questions.append((messages, reply))
        return reply

    def run(self) -> None:
        """Answers all questions. Raises ConfigError where there is no engine."""
        with self._lock:
            questions, self._questions = self._questions, []
        if not questions:
            return
        if self.generate is None:
            raise ConfigError(
                "rewards.judge: a judge in an engine of our own judges in `compass train` alone;"
                " serve it (compass serve --openai) and name its endpoint in JudgeConfig"
            )
        replies = self.generate([messages for messages, _ in questions])
        for (_, future), reply in zip(questions, replies, strict=True):
            future.set_result(reply)

    def close(self) -> None:
        """Drops the questions that were not answered."""
        self._questions = []
