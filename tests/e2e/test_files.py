"""Cited passages from a folder of files follow changes of the files, through a whole node."""

import importlib.util
from pathlib import Path

import openai
import pytest

from runtime.node.supervisor.admin import reload_collections
from runtime.retrieval.embedding.embedder import HashingEmbedder
from runtime.retrieval.ingestion.ingest import add, ingest
from runtime.testing.node import Node
from tests.retrieval.sample_files import pdf

CONFIG = """
[node]
name = "files"
run_dir = "run"

[http]
port = 0
drain_notice_s = 0

[[collections]]
name = "handbook"
path = "index"
"""


@pytest.mark.skipif(importlib.util.find_spec("pypdf") is None, reason="pypdf is not installed: [documents]")
def test_a_passage_names_its_file_and_page_and_changes_with_the_file(tmp_path: Path) -> None:
    folder, index = tmp_path / "handbook", tmp_path / "index"
    folder.mkdir()
    (folder / "leave.pdf").write_bytes(pdf("Holidays are thirty days.", "Parental leave is twelve weeks."))
    (folder / "pay.md").write_text("# Pay\n\nWages are paid monthly.")
    ingest([folder], index, "hashing-256", HashingEmbedder(256), degree=2)
    (tmp_path / "node.toml").write_text(CONFIG)
    node = Node(tmp_path / "node.toml")
    try:
        with openai.OpenAI(base_url=f"{node.info.url}/v1", api_key="none") as client:

            def found() -> tuple[str, object, str]:
                (first,) = client.vector_stores.search("handbook", query="parental leave", max_num_results=1)
                return first.filename, first.attributes, first.content[0].text

            cited = {"source": "leave.pdf", "page": 2}
            assert found() == ("leave.pdf", cited, "Parental leave is twelve weeks.")
            (folder / "leave.pdf").write_bytes(pdf("Holidays are thirty days.", "Parental leave is sixteen weeks."))
            assert add([folder], index).embedded == 1
            reload_collections(node.info, "handbook", 60)
            assert found() == ("leave.pdf", cited, "Parental leave is sixteen weeks.")
    finally:
        node.stop()
