"""Tools of a server of the Model Context Protocol. The package mcp stands in for itself where it is
not installed, with the parts that are used of it.
"""

import contextlib
import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from compass_jax.base.chat.calls import ToolCall
from compass_jax.config.chat import find_format
from compass_jax.rewards.tasks.environment import EnvironmentFault
from compass_jax.rewards.tasks.tools import MOST_CHARS, ToolError

SERVER = '''
import os
from mcp.server import MCPServer

server, stock = MCPServer("shop"), {"tea": 3}


@server.tool()
def price(item: str, cups: int = 1) -> int:
    """Returns the price of an item."""
    return stock[item] * cups


@server.tool()
def die() -> str:
    """Ends the server."""
    os._exit(3)


server.run()
'''
SCHEMA = {
    "type": "object",
    "properties": {"item": {"type": "string"}, "cups": {"type": "integer"}},
    "required": ["item"],
}


class MCPError(Exception):
    def __init__(self, code, text):
        super().__init__(text)
        self.code = code


def result(*texts, error=False, **more):
    content = [SimpleNamespace(type="text", text=text) for text in texts]
    return SimpleNamespace(
        **{"content": content, "is_error": error, "structured_content": None, **more}
    )


class Client:
    """Answers as the server above, and in other ways that a server has."""

    opened, closed = [], []

    def __init__(self, target, read_timeout_seconds):
        self.target = target
        self.opened.append(target)

    async def __aenter__(self):
        if self.target == "http://127.0.0.1:9/mcp":
            raise ExceptionGroup("unhandled", [OSError("connection refused")])
        return self

    async def __aexit__(self, *_):
        self.closed.append(self.target)

    async def list_tools(self, cursor=None):
        names = ["price"] if cursor is None else ["die", "odd"]
        tools = [SimpleNamespace(name=x, description="d", input_schema=SCHEMA) for x in names]
        return SimpleNamespace(tools=tools, next_cursor="more" if cursor is None else None)

    async def call_tool(self, name, arguments):
        if name == "die":
            raise MCPError(-32000, "Connection closed")
        if name == "odd":
            return {
                "long": result("x" * 2 * MOST_CHARS),
                "picture": result(content=[SimpleNamespace(type="image")]),
                "parts": result("a", "b"),
                "fields": result(structured_content={"price": 3}),
            }[arguments["item"]]
        if "item" not in arguments:
            raise MCPError(-32602, "item is missing")
        if arguments["item"] != "tea":
            return result("Error executing tool price", error=True)
        return result(str(3 * arguments.get("cups", 1)))


@pytest.fixture
def fake(monkeypatch):
    module = ModuleType("mcp")
    module.MCPError, module.Client = MCPError, Client
    module.StdioServerParameters = SimpleNamespace
    monkeypatch.setitem(sys.modules, "mcp", module)
    Client.opened.clear()
    Client.closed.clear()


@contextlib.contextmanager
def tools_of(server, **options):
    from compass_jax.rewards.tasks.mcp import McpTools

    tools = McpTools(server, **options)
    try:
        yield tools
    finally:
        tools.close()


def run(tools, name, *positional, **arguments):
    return tools.run(ToolCall(name, arguments, positional))


def test_the_tools_of_a_server_are_listed_and_called(fake):
    with tools_of("python 'a server.py' --port 1") as tools:
        (target,) = Client.opened
        assert (target.command, target.args) == ("python", ["a server.py", "--port", "1"])
        assert [x["function"]["name"] for x in tools.schemas] == ["price", "die", "odd"]
        about = {"name": "price", "description": "d", "parameters": SCHEMA}
        assert tools.schemas[0] == {"type": "function", "function": about}
        assert run(tools, "price", item="tea") == "3"
        assert run(tools, "price", "tea", 2) == "6"
        text = '<tool_call>{"name": "price", "arguments": {"item": "tea"}}</tool_call>'
        assert tools.answer(find_format("hermes").read(text)) == [
            {"role": "tool", "name": "price", "content": "3"}
        ]
        assert not Client.closed
    assert Client.closed == Client.opened
    tools.close()  # again


def test_a_result_of_any_form_is_a_text_of_bounded_length(fake):
    with tools_of("http://host/mcp") as tools:
        assert Client.opened == ["http://host/mcp"]
        assert run(tools, "odd", item="parts") == "a\nb"
        assert run(tools, "odd", item="picture") == "[image]"
        assert run(tools, "odd", item="fields") == '{"price": 3}'
        assert MOST_CHARS < len(run(tools, "odd", item="long")) < MOST_CHARS + 100


def test_a_fault_of_a_call_is_a_message_for_the_model(fake):
    with tools_of("python server.py") as tools:
        faults = {
            "Error executing tool price": run(tools, "price", item="milk"),
            "price: item is missing": run(tools, "price"),
            "price takes 2 arguments": run(tools, "price", "tea", 1, 2),
            "price gets item twice": run(tools, "price", "tea", item="tea"),
        }
        for reason, answer in faults.items():
            assert json.loads(answer) == {"error": reason}
        assert "there is no tool 'buy'; there is price" in run(tools, "buy")


def test_a_fault_of_the_server_is_an_error_of_the_episode(fake):
    with tools_of("python server.py") as tools:
        reason = "the MCP server 'python server.py': MCPError: Connection closed"
        with pytest.raises(EnvironmentFault, match=reason):
            run(tools, "die")
    with pytest.raises(EnvironmentFault, match="9/mcp': OSError: connection refused"):
        tools_of("http://127.0.0.1:9/mcp").__enter__()


@pytest.mark.parametrize("server", ["", "python 'a"])
def test_a_command_that_is_none_is_an_error_that_names_it(fake, server):
    with pytest.raises(EnvironmentFault, match=f"the MCP server .*{server[-1:]}.: ValueError: "):
        tools_of(server).__enter__()


def test_the_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ToolError, match=r"need the package mcp: pip install 'mcp.*\[mcp\]"):
        tools_of("python server.py").__enter__()


def test_the_package_starts_a_server_and_ends_it(tmp_path):
    pytest.importorskip("mcp")
    (tmp_path / "server.py").write_text(SERVER)
    with tools_of(f"{sys.executable} {tmp_path / 'server.py'}") as tools:
        assert [x["function"]["name"] for x in tools.schemas] == ["price", "die"]
        assert run(tools, "price", item="tea", cups=2) == "6"
        assert "Error executing tool price" in json.loads(run(tools, "price", item="milk"))["error"]
        assert "required" in json.loads(run(tools, "price"))["error"]
        with pytest.raises(EnvironmentFault, match="Connection closed"):
            run(tools, "die")
    for server in ("nonexistent", "false", "http://127.0.0.1:9/mcp"):
        began = time.monotonic()
        with pytest.raises(EnvironmentFault, match=f"the MCP server '{server}': "):
            tools_of(server, timeout_s=20.0).__enter__()
        assert time.monotonic() - began < 19
