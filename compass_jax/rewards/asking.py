"""How a judge's questions reach it: one by one through threads to an endpoint, or all at once to an
engine of our own, when somebody waits for the answers.
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
    """Who brings questions to a judge. `name` says which judge it is: a verdict is one judge's."""

    @property
    def name(self) -> str:
        """The same for judges that answer alike."""

    def submit(self, messages: Messages) -> Future[Reply]:
        """Queues a question."""

    def run(self) -> None:
        """Somebody waits for all that was submitted."""

    def close(self) -> None:
        """Ends what is under way."""


class Pooled:
    """Asks an endpoint, `requests` at once; `ask` stands in for it, `key` as in Endpoint."""

    def __init__(
        self,
        config: JudgeConfig,
        ask: Callable[[Messages], Reply] | None = None,
        key: str = "rewards.judge",
    ):
        self._endpoint = Endpoint(config, key)
        self._ask = ask or self._endpoint
        self._pool = ThreadPoolExecutor(config.requests, "judge")
        named = [config.model, config.max_tokens, config.temperature, config.fields]
        self.name = json.dumps(named)

    def submit(self, messages: Messages) -> Future[Reply]:
        """Queues a question for the threads."""
        return self._pool.submit(self._ask, messages)

    def run(self) -> None:
        """The threads run by themselves."""

    def close(self) -> None:
        """Cuts the requests that are under way."""
        self._endpoint.close()
        self._pool.shutdown(wait=True, cancel_futures=True)


class Batched:
    """Asks an engine of our own all questions at once, in the thread that waits for them.

    `generate` is set by who has the engine; `version`, of the policy's weights where they judge,
    tells verdicts of one version from those of the next.
    """

    def __init__(self, config: EngineJudgeConfig):
        self._config = config
        self._asked: list[tuple[Messages, Future[Reply]]] = []
        self._lock = threading.Lock()
        self.generate: Generate | None = None
        self.version = 0

    @property
    def name(self) -> str:
        """Weights, their version and the sampler."""
        config = self._config
        return json.dumps([config.weights, self.version, config.max_tokens, config.temperature])

    def submit(self, messages: Messages) -> Future[Reply]:
        """Keeps a question until somebody waits."""
        found: Future[Reply] = Future()
        with self._lock:
            self._asked.append((messages, found))
        return found

    def run(self) -> None:
        """Answers all questions. Raises ConfigError where nobody gave an engine."""
        with self._lock:
            asked, self._asked = self._asked, []
        if not asked:
            return
        if self.generate is None:
            raise ConfigError(
                "rewards.judge: a judge in an engine of our own judges in `compass train` alone;"
                " serve it (compass serve --openai) and name its endpoint in JudgeConfig"
            )
        replies = self.generate([messages for messages, _ in asked])
        for (_, found), reply in zip(asked, replies, strict=True):
            found.set_result(reply)

    def close(self) -> None:
        """Drops what nobody waited for."""
        self._asked = []
