"""MCP server with one tool, which searches a collection of a node. Needs mcp: the extra [mcp]."""

import asyncio
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from runtime.errors import TrinityError
from runtime.integrations.client import CollectionClient

_FILTER = (
    'Return only passages whose attributes pass this filter: {"type": "eq", "key": "source", "value": "a.pdf"}; types '
    'are eq, ne, gt, gte, lt, lte, in and nin, and {"type": "and" or "or", "filters": [...]}.'
)
_HYBRID = "Also search by keywords: for names, numbers and rare words."
_RERANK = "Whether a model that reads question and passage orders the passages; by default if there is one."


def mcp_server(client: CollectionClient, collection: str) -> MCPServer:
    """Create a server whose tool `search` uses `client`; `run()` serves it over standard input and output."""
    server = MCPServer(
        "trinity",
        instructions=f"Finds passages of the collection {collection!r} that are relevant to a question.",
        log_level="WARNING",
    )

    async def search(
        query: Annotated[str, Field(description="What to look for, as a question or a few words.")],
        k: Annotated[int, Field(description="How many passages.", ge=1, le=64)] = 5,
        filter: Annotated[dict[str, Any] | None, Field(description=_FILTER)] = None,
        hybrid: Annotated[bool, Field(description=_HYBRID)] = False,
        rerank: Annotated[bool | None, Field(description=_RERANK)] = None,
    ) -> list[dict[str, Any]]:
        try:
            passages = await asyncio.to_thread(client.search, query, k, filter, hybrid, rerank)
        except TrinityError as error:  # the model reads the message and can correct its filter
            raise ToolError(error.message) from error
        return [{"id": one.id, "text": one.text, "score": one.score, "metadata": one.metadata} for one in passages]

    about = f"Passages of {collection!r} that are relevant to a question, the nearest first."
    server.add_tool(search, description=about, annotations=ToolAnnotations(read_only_hint=True))
    return server
