"""The driver of environment classes: a process that plays their episodes, each in a thread of its
own, with the tokens that the trainer's engine samples.

    class Guess:                                      an object for each episode
        @staticmethod
        def rows(seed):                               the tasks, always the same for a seed
            for n in range(100):
                yield {"prompt": f"Guess my number, {n % 10 + 5} is too high.", "number": n % 10}

        def reset(self, row):                         the messages that open the episode
            self.number = row["number"]
            return [{"role": "user", "content": row["prompt"]}]

        def step(self, message):                      the model's turn (base/chat/base.py, Message)
            if message.content.strip() == str(self.number):
                return Turn(reward=1.0)               without messages: the end
            return Turn([{"role": "user", "content": "no"}])

`reset` and `step` may be coroutines, keep a state and use the network. A parameter `seed` of
`reset` gets a number that is the same for the same sample of a run. `tools` are the tools of the
chat template; `close` is called at the end of every episode. The reward is that of the last turn.

    class Harness:                                    a harness that has a client of OpenAI's
        rows = ...
        def play(self, row, base_url):                plays a whole episode
            client = openai.OpenAI(base_url=base_url, api_key="none")
            ...
            return Turn(reward=1.0)

The process reads JSON lines, {"play": ...} and {"cancel": session}, and writes {"ready": true},
{"done": ...} and {"failed": ...}; what user code prints goes to its log.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import json
import math
import os
import resource
import sys
import threading
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.config.errors import ConfigError
from compass_jax.config.named import load
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.turns import turn_encoder
from compass_jax.rewards.tasks.environment import Environment, EnvironmentFault, Turn, checked

STACK_BYTES = 2**20  # of a thread: many episodes run at once
MOST_DETAIL = 2000  # characters of an error


class Order(NamedTuple):
    """An episode to play."""

    session: str
    url: str  # of the session, under which the routes are
    base_url: str  # of OpenAI's clients in this session
    row: JsonObject
    seed: int
    turns: int
    tokens: int  # maximum tokens of the episode
    sampling: JsonObject  # the run's, which a request that names none has


class Sampled(NamedTuple):
    """A turn of the model."""

    tokens: list[int]
    cut: bool  # ended by length


Generate = Callable[[Sequence[int]], Sampled]


def sample(order: Order, tokens: Sequence[int]) -> Sampled:
    """Returns the turn that the trainer's engine samples after these tokens."""
    body = {"token_ids": list(map(int, tokens))}  # sampled as the run does
    request = urllib.request.Request(
        f"{order.url}/inference/v1/generate",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as reply:
            choice = json.load(reply)["choices"][0]
    except urllib.error.HTTPError as error:
        detail = error.read(MOST_DETAIL).decode(errors="replace")
        raise EnvironmentFault(f"the engine answered {error.code}: {detail}") from error
    return Sampled(choice["token_ids"], choice["finish_reason"] == "length")


async def play(
    environment: Any, order: Order, tokenizer: Tokenizer, generate: Generate
) -> JsonObject:
    """Plays an episode; returns its reward and the components of its last turn."""
    if not hasattr(environment, "reset"):
        options = _options(environment.play, order)
        turn = _turn(await _resolved(environment.play(order.row, **options)))
        return _verdict(turn, "environment")
    options = _options(environment.reset, order)
    opening = await _resolved(environment.reset(order.row, **options))
    tokens = tokenizer.encode_chat(_messages(opening), tools=getattr(environment, "tools", ()))
    encode, loop = turn_encoder(tokenizer), asyncio.get_running_loop()
    number, turn, end = 0, Turn(), "environment"
    while number < order.turns and len(tokens) < order.tokens:
        opened = tokenizer.opened_thought(tokens)
        sampled = await loop.run_in_executor(None, generate, tokens)
        tokens, number = [*tokens, *sampled.tokens], number + 1
        text = opened + tokenizer.decode_response(sampled.tokens)
        turn = _turn(await _resolved(environment.step(tokenizer.chat_format.read(text))))
        if not turn.messages or sampled.cut:
            end = "length" if turn.messages else end
            break
        replies = json.dumps([checked(message) for message in turn.messages])
        tokens = [*tokens, *encode(replies, sampled.tokens)]
    else:
        end = "tokens" if number < order.turns else "turns"
    if not number:
        raise EnvironmentFault(
            f"the opening messages have {len(tokens)} tokens, and an episode at most {order.tokens}"
            " (rollout.prompt_buckets[-1] + rollout.max_new_tokens)"
        )
    return _verdict(turn, end)


def _turn(result: object) -> Turn:
    if not isinstance(result, Turn):
        raise EnvironmentFault(f"step or play gave a {type(result).__name__}: make it a Turn")
    if not isinstance(result.messages, Sequence):
        raise EnvironmentFault(
            f"Turn.messages is {result.messages!r:.80}: a reward is given as Turn(reward=...)"
        )
    return result


def _verdict(turn: Turn, end: str) -> JsonObject:
    reward, metrics = _number(turn.reward, "reward"), _metrics(turn.components)
    return {"reward": reward, "metrics": metrics, "end": end}


def _messages(opening: Json) -> list[JsonObject]:
    if isinstance(opening, str):
        opening = [{"role": "user", "content": opening}]
    if not isinstance(opening, Sequence) or not opening:
        raise EnvironmentFault(
            f"reset gave {opening!r:.80}: it returns the messages that open the episode"
        )
    return [checked(message) for message in opening]


def _metrics(components: Mapping[str, float]) -> dict[str, float]:
    return {str(name): _number(value, name) for name, value in components.items()}


def _number(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentFault(f"{name} = {value!r:.80}: make it a finite number")
    return number


def _options(method: Callable[..., object], order: Order) -> dict[str, int | str]:
    """Returns the parts of an order that an environment's method takes beside the row."""
    parameters = inspect.signature(method).parameters
    return {name: getattr(order, name) for name in ("seed", "base_url") if name in parameters}


async def _resolved(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


class Players:
    """The episodes that this process plays."""

    def __init__(self, make: Callable[[], Any], tokenizer: Tokenizer, tell: Callable[..., None]):
        self._make, self._tokenizer, self._tell = make, tokenizer, tell
        self._tasks: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task]] = {}
        self._lock = threading.Lock()

    def start(self, order: Order) -> None:
        """Plays an episode in a new thread."""
        threading.Thread(target=self._run, args=(order,), daemon=True).start()

    def cancel(self, session: str) -> None:
        """Ends an episode; its environment is closed."""
        with self._lock:
            loop, task = self._tasks.get(session, (None, None))
            if loop is not None and task is not None:
                loop.call_soon_threadsafe(task.cancel)

    def _run(self, order: Order) -> None:
        try:
            result = asyncio.run(self._episode(order))
            self._tell(done={"session": order.session, **result})
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # SystemExit, too: it must not lose the sample
            traceback.print_exc()
            detail = f"{type(error).__name__}: {error}"[:MOST_DETAIL]
            self._tell(failed={"session": order.session, "detail": detail})

    async def _episode(self, order: Order) -> JsonObject:
        task = asyncio.current_task()
        assert task is not None
        with self._lock:
            self._tasks[order.session] = asyncio.get_running_loop(), task
        environment = None
        try:
            environment = self._make()
            return await play(
                environment, order, self._tokenizer, lambda tokens: sample(order, tokens)
            )
        finally:
            with self._lock:
                del self._tasks[order.session]
            if (close := getattr(environment, "close", None)) is not None:
                await _resolved(close())


def environment_class(name: str, options: Mapping[str, object]) -> Any:
    """Returns the class of an environment. Raises ConfigError if it lacks a method, or does not
    take the options.
    """
    kind = load(name, "env")
    if isinstance(kind, type) and issubclass(kind, Environment):
        raise ConfigError(
            f"env = {name!r}: it is an Environment of compass_jax.rewards.tasks, which replays its"
            " start and step: make it the verifier of a Task and name that by --data, or write a"
            " class with rows(seed), reset(row) and step(message)"
        )
    methods = ["reset", "step"]
    if hasattr(kind, "play") and not hasattr(kind, "reset"):
        methods = ["play"]
    missing = [x for x in ("rows", *methods) if not callable(getattr(kind, x, None))]
    if missing:
        raise ConfigError(
            f"env = {name!r}: it has no {', '.join(missing)}; an environment is a class with"
            " rows(seed), and with reset(row) and step(message), or play(row, base_url)"
        )
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigError(f"env = {name!r}: with options {dict(options)}: {error}") from error
    return kind


def rows(kind: Any, seed: int, size: int, tell: Callable[..., None]) -> None:
    """Writes the rows of an environment, at most `size` (0: all). Raises ConfigError for a row that
    is no task.
    """
    for count, row in enumerate(itertools.islice(kind.rows(seed), size or None), 1):
        if not isinstance(row, Mapping) or not isinstance(row.get("prompt"), str | list):
            raise ConfigError(
                f"row {count} is {row!r:.80}: a row is a mapping with a prompt, by which it is"
                " known, and with what reset reads"
            )
        tell(row=dict(row))


def own_output() -> TextIO:
    """Returns the process's output; what other code prints goes to the log from here on."""
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return output


def main() -> None:
    """Reads the setup, then orders until the input ends."""
    output, lock = own_output(), threading.Lock()

    def tell(**message: Json) -> None:
        line = json.dumps(message) + "\n"
        with lock, contextlib.suppress(BrokenPipeError):
            output.write(line)
            output.flush()

    setup: JsonMapping = json.loads(sys.stdin.readline())
    limit = int(setup["memory_gib"] * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with contextlib.suppress(OSError, ValueError):  # an episode holds a connection
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threading.stack_size(STACK_BYTES)
    try:
        kind = environment_class(setup["env"], setup["options"])
        if setup["mode"] == "rows":
            return rows(kind, setup["seed"], setup["size"], tell)
        tokenizer = Tokenizer(**setup["tokenizer"])
    except Exception as error:
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        reason = str(error).removeprefix(f"env = {setup['env']!r}: ")  # the trainer says it
        return tell(refused=reason or type(error).__name__)
    players = Players(lambda: kind(**setup["options"]), tokenizer, tell)
    tell(ready=True)
    for line in sys.stdin:
        message = json.loads(line)
        if "play" in message:
            players.start(Order(**message["play"]))
        else:
            players.cancel(message["cancel"])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of user code may not end
