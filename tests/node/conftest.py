"""Nodes of tiny workers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.process_context  # noqa: F401  (preloads the imports of tiny nodes)
from tests.node.tiny_node import TinyNode

StartTiny = Callable[..., TinyNode]


@pytest.fixture
def start_tiny(tmp_path: Path) -> Iterator[StartTiny]:
    """Start a node with the arguments of `TinyNode`; it is killed after the test."""
    nodes: list[TinyNode] = []

    def start(orders: dict[str, list[str]] | None = None, **options: Any) -> TinyNode:
        nodes.append(TinyNode(tmp_path, orders, **options))
        return nodes[-1]

    yield start
    for node in nodes:
        node.close()
