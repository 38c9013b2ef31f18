"""Files are uploaded into a collection of the configuration while the frontend is killed; an answer cites one."""

import shutil
from pathlib import Path
from typing import Any

import openai

from runtime.testing.waiting import eventually
from tests.e2e.conftest import STORES, StartNode

FILES = 12


def test_uploads_into_a_collection_survive_the_frontends_death(
    new_node: StartNode, collection: Path, tmp_path: Path
) -> None:
    shutil.copytree(collection, tmp_path / "handbook")
    more = f'\n[[collections]]\nname = "handbook"\npath = "{tmp_path / "handbook"}"\n'
    node = new_node(more=STORES + more)
    try:
        client = openai.OpenAI(base_url=f"{node.info.url}/v1", api_key="none", max_retries=8, timeout=120)
        before = client.vector_stores.retrieve("handbook").file_counts.total
        names = [f"unique{number}.txt" for number in range(FILES)]
        ids = [client.files.create(file=(name, name[:-4].encode()), purpose="assistants").id for name in names]
        batch = client.vector_stores.file_batches.create("handbook", file_ids=ids[1:])
        node.kill("frontend-0")
        node.wait_ready()
        client.vector_stores.files.create("handbook", file_id=ids[0])
        client.files.delete(ids[-1])
        eventually(
            lambda: client.vector_stores.retrieve("handbook").status == "completed", 120, "the files to be indexed"
        )
        assert client.vector_stores.retrieve("handbook").file_counts.completed == before + FILES - 1
        left = client.vector_stores.file_batches.retrieve(batch.id, vector_store_id="handbook").file_counts
        assert (left.completed, left.total) == (FILES - 2, FILES - 2)
        tool: Any = {"type": "file_search", "vector_store_ids": ["handbook"], "max_num_results": 1}

        def cited(name: str) -> list[tuple[str, str]]:
            answer = client.responses.create(
                model="tiny", input=name[:-4], tools=[tool], max_output_tokens=4, include=["file_search_call.results"]
            )
            call: Any = next(item for item in answer.output if item.type == "file_search_call")
            return [(one.file_id, one.filename) for one in call.results]

        for id, name in zip(ids[:-1], names, strict=False):  # a pool may be late to apply the write of a file
            eventually(lambda id=id, name=name: cited(name) == [(id, name)], 60, f"{name} to be cited")  # type: ignore[misc]
    finally:
        node.stop()
