"""The tools of a server that speaks the Model Context Protocol, for an environment:

    class Shop:
        def __init__(self):
            self.server = McpTools("python shop_server.py")    a command, or an address http://...
            self.tools = self.server.schemas

        def step(self, message):
            if message.calls or message.malformed:
                return Turn(self.server.answer(message))
            ...

        def close(self):
            self.server.close()

A command is a server of the episode's own, with its state; an address is one that others use too.
A fault of a call is a message for the model, as in tools.py. A fault of the server,
such as its end, leaves the sample out.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from compass_jax.base.aliases import JsonObject
from compass_jax.base.extras import how_to_install
from compass_jax.rewards.tasks.environment import EnvironmentFault
from compass_jax.rewards.tasks.tools import Tool, ToolError, Tools, answer_text, error_text

INVALID_PARAMS = -32602  # JSON-RPC's code of arguments that a server refuses
CLOSE_S = 5.0


class McpTool(Tool):
    """A tool that a server lists; `call` asks the server."""

    def __init__(self, listed: Any, call: Callable[[str, JsonObject], str]):
        self.name, self._call = listed.name, call
        parameters = listed.input_schema
        self._fields = list(parameters.get("properties", {}))
        about = {"name": self.name, "description": listed.description or ""}
        self.schema = {"type": "function", "function": {**about, "parameters": parameters}}

    def called(self, arguments: JsonObject) -> str:
        """Returns the server's answer."""
        return answer_text(self._call(self.name, arguments))


class McpTools(Tools):
    """The tools of an MCP server.

    Args:
        server: the command that starts it, or its address.
        timeout_s: time limit of its start and of each answer, in seconds.

    Raises ToolError without the package mcp, and EnvironmentFault if the server does not start.
    """

    def __init__(self, server: str, timeout_s: float = 60.0):
        super().__init__()
        try:
            import mcp
        except ImportError as error:
            raise ToolError(
                f"the tools of {server!r:.200} need the package mcp: {how_to_install('mcp', 'mcp')}"
            ) from error
        self._mcp, self._server, self._timeout_s = mcp, server, timeout_s
        self._client: Future = Future()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        try:
            self._tools = {tool.name: tool for tool in self._listed()}
        except BaseException:
            self.close()
            raise

    async def _serve(self) -> None:
        """Holds the connection, which one task must open and close."""
        self._loop, self._closed = asyncio.get_running_loop(), asyncio.Event()
        target: object = self._server
        try:
            if not self._server.startswith(("http://", "https://")):
                command, *words = shlex.split(self._server)
                options = {"args": words, "env": dict(os.environ)}
                target = self._mcp.StdioServerParameters(command=command, **options)
            async with self._mcp.Client(target, read_timeout_seconds=self._timeout_s) as client:
                self._client.set_result(client)
                await self._closed.wait()
        except Exception as error:  # after the start each call has its own
            if not self._client.done():
                self._client.set_exception(error)

    def _listed(self) -> Iterator[McpTool]:
        cursor, pages = None, 0
        while cursor or not pages:
            page = self._ask("list_tools", cursor=cursor)
            yield from (McpTool(listed, self._call) for listed in page.tools)
            cursor, pages = page.next_cursor, pages + 1

    def _call(self, name: str, arguments: JsonObject) -> str:
        try:
            return _text(self._ask("call_tool", name=name, arguments=arguments))
        except self._mcp.MCPError as error:
            return error_text(f"{name}: {error}")

    def _ask(self, method: str, **arguments: object) -> Any:
        """Returns what a method of the client returns. Raises MCPError for arguments that the
        server refuses, and EnvironmentFault for all that is the server's fault.
        """
        try:
            client = self._client.result(self._timeout_s)
            answer = asyncio.run_coroutine_threadsafe(
                getattr(client, method)(**arguments), self._loop
            )
            return answer.result(self._timeout_s)
        except Exception as error:
            if getattr(error, "code", None) == INVALID_PARAMS:
                raise
            cause: BaseException = error
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            reason = f"{type(cause).__name__}: {cause}".removesuffix(": ")
            raise EnvironmentFault(f"the MCP server {self._server!r:.200}: {reason}") from error

    def close(self) -> None:
        """Closes the connection, and ends a server that a command started."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join(CLOSE_S)


def _text(result: Any) -> str:
    """Returns a result as text: {"error": ...} for one that is an error."""
    parts = [x.text if x.type == "text" else f"[{x.type}]" for x in result.content]
    text = "\n".join(parts)
    if not parts and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    return error_text(text) if result.is_error else text
