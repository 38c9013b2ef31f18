"""OpenAI's published examples of file search: their calls, in their order and with their parameters.

The cookbook "Using file search tool in the Responses API", the guides "File search" and "Retrieval", and examples of
the Python client. Only the address and the model differ.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.frontend.cluster import Cluster
from tests.frontend.store_node import store_node
from tests.frontend.test_stores import wait_indexed
from tests.retrieval.sample_files import pdf

MODEL = "tiny"
FACTS = {
    "Deep research": "Deep research reads many pages of the web for one answer.",
    "Operator": "Operator clicks and types in a browser of its own.",
    "Data residency": "Data residency keeps the data of customers in Europe.",
}
QUESTION = "What is deep research by OpenAI?"
CITING = f"{QUESTION} answer=Deep_research_reads_many_pages_of_the_web_for_one_answer._It_is_new."


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with store_node(tmp_path / "stores") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with cluster.client() as client:
        yield client


@pytest.fixture
def pdfs(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name} _ OpenAI.pdf" for name in FACTS]
    for path, text in zip(paths, FACTS.values(), strict=True):
        path.write_bytes(pdf(text, title=path.stem))
    return paths


def test_the_cookbooks_files_are_uploaded_by_threads_searched_and_cited(
    client: openai.OpenAI, pdfs: list[Path]
) -> None:
    store = client.vector_stores.create(name="openai_blog_store")
    assert (store.name, store.file_counts.completed) == ("openai_blog_store", 0)

    def upload(path: Path) -> str:
        with path.open("rb") as file:
            made = client.files.create(file=file, purpose="assistants")
        return client.vector_stores.files.create(vector_store_id=store.id, file_id=made.id).status

    with ThreadPoolExecutor(max_workers=10) as executor:
        uploads = [executor.submit(upload, path) for path in pdfs * 7]  # the example has 21 files
        assert {one.result() for one in as_completed(uploads)} <= {"in_progress", "completed"}
    wait_indexed(client, store.id)
    found = client.vector_stores.search(vector_store_id=store.id, query="What's Deep Research?")
    assert len(found.data) == 10
    assert found.data[0].filename == pdfs[0].name
    assert found.data[0].content[0].text.strip() == FACTS["Deep research"]
    assert found.data[0].score > found.data[-1].score
    answer: Any = client.responses.create(
        input=CITING, model=MODEL, tools=[{"type": "file_search", "vector_store_ids": [store.id]}]
    )
    assert {one.filename for one in answer.output[1].content[0].annotations} == {pdfs[0].name}
    assert answer.output[1].content[0].text.startswith(FACTS["Deep research"])
    made: Any = client.responses.create(input="Can you generate a question that … say=3", model=MODEL)
    assert made.output[0].content[0].text == "w0 w1 w2 "

    def process_query(question: str) -> list[str]:
        response: Any = client.responses.create(
            input=question, model=MODEL, tool_choice="required",
            tools=[{"type": "file_search", "vector_store_ids": [store.id], "max_num_results": 5}],
        )  # fmt: skip
        return [one.filename for one in response.output[1].content[0].annotations[:5]]

    questions = [f"About: {fact} answer={fact.replace(' ', '_')}" for fact in FACTS.values()]
    with ThreadPoolExecutor() as executor:
        assert list(executor.map(process_query, questions)) == [[path.name] for path in pdfs]


def test_the_retrieval_guides_operations_on_stores_files_and_batches(client: openai.OpenAI, tmp_path: Path) -> None:
    path = tmp_path / "customer_policies.txt"
    path.write_text("Goods may be returned within thirty days of their purchase.")
    store = client.vector_stores.create(name="Support FAQ")
    with path.open("rb") as file:
        client.vector_stores.files.upload_and_poll(vector_store_id=store.id, file=file)
    question = "What is the return policy?"
    results = client.vector_stores.search(vector_store_id=store.id, query=question)
    sources = "".join(
        f"<result file_id='{one.file_id}' file_name='{one.filename}'>{''.join(part.text for part in one.content)}"
        for one in results.data
    )
    completion = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "Produce a concise answer to the query based on the provided sources."},
            {"role": "user", "content": f"Sources: {sources}\n\nQuery: '{question}' say=2"},
        ],
    )
    assert completion.choices[0].message.content == "w0 w1 "
    made = results.data[0].file_id
    other = client.files.create(file=("other.txt", b"Other words."), purpose="assistants").id
    filled = client.vector_stores.create(name="Support FAQ", file_ids=[made])
    assert client.vector_stores.retrieve(vector_store_id=filled.id).file_counts.total == 1
    assert client.vector_stores.update(vector_store_id=filled.id, name="Support FAQ Updated").name.endswith("Updated")
    assert client.vector_stores.delete(vector_store_id=filled.id).deleted
    assert [one.id for one in client.vector_stores.list()] == [store.id]
    assert client.vector_stores.files.create_and_poll(vector_store_id=store.id, file_id=made).status == "completed"
    assert client.vector_stores.files.retrieve(vector_store_id=store.id, file_id=made).id == made
    changed = client.vector_stores.files.update(vector_store_id=store.id, file_id=made, attributes={"key": "value"})
    assert changed.attributes == {"key": "value"}
    assert client.vector_stores.files.delete(vector_store_id=store.id, file_id=made).deleted
    assert not client.vector_stores.files.list(vector_store_id=store.id).data
    sizes: Any = {"type": "static", "max_chunk_size_tokens": 1200, "chunk_overlap_tokens": 200}  # as the guide has it
    batch = client.vector_stores.file_batches.create_and_poll(
        vector_store_id=store.id,
        files=[
            {"file_id": made, "attributes": {"department": "finance"}},
            {"file_id": other, "chunking_strategy": sizes},
        ],
    )
    assert (batch.status, batch.file_counts.completed) == ("completed", 2)
    assert client.vector_stores.file_batches.retrieve(vector_store_id=store.id, batch_id=batch.id).status == "completed"
    assert client.vector_stores.file_batches.cancel(vector_store_id=store.id, batch_id=batch.id).id == batch.id
    listed = client.vector_stores.file_batches.list_files(batch.id, vector_store_id=store.id)
    strategies: dict[str, Any] = {one.id: one.chunking_strategy for one in listed}
    assert strategies[other].static.max_chunk_size_tokens == 1200
    client.vector_stores.files.create(
        vector_store_id=store.id, file_id=made,
        attributes={"region": "US", "category": "Marketing", "date": 1672531200},
    )  # fmt: skip
    expiring = client.vector_stores.update(
        vector_store_id=store.id, expires_after={"anchor": "last_active_at", "days": 7}
    )
    assert expiring.expires_after is not None
    assert expiring.expires_after.days == 7
