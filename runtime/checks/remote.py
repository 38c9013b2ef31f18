"""For `trinity doctor`: whether the nodes of collections that lie elsewhere are there, and fit together."""

import asyncio
from collections.abc import Iterator

from runtime.checks.finding import Finding
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.remote_collections import RemoteCollections

_START = "start it; a node that runs already takes it when it answers"


def findings(config: NodeConfig) -> Iterator[Finding]:
    """A line for each node of each collection."""
    try:
        found, about = asyncio.run(_looked(config))
    except ConfigError as error:
        yield Finding("error", "remote", error.message, "mend [[remote]]")
        return
    for section in config.remote:
        for url, trouble in found[section.name].items():
            what = f"remote {section.name} at {url}"
            if trouble:
                partly = section.missing == "partial" and not all(found[section.name].values())
                yield Finding("warning" if partly else "error", what, trouble, _START)
            else:
                one = about[section.name]
                yield Finding("ok", what, f"{one.embedder or 'no embedder'}, {one.dim} dimensions, {one.metric}")


async def _looked(config: NodeConfig) -> tuple[dict[str, dict[str, str]], dict[str, CollectionSummary]]:
    """By collection, its nodes' troubles, and what it is. Raises `ConfigError` for a key that cannot be read."""
    collections = RemoteCollections(config.remote)
    try:
        await collections.probe()
        named = collections.by_name.items()
        return {name: one.nodes for name, one in named}, {name: one.summary for name, one in named}
    finally:
        await collections.close()
