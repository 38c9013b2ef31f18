"""A node that serves a sharded collection from two pool workers, also when a worker dies."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from runtime import AsyncSearchClient, SearchClient
from runtime.retrieval.collections import bulk_load
from runtime.testing.node import Node

CONFIG = """
[node]
name = "split"
run_dir = "{home}/run"

[http]
port = 0
drain_notice_s = 0

[pool]
workers = 2

[[collections]]
name = "docs"
path = "{home}/docs"
shards = {shards}
"""

VECTORS = np.random.default_rng(0).normal(size=(300, 12)).astype(np.float32)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("split")
    bulk_load.build(VECTORS, home / "docs", metric="l2", degree=8, shards=2)
    return home


def test_a_sharded_collection_is_searched_as_one_and_recovers_from_a_dead_worker(home: Path) -> None:
    (home / "node.toml").write_text(CONFIG.format(home=home, shards=2))
    node = Node(home / "node.toml")
    try:
        with SearchClient.connect(node.run_dir) as client:
            for victim in (None, "pool-1"):
                if victim:
                    node.kill(victim)
                batch = client.search_batch(VECTORS[:40], 1, top_m=100, deadline_ms=60_000).checked()
                assert batch.ids[:, 0].tolist() == list(range(40))
        status, answer = node.post("/v1/retrieval", {"vector": VECTORS[7].tolist(), "collection": "docs", "k": 3})
        assert status == 200
        assert answer["passages"][0]["id"] == "7"

        async def main() -> list[int]:
            async with await AsyncSearchClient.connect(node.run_dir) as client:
                found = await asyncio.gather(*(client.search(vector, 1, top_m=100) for vector in VECTORS[:20]))
                return [int(result.ids[0]) for result in found]

        assert asyncio.run(main()) == list(range(20))
    finally:
        assert node.stop() == 0


def test_a_node_configured_with_another_number_of_shards_does_not_start(home: Path) -> None:
    (home / "other.toml").write_text(CONFIG.format(home=home, shards=1))
    with pytest.raises(RuntimeError, match=r"shards = 1, but .* was built with 2: set shards = 2"):
        Node(home / "other.toml")
