"""Checks of `trinity doctor` for `[[remote]]`: whether the nodes answer, and whether their collections match."""

import asyncio
from collections.abc import Iterator

from runtime.checks.finding import Finding
from runtime.errors import ConfigError
from runtime.node.config import NodeConfig
from runtime.retrieval.collection_summary import CollectionSummary
from runtime.retrieval.remote_collections import RemoteCollections

_START = "start it; a running node uses it as soon as it answers"


def findings(config: NodeConfig) -> Iterator[Finding]:
    """Yield one finding per node of each collection."""
    try:
        errors, summaries = asyncio.run(_probe_nodes(config))
    except ConfigError as invalid:
        yield Finding("error", "remote", invalid.message, "fix [[remote]]")
        return
    for section in config.remote:
        for url, error in errors[section.name].items():
            subject = f"remote {section.name} at {url}"
            if error:
                partial = section.missing == "partial" and not all(errors[section.name].values())
                yield Finding("warning" if partial else "error", subject, error, _START)
            else:
                summary = summaries[section.name]
                embedder = summary.embedder or "no embedder"
                yield Finding("ok", subject, f"{embedder}, {summary.dim} dimensions, {summary.metric}")


async def _probe_nodes(config: NodeConfig) -> tuple[dict[str, dict[str, str]], dict[str, CollectionSummary]]:
    """Return, by collection, the errors of its nodes, and its properties. Raises `ConfigError` if a key cannot be
    read."""
    collections = RemoteCollections(config.remote)
    try:
        await collections.probe()
        named = collections.by_name.items()
        return {name: one.nodes for name, one in named}, {name: one.summary for name, one in named}
    finally:
        await collections.close()
