"""Two tenants of one collection attack each other through a node: a search tells nothing of the other's documents."""

from pathlib import Path
from typing import Any

import httpx

from runtime.retrieval.collections.bulk_load import create
from runtime.testing.node import Node
from runtime.testing.waiting import until
from runtime.testing.writable_node import DIM, DOCUMENTS

CONFIG = """
[node]
name = "tenants"
run_dir = "run"

[http]
port = 0
drain_notice_s = 0
api_keys_file = "keys"

[[collections]]
name = "notes"
path = "notes"
"""
WORDS = ("cat", "dog", "mouse", "heron")
QUERIES = [*WORDS, "cat mouse", "cat dog heron", "mouse zebra", "zebra", "zebra cat", "quartz", "quartz cat"]
"""Words of nobody's documents, of acme's, and of those that blue is about to write."""


def put(url: str, tenant: str, texts: dict[str, str]) -> None:
    for begin in range(0, len(texts), 200):
        documents = [
            {"id": f"{tenant}-{name}", "text": text, "attributes": {"tenant": tenant}}
            for name, text in list(texts.items())[begin : begin + 200]
        ]
        request(url, tenant, "PUT", DOCUMENTS, {"documents": documents}).raise_for_status()


def request(url: str, tenant: str, method: str, path: str, body: dict[str, Any]) -> httpx.Response:
    with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
        return http.request(method, path, json=body, headers={"authorization": f"Bearer key-of-{tenant}"})


def answers(url: str, tenant: str) -> list[bytes]:
    """Return the answers to all queries, byte by byte."""
    found = []
    for query in QUERIES:
        for hybrid in (0.5, 1.0):
            answer = request(url, tenant, "POST", "/v1/retrieval", {"query": query, "k": 4, "hybrid": hybrid})
            assert answer.status_code == 200, answer.text
            found.append(answer.content.partition(b'"passages"')[2].partition(b'"timings"')[0])
            assert found[-1].startswith(b":[")
    return found


def test_hybrid_answers_to_a_tenant_are_equal_byte_by_byte_whatever_others_write_and_delete(tmp_path: Path) -> None:
    create(tmp_path / "notes", DIM, embedder=f"hashing-{DIM}")
    (tmp_path / "keys").write_text("key-of-acme notes/tenant=acme\nkey-of-blue notes/tenant=blue\n")
    (tmp_path / "keys").chmod(0o600)
    (tmp_path / "node.toml").write_text(CONFIG)
    node = Node(tmp_path / "node.toml")
    try:
        url = node.info.url
        put(
            url,
            "acme",
            {word: f"the {word} and {other}" for word, other in zip(WORDS, WORDS[1:] + WORDS, strict=False)},
        )

        def finds(tenant: str, word: str) -> bool:
            body = {"query": word, "k": 4, "hybrid": 1.0}
            answer = request(url, tenant, "POST", "/v1/retrieval", body)
            return answer.status_code == 200 and word in answer.text

        until(lambda: finds("acme", "heron"))
        alone = answers(url, "acme")
        put(url, "blue", {str(n): f"zebra cat cat {n % 7} mouse{n} " * (1 + n % 3) for n in range(200)})
        until(lambda: finds("blue", "mouse199"))
        assert answers(url, "acme") == alone
        deleted = request(url, "blue", "DELETE", DOCUMENTS, {"ids": [f"blue-{n}" for n in range(199)]})
        assert deleted.json()["count"] == 199
        assert answers(url, "acme") == alone
    finally:
        node.stop()
