"""The driver of environments of the package verifiers (0.4, verifiers.v1), unmodified.

A script of its own: it runs under any interpreter that has verifiers, and imports nothing of this
package. The protocol is that of experience/episodes/drivers.py. Its environments render with the
package renderers, so that the tokens of a turn are kept, and sample through TrainClient.

    env = "verifiers:NAME"      the id of a task set, as `--env.taskset.id`
    options                     fields of its task set; "env" and "renderer" have mappings of the
                                environment's other fields and of the renderer's
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import resource
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

Fields = dict  # a JSON object
Tell = Callable[..., None]
MOST_DETAIL = 2000  # characters of an error
MODEL = "policy"
OWN_OPTIONS = ("env", "renderer")


def environment_of(setup: Fields) -> Any:
    """Returns the environment that a setup names. Agents without a runtime have one of this
    machine: the default is a service in the cloud.
    """
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    options = setup["options"]
    taskset = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    name = setup["env"].partition(":")[2]
    data = {**options.get("env", {}), "taskset": {**taskset, "id": name}}
    for role, agent in agent_config_fields(resolve_env_config(data)).items():
        if "runtime" not in agent.model_fields_set:
            data[role] = {**data.get(role, {}), "runtime": {"type": "subprocess"}}
    return load_environment(resolve_env_config(data))


def row_of(data: Any) -> Fields:
    """Returns the row of a task's data. A task without a prompt is known by its other fields."""
    fields = data.model_dump(mode="json")
    prompt = fields.get("prompt")
    text = prompt if isinstance(prompt, str) and prompt else json.dumps(fields, sort_keys=True)
    return {"prompt": text[:100_000], "data": json.dumps(fields)}


def rows(environment: Any, size: int, tell: Tell) -> None:
    """Writes the rows of the environment's task set, `size` of them (0: all)."""
    taskset = environment.taskset
    if not size and not taskset.bounded:
        tell(refused="its task set is endless: set size, the number of its tasks to take")
        return
    for task in itertools.islice(iter(taskset), size or None):
        tell(row=row_of(task.data))


class Players:
    """The episodes that run in this process's event loop."""

    def __init__(self, environment: Any, setup: Fields, tell: Tell):
        self._environment, self._tell = environment, tell
        self._tokenizer = setup["tokenizer"]["folder"]
        self._renderer = setup["options"].get("renderer")
        self._tasks: dict[str, asyncio.Task] = {}

    def start(self, order: Fields) -> None:
        """Plays an episode."""
        session = order["session"]
        task = asyncio.create_task(self._play(order))
        self._tasks[session] = task
        task.add_done_callback(lambda _: self._tasks.pop(session, None))

    def cancel(self, session: str) -> None:
        """Ends an episode."""
        if (task := self._tasks.get(session)) is not None:
            task.cancel()

    async def _play(self, order: Fields) -> None:
        session = order["session"]
        try:
            result = await self._episode(order)
            self._tell(done={"session": session, **result})
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            traceback.print_exc()
            detail = f"{type(error).__name__}: {error}"[:MOST_DETAIL]
            self._tell(failed={"session": session, "detail": detail})

    async def _episode(self, order: Fields) -> Fields:
        from verifiers.v1.clients.client import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig
        from verifiers.v1.types import SamplingConfig

        environment = self._environment
        kind = type(environment.taskset).task_type()
        data = kind.data_type().model_validate(json.loads(order["row"]["data"]))
        task = kind(data, environment.config.taskset.task)
        client = TrainClientConfig(
            base_url=order["base_url"],
            api_key_var="COMPASS_NO_KEY",
            renderer_model_name=self._tokenizer,
            renderer=self._renderer,
        )
        sampling = {k: v for k, v in order["sampling"].items() if k != "top_k" or v}
        context = ModelContext(client=client, model=MODEL, sampling=SamplingConfig(**sampling))
        (slot,) = environment.slots(task)
        episode = await environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if errors or not episode.traces:
            why = "; ".join(str(getattr(x, "message", x)) for x in errors)
            raise RuntimeError(why or "the episode has no trace")
        return self._verdict(episode.traces)

    def _verdict(self, traces: list[Any]) -> Fields:
        """Returns the first agent's reward, with its parts and the metrics of all agents."""
        first, *_ = traces
        metrics = {name: x.value for name, x in first.rewards.items() if x is not None}
        for trace in traces:
            metrics |= {name: x for name, x in trace.metrics.items() if x is not None}
        named = {"".join(c if c.isalnum() else "_" for c in k): v for k, v in metrics.items()}
        numbers = {k: float(v) for k, v in named.items() if isinstance(v, int | float)}
        return {"reward": float(first.reward), "metrics": numbers, "agent": first.id}


async def serve(players: Players, environment: Any, tell: Tell) -> None:
    """Plays what standard input orders, until it ends."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, "")

    async with environment.serving():
        tell(ready=True)
        threading.Thread(target=read, daemon=True).start()
        while line := await lines.get():
            message = json.loads(line)
            if "play" in message:
                players.start(message["play"])
            else:
                players.cancel(message["cancel"])


def main() -> None:
    """Reads the setup, then lists rows or plays."""
    output, lock = os.fdopen(os.dup(1), "w", encoding="utf-8"), threading.Lock()
    os.dup2(2, 1)  # what other code prints goes to the log

    def tell(**message: object) -> None:
        with lock:
            output.write(json.dumps(message) + "\n")
            output.flush()

    setup = json.loads(sys.stdin.readline())
    limit = int(setup["memory_gib"] * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        environment = environment_of(setup)
        if setup["mode"] == "rows":
            return rows(environment, setup["size"], tell)
    except Exception as error:
        traceback.print_exc()
        return tell(refused=f"{type(error).__name__}: {error}"[:MOST_DETAIL])
    asyncio.run(serve(Players(environment, setup, tell), environment, tell))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
