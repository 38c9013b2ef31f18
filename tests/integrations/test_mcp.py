"""The MCP server with the package's own client: in-process, and as `trinity mcp` over a pipe."""

import asyncio
import os
import sys
from typing import Any

import pytest

pytest.importorskip("mcp", reason="mcp is not installed: [mcp]")

from mcp import Client, StdioServerParameters

from runtime.integrations.client import CollectionClient
from runtime.integrations.mcp_server import mcp_server
from tests.integrations.conftest import KEY

BIRDS = {"id": "birds", "text": "birds sing", "metadata": {"legs": 2}}


pytestmark = pytest.mark.usefixtures("animals")


async def asked(server: Any, **arguments: Any) -> tuple[list[str], Any]:
    """The tools' names, and the result of `search`."""
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
        return [tool.name for tool in tools], await client.call_tool("search", arguments)


def found(answer: Any) -> list[dict[str, Any]]:
    assert not answer.is_error, answer
    return [{name: one[name] for name in BIRDS} for one in answer.structured_content["result"]]


def test_the_search_tool_applies_a_filter(url: str) -> None:
    client = CollectionClient(url, "notes", KEY)
    server = mcp_server(client, "notes")
    names, answer = asyncio.run(asked(server, query="birds sing", k=1))
    assert (names, found(answer)) == (["search"], [BIRDS])
    wanted = {"type": "eq", "key": "legs", "value": 2}
    assert found(asyncio.run(asked(server, query="cats purr", filter=wanted))[1]) == [BIRDS]
    client.close()


def test_errors_of_the_node_are_returned_to_the_model(url: str) -> None:
    client = CollectionClient(url, "notes", KEY)
    server = mcp_server(client, "notes")
    wanted = {"type": "eq", "key": "feet", "value": 2}
    _, answer = asyncio.run(asked(server, query="cats", filter=wanted))
    assert answer.is_error
    assert "feet" in answer.content[0].text
    assert asyncio.run(asked(server, query="cats", k=65))[1].is_error
    client.close()


def test_the_command_serves_mcp_over_a_pipe(url: str) -> None:
    words = ["-m", "launchers.entry", "mcp", "notes", "--url", url]
    command = StdioServerParameters(command=sys.executable, args=words, env=os.environ | {"TRINITY_API_KEY": KEY})
    names, answer = asyncio.run(asked(command, query="birds sing", k=1))
    assert (names, found(answer)) == (["search"], [BIRDS])
