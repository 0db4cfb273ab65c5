"""Transport of questions to a judge: concurrent requests to an endpoint, or one batch for an engine
in this process.
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
    """An object that sends questions to a judge."""

    @property
    def name(self) -> str:
        """The judge's identity. Judges with the same name give the same answers."""

    def submit(self, messages: Messages) -> Future[Reply]:
        """Queues a question."""

    def run(self) -> None:
        """Starts work on all submitted questions, for which the caller waits."""

    def close(self) -> None:
        """Cancels the requests in flight."""


class Pooled:
    """Sends questions to an endpoint, up to `requests` at a time. `ask` replaces the endpoint;
    `key` is that of Endpoint.
    """

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
        """Queues a question for the thread pool."""
        return self._pool.submit(self._ask, messages)

    def run(self) -> None:
        """Does nothing, because the threads are running already."""

    def close(self) -> None:
        """Cancels the requests in flight."""
        self._endpoint.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class Batched:
    """Sends all questions at once to an engine in this process, in the thread that waits for the
    answers.

    The owner of the engine sets `generate`. If the policy's own weights judge, it also sets
    `version`, their version, since verdicts of different versions differ.
    """

    def __init__(self, config: EngineJudgeConfig):
        self._config = config
        self._questions: list[tuple[Messages, Future[Reply]]] = []
        self._lock = threading.Lock()
        self.generate: Generate | None = None
        self.version = 0

    @property
    def name(self) -> str:
        """The weights, their version and the sampling parameters."""
        config = self._config
        return json.dumps([config.weights, self.version, config.max_tokens, config.temperature])

    def submit(self, messages: Messages) -> Future[Reply]:
        """Stores a question until `run`."""
        reply: Future[Reply] = Future()
        with self._lock:
            self._questions.append((messages, reply))
        return reply

    def run(self) -> None:
        """Answers all stored questions. Raises ConfigError if no engine is set."""
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
        """Drops the unanswered questions."""
        self._questions = []
