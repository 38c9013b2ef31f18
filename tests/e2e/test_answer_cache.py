"""The answer cache on a whole node: it survives its frontend and is removed with the node."""

from runtime.node.placement.plan import ANSWERS_FOLDER
from runtime.testing.waiting import eventually
from tests.e2e.conftest import StartNode

BODY = {"model": "tiny", "prompt": "What is a decorator?", "max_tokens": 8, "temperature": 0}
CACHE = """
[answer_cache]
enabled = true
embedder = "hashing-128"
"""


def test_a_cached_answer_survives_its_frontend(start_node: StartNode) -> None:
    node = start_node(more=CACHE)
    first = node.post("/v1/completions", BODY)[1]
    eventually(lambda: "cached" in node.post("/v1/completions", BODY)[1], 60, "a hit")
    node.kill("frontend-0")
    status, again = node.post("/v1/completions", BODY)
    assert status == 200
    assert again["cached"]["similarity"] == 1.0
    assert again["choices"] == first["choices"]
    run_dir = node.run_dir
    assert (run_dir / ANSWERS_FOLDER).is_dir()
    assert node.stop() == 0
    assert not (run_dir / ANSWERS_FOLDER).exists()
