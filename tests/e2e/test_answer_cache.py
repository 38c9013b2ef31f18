"""The answer cache on a whole node: it survives its frontend and is removed with the node."""

from pathlib import Path

from runtime.node.placement.plan import ANSWERS_FOLDER
from runtime.testing.node import Node, running
from runtime.testing.waiting import eventually
from tests.e2e.conftest import GATEWAY

BODY = {"model": "tiny", "prompt": "What is a decorator?", "max_tokens": 8, "temperature": 0}
CACHE = """
[answer_cache]
threshold = 0.97
"""


def test_a_cached_answer_survives_its_frontend(node: Node, collection: Path, tmp_path: Path) -> None:
    config = tmp_path / "node.toml"
    config.write_text(GATEWAY.format(url=node.info.url, collection=collection) + CACHE)
    with running(config) as caching:
        first = caching.post("/v1/completions", BODY)[1]
        eventually(lambda: "cached" in caching.post("/v1/completions", BODY)[1], 60, "a hit")
        caching.kill("frontend-0")
        status, again = caching.post("/v1/completions", BODY)
        assert status == 200
        assert again["cached"]["similarity"] == 1.0
        assert again["choices"] == first["choices"]
        assert (caching.run_dir / ANSWERS_FOLDER).is_dir()
        assert caching.stop() == 0
    assert not (caching.run_dir / ANSWERS_FOLDER).exists()
