"""The driver of environments of the package verifiers (0.4, verifiers.v1), unmodified.

A script of its own: it runs under any interpreter that has verifiers, and imports nothing of this
package. The protocol is that of experience/episodes/drivers.py. Its environments render with the
package renderers, so that the tokens of a turn are kept, and sample through TrainClient.

    env = "verifiers:NAME"      the id of a task set, as `--env.taskset.id`
    options                     fields of its task set; "env" and "renderer" have mappings of the
                                environment's other fields and of the renderer's

An agent's harness may be CHAT, verifiers' chat loop (null) in this process: null starts a Python
program for each turn of its user.
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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from types import ModuleType
from typing import Any

Fields = dict  # a JSON object
Tell = Callable[..., None]
Ask = Callable[[Fields], Awaitable[tuple[int, str]]]
CallTool = Callable[[str, Fields], Awaitable[Any]]
MOST_DETAIL = 2000  # characters of an error
MODEL = "policy"
OWN_OPTIONS = ("env", "renderer")
CHAT = "compass_chat"  # the id of the harness


def environment_of(setup: Fields) -> Any:
    """Returns the environment that a setup names."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    sys.modules[CHAT] = chat_module()
    options = setup["options"]
    taskset = {key: value for key, value in options.items() if key not in OWN_OPTIONS}
    name = setup["env"].partition(":")[2]
    data = {**options.get("env", {}), "taskset": {**taskset, "id": name}}
    agents = agent_config_fields(resolve_env_config(data))
    data |= {
        role: {**data.get(role, {}), **agent_defaults(agent, setup["turns"])}
        for role, agent in agents.items()
    }
    return load_environment(resolve_env_config(data))


def agent_defaults(agent: Any, turns: int) -> Fields:
    """Returns the fields that an agent's settings lack: a runtime of this machine (verifiers' is a
    service in the cloud), and at most `turns` turns. The door refuses further ones, and verifiers
    would take this for an error.
    """
    fields: Fields = {}
    if "runtime" not in agent.model_fields_set:
        fields["runtime"] = {"type": "subprocess"}
    if agent.max_turns is None or agent.max_turns > turns:
        fields["max_turns"] = turns
    return fields


def share_connections() -> None:
    """Makes the clients of all episodes use one pool of connections. Each episode has an address,
    and so a client, which verifiers keeps to its end: with a pool of its own it takes 45 ms to
    build, and 0.8 MiB.
    """
    from openai import AsyncOpenAI
    from verifiers.v1.clients import base, train

    pools: list[Any] = []

    def build(config: Any) -> object:
        if not pools:
            pools.append(base.build_async_httpx(config))
        return AsyncOpenAI(
            base_url=config.base_url,
            api_key=base.resolve_api_key(config),
            max_retries=base.MAX_RETRIES,
            http_client=pools[0],
        )

    train.build_async_openai = build


def rows_of(tasks: Sequence[Fields] | Iterator[Fields]) -> Iterator[Fields]:
    """Yields the rows of tasks' data. A task is known by its prompt, and without one, or with that
    of an earlier task, by all its fields: each game of Wordle has the same prompt.
    """
    known = {""}
    for fields in tasks:
        text = fields.get("prompt")
        if not isinstance(text, str) or text in known:
            text = json.dumps(fields, sort_keys=True)
        known.add(text)
        yield {"prompt": text[:100_000], "data": json.dumps(fields)}


def rows(environment: Any, size: int, tell: Tell) -> None:
    """Writes the rows of the environment's task set, `size` of them (0: all)."""
    taskset = environment.taskset
    if not size and not taskset.bounded:
        tell(refused="its task set is endless: set size, the number of its tasks to take")
        return
    tasks = itertools.islice(iter(taskset), size or None)
    for row in rows_of(task.data.model_dump(mode="json") for task in tasks):
        tell(row=row)


async def converse(messages: list[Fields], tools: list[Fields], ask: Ask, call: CallTool) -> str:
    """Asks for turns and makes their calls of tools until a turn has no call. Returns why the model
    gave no turn, else an empty text.
    """
    while True:
        body = {"model": MODEL, "messages": messages, **({"tools": tools} if tools else {})}
        status, answer = await ask(body)
        if status != 200:
            return answer
        message = json.loads(answer)["choices"][0]["message"]
        messages.append(message)
        calls = message.get("tool_calls") or []
        for tool_call in calls:
            function = tool_call["function"]
            try:
                arguments = dict(json.loads(function["arguments"] or "{}"))
            except (TypeError, ValueError) as error:
                content = f"error: the tool's arguments are no JSON object ({error}); call it again"
            else:
                content = await call(function["name"], arguments)
            answered = {"role": "tool", "tool_call_id": tool_call["id"], "name": function["name"]}
            messages.append({**answered, "content": content})
        if not calls:
            return ""


def chat_module() -> ModuleType:
    """Returns the module of the harness CHAT, as verifiers imports a harness."""
    import httpx
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        """A chat loop with the task's tools, and no others."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: object,
            trace: object,
            runtime: object,
            endpoint: str,
            secret: str,
            mcp_urls: Mapping[str, str],
            data: object,
        ) -> object:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += map(message_to_wire, prompt or ())
            timeout_s = self.config.tool_timeout
            specs = {name: {"url": url, "timeout": timeout_s} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                tools, places, servers = await connect_mcp({"mcpServers": specs}, stack)
                # the address is this machine's: verify only takes time
                client = httpx.AsyncClient(timeout=None, verify=False)
                await stack.enter_async_context(client)

                async def ask(body: Fields) -> tuple[int, str]:
                    headers = {"Authorization": f"Bearer {secret}"}
                    url = f"{endpoint}/chat/completions"
                    reply = await client.post(url, json=body, headers=headers)
                    return reply.status_code, reply.text

                async def call(name: str, arguments: Fields) -> object:
                    if name not in places:
                        return f"error: unknown tool {name!r}"
                    return await call_mcp(servers, places, name, arguments)

                fault = await converse(messages, tools, ask, call)
            # as in null: a conversation without room for a turn ends, and has a reward
            full = any(x in fault.casefold() for x in CONTEXT_OVERFLOW_MARKERS)
            return ProgramResult(exit_code=int(bool(fault and not full)), stdout="", stderr=fault)

    module = ModuleType(CHAT)
    module.__dict__.update({"ChatHarness": ChatHarness, "__all__": ["ChatHarness"]})
    return module


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
        share_connections()
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
