"""`trinity mcp`: a collection of a node as a tool for clients of the Model Context Protocol."""

import importlib.util
from typing import Annotated

import typer

from launchers.node_option import NodeOption
from runtime.errors import ConfigError, UsageError
from runtime.integrations.client import CollectionClient
from runtime.node.run_dir import find_node


def serve_mcp(
    collection: Annotated[str, typer.Argument(help="The collection to search.")],
    node: NodeOption = "",
    url: Annotated[str, typer.Option(help="Use the node at this address instead, such as http://host:8080.")] = "",
    key: Annotated[str, typer.Option(envvar="TRINITY_API_KEY", help="An API key, if the node requires one.")] = "",
) -> None:
    """Serve MCP over standard input and output, with one tool that searches a collection of a running node."""
    if importlib.util.find_spec("mcp") is None:
        raise ConfigError("missing: mcp. Install with: python -m pip install 'mcp>=2.3,<3'")
    from runtime.integrations.mcp_server import mcp_server

    if url and not url.startswith(("http://", "https://")):
        raise UsageError(f"--url is {url!r}: it must look like http://HOST:PORT")
    client = CollectionClient(url or find_node(node).url, collection, key)
    mcp_server(client, collection).run()
